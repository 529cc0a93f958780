"""Documents: each kind of broken file gets one sentence with its place and a remedy."""

import hashlib
import json
import math
import os
from pathlib import Path

import pytest

from topologies import document
from topologies.cluster import Cluster
from topologies.document import InputFile, load, read_mapping, to_json, write_atomically
from topologies.errors import InputError
from topologies.hardware import CATALOG, Gpu, Nic

NIC = "name: port\nbandwidth: 400 Gbit/s\n"
CLUSTER = "name: mine\nnode: dgx-h100\nnum_nodes: 4\nfabric:\n  kind: none\n"


@pytest.fixture
def write(tmp_path):
    def to_file(content, name="mine.yaml"):
        path = tmp_path / name
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return path

    return to_file


def complaint(path, model, **options):
    with pytest.raises(InputError) as caught:
        load(path, model, **options)
    return caught.value


@pytest.mark.parametrize(
    ("content", "line", "column", "words"),
    [
        ("name: port\nbandwidth: [400\n", 3, 1, "is not valid YAML"),
        ("name: port\n\tbandwidth: 1 GB/s\n", 2, 1, "is not valid YAML"),
        ("name: port\nname: other\n", 2, 1, 'the key "name" is given twice; keep one'),
        ("a: 1\n---\nb: 2\n", 2, 1, "is not valid YAML"),
        ("", None, None, "holds nothing at its top level; write 'key: value' lines"),
        ("- a\n- b\n", None, None, "holds a list at its top level"),
        ("just words\n", None, None, "holds a str at its top level"),
        (b"\x89PNG\r\n\x1a\n\xff\xd8", None, None, "is not a text file in UTF-8; give a YAML or JSON file"),
        (b"name: a\x00b\n", None, None, "is not valid YAML: unacceptable character"),
        ("a: " + "[" * 800 + "]" * 800, None, None, "is nested too deeply"),
    ],
)
def test_a_file_that_cannot_be_parsed(write, content, line, column, words):
    path = write(content)
    error = complaint(path, Nic)
    assert (error.file, error.line, error.column) == (str(path), line, column)
    assert words in str(error)
    assert "\n" not in str(error)


def test_a_path_that_cannot_be_read(tmp_path, write, monkeypatch):
    assert "cannot be read: No such file or directory" in str(complaint(tmp_path / "absent.yaml", Nic))
    assert "cannot be read: Is a directory" in str(complaint(tmp_path, Nic))

    def refuse(path):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "read_bytes", refuse)
    assert str(complaint(write(NIC), Nic)).endswith(
        "cannot be read: Permission denied; give the path of a readable file"
    )


@pytest.mark.parametrize(
    ("content", "place", "words"),
    [
        ("name: port\nbandwith: 1 GB/s\n", (2, 1, "bandwith"), "did you mean 'bandwidth'?"),
        (
            "name: port\nbandwidth: 1 GB/s\nzzz: 1\n",
            (3, 1, "zzz"),
            "known keys: version, name, source, bandwidth, latency",
        ),
        ("name: port\n", (1, 1, "bandwidth"), "is missing; add this key"),
        (
            "name: port\nbandwidth: 400\n",
            (2, 1, "bandwidth"),
            "400 is a bare int, not a quantity; add one of the units: B/s",
        ),
        (
            "name: port\nbandwidth: 400 GB\n",
            (2, 1, "bandwidth"),
            "the unit 'GB' is not known here; accepted units: B/s",
        ),
        ("name: port\nbandwidth: -4 GB/s\n", (2, 1, "bandwidth"), "must be finite and not negative"),
        ("name: port\nbandwidth: 0 GB/s\n", (2, 1, "bandwidth"), "input should be greater than 0"),
        ("name: ''\nbandwidth: 1 GB/s\n", (1, 1, "name"), "at least 1 character"),
        ("name: port\nbandwidth: 1 GB/s\nversion: two\n", (3, 1, "version"), "input should be 1"),
    ],
)
def test_a_file_that_says_the_wrong_thing(write, content, place, words):
    path = write(content)
    error = complaint(path, Nic)
    assert (error.file, error.line, error.column, error.key) == (str(path), *place)
    assert words in str(error)


def test_a_newer_version_is_refused_before_anything_else(write):
    error = complaint(write("version: 2\nname: port\nnew_key: 1\n"), Nic)
    assert "has format version 2, and this headway reads up to 1; upgrade headway" in str(error)


def test_the_place_of_a_nested_complaint_is_exact(write):
    text = CLUSTER + "  tiers:\n    - name: leaf\n      nodes: 32\n    - {name: spine, nodes: 8, latncy: 1 us}\n"
    error = complaint(write(text), Cluster)
    assert (error.line, error.column, error.key) == (9, 31, "fabric.tiers.1.latncy")
    assert error.hint == "did you mean 'latency'?"


def test_json_is_read_like_yaml(write):
    path = write('{\n\t"name": "port",\n\t"bandwidth": "100 Gbit/s"\n}\n', "port.json")
    assert load(path, Nic).bandwidth_bytes_per_second == 12.5e9
    assert read_mapping(write('{"a": 1e-05, "b": 1E6}', "numbers.json")) == {"a": 1e-05, "b": 1e6}


# references


def test_a_reference_is_a_name_a_path_or_the_content(write):
    write("name: my port\nbandwidth: 300 Gbit/s\n", "port.yaml")
    for nic in ("200g", "./port.yaml", "{name: inline, bandwidth: 300 Gbit/s}"):
        text = f"name: mine\nnum_nodes: 1\nnode: {{from: dgx-h100, nic: {nic}}}\n"
        nic_found = load(write(text), Cluster).node.nic
        assert nic_found is not None
        assert nic_found.bandwidth_bytes_per_second == (25e9 if nic == "200g" else 37.5e9)


def test_an_unknown_name_lists_near_ones_and_an_absent_path_is_told(write):
    error = complaint(write("name: mine\nnode: dgx-h10\nnum_nodes: 4\n"), Cluster)
    assert (error.line, error.key) == (2, "node")
    assert "'dgx-h10' is not shipped with headway; did you mean 'dgx-h100'" in str(error)
    error = complaint(write("name: mine\nnode: ./absent.yaml\nnum_nodes: 4\n"), Cluster)
    assert "absent.yaml; paths are relative to the file that names them" in str(error)


def test_paths_are_relative_to_the_file_that_says_them(tmp_path, write):
    (tmp_path / "deep").mkdir()
    gpu = (CATALOG / "gpus" / "h100-sxm.yaml").read_text().replace("name: H100 SXM", "name: my H100")
    write(gpu, "deep/gpu.yaml")
    node = (CATALOG / "nodes" / "dgx-h100.yaml").read_text().replace("gpu: h100-sxm", "gpu: ./gpu.yaml")
    write(node, "deep/node.yaml")
    assert load(write("name: mine\nnode: deep/node.yaml\nnum_nodes: 2\n"), Cluster).gpu.name == "my H100"
    changed = "name: mine\nnode: {from: dgx-h100, gpu: ./deep/gpu.yaml}\nnum_nodes: 2\n"
    assert load(write(changed), Cluster).gpu.name == "my H100"


def test_from_changes_a_file_key_by_key(write):
    text = "name: mine\nnum_nodes: 2\nnode:\n  from: dgx-h100\n  nics_per_node: 4\n  gpu: {power: 600 W}\n"
    changed, shipped = load(write(text), Cluster), load(CATALOG / "clusters" / "h100-512.yaml", Cluster)
    assert changed.node.nics_per_node == 4
    assert changed.gpu.power_watts == 600.0
    assert changed.gpu.peak_flop_per_second == shipped.gpu.peak_flop_per_second
    assert changed.scale_up == shipped.scale_up
    assert type(changed.gpu.name) is str


@pytest.mark.parametrize(
    ("change", "place", "words"),
    [
        ("  gpus_per_node: 0\n", (5, 3), "greater than or equal to 1"),
        ("  gpu:\n    powr: 600 W\n", (6, 5), "did you mean 'power'"),
        ("  gpu: {peak: {bf16: 5 W}}\n", (5, 16), "the unit 'W' is not known here"),
        ("  gpu: ./absent.yaml\n", (5, 3), "there is no file"),
        ("  nics_per_node: 0\n", (5, 3), "nic and nics_per_node belong together"),
    ],
)
def test_a_wrong_change_points_at_the_file_that_makes_it(write, change, place, words):
    path = write(f"name: mine\nnum_nodes: 2\nnode:\n  from: dgx-h100\n{change}")
    error = complaint(path, Cluster)
    assert error.file == str(path)
    assert words in str(error)
    if "belong together" not in words:
        assert (error.line, error.column) == place


def test_a_fault_in_a_file_that_is_referred_to_points_at_that_file(write):
    gpu = write((CATALOG / "gpus" / "h100-sxm.yaml").read_text().replace("80 GiB", "80 GBs"), "gpu.yaml")
    error = complaint(write("name: mine\nnum_nodes: 1\nnode: {from: dgx-h100, gpu: ./gpu.yaml}\n"), Cluster)
    assert error.file == str(gpu)
    assert error.key == "memory"
    assert error.line == gpu.read_text().splitlines().index("memory: 80 GBs") + 1


def test_inputs_name_every_file_with_its_hash(write):
    inputs: list[InputFile] = []
    path = write(CLUSTER)
    load(path, Cluster, inputs=inputs)
    names = [Path(one.path).name for one in inputs]
    assert names == ["mine.yaml", "dgx-h100.yaml", "h100-sxm.yaml", "400g.yaml"]
    assert inputs[0].sha256 == hashlib.sha256(path.read_bytes()).hexdigest()


# overrides


def test_overrides_replace_values_and_reach_into_references(write):
    path = write(CLUSTER)
    found = load(path, Cluster, overrides=["num_nodes=7", "node.gpu.power=650 W", "fabric.efficiency=0.5"])
    assert (found.num_nodes, found.gpu.power_watts, found.fabric.efficiency) == (7, 650.0, 0.5)


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("num_nodes", "--set: 'num_nodes' is not of the form key.path=value"),
        ("=3", "is not of the form"),
        ("fabric..x=3", "is not of the form"),
        ("name.x.y=3", "--set: name.x.y: input should be a valid string"),
        ("num_nodes=[1", "--set: num_nodes: the value '[1' is not valid YAML"),
        ("num_nodes=0", "--set: num_nodes: input should be greater than or equal to 1"),
        ("fabric.raisl=3", "--set: fabric.raisl: is not a known key here; did you mean 'rails'"),
        ("node.gpu.power=5", "--set: node.gpu.power: 5 is a bare int"),
        ("node=dgx-h1", "--set: node: 'dgx-h1' is not shipped"),
    ],
)
def test_a_wrong_override_is_blamed_on_the_override(write, override, words):
    assert words in str(complaint(write(CLUSTER), Cluster, overrides=[override]))


# files out


def test_write_atomically_writes_whole_files_and_makes_folders(tmp_path):
    path = tmp_path / "new" / "plan.json"
    write_atomically(path, "one")
    write_atomically(path, b"two")
    assert path.read_text() == "two"
    assert path.stat().st_mode & 0o777 == 0o644
    assert list(path.parent.iterdir()) == [path]


@pytest.mark.parametrize("step", ["fdopen", "replace"])
def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch, step):
    path = tmp_path / "plan.json"
    path.write_text("old")

    class FullDisk:
        def __init__(self, handle, mode):
            self.handle = handle

        def __enter__(self):
            return self

        def __exit__(self, *reason):
            os.close(self.handle)

        def write(self, data):
            os.write(self.handle, data[:1])
            raise OSError(28, "No space left on device")

    def refuse(self, target):
        raise OSError(13, "Permission denied")

    if step == "fdopen":
        monkeypatch.setattr(document.os, "fdopen", FullDisk)
    else:
        monkeypatch.setattr(Path, "replace", refuse)
    with pytest.raises(InputError, match=r"plan.json: cannot be written: .*; choose another place or free space"):
        write_atomically(path, "new content")
    monkeypatch.undo()
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_an_interrupted_write_leaves_no_half_file(tmp_path, monkeypatch):
    path = tmp_path / "plan.json"

    def interrupt(self, target):
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "replace", interrupt)
    with pytest.raises(KeyboardInterrupt):
        write_atomically(path, "content")
    assert list(tmp_path.iterdir()) == []


def test_a_file_in_the_way_of_a_folder_is_an_input_error(tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(InputError, match="cannot be written"):
        write_atomically(tmp_path / "file" / "plan.json", "x")


def test_json_has_no_nan_and_keys_are_texts():
    content = {"a": [math.nan, -math.inf, 1.5], 3: (True, None, "x"), "b": {"c": math.inf}}
    assert json.loads(to_json(content)) == {"a": [None, None, 1.5], "3": [True, None, "x"], "b": {"c": None}}


def test_documents_are_frozen(write):
    nic = load(write(NIC), Nic)
    with pytest.raises(ValueError, match="frozen"):
        nic.latency_seconds = 1.0


def test_a_schema_names_the_units():
    schema = Gpu.model_json_schema(by_alias=True)
    assert schema["properties"]["memory"]["examples"] == ["80 GB"]
    assert "memory_bytes" not in schema["properties"]
