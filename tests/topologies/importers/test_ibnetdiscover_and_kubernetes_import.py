import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from topologies.errors import InputError
from topologies.importers.ibnetdiscover import import_ibnetdiscover
from topologies.importers.kubernetes import import_kubernetes_nodes

Practitioner = Callable[[str], tuple[str, Path]]

TWO_RAILS = """\
vendid=0x2c9
switchguid=0x1(1)
Switch  65 "S-1"  # "leaf1" enhanced port 0 lid 1 lmc 0
[1]  "H-1a"[1](a)  # "h1 mlx5_0" lid 11 4xNDR
[2]  "H-2a"[1](a)  # "h2 mlx5_0" lid 12 4xNDR
[9]  "S-3"[1]      # "spine" lid 3 4xNDR
[10]  "S-3"[2]     # "spine" lid 3 4xNDR

switchguid=0x2(2)
Switch  65 "S-2"  # "leaf2" enhanced port 0 lid 2 lmc 0
[1]  "H-1b"[1](a)  # "h1 mlx5_1" lid 13 4xNDR
[2]  "H-2b"[1](a)  # "h2 mlx5_1" lid 14 4xNDR
[9]  "S-3"[3]      # "spine" lid 3 4xNDR

switchguid=0x3(3)
Switch  65 "S-3"  # "spine" enhanced port 0 lid 3 lmc 0
[1]  "S-1"[9]      # "leaf1" lid 1 4xNDR
[2]  "S-1"[10]     # "leaf1" lid 1 4xNDR
[3]  "S-2"[9]      # "leaf2" lid 2 4xNDR

caguid=0xa
Ca  1 "H-1a"  # "h1 mlx5_0"
[1](a)  "S-1"[1]  # lid 11 lmc 0 "leaf1" lid 1 4xNDR

Ca  1 "H-2a"  # "h2 mlx5_0"
[1](a)  "S-1"[2]  # lid 12 lmc 0 "leaf1" lid 1 4xNDR

Ca  1 "H-1b"  # "h1 mlx5_1"
[1](a)  "S-2"[1]  # lid 13 lmc 0 "leaf2" lid 2 4xNDR

Ca  1 "H-2b"  # "h2 mlx5_1"
[1](a)  "S-2"[2]  # lid 14 lmc 0 "leaf2" lid 2 4xNDR
"""


def test_two_rails_and_their_oversubscription() -> None:
    fabric = import_ibnetdiscover(TWO_RAILS)
    assert (set(fabric.hosts), fabric.rails, len(fabric.links)) == ({"h1", "h2"}, 2, 3)
    assert {adapter.bytes_per_second for adapter in fabric.adapters} == {50e9}
    assert fabric.ratio("S-1") == 1.0
    assert fabric.ratio("S-2") == 2.0
    assert fabric.tiers() == [
        {"name": "leaf", "nodes": 2},
        {"name": "spine", "nodes": 2, "oversubscription": 2.0},
    ]


def test_adapters_without_a_host_name_are_no_host() -> None:
    fabric = import_ibnetdiscover(TWO_RAILS.replace("h2 mlx5_1", "MT4129 ConnectX7   Mellanox Technologies"))
    assert set(fabric.hosts) == {"h1", "h2"}
    assert fabric.nameless_adapters == 1
    assert any("1 adapters do not name their host" in warning for warning in fabric.warnings)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (TWO_RAILS.split("Ca  1")[0], r"^f:4: port 1 of leaf1 leads to H-1a, which is not described.*truncated"),
        (
            TWO_RAILS.replace('[1](a)  "S-2"[2]  # lid 14 lmc 0 "leaf2" lid 2 4xNDR\n', ""),
            r"^f:31: h2 mlx5_1 has no port",
        ),
        (TWO_RAILS.replace('[9]  "S-3"[1] ', '[9]  "S-'), r"^f:6: .*is not a port"),
        ("# nothing\n", "holds no switch and no adapter"),
    ],
)
def test_truncated_fabrics_are_refused_with_their_place(text: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        import_ibnetdiscover(text, "f")


def test_director_with_line_cards(practitioner: Practitioner) -> None:
    fabric = import_ibnetdiscover(*practitioner("fabric/08"))
    by_name = {name: guid for guid, name in fabric.switches.items()}
    core = by_name["sw-0908-01ib1-A:MCS8500/S01/U1"]
    lines = [by_name[f"sw-0908-01ib1-A:MCS8500/L0{number}/U1"] for number in (1, 2)]
    leaves = [guid for guid, level in fabric.levels.items() if level == 1]
    assert (len(fabric.switches), len(fabric.hosts), len(leaves), fabric.aggregation_nodes) == (8, 10, 5, 1)
    assert fabric.levels[core] == 3
    assert all(sum(adapter.switch == leaf for adapter in fabric.adapters) == 2 for leaf in leaves)
    assert [sum(leaf in fabric.graph[line] for leaf in leaves) for line in lines] == [3, 2]
    assert {adapter.bytes_per_second for adapter in fabric.adapters} == {25e9}
    assert {rate for _, _, rate in fabric.links} == {25e9}
    assert len(fabric.switches_between("node-001", "node-002")) == 1
    assert [name.split("/")[-2] for name in fabric.switches_between("node-001", "node-003")[1:-1]] == ["L01"]
    way = fabric.switches_between("node-001", "node-007")
    assert [name.split("/")[-2] for name in way[1:-1]] == ["L01", "S01", "L02"]
    with pytest.raises(InputError, match="no host 'node-999'"):
        fabric.switches_between("node-001", "node-999")


def test_an_adapter_without_a_port_is_truncated(practitioner: Practitioner) -> None:
    text, path = practitioner("fabric/09")
    with pytest.raises(InputError, match=r":10: dgx-gb200-n01-c1 HCA-1 has no port with a link"):
        import_ibnetdiscover(text, path)


def node(name: str, gpus: int = 8, ready: str = "True", **labels: str) -> dict[str, Any]:
    named = {key.replace("__", "/").replace("_DOT_", "."): value for key, value in labels.items()}
    return {
        "kind": "Node",
        "metadata": {"name": name, "labels": {"nvidia.com/gpu.product": "NVIDIA-H100-80GB-HBM3"} | named},
        "status": {"allocatable": {"nvidia.com/gpu": str(gpus)}, "conditions": [{"type": "Ready", "status": ready}]},
    }


def listed(*nodes: dict[str, Any]) -> str:
    return json.dumps({"kind": "List", "items": list(nodes)})


@pytest.mark.parametrize(
    ("keys", "writer"),
    [
        (("fabric.topograph.run/tier-0", "fabric.topograph.run/tier-1"), "topograph"),
        (("network.topology.nvidia.com/leaf", "network.topology.nvidia.com/spine"), "topograph"),
        (("network.topology.nvidia.com/block", "network.topology.nvidia.com/spine"), "topograph, older"),
        (("topology.k8s.aws/network-node-layer-3", "topology.k8s.aws/network-node-layer-2"), "AWS"),
        (("cloud.google.com/gce-topology-subblock", "cloud.google.com/gce-topology-block"), "GKE"),
    ],
)
def test_switch_labels_of_all_writers(keys: tuple[str, str], writer: str) -> None:
    nodes = [node(f"n{index}") for index in range(6)]
    for index, one in enumerate(nodes):
        one["metadata"]["labels"] |= {keys[0]: f"leaf-{index // 2}", keys[1]: "spine-0"}
    found = import_kubernetes_nodes(listed(*nodes))
    assert found.labelled_by == writer
    assert found.tree is not None
    assert found.tree.tiers("spine-0") == [{"name": "leaf", "nodes": 2}, {"name": "spine", "nodes": 6}]
    assert found.products == {"NVIDIA-H100-80GB-HBM3": 6}


def test_equal_values_on_two_levels_are_two_switches() -> None:
    labels = {"network.topology.nvidia.com/leaf": "x", "network.topology.nvidia.com/spine": "x"}
    one = node("n")
    one["metadata"]["labels"] |= labels
    found = import_kubernetes_nodes(listed(one))
    assert found.tree is not None
    assert len(found.tree.switches) == 2


def test_gpu_labels_domains_and_what_is_wrong_with_nodes() -> None:
    first, second = node("a", 4), node("b", 4, ready="False")
    first["metadata"]["labels"] |= {"nvidia.com/gpu.clique": "u.1", "nvidia.com/gpu.memory": "81559"}
    second["metadata"]["labels"] |= {
        "nvidia.com/gpu.clique": "u.1",
        "nvidia.com/gpu.product": "A100-SXM4-40GB-MIG-1g.5gb",
    }
    third = {"kind": "Node", "metadata": {"name": "cpu", "labels": {}}, "status": {"allocatable": {"cpu": "8"}}}
    found = import_kubernetes_nodes(listed(first, second, third))
    assert [(one.name, one.gpus, one.ready) for one in found.nodes] == [("a", 4, True), ("b", 4, False)]
    assert found.nodes[0].memory_bytes == 81559 * 2**20
    assert found.domains == {"u.1": ("a", "b")}
    assert found.tree is None
    words = " | ".join(found.warnings)
    for part in ("not ready", "1 nodes without GPUs", "MIG", "different kinds", "the fabric is unknown"):
        assert part in words


def test_amd_nodes_count_their_resource() -> None:
    one = {
        "kind": "Node",
        "metadata": {"name": "m", "labels": {"amd.com/gpu.product-name": "AMD_Instinct_MI300X_OAM"}},
        "status": {"allocatable": {"amd.com/gpu": "8"}},
    }
    assert import_kubernetes_nodes(json.dumps(one)).nodes[0].gpus == 8


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"items": 3}', "is no list of nodes"),
        ('{"items": [{"kind": "Pod", "metadata": {"name": "p"}}]}', "an item is no node"),
        ('{"items": [{"kind": "Node", "metadata": {"name": "n"}}]}', "none of 1 nodes has GPUs"),
        ('{"items": [', "is not valid YAML"),
    ],
)
def test_bad_node_lists_are_refused(text: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        import_kubernetes_nodes(text, "k")
