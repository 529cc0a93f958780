"""The shipped catalog loads whole, has a source for each number, and repeats the published dense peaks."""

import re
from pathlib import Path

import pytest
from ruamel.yaml import YAML

from topologies.catalog import KINDS, find, load_cluster
from topologies.checks import check_cluster, numbers, unsourced
from topologies.cluster import Cluster
from topologies.document import load, shipped
from topologies.errors import InputError
from topologies.hardware import CATALOG, Gpu, Node
from topologies.importers.products import gpu_of_device, gpu_of_product
from topologies.units import UNITS, parse_quantity

SHARED = Path(__file__).resolve().parents[2].parent / "shared"
FILES = [(model, path) for folder, model in KINDS.items() for path in shipped(CATALOG / folder).values()]
IDS = [f"{path.parent.name}/{path.stem}" for _, path in FILES]
GPUS = {name: load(path, Gpu) for name, path in shipped(CATALOG / "gpus").items()}
NODES = {name: load(path, Node) for name, path in shipped(CATALOG / "nodes").items()}
CLUSTERS = {name: load(path, Cluster) for name, path in shipped(CATALOG / "clusters").items()}

PUBLISHED_NAMES = {
    "A100": ("a100-40gb", "a100-80gb"),
    "H100": ("h100-sxm",),
    "H200": ("h200-sxm",),
    "H800": ("h800-sxm",),
    **{name: (name.lower(),) for name in ("GH200", "B200", "GB200", "B300", "GB300")},
    **{name: (name.lower(),) for name in ("MI300X", "MI325X", "MI350X", "MI355X")},
}


def test_the_catalog_holds_what_others_refer_to():
    assert set(GPUS) >= {
        *("a100-40gb", "a100-80gb", "h100-sxm", "h200-sxm", "h800-sxm", "gh200", "b200", "gb200", "b300", "gb300"),
        *("mi300x", "mi325x", "mi350x", "mi355x", "cpu-core"),
    }
    assert set(CLUSTERS) >= {
        *("dgx-h100-superpod", "dgx-a100-superpod", "mi300x-cluster", "gb200-nvl72", "llama3-roce-16k", "h800-2048"),
        *("h100-512", "a100-1024", "mi300x-64", "laptop"),
    }
    sizes = {name: CLUSTERS[name].num_gpus for name in ("llama3-roce-16k", "h800-2048", "h100-512", "a100-1024")}
    assert sizes == {"llama3-roce-16k": 16384, "h800-2048": 2048, "h100-512": 512, "a100-1024": 1024}
    assert CLUSTERS["dgx-a100-superpod"].num_nodes == 140
    assert CLUSTERS["gb200-nvl72"].domain_size == 72
    assert (CLUSTERS["laptop"].num_gpus, CLUSTERS["laptop"].fabric.kind) == (2, "none")
    assert CLUSTERS["laptop"].measured is None


@pytest.mark.parametrize(("model", "path"), FILES, ids=IDS)
def test_every_number_of_a_shipped_file_has_a_source(model, path):
    raw = YAML(typ="safe").load(path.read_text())
    sources = raw.pop("source")
    unit = re.compile(rf"[\d.]+ ({'|'.join(re.escape(unit) for units in UNITS.values() for unit in units)})")

    def quantities(value, key):
        if isinstance(value, dict):
            return {found for name, entry in value.items() for found in quantities(entry, [*key, name])}
        if isinstance(value, list):
            return {found for entry in value for found in quantities(entry, key)}
        if isinstance(value, str):
            return {".".join(key)} if unit.fullmatch(value) else set()
        return set() if isinstance(value, bool) else {".".join(key)}

    found = quantities(raw, [])
    assert found, "the walk must see the numbers"
    for key in found:
        prefixes = {key.rsplit(".", cut)[0] for cut in range(key.count(".") + 1)}
        assert (prefixes | {"*"}) & sources.keys(), f"{key} has no source"
    assert set(numbers(load(path, model))) == found
    assert unsourced(load(path, model)) == []
    assert all(len(source.strip()) > 5 for source in sources.values())


def test_a_number_without_source_is_seen(tmp_path):
    text = (CATALOG / "gpus" / "h100-sxm.yaml").read_text()
    body, sources = text.split("source:\n")
    sources = re.sub(r"^  power:.*\n", "", sources, flags=re.MULTILINE).replace("  peak:", "  peak.bf16:")
    path = tmp_path / "gpu.yaml"
    path.write_text(f"{body}source:\n{sources}")
    assert unsourced(load(path, Gpu)) == ["peak.fp32", "peak.tf32", "peak.fp16", "peak.fp8", "power"]


def published_peaks():
    path = SHARED / "data" / "published-runs.md"
    if not path.exists():
        pytest.skip("the published runs are not beside this checkout")
    lines = path.read_text().splitlines()
    start = lines.index("| GPU | bf16 | fp8 | fp4 |") + 2
    for line in lines[start:]:
        if not line.startswith("|"):
            return
        names, *peaks = (cell.strip() for cell in line.strip("|").split("|"))
        for name in names.split(", "):
            yield name, [None if peak == "-" else float(peak) * 1e12 for peak in peaks]


def test_dense_peaks_equal_those_of_the_published_runs():
    compared = 0
    for name, (bf16, fp8, fp4) in published_peaks():
        for ours in PUBLISHED_NAMES.get(name, ()):
            gpu = GPUS[ours]
            assert (gpu.peak("bf16"), gpu.peak("fp16"), gpu.peak("fp8")) == (bf16, bf16, fp8), ours
            # CDNA 4 has MXFP4, not NVFP4: headway knows no peak for it there
            assert gpu.peak("nvfp4") == (fp4 if gpu.vendor == "NVIDIA" else None), ours
            compared += 1
    assert compared == 14


def test_precisions_fit_the_generation():
    for name, gpu in GPUS.items():
        peaks = gpu.peak_flop_per_second
        if gpu.architecture == "ampere":
            assert gpu.peak("fp8") is None, name
        if gpu.architecture in ("ampere", "hopper", "cdna3"):
            assert gpu.peak("mxfp8") is None, name
            assert gpu.peak("nvfp4") is None, name
        if gpu.architecture in ("blackwell", "cdna4"):
            assert gpu.peak("mxfp8") == gpu.peak("fp8"), name
        if "tf32" in peaks:
            assert peaks["tf32"] == pytest.approx(peaks["bf16"] / 2, rel=0.001), name
        if "fp8" in peaks:
            assert peaks["fp8"] == pytest.approx(2 * peaks["bf16"], rel=0.001), name


def test_memory_and_power_are_plausible():
    for name, gpu in GPUS.items():
        assert 0.9 * gpu.memory_bytes <= gpu.usable_memory_bytes <= gpu.memory_bytes, name
        assert 0 < gpu.idle_power_watts < 0.5 * gpu.power_watts, name
    for name, node in NODES.items():
        assert node.gpus_per_node * node.gpu.power_watts < node.power_watts, name
        assert node.gpus_per_node * node.gpu.idle_power_watts < node.idle_power_watts < node.power_watts, name
        assert node.scale_up.bus_bandwidth_bytes_per_second <= node.scale_up.bandwidth_bytes_per_second, name


@pytest.mark.parametrize(
    ("node", "link", "busbw", "nic"),
    [  # data sheets; ring all-reduce of stas00/ml-engineering and the OCI readme; GB/s, GB/s, Gbit/s a GPU
        ("dgx-a100", 300, 235, 200),
        ("dgx-h100", 450, 365, 400),
        ("dgx-h800", 200, 160, 400),
        ("hgx-h20", 450, 365, 400),
        ("hgx-a800", 200, 157, 200),
        ("dgx-b200", 900, 682, 400),
        ("dgx-b300", 900, 682, 800),
        ("gb300-nvl72-tray", 900, 682, 800),
        ("mi300x-node", 448, 312, 400),
        ("mi355x-node", 537, 406, 400),
    ],
)
def test_links_of_nodes(node, link, busbw, nic):
    scale_up = NODES[node].scale_up
    assert scale_up.bandwidth_bytes_per_second == link * 1e9
    assert scale_up.bus_bandwidth_bytes_per_second == busbw * 1e9
    assert NODES[node].network_bytes_per_second_per_gpu == nic * 1e9 / 8


@pytest.mark.parametrize("name", CLUSTERS)
def test_shipped_clusters_can_be_built(name):
    findings = check_cluster(CLUSTERS[name])
    assert [finding for finding in findings if finding.level == "failure"] == []
    rules = {finding.rule for finding in findings}
    assert rules == ({"oversubscription"} if name == "llama3-roce-16k" else set())


def test_llama3_storage_is_that_of_the_paper():
    tectonic = CLUSTERS["llama3-roce-16k"].storage[-1]
    assert tectonic.write_bytes_per_second == parse_quantity("2 TB/s", "bytes_per_second")
    assert tectonic.capacity_bytes == 240e15
    assert "7 TB/s" in CLUSTERS["llama3-roce-16k"].source["storage"]


def test_find_by_name_and_by_path(tmp_path):
    assert isinstance(find("llama3-roce-16k"), Cluster)
    assert find("h100-sxm") == GPUS["h100-sxm"]
    for folder, name in (("gpus", "b200"), ("nodes", "dgx-b200"), ("nics", "400g"), ("clusters", "laptop")):
        assert find(str(CATALOG / folder / f"{name}.yaml")) == find(name)
    assert load_cluster("h100-512") == load_cluster(CATALOG / "clusters" / "h100-512.yaml")
    with pytest.raises(InputError, match=r"'h101-sxm' is not in the catalog; did you mean .*'h100-sxm'"):
        find("h101-sxm")
    with pytest.raises(InputError, match="'h100-51' is not shipped with headway; did you mean 'h100-512'"):
        load_cluster("h100-51")
    with pytest.raises(InputError, match="cannot be read"):
        find(str(tmp_path / "absent.yaml"))


@pytest.mark.parametrize(
    ("product", "device", "name"),
    [  # as nvidia-smi and the PCI ID repository name them
        ("NVIDIA A100-SXM4-80GB", "0x20b2", "a100-80gb"),
        ("NVIDIA A100 80GB PCIe", "0x20b5", "a100-pcie-80gb"),
        ("NVIDIA A800-SXM4-80GB", "0x20f3", "a800-sxm"),
        ("NVIDIA H100 80GB HBM3", "0x2330", "h100-sxm"),
        ("NVIDIA H100 PCIe", "0x2331", "h100-pcie"),
        ("NVIDIA H20", "0x2329", "h20"),
        ("NVIDIA H200", "0x2335", "h200-sxm"),
    ],
)
def test_tools_names_lead_to_the_catalog(product, device, name):
    assert gpu_of_product(product) == gpu_of_device("0x10de", device) == name
    assert name in GPUS
