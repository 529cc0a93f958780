"""Routes by arithmetic against the graph: contiguous, as short as can be, over cables that exist; what failures do."""

import networkx as nx
import numpy as np
import pytest
from fabrics import SMALL, cluster, node, rail_16k

from topologies.errors import InputError
from topologies.fabric_graph import graph
from topologies.link_map import BLOCKS, link_map
from topologies.routes import routes, storage_routes


def walks(network, flows, k):
    """The links of flow k, cut into walks (one per lane) of (end, end)."""
    ends = [network.ends(int(link)) for link in flows.links[flows.starts[k] : flows.starts[k + 1]]]
    result = [[ends[0]]] if ends else []
    for one in ends[1:]:
        if meets(network, result[-1][-1][1], one[0]):
            result[-1].append(one)
        else:
            result.append([one])
    return result


def meets(network, left, right):
    if left == right:
        return True
    at = {left.partition(".")[0], right.partition(".")[0]}
    gpu = next((name for name in at if name.startswith("gpu")), None)
    return gpu is not None and f"node{int(gpu[3:]) // network.gpus_per_node}" in at


def on_node(network, end):
    kind, number = ("gpu", end[3:]) if end.startswith("gpu") else ("node", end.partition(".")[0][4:])
    return int(number) // network.gpus_per_node if kind == "gpu" else int(number)


@pytest.mark.parametrize("bundled", [True, False])
@pytest.mark.parametrize("name", SMALL)
def test_routes_are_shortest_walks_over_cables_that_exist(name, bundled):
    described = SMALL[name]
    network, view = link_map(described, bundled=bundled), graph(described)
    gpus, per_node = described.num_gpus, described.node.gpus_per_node
    rng = np.random.default_rng(5)
    sources, targets = rng.integers(0, gpus, 200), rng.integers(0, gpus, 200)
    flows = routes(network, sources, targets, labels=np.arange(200))
    for k, (source, target) in enumerate(zip(sources, targets, strict=True)):
        found = walks(network, flows, k)
        if source == target:
            assert not found
            continue
        loads = flows.loads[flows.starts[k] : flows.starts[k + 1]]
        far = network.domain[source] != network.domain[target]
        if not far:
            assert len(found) == 1
            assert found[0][0][0] == f"gpu{source}"
            assert found[0][-1][1] == f"gpu{target}"
            continue
        nics = [load for one, load in zip(np.concatenate(found), loads, strict=True) if one[0].startswith("node")]
        assert sum(nics) == pytest.approx(1)
        assert len(nics) == network.lanes
        for walk in (walk for walk in found if not walk[0][0].startswith("gpu")):
            assert on_node(network, walk[0][0]) == source // per_node
            assert on_node(network, walk[-1][1]) == target // per_node
        if not bundled:
            cables = [end for one in found for end in one if "gpu" not in end[0] + end[1] and "scale" not in str(end)]
            for low, high in cables:
                assert view.has_edge(low.partition(".nic")[0], high.partition(".nic")[0])
            if network.lanes == 1:
                rails = len(cables) and cables[0][0].partition("nic")[2] == cables[-1][1].partition("nic")[2]
                shortest = nx.shortest_path_length(view, f"node{source // per_node}", f"node{target // per_node}")
                assert len(cables) == shortest or not rails


def test_the_relay_keeps_traffic_of_one_unit_off_the_spine():
    network = link_map(SMALL["rail, two tiers"])
    source, target = np.array([0]), np.array([8 + 3])  # another node of the same leaf group, another rail
    with_relay = routes(network, source, target)
    names = [network.name(int(link)) for link in with_relay.links]
    assert names == [
        "gpu0 to scale-up0",
        "scale-up0 to gpu3",
        "node0.nic3 to leaf0.0.3",
        "leaf0.0.3 to node1.nic3",
    ]
    without = [network.name(int(link)) for link in routes(network, source, target, relay=False).links]
    assert without == [
        "node0.nic0 to leaf0.0.0",
        "leaf0.0.0 to spines0.0",
        "spines0.0 to leaf0.0.3",
        "leaf0.0.3 to node1.nic3",
    ]


def test_rails_that_never_meet_need_the_relay():
    network = link_map(SMALL["rail-only"])
    with pytest.raises(InputError, match=r"GPU 0 and GPU 9 are on rails that do not meet .*; let the sender relay"):
        routes(network, [0], [9], relay=False)
    assert len(routes(network, [0], [9]).links) == 4


def test_lone_domains_without_a_fabric_are_refused():
    described = cluster(1, of=node(gpus=8, nics=0, domain=4))
    with pytest.raises(InputError, match="GPU 3 and GPU 4 are in different domains and test has no fabric"):
        routes(link_map(described), [3], [4])


def test_nics_that_gpus_cannot_share_evenly_are_refused():
    with pytest.raises(InputError, match="3 NICs of test node cannot be shared evenly by 8 GPUs"):
        link_map(cluster(4, 4, of=node(nics=3), rails=3))


def test_bundles_hold_what_their_cables_hold():
    for described in SMALL.values():
        cables, bundles = link_map(described, bundled=False), link_map(described, bundled=True)
        for block in BLOCKS:
            assert held(cables, block) == pytest.approx(held(bundles, block))


def held(network, block):
    after = [start for start in network.first.values() if start > network.first[block]]
    end = min(after, default=network.num_links)
    return network.capacities_bytes_per_second[network.first[block] : end].sum()


def test_hashing_is_seeded_and_spreads():
    network = link_map(rail_16k(routing="ecmp"))
    assert not network.bundled
    source, target = np.arange(1024), np.arange(1024) + 8192
    labels = np.arange(1024)
    first, again = (routes(network, source, target, labels=labels, seed=1) for _ in range(2))
    other = routes(network, source, target, labels=labels, seed=2)
    assert np.array_equal(first.links, again.links)
    assert not np.array_equal(first.links, other.links)
    uplinks = first.links[(first.links >= network.first["leaf_up"]) & (first.links < network.first["leaf_down"])]
    used = np.bincount(uplinks - network.first["leaf_up"])
    assert used.max() > 1  # 32 flows onto 32 uplinks of each leaf: some collide
    assert np.count_nonzero(used) == pytest.approx(1024 * (1 - np.exp(-1)), rel=0.05)  # balls into bins


def test_queue_pairs_split_a_flow_evenly():
    one = link_map(rail_16k(routing="ecmp"))
    many = link_map(rail_16k(routing="ecmp", queue_pairs=8))
    flow = routes(many, [0], [8192])
    ups = (flow.links >= many.first["leaf_up"]) & (flow.links < many.first["leaf_down"])
    assert flow.loads[ups].sum() == pytest.approx(1)
    assert len(np.unique(flow.links[ups])) > len(routes(one, [0], [8192]).links) / 8
    assert flow.loads.max() == pytest.approx(1 / 8)


@pytest.mark.parametrize("dead", [1, 8, 31, 63])
def test_only_flows_on_dead_cables_move(dead):
    network = link_map(SMALL["rail, partly filled"] if dead > 31 else rail_16k(), bundled=False)
    uplinks, leaf = network.uplinks, 1
    dead = min(dead, uplinks - 1)
    gpus, per_node = len(network.domain), network.gpus_per_node
    rng = np.random.default_rng(0)
    source, target = rng.integers(0, gpus, 4000), rng.integers(0, gpus, 4000)
    target = np.where(source // per_node == target // per_node, (target + per_node) % gpus, target)
    cut = network.first["leaf_up"] + leaf * uplinks + np.arange(dead)
    back = network.first["leaf_down"] + leaf * uplinks + np.arange(dead)
    broken = network.degraded(np.concatenate([cut, back]), 0.0)
    before = routes(network, source, target, labels=np.arange(4000))
    after = routes(broken, source, target, labels=np.arange(4000))
    hit = np.isin(before.links, np.concatenate([cut, back]))
    moved = np.unique(before.rows[before.links != after.links])
    assert set(moved) == set(np.unique(before.rows[hit]))
    assert len(moved) > 0
    assert not np.isin(after.links, np.concatenate([cut, back])).any()


def test_a_cut_is_said():
    network = link_map(SMALL["rail, two tiers"], bundled=False)
    leaf = network.first["leaf_up"] + np.arange(network.uplinks)
    with pytest.raises(InputError, match=r"every path between leaf0\.0\.0 and leaf0\.1\.0 is dead"):
        routes(network.degraded(leaf, 0.0), [0], [5 * 8])
    nic = network.degraded([network.first["nic_up"]], 0.0)
    with pytest.raises(InputError, match=r"GPU 0 has no live NIC towards GPU 8 .*; leave those nodes out, or give up"):
        routes(nic, [0], [8])


def test_the_other_plane_takes_over():
    network = link_map(SMALL["dual-plane"])
    healthy = routes(network, [0, 1], [32, 33])
    assert set(healthy.loads) == {0.5}
    after = routes(network.degraded([network.first["nic_up"]], 0.0), [0, 1], [32, 33])
    assert set(after.loads[: after.starts[1]]) == {1.0}
    assert set(after.loads[after.starts[1] :]) == {0.5}


def test_storage_traffic_takes_its_own_network_or_the_fabric():
    from topologies.cluster import Storage, StorageNetwork

    shared = SMALL["rail, two tiers"].model_copy(
        update={
            "storage": (
                Storage(
                    name="disk", kind="local-nvme", write_bytes_per_second=1, read_bytes_per_second=1, per_node=True
                ),
                Storage(
                    name="files", kind="parallel-file-system", write_bytes_per_second=90e9, read_bytes_per_second=180e9
                ),
            )
        }
    )
    network = link_map(shared)
    assert len(storage_routes(network, [0, 1], 0, write=True).links) == 0
    up = storage_routes(network, [2], 1, write=True)
    assert {network.name(int(link)) for link in up.links} >= {"node2.nic0 to leaf0.0.0", "network to storage 1: files"}
    assert network.capacities_bytes_per_second[up.links].min() == 50e9
    beside = link_map(
        shared.model_copy(
            update={"storage_network": StorageNetwork(bandwidth_bytes_per_second=12.5e9, oversubscription=2)}
        )
    )
    down = storage_routes(beside, [2], 1, write=False)
    assert [beside.name(int(link)) for link in down.links] == [
        "storage network to node2",
        "storage network to storage network",
        "storage 1: files to network",
    ]
    assert beside.capacities_bytes_per_second[down.links].tolist() == [12.5e9, 16 * 12.5e9 / 2, 180e9]
