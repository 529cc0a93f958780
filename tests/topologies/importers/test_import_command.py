import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from topologies.catalog import load_cluster
from topologies.checks import check_cluster
from topologies.cluster import Cluster
from topologies.commands import topology
from topologies.document import load
from topologies.errors import InputError
from topologies.importers import Choices, import_file
from topologies.importers.assemble import to_yaml
from topologies.importers.facts import facts, flat
from topologies.importers.importing import FORMATS, READERS, format_of
from topologies.importers.nccl_curve import import_nccl_tests

Practitioner = Callable[[str], tuple[str, Path]]

SLURM = "SwitchName=spine Switches=leaf[1-2]\nSwitchName=leaf1 Nodes=n[1-4]\nSwitchName=leaf2 Nodes=n[5-8]\n"
LOG = """\
# Collective test starting: all_reduce_perf
#       size         count      type   redop    root     time   algbw   busbw #wrong     time   algbw   busbw #wrong
       65536         16384     float     sum      -1    227.4    0.29    0.54      0    225.5    0.29    0.54      0
  2147483648     536870912     float     sum      -1    51406   41.78   78.33      0    51406   41.77   78.33      0
# Out of bounds values : 0 OK
# Avg bus bandwidth    : 39.4
"""


def matrix(gpus: int, link: str, nics: int = 0) -> str:
    names = [f"GPU{index}" for index in range(gpus)] + [f"NIC{index}" for index in range(nics)]
    lines = ["\t" + "\t".join(names) + "\tCPU Affinity\tNUMA Affinity"]
    for one in range(gpus):
        cells = ["X" if one == other else link for other in range(gpus)]
        cells += ["PIX" if nic == one else "SYS" for nic in range(nics)]
        lines.append(f"GPU{one}\t" + "\t".join(cells) + "\t0-7\t0")
    return "\n".join(lines) + "\n"


def written(tmp_path: Path, text: str, name: str = "input") -> Path:
    path = tmp_path / name
    path.write_text(text)
    return path


def imported(path: Path, tmp_path: Path, *options: str) -> Cluster:
    """Run the command and load what it wrote; written again, it must say the same."""
    target = tmp_path / "out" / "my.yaml"
    result = CliRunner().invoke(topology, ["import", str(path), "-o", str(target), *options])
    assert result.exit_code == 0, result.stderr
    cluster = load(target, Cluster)
    again = written(tmp_path, target.read_text(), "again.yaml")
    assert load(again, Cluster) == cluster
    return cluster


def test_a_matrix_and_a_gpu_make_a_node(tmp_path: Path) -> None:
    path = written(tmp_path, matrix(8, "NV18", 8))
    cluster = imported(path, tmp_path, "--gpu", "h100-sxm", "--nic", "400g")
    reference = load_cluster("dgx-h100-superpod").node
    assert (cluster.num_gpus, cluster.domain_size, cluster.node.nics_per_node) == (8, 8, 8)
    assert cluster.scale_up.bandwidth_bytes_per_second == reference.scale_up.bandwidth_bytes_per_second == 450e9
    assert cluster.scale_up.bus_bandwidth_bytes_per_second == reference.scale_up.bus_bandwidth_bytes_per_second
    assert [finding for finding in check_cluster(cluster) if finding.level == "failure"] == []


def test_fewer_nvlinks_scale_the_rates_and_say_so(tmp_path: Path) -> None:
    cluster = imported(written(tmp_path, matrix(8, "NV8")), tmp_path, "--gpu", "a100-80gb")
    full = load_cluster("dgx-a100-superpod").scale_up
    assert cluster.scale_up.bandwidth_bytes_per_second == 200e9
    share = full.bus_bandwidth_bytes_per_second / full.bandwidth_bytes_per_second
    assert cluster.scale_up.bus_bandwidth_bytes_per_second == pytest.approx(200e9 * share)
    assert "bus bandwidth assumed" in cluster.node.source["scale_up"]
    assert cluster.node.nic is None


def test_blackwell_links_carry_twice_as_much(tmp_path: Path) -> None:
    cluster = imported(written(tmp_path, matrix(4, "NV18")), tmp_path, "--gpu", "gb200")
    assert cluster.scale_up.bandwidth_bytes_per_second == 900e9


@pytest.mark.parametrize(
    ("text", "options", "message"),
    [
        (matrix(8, "NV18"), Choices(), "does not say which GPU"),
        (matrix(8, "NV18"), Choices(gpu="h100"), "did you mean"),
        (matrix(8, "NODE"), Choices(gpu="h100-sxm"), "what joins the GPUs is not in the file"),
        (SLURM, Choices(), "give --node NAME"),
        (SLURM, Choices(node="dgx-h100", part="leaf9"), "there is no switch 'leaf9'"),
        (SLURM.partition("\n")[2], Choices(node="dgx-h100"), "2 trees without a common root"),
        (LOG, Choices(), "give --cluster NAME"),
        ("GPU 0: A (UUID: GPU-1)\n", Choices(), "does not say what joins them"),
        ("h:1:1 [0] NCCL INFO Using network IB\n", Choices(), "a debug log determines no cluster"),
        ("- topology: t\n  flat: true\n", Choices(node="dgx-h100"), "describes no fabric of levels"),
    ],
)
def test_what_a_file_does_not_say_is_asked_for(tmp_path: Path, text: str, options: Choices, message: str) -> None:
    found = import_file(written(tmp_path, text), options)
    assert found.cluster is None
    assert message in str(found.undetermined)


def test_a_tree_and_a_node_make_a_cluster(tmp_path: Path) -> None:
    cluster = imported(written(tmp_path, SLURM), tmp_path, "--node", "dgx-h100")
    assert (cluster.num_nodes, cluster.num_gpus) == (8, 64)
    assert [(tier.name, tier.nodes) for tier in cluster.fabric.tiers] == [("leaf", 4), ("spine", 8)]
    assert cluster.fabric.rails == 8
    assert "rails are not in the file" in cluster.source["fabric"]
    part = imported(written(tmp_path, SLURM), tmp_path, "--node", "dgx-h100", "--part", "leaf2")
    assert part.num_nodes == 4


def test_a_node_may_be_a_file_of_its_own(tmp_path: Path) -> None:
    node = written(tmp_path, to_yaml({"name": "mine", **_node()}), "node.yaml")
    cluster = imported(written(tmp_path, SLURM), tmp_path, "--node", str(node))
    assert cluster.node.name == "mine"


def _node() -> dict[str, Any]:
    scale_up = {"kind": "pcie", "bandwidth": "20 GB/s", "bus_bandwidth": "15 GB/s", "latency": "2 us", "domain_size": 2}
    return {"gpu": "h100-sxm", "gpus_per_node": 2, "scale_up": scale_up, "nic": "100g", "nics_per_node": 1}


def test_blocks_make_levels(tmp_path: Path) -> None:
    text = "BlockName=b1 Nodes=n[1-4]\nBlockName=b2 Nodes=n[5-8]\nBlockName=b3 Nodes=n[9-12]\nBlockSizes=4,8\n"
    cluster = imported(written(tmp_path, text), tmp_path, "--node", "dgx-h100")
    assert [tier.nodes for tier in cluster.fabric.tiers] == [4, 8, 12]


def test_labels_correct_the_number_of_gpus(tmp_path: Path) -> None:
    items = [
        {
            "kind": "Node",
            "metadata": {
                "name": f"n{index}",
                "labels": {"nvidia.com/gpu.count": "4", "network.topology.nvidia.com/leaf": f"l{index // 2}"}
                | {"network.topology.nvidia.com/spine": "s"},
            },
        }
        for index in range(4)
    ]
    path = written(tmp_path, json.dumps({"kind": "List", "items": items}))
    cluster = imported(path, tmp_path, "--node", "dgx-h100")
    assert (cluster.num_nodes, cluster.num_gpus) == (4, 16)


def test_a_log_adds_a_curve_to_a_cluster(tmp_path: Path) -> None:
    path = written(tmp_path, LOG)
    cluster = imported(path, tmp_path, "--cluster", "dgx-a100-superpod")
    base = load_cluster("dgx-a100-superpod")
    assert cluster.measured is not None
    points = cluster.measured.collectives
    assert [(one.kind, one.ranks, one.size_bytes) for one in points] == [
        ("all_reduce", 16, 65536),
        ("all_reduce", 16, 2147483648),
    ]
    assert points[1].time_seconds == pytest.approx(51406e-6)
    assert cluster.model_copy(update={"measured": None}) == base
    mine = written(
        tmp_path, to_yaml(json.loads(json.dumps(import_file(path, Choices(cluster="dgx-a100-superpod")).cluster)))
    )
    twice = imported(written(tmp_path, LOG, "log"), tmp_path, "--cluster", str(mine.rename(tmp_path / "mine.yaml")))
    assert twice.measured == cluster.measured


def test_json_says_what_was_found_and_what_is_missing(tmp_path: Path) -> None:
    result = CliRunner().invoke(topology, ["import", str(written(tmp_path, SLURM)), "--json"])
    content = json.loads(result.stdout)
    assert result.exit_code == 0
    assert content["format"] == "slurm-topology"
    assert content["found"]["topologies"]["topology.conf"]["nodes"] == 8
    assert content["cluster"] is None
    assert "--node" in content["undetermined"]


def test_a_cluster_to_stdout_is_nothing_but_the_document(tmp_path: Path) -> None:
    result = CliRunner().invoke(topology, ["import", str(written(tmp_path, SLURM)), "--node", "dgx-h100", "-o", "-"])
    assert result.exit_code == 0
    assert load(written(tmp_path, result.stdout, "my.yaml"), Cluster).num_nodes == 8


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty"),
        (b"\x7fELF\x02\x01\x01\x00\x00", "is not a text file"),
        (b"\xff\x00\xff", "is not a text file"),
        (b"hello\nworld\n", "is of no format that headway reads"),
        (b"[1, 2, 3]", "is of no format that headway reads"),
        (b"n1: Test NCCL failure common.cu:392 'unhandled cuda error'\n# nThread 1 nGpus 2\n", "the run failed"),
        (b"SwitchName=a Switches=b\nSwitchName=b Switches=a\n", "circle"),
        (b"<?xml version='1.0'?><!DOCTYPE x [<!ENTITY a 'b'>]><system>&a;</system>", "entities"),
        (b'{"items": [', "is of no format"),
    ],
)
def test_bad_files_give_one_clear_error_and_exit_2(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "bad"
    path.write_bytes(content)
    result = CliRunner().invoke(topology, ["import", str(path)])
    assert result.exit_code == 2
    assert result.stderr.startswith(f"error: {path}:")
    assert message in result.stderr
    assert result.stderr.count("\n") == 1
    with pytest.raises(InputError):
        import_file(path)


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    result = CliRunner().invoke(topology, ["import", str(tmp_path / "none")])
    assert result.exit_code == 2
    assert "cannot be read" in result.stderr


SAMPLES = (
    SLURM,
    LOG,
    matrix(4, "NV18", 2),
    "<system version='1'><cpu numaid='0'><pci busid='1' class='0x030200'><gpu dev='0'/></pci></cpu></system>",
    "h1:1:2 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[0] [send] via NET/IB/0/GDRDMA\n",
    'Switch 4 "S-1" # "leaf"\n[1] "H-1"[1] # "h a" 4xHDR\nCa 1 "H-1" # "h a"\n[1](1) "S-1"[1] # "leaf" 4xHDR\n',
    "switches: {core: {switches: [leaf]}, leaf: {nodes: ['n[1-2]']}}\n",
)


@given(st.sampled_from(SAMPLES), st.data())
def test_damaged_files_give_an_error_and_never_a_crash(text: str, data: st.DataObject) -> None:
    start = data.draw(st.integers(0, len(text)))
    end = data.draw(st.integers(start, min(len(text), start + 40)))
    damaged = text[:start] + data.draw(st.text('0123456789ABX[]<>":,-#=\n\t ', max_size=5)) + text[end:]
    try:
        name = format_of(damaged)
        content = import_nccl_tests(damaged) if name == "nccl-tests" else READERS[name](damaged, None)
    except InputError:
        return
    assert flat(facts(content))


FOLDERS = {
    "nccl_tests": {"nccl-tests"},
    "topo": {"gpu-matrix", "gpu-list"},
    "nccl_xml": {"nccl-xml"},
    "fabric": {"slurm-topology", "topograph", "ibnetdiscover"},
    "nccl_debug": {"nccl-debug"},
}


@pytest.mark.parametrize("folder", FOLDERS)
def test_formats_of_all_practitioner_files_are_told(practitioner: Practitioner, folder: str) -> None:
    _, first = practitioner(f"{folder}/")
    files = sorted(first.parent.iterdir())
    found = {format_of(path.read_text(), path) for path in files}
    assert len(files) > 3
    assert found == FOLDERS[folder]
    assert found <= set(FORMATS)


CLUSTERS = [
    ("topo/01", ("--gpu", "a100-80gb", "--nic", "200g"), 8, 8),
    ("topo/02", ("--gpu", "mi300x"), 8, 8),
    ("topo/04", ("--gpu", "h100-sxm"), 8, 8),
    ("topo/05", ("--gpu", "gb200"), 4, 4),
    ("topo/07", ("--gpu", "a100-40gb", "--node", "dgx-a100", "--nic", "200g"), 8, 8),
    ("topo/08", ("--gpu", "a100-80gb", "--nic", "200g"), 4, 4),
    ("topo/10", ("--gpu", "a100-80gb", "--nic", "200g"), 8, 8),
    ("topo/14", ("--gpu", "h100-sxm"), 1, 1),
    ("nccl_xml/03", (), 8, 8),
    ("nccl_xml/05", (), 8, 8),
    ("fabric/01", ("--node", "dgx-h100", "--part", "spineB"), 128, 8),
    ("fabric/03", ("--node", "dgx-h100"), 32, 8),
    ("fabric/04", ("--node", "dgx-h100"), 768, 8),
    ("fabric/07", ("--node", "gb200-nvl72-tray"), 1020, 72),
    ("fabric/08", ("--node", "dgx-a100"), 80, 8),
    ("nccl_tests/08", ("--cluster", "dgx-h100-superpod"), 1024, 8),
]


@pytest.mark.parametrize(("start", "options", "gpus", "domain"), CLUSTERS)
def test_practitioner_files_become_clusters(
    practitioner: Practitioner, tmp_path: Path, start: str, options: tuple[str, ...], gpus: int, domain: int
) -> None:
    cluster = imported(practitioner(start)[1], tmp_path, *options)
    assert (cluster.num_gpus, cluster.domain_size) == (gpus, domain)


def test_nvls_explains_what_nvlink_does_not_carry(practitioner: Practitioner) -> None:
    _, path = practitioner("nccl_tests/08")
    found = import_file(path, Choices(cluster="dgx-h100-superpod"))
    assert any("NVLS reduces in the switch" in warning for warning in found.warnings)
