"""Collectives as flows: closed forms where nothing is shared, counts, and what must never make anything faster."""

import math

import numpy as np
import pytest
from fabrics import SMALL, cluster, node, rail_16k
from hypothesis import given, settings
from hypothesis import strategies as st

from simulator.collective_answer import traffic_warnings
from simulator.collectives import bus_factor
from simulator.exchange import exchange_loads
from simulator.flow_traffic import collective_traffic, lockstep
from simulator.flows import play_collective
from simulator.maxmin import max_min_rates
from simulator.patterns import double_tree, ring, units_of
from topologies.errors import InputError
from topologies.link_map import link_map
from topologies.routes import routes

KINDS = ["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "send_recv"]
SIZE = 8e9


def bandwidth_seconds(found):
    return found.seconds - found.latency_seconds


def bus(network, kind, gpus, **options):
    gpus = np.arange(gpus) if isinstance(gpus, int) else gpus
    found = play_collective(network, kind, gpus, SIZE, **options)
    return SIZE / bandwidth_seconds(found) * bus_factor(kind, len(gpus))


@pytest.mark.parametrize("kind", ["all_reduce", "all_gather", "reduce_scatter"])
@pytest.mark.parametrize("gpus", [2, 4, 8])
def test_a_ring_in_one_domain_runs_at_its_links(kind, gpus):
    assert bus(link_map(SMALL["rail, one leaf"]), kind, gpus) == pytest.approx(400e9)


@pytest.mark.parametrize("gpus", [2, 4, 8])
def test_a_mesh_carries_what_the_pairs_in_use_carry(gpus):
    """2 of 8 MI300X reach a seventh of what 8 reach (47.7 against 312.9 GB/s, stas00/ml-engineering)."""
    for kind in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all"):
        assert bus(link_map(SMALL["mesh"]), kind, gpus) == pytest.approx(400e9 * (gpus - 1) / 7)


@pytest.mark.parametrize("kind", ["all_reduce", "all_gather", "reduce_scatter"])
def test_rings_across_nodes_use_every_nic_and_the_fast_links(kind):
    """Every channel leaves over its NIC after a last hop inside: eight crossings of each GPU's links a turn."""
    network = link_map(SMALL["rail, two tiers"])
    assert bus(network, kind, 128) == pytest.approx(min(8 * 50e9, 400e9))
    thin = link_map(cluster(16, 4, 16, of=node(nic_rate=25e9), ports=16))
    assert bus(thin, kind, 128) == pytest.approx(8 * 25e9)


def test_a_double_tree_moves_the_buffer_twice_in_and_out_of_a_node():
    network = link_map(cluster(16, 4, 16, of=node(nic_rate=25e9), ports=16))
    found = play_collective(network, "all_reduce", np.arange(128), SIZE, algorithm="tree")
    assert bandwidth_seconds(found) == pytest.approx(2 * SIZE / (8 * 25e9))
    two = play_collective(network, "all_reduce", np.arange(16), SIZE, algorithm="tree")
    assert bandwidth_seconds(two) == pytest.approx(SIZE / (8 * 25e9))  # two nodes: once each way


@pytest.mark.parametrize("count", [2, 3, 4, 5, 8, 13, 16, 31, 64])
def test_every_node_is_a_leaf_of_one_of_the_two_trees(count):
    network = link_map(cluster(count, 64, of=node(gpus=1, nics=1, scale_up=0, kind="none"), ports=64))
    pattern = double_tree(units_of(network, np.arange(count)), 1.0)
    upwards = slice(0, len(pattern.sources) // 2)
    for tree in (0, 1):
        mine = pattern.groups[upwards] == tree
        children, parents = pattern.sources[upwards][mine], pattern.targets[upwards][mine]
        assert len(children) == len(set(children)) == count - 1  # one parent each, one root
        assert np.bincount(parents).max() <= 2
        depth = {int(next(iter(set(range(count)) - set(children.tolist())))): 0}
        while len(depth) < count:
            depth |= {c: depth[p] + 1 for c, p in zip(children.tolist(), parents.tolist(), strict=True) if p in depth}
        assert max(depth.values()) <= math.ceil(math.log2(count)) + 1
    inner = [set(pattern.targets[upwards][pattern.groups[upwards] == tree].tolist()) for tree in (0, 1)]
    assert not (inner[0] & inner[1]) or count % 2 or count <= 3


def test_three_phases_of_a_hierarchy_add_up():
    network = link_map(cluster(16, 4, 16, of=node(nic_rate=25e9), ports=16))
    found = play_collective(network, "all_reduce", np.arange(128), SIZE, algorithm="hierarchical")
    inside, across = 2 * 7 / 8 * SIZE / 400e9, 2 * 15 / 16 * SIZE / 8 / 25e9
    assert bandwidth_seconds(found) == pytest.approx(inside + across)


@pytest.mark.parametrize("gpus", [2, 4, 8])
def test_reduction_in_the_switch_sends_once(gpus):
    network = link_map(SMALL["rail, one leaf"])
    reached = min(400e9, 400e9 / 25 * 20.6 * 0.85)  # NCCL's count of Hopper links, and its NVLS efficiency
    found = bus(network, "all_reduce", gpus, algorithm="nvls")
    assert found == pytest.approx(2 * (gpus - 1) / (gpus + 1) * reached)
    with pytest.raises(ValueError, match="inside switched domains"):
        play_collective(link_map(SMALL["mesh"]), "all_reduce", np.arange(16), SIZE, algorithm="nvls")
    with pytest.raises(ValueError, match="not for all_gather"):
        play_collective(network, "all_gather", np.arange(8), SIZE, algorithm="nvls")


def test_reduction_in_the_switch_with_trees_between():
    network = link_map(cluster(16, 4, 16, of=node(nic_rate=25e9), ports=16))
    thin = play_collective(network, "all_reduce", np.arange(128), SIZE, algorithm="nvls-tree")
    assert bandwidth_seconds(thin) == pytest.approx(2 * SIZE / (8 * 25e9))
    wide = link_map(cluster(16, 4, 16, of=node(nic_rate=200e9), ports=16))
    found = play_collective(wide, "all_reduce", np.arange(128), SIZE, algorithm="nvls-tree")
    assert bandwidth_seconds(found) == pytest.approx(9 / 8 * SIZE / (400e9 / 25 * 20.6 * 0.85))


@pytest.mark.parametrize("kind", ["all_gather", "broadcast"])
def test_trees_are_for_all_reduce(kind):
    with pytest.raises(ValueError, match=f"{kind} has no algorithm 'tree'"):
        play_collective(link_map(SMALL["mesh"]), kind, np.arange(16), SIZE, algorithm="tree")


@pytest.mark.parametrize("name", SMALL)
@pytest.mark.parametrize("relay", [True, False])
def test_counting_an_all_to_all_equals_listing_its_pairs(name, relay):
    network = link_map(SMALL[name])
    gpus = np.random.default_rng(0).permutation(SMALL[name].num_gpus)[: SMALL[name].num_gpus * 3 // 4]
    n = len(gpus)
    source, target = np.repeat(gpus, n), np.tile(gpus, n)
    moves = source != target
    try:
        flows = routes(network, source[moves], target[moves], relay=relay)
    except InputError:
        with pytest.raises(InputError, match="rails do not meet in test"):
            exchange_loads(network, gpus, SIZE, relay=relay)
        return
    listed = np.bincount(flows.links, flows.loads, network.num_links) * SIZE / n
    np.testing.assert_allclose(exchange_loads(network, gpus, SIZE, relay=relay), listed, rtol=1e-9)


@pytest.mark.parametrize("relay", [True, False])
def test_the_relay_of_an_all_to_all_keeps_it_off_the_spine(relay):
    """Inside one scalable unit nothing crosses a spine with PXN; without it only the own rail is spared."""
    network = link_map(cluster(32, 32, 256))
    loads = exchange_loads(network, np.arange(256), SIZE, relay=relay)
    spine = loads[network.first["leaf_up"] : network.first["leaf_down"]].sum()
    assert spine == pytest.approx(0 if relay else 256 * SIZE * (256 - 39) / 256)
    nics = loads[network.first["nic_up"] : network.first["nic_down"]]
    assert nics == pytest.approx(SIZE * (256 - 8) / 256)


def test_all_to_all_of_unequal_flows_ends_with_its_busiest_link():
    """The lockstep time of counted loads is the lower bound that 16,256 listed flows reach on a healthy fabric."""
    network = link_map(SMALL["rail, two tiers"])
    found = play_collective(network, "all_to_all", np.arange(128), SIZE)
    assert bandwidth_seconds(found) == pytest.approx(SIZE * (128 - 8) / 128 / 50e9)
    source, target = np.repeat(np.arange(128), 128), np.tile(np.arange(128), 128)
    flows = routes(network, source[source != target], target[source != target])
    rates = max_min_rates(network.capacities_bytes_per_second, flows)
    assert SIZE / 128 / rates.min() == pytest.approx(bandwidth_seconds(found), rel=0.02)


@pytest.mark.parametrize("name", SMALL)
@pytest.mark.parametrize("kind", KINDS)
def test_what_leaves_gpus_is_what_the_collective_moves(name, kind):
    """Bytes into GPUs, over scale-up links and NICs, less what is relayed: the volume of the algorithm."""
    described = SMALL[name]
    network, n = link_map(described), described.num_gpus
    (phase,) = collective_traffic(network, kind, np.arange(n), SIZE)
    flows, sizes = lockstep(phase)
    carried = np.bincount(flows.links, flows.loads * sizes[flows.rows], network.num_links)
    if kind in ("all_to_all", "broadcast"):
        moved = SIZE * (n - 1)
    elif kind == "send_recv":
        moved = SIZE * n
    else:
        moved = SIZE * (n - 1) * (2 if kind == "all_reduce" else 1)
    ends = [network.ends(int(link)) for link in np.flatnonzero(carried)]
    into = {"mesh": "gpu", "switch": "scale"}
    received = sum(
        carried[link]
        for link, (source, target) in zip(np.flatnonzero(carried), ends, strict=True)
        if (target.startswith("gpu") and source.startswith(tuple(into.values()))) or ".nic" in target
    )
    sent = sum(
        carried[link]
        for link, (source, target) in zip(np.flatnonzero(carried), ends, strict=True)
        if source.startswith("gpu") or ".nic" in source
    )
    relayed = received - moved
    assert sent == pytest.approx(received)
    assert -1e-6 * moved <= relayed <= moved  # a relayed byte enters one GPU more


def degrade_one(network, data):
    link = data.draw(st.integers(0, network.num_links - 1))
    return network.degraded([link], data.draw(st.sampled_from([0.25, 0.5, 0.9])))


@settings(max_examples=80, deadline=None)
@given(st.sampled_from(sorted(SMALL)), st.sampled_from(KINDS), st.data())
def test_a_slower_link_never_makes_anything_faster(name, kind, data):
    network = link_map(SMALL[name])
    gpus = np.arange(SMALL[name].num_gpus)
    healthy = play_collective(network, kind, gpus, SIZE)
    broken = play_collective(degrade_one(network, data), kind, gpus, SIZE)
    assert bandwidth_seconds(broken) >= bandwidth_seconds(healthy) * (1 - 1e-9)
    assert broken.high_seconds >= broken.seconds


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", ["rail-optimized", "fat-tree"])
def test_more_oversubscription_never_makes_anything_faster(kind, shape):
    rng = np.random.default_rng(3)
    gpus = (rng.permutation(64)[:, None] * 8 + np.arange(8)).ravel()  # scattered nodes: the spine matters
    before = 0.0
    for factor in (1, 2, 4, 8):
        network = link_map(cluster(64, 4, 16, 256, kind=shape, ports=128, over=(1, factor, factor)))
        seconds = bandwidth_seconds(play_collective(network, kind, gpus, SIZE))
        assert seconds >= before * (1 - 1e-9)
        before = seconds
    full = bandwidth_seconds(play_collective(link_map(cluster(64, 4, 16, 256, ports=128)), kind, gpus, SIZE))
    assert before > 1.5 * full


def test_topology_and_placement_matter():
    """astra-sim issue 207: the same cycles for any topology would be wrong."""
    tapered = {"over": (1, 4), "ports": 128}
    rail = link_map(cluster(64, 8, 64, **tapered))
    tree = link_map(cluster(64, 2, 64, kind="fat-tree", **tapered))
    rail_only = link_map(cluster(64, 8, 64, kind="rail-only", **tapered))
    times = {
        name: bandwidth_seconds(play_collective(network, "all_to_all", np.arange(64), SIZE))
        for name, network in (("rail", rail), ("tree", tree), ("rail-only", rail_only))
    }
    assert times["rail"] < 0.5 * times["tree"]  # one unit of eight nodes: no spine; racks of two cross it
    assert times["rail-only"] == pytest.approx(times["rail"])
    sorted_nodes, mixed = np.arange(64), np.arange(64).reshape(8, 8).T.ravel()
    placed = [bus(rail, "all_reduce", (nodes[:, None] * 8 + np.arange(8)).ravel()) for nodes in (sorted_nodes, mixed)]
    assert placed[0] > 2 * placed[1]  # rank order that hops between leaves (volcano issue 4233)
    assert bus(link_map(cluster(2, 4, of=node(gpus=8))), "all_reduce", 16) > bus(
        link_map(cluster(8, 8, of=node(gpus=2))), "all_reduce", 16
    )


def test_collisions_of_hashed_rings_need_queue_pairs():
    """Every ring runs at its worst edge: a collision anywhere halves it, and more queue pairs mend that."""
    rng = np.random.default_rng(0)
    gpus = (rng.permutation(128)[:, None] * 8 + np.arange(8)).ravel()
    sprayed = bus(link_map(cluster(128, 16, 64, 1024, ports=32)), "all_reduce", gpus)
    rates = []
    for pairs in (1, 4, 16):
        described = cluster(128, 16, 64, 1024, ports=32, routing="ecmp", queue_pairs=pairs)
        rates.append(np.median([bus(link_map(described), "all_reduce", gpus, seed=seed) for seed in range(3)]))
    assert sprayed == pytest.approx(400e9)
    assert rates[0] < 0.5 * sprayed
    assert rates[0] < rates[1] < rates[2] <= sprayed


def test_one_slow_nic_slows_the_whole_ring():
    network = link_map(rail_16k())
    gpus = np.arange(16384)
    healthy = play_collective(network, "all_reduce", gpus, SIZE)
    slow = play_collective(network.degraded([network.first["nic_up"] + 8000], 0.5), "all_reduce", gpus, SIZE)
    assert bandwidth_seconds(slow) == pytest.approx(2 * bandwidth_seconds(healthy), rel=1e-6)
    assert slow.bottleneck == "node1000.nic0 to leaf0.31.0"
    assert slow.bottlenecks == 1
    assert healthy.bottlenecks > 10000


def test_latency_hides_behind_one_slow_edge():
    lone = node(gpus=1, nics=1, scale_up=0, kind="none")
    network = link_map(cluster(256, 256, of=lone, ports=512))
    even = play_collective(network, "all_reduce", np.arange(256), 1e8)
    assert even.latency_seconds == pytest.approx(2 * 255 * 1e-6)
    slow = play_collective(network.degraded([network.first["nic_up"]], 0.5), "all_reduce", np.arange(256), 1e8)
    assert slow.latency_seconds == pytest.approx(1e-6)


def test_a_dead_nic_is_said():
    network = link_map(SMALL["rail, two tiers"])
    with pytest.raises(InputError, match="no live NIC"):
        play_collective(network.degraded([network.first["nic_up"]], 0.0), "all_reduce", np.arange(128), SIZE)
    with pytest.raises(InputError, match=r"node0\.nic0 to leaf0\.0\.0 is dead and its flows have no other way"):
        play_collective(network.degraded([network.first["nic_up"]], 0.0), "all_to_all", np.arange(128), SIZE)


@pytest.mark.parametrize("algorithm", ["ring", "tree"])
def test_uneven_groups(algorithm):
    network = link_map(SMALL["rail, two tiers"])
    gpus = np.concatenate([np.arange(8), np.arange(8, 12)])
    if algorithm == "tree":
        with pytest.raises(ValueError, match="equally large"):
            play_collective(network, "all_reduce", gpus, SIZE, algorithm=algorithm)
        return
    pattern = ring("all_reduce", units_of(network, gpus), SIZE)
    assert len(pattern.sources) == 4 * 12
    for channel in range(4):
        mine = pattern.channels == channel
        assert set(pattern.sources[mine]) == set(pattern.targets[mine]) == set(gpus)


def test_what_a_fabric_does_to_planned_traffic_is_said():
    def said(gpus=512, **fabric):
        return " ".join(traffic_warnings(cluster(64, 4, 64, over=(1, 3), **fabric), gpus))

    assert "an oversubscription of 3:1: a GPU keeps 16.7 GB/s" in said()
    assert said(gpus=8) == ""  # one node: nothing crosses the fabric
    assert "drops packets under congestion" in said(lossless=False)
    assert "hashed onto equal paths with 4 queue pairs" in said(routing="ecmp", queue_pairs=4)
    assert "hashed" not in said(gpus=32, routing="ecmp")  # one leaf: no choice of paths
