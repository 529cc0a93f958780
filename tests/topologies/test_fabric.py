"""Fabrics: published switch counts, the graph against the arithmetic, and max-flow against the bisection."""

import math

import networkx as nx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from topologies.catalog import load_cluster
from topologies.cluster import Cluster, Fabric, Pool, Tier
from topologies.errors import InputError
from topologies.fabric import LEVELS, count, wiring
from topologies.fabric_graph import graph

H100 = load_cluster("dgx-h100-superpod").node
TRAY = load_cluster("gb200-nvl72").node


def build(nodes, *sizes, kind="rail-optimized", node=H100, over=(), ports=64, rails=8):
    over = (*over, *[1.0] * len(sizes))
    tiers = tuple(
        Tier(name=name, nodes=size, oversubscription=factor, latency_seconds=1e-6 * (level + 1))
        for level, (name, size, factor) in enumerate(zip(LEVELS, sizes, over, strict=False))
    )
    fabric = Fabric(kind=kind, rails=1 if kind == "fat-tree" else rails, tiers=tiers, switch_ports=ports)
    return Cluster(name="test", pools=(Pool(node=node, num_nodes=nodes),), fabric=fabric)


def switches(cluster):
    counts = count(cluster)
    assert counts is not None
    return [level.switches for level in counts.levels]


def links(cluster):
    counts = count(cluster)
    assert counts is not None
    return [level.links for level in counts.levels]


@pytest.mark.parametrize(
    ("units", "leaves", "spines", "uplinks"),
    [(1, 8, 4, 256), (2, 16, 8, 512), (3, 24, 16, 768), (4, 32, 16, 1024)],
)
def test_dgx_h100_superpod_table_4(units, leaves, spines, uplinks):
    cluster = build(32 * units, 32, 256)
    assert switches(cluster) == [leaves, spines]
    assert links(cluster) == [256 * units, uplinks]


@pytest.mark.parametrize(
    ("units", "expected"),
    [(8, [64, 32]), (16, [128, 128, 64]), (32, [256, 256, 128]), (64, [512, 512, 256])],
)
def test_dgx_b200_superpod_larger_sizes(units, expected):
    sizes = (32, 256) if units == 8 else (32, 128, 2048)
    cluster = build(32 * units, *sizes)
    assert switches(cluster) == expected
    assert links(cluster) == [256 * units] * len(expected)


@given(nodes=st.integers(1, 400), ports=st.sampled_from([16, 32, 40, 64]), rails=st.sampled_from([1, 2, 4, 8]))
def test_leaves_follow_the_textbook_formula(nodes, ports, rails):
    node = H100.model_copy(update={"nics_per_node": rails})
    cluster = build(nodes, ports // 2, ports // 2 * ports, rails=rails, ports=ports, node=node)
    wires = wiring(cluster)
    assert wires is not None
    assert switches(cluster)[0] == rails * math.ceil(nodes / (ports // 2))
    assert wires.ports_used[0] <= ports


@given(groups=st.integers(1, 24), kind=st.sampled_from(["rail-optimized", "rail-only", "dual-plane"]))
def test_enough_ports_and_at_least_full_bisection(groups, kind):
    cluster = build(32 * groups, 32, 128, 2048, kind=kind)
    wires, counts = wiring(cluster), count(cluster)
    assert wires is not None
    assert counts is not None
    assert all(used <= ports for used, ports in zip(wires.ports_used, wires.ports, strict=True))
    if len(counts.levels) > 1:
        assert counts.levels[1].links >= counts.levels[0].links
    if wires.spines_per_pod:
        assert wires.uplinks_per_leaf % wires.spines_per_pod == 0
        leaves = wires.leaves_per_group * wires.groups_per_pod
        assert wires.spines_per_pod >= leaves * wires.uplinks_per_leaf / 64


def test_the_a100_superpod_of_seven_units():
    cluster = load_cluster("dgx-a100-superpod")
    assert switches(cluster)[:2] == [56, 80]
    assert links(cluster)[:2] == [1120, 1120]


def test_llama3_cluster():
    cluster = load_cluster("llama3-roce-16k")
    leaves, _, _ = switches(cluster)
    assert leaves == 1024  # 16 GPUs a rack under one ToR
    node_links, rack_uplinks, pod_uplinks = links(cluster)
    assert (node_links, rack_uplinks) == (16384, 16384)
    assert pod_uplinks == pytest.approx(6 * 3072 / 7, rel=0.005)  # 6 pods, the last one wired like the others
    counts = count(cluster)
    assert counts is not None
    assert counts.bisection_bytes_per_second == pytest.approx(16384 / 2 * 50e9 / 7)
    assert counts.optics == 2 * (rack_uplinks + pod_uplinks)


def test_one_switch_and_no_fabric():
    assert switches(load_cluster("mi300x-64")) == [1]
    assert count(load_cluster("laptop")) is None
    assert list(graph(load_cluster("laptop"))) == ["node0"]


SMALL = {
    "rail, one unit": build(4, 4, 16, ports=8),
    "rail, two tiers": build(16, 4, 16, ports=16, rails=4, node=TRAY),
    "rail, partly filled": build(13, 4, 32, ports=16, rails=4, node=TRAY),
    "rail, three tiers": build(16, 4, 8, 64, ports=8, rails=4, node=TRAY),
    "rail, tapered": build(16, 4, 8, 64, ports=16, rails=4, node=TRAY, over=(1, 2, 2)),
    "rail-only": build(16, 4, 16, kind="rail-only", ports=8, rails=4, node=TRAY),
    "dual-plane": build(8, 4, 16, kind="dual-plane", ports=16, rails=4, node=TRAY),
    "fat tree, two tiers": build(8, 2, 16, kind="fat-tree", ports=32),
    "fat tree, three tiers": build(16, 2, 8, 64, kind="fat-tree", ports=32, over=(1, 1, 4)),
    "fat tree, one switch": build(4, 8, kind="fat-tree"),
    "odd": build(18, 4, 8, 64, ports=12, rails=2, node=TRAY, over=(1, 1, 1.5)),
}


@pytest.mark.parametrize("name", SMALL)
def test_the_graph_equals_the_arithmetic(name):
    cluster = SMALL[name]
    counts, view = count(cluster), graph(cluster)
    assert counts is not None
    kinds = nx.get_node_attributes(view, "kind")
    for level, tier in zip(counts.levels, cluster.fabric.tiers, strict=False):
        assert sum(kind == level.name for kind in kinds.values()) == level.switches
        cables = [links for *_, tier_name, links in edges(view) if tier_name == tier.name]
        assert sum(cables) == level.links
        used = [
            sum(view[vertex][peer]["links"] for peer in view[vertex]) for vertex in view if kinds[vertex] == level.name
        ]
        assert max(used) <= level.ports_used
    assert sum(kind == "node" for kind in kinds.values()) == cluster.num_nodes
    node = cluster.node
    assert node.nic is not None
    for vertex in (vertex for vertex, kind in kinds.items() if kind == "node"):
        capacity = sum(view[vertex][leaf]["capacity_bytes_per_second"] for leaf in view[vertex])
        assert capacity == node.nics_per_node * node.nic.bandwidth_bytes_per_second


def edges(view):
    return [(a, b, data["tier"], data["links"]) for a, b, data in view.edges(data=True)]


@pytest.mark.parametrize("name", SMALL)
def test_latencies_along_a_path_are_those_of_the_tier_it_crosses(name):
    cluster = SMALL[name]
    view, fabric = graph(cluster), cluster.fabric
    for other in range(1, cluster.num_nodes):
        tier = next((tier for tier in fabric.tiers if other < tier.nodes), fabric.tiers[-1])
        seconds = nx.shortest_path_length(view, "node0", f"node{other}", weight="latency_seconds")
        assert seconds == pytest.approx(tier.latency_seconds)


@pytest.mark.parametrize("name", [name for name in SMALL if name not in ("rail, partly filled", "odd")])
def test_max_flow_between_halves_is_the_bisection(name):
    cluster = SMALL[name]
    counts, view = count(cluster), graph(cluster).to_directed()
    assert counts is not None
    half = cluster.num_nodes // 2
    for index in range(cluster.num_nodes):
        end = ("left", f"node{index}") if index < half else (f"node{index}", "right")
        view.add_edge(*end, capacity_bytes_per_second=math.inf)
    flow = nx.maximum_flow_value(view, "left", "right", capacity="capacity_bytes_per_second")
    assert flow == pytest.approx(counts.bisection_bytes_per_second)


def test_rails_meet_only_where_there_are_spines():
    cluster = SMALL["rail-only"]
    view = graph(cluster)
    view.remove_nodes_from([vertex for vertex, kind in view.nodes(data="kind") if kind == "node"])
    assert nx.number_connected_components(view) == 4
    view = graph(SMALL["rail, two tiers"])
    rails = {data["rail"] for leaf in view["node0"] for data in [view["node0"][leaf]]}
    assert rails == {0, 1, 2, 3}
    view.remove_nodes_from([vertex for vertex, kind in view.nodes(data="kind") if kind == "node"])
    assert nx.is_connected(view)


def test_same_rail_is_one_leaf_away_and_other_units_go_over_a_spine():
    view = graph(SMALL["rail, two tiers"])
    assert nx.shortest_path_length(view, "node0", "node3") == 2
    assert nx.shortest_path_length(view, "node0", "node4") == 4


def test_what_cannot_be_wired_is_said():
    with pytest.raises(InputError, match=r"8 NICs of DGX H100 cannot be spread evenly over 3 rails; let fabric.rails"):
        wiring(build(8, 4, 16, rails=3))
    deep = build(8, 2, 4, 8)
    tiers = (*deep.fabric.tiers, Tier(name="campus", nodes=64))
    deep = deep.model_copy(update={"fabric": deep.fabric.model_copy(update={"tiers": tiers})})
    with pytest.raises(InputError, match="has 4 levels; describe at most leaf, spine and core"):
        count(deep)


@settings(max_examples=30, deadline=None)
@given(
    nodes=st.integers(1, 40), near=st.integers(1, 8), ports=st.sampled_from([8, 16, 64]), taper=st.sampled_from([1, 2])
)
def test_graph_and_arithmetic_agree_for_any_size(nodes, near, ports, taper):
    cluster = build(nodes, near, near * 2, near * 64, ports=ports, rails=4, node=TRAY, over=(1, taper, taper))
    counts, view = count(cluster), graph(cluster)
    assert counts is not None
    assert view.number_of_nodes() == cluster.num_nodes + counts.switches
    assert sum(links for *_, links in edges(view)) == counts.links
    assert nx.is_connected(view)
