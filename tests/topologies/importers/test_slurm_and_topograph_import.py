from collections.abc import Callable
from pathlib import Path

import pytest

from topologies.errors import InputError
from topologies.importers.slurm_topology import import_slurm_topology
from topologies.importers.topograph import import_topograph

Practitioner = Callable[[str], tuple[str, Path]]

TREE = """
# spine.1=real-spine
SwitchName=spine.1 Switches=leaf[1-2] LinkSpeed=1
switchname=leaf1 \\
    nodes=n[01-04]
SwitchName=leaf2 Nodes=n[05-06],m1   # the rest
"""


def test_topology_conf_with_continuation_case_and_comments() -> None:
    found = import_slurm_topology(TREE).choose(None)
    assert found.tree is not None
    assert found.plugin == "tree"
    assert found.nodes == ("n01", "n02", "n03", "n04", "n05", "n06", "m1")
    assert found.tree.roots == ("spine.1",)
    assert found.aliases == {"spine.1": "real-spine"}
    assert any("3 to 4 nodes" in warning for warning in found.warnings)


def test_topology_conf_with_blocks() -> None:
    found = import_slurm_topology("BlockName=b1 Nodes=n[1-4]\nBlockName=b2 Nodes=n[5-7]\nBlockSizes=4,8\n").choose(None)
    assert (found.plugin, found.block_sizes, len(found.nodes)) == ("block", (4, 8), 7)
    assert any("fewer than the base block size 4" in warning for warning in found.warnings)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("SwitchName=a Switches=b\nSwitchName=b Switches=a\n", r"^t:2: the switches run in a circle: a -> b -> a"),
        ("SwitchName=a Switches=x[1-2]\n", r"^t:1: the switch a leads to x1, which is not described"),
        ("SwitchName=a Nodes=n1\nSwitchName=a Nodes=n2\n", r"^t:2: the switch a is described twice"),
        ("SwitchName=a Nodes=n[1-2\n", r"^t:1: 'n\[1-2' is not a host list"),
        ("SwitchName=a Noodes=n1\n", r"^t:1: 'noodes' is not a key.*did you mean 'nodes'"),
        ("SwitchName=a Nodes=n1 and more\n", r"^t:1: 'and more' is not of the form Key=Value"),
        ("SwitchName=a Nodes=n1\nBlockName=b Nodes=n2\n", r"^t: describes both switches and blocks"),
        ("- topology: t\n  tree:\n    switches:\n      - switch: a\n        children: b\n", r"^t:4: .*leads to b"),
        ("- topology: t\n  cube: {}\n", r"^t:1: topology: t names no plugin"),
        (
            "- topology: t\n  torus3d:\n    toruses:\n      - {name: p, dims: {x: 2, y: 2, z: 2}, nodes: 'n[1-7]'}\n",
            "7 nodes",
        ),
        ("- topology: t\n  block:\n    blocks: 3\n", r"^t:3: blocks: 'blocks' must be a list"),
        ("- topology: [\n", r"^t:2:1: is not valid YAML"),
        ("", r"^t: is empty"),
    ],
)
def test_bad_slurm_topologies_are_refused_with_their_place(text: str, said: str) -> None:
    with pytest.raises(InputError, match=said):
        import_slurm_topology(text, "t")


def test_disconnected_trunks(practitioner: Practitioner) -> None:
    found = import_slurm_topology(*practitioner("fabric/01"))
    topology = found.choose(None)
    assert topology.tree is not None
    assert len(topology.nodes) == 40
    assert {root: len(topology.tree.nodes_below(root)) for root in topology.tree.roots} == {
        "spineA": 16,
        "spineB": 16,
        "leafC": 8,
    }
    assert any("more than 16 nodes cannot be placed in one tree" in warning for warning in found.warnings)


def test_all_plugins_of_topology_yaml(practitioner: Practitioner) -> None:
    found = import_slurm_topology(*practitioner("fabric/03"))
    by_name = {one.name: one for one in found.topologies}
    assert found.choose(None).name == "topo1"
    assert len(found.choose(None).nodes) == 4
    assert [one.plugin for one in found.topologies] == ["tree", "block", "flat", "flat", "ring", "torus3d"]
    assert {name: len(nodes) for name, nodes in by_name["topo2"].groups.items()} == dict.fromkeys(
        ("b1", "b2", "b3", "b4"), 4
    )
    assert by_name["topo2"].block_sizes == (4, 16)
    assert [len(nodes) for nodes in by_name["topo4"].groups.values()] == [8, 8]
    assert by_name["topo5"].dims == {"pod1": (4, 4, 2)}
    assert len(by_name["topo5"].nodes) == 32
    with pytest.raises(InputError, match="did you mean"):
        found.choose("topo9")


def test_slinky_tree_with_real_names_in_comments(practitioner: Practitioner) -> None:
    topology = import_slurm_topology(*practitioner("fabric/04")).choose(None)
    assert topology.tree is not None
    assert (len(topology.nodes), len(topology.tree.leaves)) == (96, 12)
    assert all(len(leaf.nodes) == 8 for leaf in topology.tree.leaves)
    assert sum(height == 2 for height in topology.tree.heights.values()) == 6
    assert topology.aliases["switch.3.1"] == "core"
    assert topology.aliases["switch.1.12"] == "leaf-6-2"
    assert topology.warnings == ()


def test_irregular_topograph_model(practitioner: Practitioner) -> None:
    model = import_topograph(*practitioner("fabric/07"))
    assert model.tree.roots == ("core",)
    filled = {leaf.name: len(leaf.nodes) for leaf in model.tree.leaves}
    assert sum(name.startswith("rack-1-") for name in filled) == 14
    assert sum(name.startswith("rack-2-") for name in filled) == 15
    assert filled["rack-2-15"] == 5
    assert filled["rack-1-04"] == 7
    assert sorted(set(filled.values())) == [5, 7, 9]
    assert {name: len(nodes) for name, nodes in model.domains.items()} == {"domain-01": 124, "domain-02": 131}
    assert len(model.sub_domains) == 29
    assert any("rack-1-03, rack-1-13" in warning for warning in model.warnings)


def test_older_topograph_model_with_capacity_blocks() -> None:
    model = import_topograph(
        """
switches:
  core: {switches: [leaf]}
  leaf: {metadata: {group: cb1}, nodes: ["n[1-2]", n3]}
capacity_blocks:
  cb1: {nodes: ["n[1-2]"], attributes: {nvlink: nvl1}}
  cb2: {nodes: [n3], attributes: {nvlink: nvl2}}
"""
    )
    assert model.nodes == ("n1", "n2", "n3")
    assert model.domains == {"nvl1": ("n1", "n2"), "nvl2": ("n3",)}


def test_topograph_graph_of_instances() -> None:
    model = import_topograph(
        '{"instances": [{"id": "i1", "network_layers": ["leaf-a", "spine"], '
        '"labels": {"nvidia.com/gpu.product": "H100", '
        '"network.topology.nvidia.com/accelerator": "nvl-1"}}, {"id": "i2", "network_layers": ["leaf-b", "spine"]}]}'
    )
    assert model.tree.tiers("spine") == [{"name": "leaf", "nodes": 1}, {"name": "spine", "nodes": 2}]
    assert model.domains == {"nvl-1": ("i1",)}
    assert model.products == {"i1": "H100"}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("switches: {a: {switches: [b]}, b: {switches: [a]}}", "circle"),
        ("switches: {a: {}}\nblocks:\n- nodes: [n1]\n", r"^m:3: a block has no switch"),
        ("pears: 3\n", "is no topograph model"),
        ('{"instances": [{"id": "x"}]}', "no id or no network_layers"),
    ],
)
def test_bad_topograph_files_are_refused(text: str, said: str) -> None:
    with pytest.raises(InputError, match=said):
        import_topograph(text, "m")
