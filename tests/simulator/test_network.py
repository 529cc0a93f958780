"""The fluid engine: worked by hand, bytes conserved, equal to the plain loop, and to a ring played step by step."""

import numpy as np
import pytest
import simpy
from fabrics import SMALL, cluster, node, rail_16k
from hypothesis import given, settings
from hypothesis import strategies as st

from simulator.flows import finish_seconds, play_collective
from simulator.network import Network
from simulator.sharing import Change, collective_load, play_together, storage_load
from topologies.cluster import Storage, StorageNetwork
from topologies.errors import InputError
from topologies.link_map import link_map
from topologies.routes import Routes, routes


def play(capacities, transfers, changes=(), **options):
    """Ends of transfers (start, links, bytes), with capacity changes (time, capacities)."""
    environment = simpy.Environment()
    engine = Network(environment, np.array(capacities, float), **options)
    ends = {}

    def send(name, start, links, size):
        yield environment.timeout(start)
        yield engine.transfer(links, size)
        ends[name] = environment.now

    def alter(at, new):
        yield environment.timeout(at)
        engine.change(np.array(new, float))

    for number, transfer in enumerate(transfers):
        environment.process(send(number, *transfer))
    for change in changes:
        environment.process(alter(*change))
    environment.run()
    return [ends[k] for k in sorted(ends)], engine


def test_a_link_that_loses_capacity_in_mid_flight_by_hand():
    # 0-2: a and c alone at 10. 2-4: b joins both links, all at 5; c ends its 40 bytes with 10 left at 4, when link 0
    # falls to 4: a and b get 2, c 8 and ends at 5.25. b has 20 left at 4: ends at 14. a has 50 left then: 14 + 50/4.
    ends, engine = play([10, 10], [(0, [0], 100), (2, [0, 1], 30), (0, [1], 40)], changes=[(4, [4, 10])])
    assert ends == pytest.approx([26.5, 14, 5.25], rel=1e-12)
    assert engine.carried_bytes == pytest.approx([130, 70])


def test_a_dead_link_waits_for_its_repair():
    ends, _ = play([10], [(0, [0], 100)], changes=[(5, [0]), (20, [10])])
    assert ends == pytest.approx([25])
    ends, _ = play([10], [(0, [0], 100)], changes=[(5, [0])])
    assert ends == []


def test_nothing_to_send_and_nothing_to_cross_is_done_at_once():
    ends, _ = play([10], [(1, [0], 0), (2, [], 100)])
    assert ends == [1, 2]


def test_arrivals_of_one_instant_cost_one_solve():
    _, engine = play([10], [(0, [0], 10)] * 100)
    assert engine.counters.solves == 1
    assert engine.counters.transfers == 100


def test_a_transfer_can_be_moved():
    environment = simpy.Environment()
    engine = Network(environment, np.array([10.0, 5.0]))
    event = engine.transfer([0], 100)
    environment.run(until=4)
    engine.reroute(event, [1], np.ones(1))
    environment.run(until=event)
    assert environment.now == pytest.approx(4 + 60 / 5)
    with pytest.raises(ValueError, match="under way"):
        engine.reroute(event, [0], np.ones(1))


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_bytes_are_conserved_and_nothing_is_faster_than_alone(data):
    links = data.draw(st.integers(1, 5))
    capacities = data.draw(st.lists(st.integers(1, 9), min_size=links, max_size=links))
    one = st.tuples(st.integers(0, 5), st.lists(st.integers(0, links - 1), min_size=1, unique=True), st.integers(1, 50))
    transfers = data.draw(st.lists(one, min_size=1, max_size=8))
    changes = data.draw(st.lists(st.tuples(st.integers(1, 9), st.just(capacities[::-1])), max_size=2))
    ends, engine = play(capacities, transfers, changes)
    carried = np.zeros(links)
    for _, path, size in transfers:
        carried[path] += size
    assert engine.carried_bytes == pytest.approx(carried, rel=1e-9)
    for end, transfer in zip(ends, transfers, strict=True):
        assert end >= play(capacities, [transfer], changes)[0][0] * (1 - 1e-9)


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_equals_the_loop_without_processes(data):
    links = data.draw(st.integers(1, 5))
    capacities = np.array(data.draw(st.lists(st.integers(1, 9), min_size=links, max_size=links)), float)
    path = st.lists(st.integers(0, links - 1), min_size=1, unique=True)
    paths = data.draw(st.lists(path, min_size=1, max_size=8))
    sizes = data.draw(st.lists(st.integers(1, 50), min_size=len(paths), max_size=len(paths)))
    flows = Routes(
        starts=np.cumsum([0, *(len(one) for one in paths)]),
        links=np.array([link for one in paths for link in one]),
        loads=np.ones(sum(len(one) for one in paths)),
    )
    ends, _ = play(capacities, [(0, one, size) for one, size in zip(paths, sizes, strict=True)])
    assert ends == pytest.approx(finish_seconds(capacities, flows, np.array(sizes, float)), rel=1e-9)


def test_the_window_saves_solves_and_is_early_by_little():
    network = link_map(cluster(128, 32, 256), bundled=False)
    rng = np.random.default_rng(0)
    source = rng.integers(0, 1024, 600)
    flows = routes(network, source, (source + 8 * rng.integers(1, 128, 600)) % 1024, labels=np.arange(600))
    sizes = rng.uniform(1e8, 2e9, 600)
    exact = finish_seconds(network.capacities_bytes_per_second, flows, sizes)
    early = finish_seconds(network.capacities_bytes_per_second, flows, sizes, window=0.01)
    assert len(np.unique(early)) < len(np.unique(exact)) / 3
    assert exact.max() * 0.99 < early.max() <= exact.max() * (1 + 1e-9)


def step_by_step(capacities, rings, latency):
    """Rings of (links of each edge, bytes): rank i sends chunk k when it has chunk k - 1 of its neighbour."""
    environment = simpy.Environment()
    engine = Network(environment, capacities)
    ends = [0.0] * len(rings)

    def rank(job, i, arrived, links, chunk):
        for k in range(len(arrived)):
            if k:
                yield arrived[k - 1][(i - 1) % len(links)]
            yield engine.transfer(links[i], chunk)
            seen = arrived[k][i]
            seen._ok, seen._value = True, None
            environment.schedule(seen, delay=latency)
            ends[job] = max(ends[job], environment.now + latency)

    for job, (links, size) in enumerate(rings):
        n = len(links)
        arrived = [[environment.event() for _ in range(n)] for _ in range(2 * (n - 1))]
        for i in range(n):
            environment.process(rank(job, i, arrived, links, size / n))
    environment.run()
    return ends


LONE = node(gpus=1, nics=1, scale_up=0, kind="none")


@pytest.mark.parametrize("slow", [None, 0.5])
def test_a_ring_equals_itself_step_by_step(slow):
    network = link_map(cluster(16, 4, 16, of=LONE, ports=16))
    if slow:
        network = network.degraded([network.first["nic_up"] + 5], slow)
    gpus = np.arange(16)
    flows = routes(network, gpus, np.roll(gpus, -1))
    links = [flows.links[flows.starts[k] : flows.starts[k + 1]] for k in range(16)]
    found = play_collective(network, "all_reduce", gpus, 1e9)
    latency = 1.4e-6  # of the mean step: most edges cross a leaf, some a spine
    truth = step_by_step(network.capacities_bytes_per_second, [(links, 1e9)], latency)[0]
    assert found.seconds == pytest.approx(truth, rel=0.003)
    assert found.high_seconds == pytest.approx(truth, rel=0.003)


@pytest.mark.parametrize("slow", [1.0, 0.25])
def test_two_rings_on_one_link_lie_between_lockstep_and_edge_by_edge(slow):
    """Ring 0 may be slow elsewhere: then it uses the shared links in bursts, and ring 1 sees something in between."""
    network = link_map(cluster(24, 4, 64, of=LONE, ports=16))
    network = network.degraded([network.first["nic_up"] + 2], slow)
    rings = [np.arange(16), np.arange(8, 24)]
    jobs = []
    for gpus in rings:
        flows = routes(network, gpus, np.roll(gpus, -1))
        jobs.append(([flows.links[flows.starts[k] : flows.starts[k + 1]] for k in range(16)], 1e9))
    truth = step_by_step(network.capacities_bytes_per_second, jobs, 0.0)
    loads = [collective_load(str(k), "all_reduce", gpus, 1e9) for k, gpus in enumerate(rings)]
    low = play_together(network, loads).end_seconds
    high = play_together(network, loads, edge_by_edge=True).end_seconds
    for k, end in enumerate(truth):
        assert low[str(k)] * 0.99 <= end <= high[str(k)] * 1.01
    if slow < 1:
        assert high["1"] > 1.05 * low["1"]  # the two fluids do differ here


def test_jobs_on_one_fabric_share_it_and_leave_it():
    network = link_map(SMALL["rail, two tiers"])
    all_gpus = np.arange(128)
    alone = play_collective(network, "all_reduce", all_gpus, 8e9)
    bandwidth = alone.seconds - alone.latency_seconds
    two = [collective_load(name, "all_reduce", all_gpus, 8e9) for name in ("a", "b")]
    ends = play_together(network, two).end_seconds
    assert ends == pytest.approx({"a": 2 * bandwidth, "b": 2 * bandwidth})
    late = collective_load("b", "all_reduce", all_gpus, 8e9, start_seconds=bandwidth / 2)
    assert play_together(network, [two[0], late]).end_seconds == pytest.approx(
        {"a": 1.5 * bandwidth, "b": 2 * bandwidth}
    )
    apart = [
        collective_load("a", "all_reduce", np.arange(64), 8e9),
        collective_load("b", "all_reduce", np.arange(64, 128), 8e9),
    ]
    half = play_collective(network, "all_reduce", np.arange(64), 8e9)
    assert play_together(network, apart).end_seconds["a"] == pytest.approx(half.seconds - half.latency_seconds)


@pytest.mark.parametrize("name", ["rail, two tiers", "fat tree", "mesh", "NVL16 of trays"])
def test_folded_jobs_equal_unfolded_flows(name):
    network = link_map(SMALL[name])
    gpus = np.arange(SMALL[name].num_gpus)
    loads = [
        collective_load("all", "all_reduce", gpus, 8e9),
        collective_load("first half", "all_gather", gpus[: len(gpus) // 2], 4e9, start_seconds=0.01),
    ]
    folded = play_together(network, loads, edge_by_edge=True)
    assert folded.end_seconds == pytest.approx(unfolded(network, loads), rel=1e-9)


def unfolded(network, loads):
    environment = simpy.Environment()
    engine = Network(environment, network.capacities_bytes_per_second)
    ends = {}

    def run(load):
        yield environment.timeout(load.start_seconds)
        for phase in load.traffic(network):
            sizes = phase.edge_bytes[phase.flow_edge]
            edges = phase.edges
            yield environment.all_of(
                [
                    engine.transfer(
                        edges.links[edges.starts[k] : edges.starts[k + 1]],
                        size,
                        edges.loads[edges.starts[k] : edges.starts[k + 1]],
                    )
                    for k, size in zip(phase.flow_edge, sizes, strict=True)
                ]
            )
        ends[load.name] = environment.now

    for load in loads:
        environment.process(run(load))
    environment.run()
    return ends


def test_a_dead_cable_moves_hashed_flows_and_keeps_what_was_sent():
    described = cluster(16, 4, 16, of=LONE, ports=16, routing="ecmp")
    network = link_map(described)
    load = collective_load("job", "send_recv", [0, 4], 1e9)
    flow = load.traffic(network)[0].edges
    cable = int(flow.links[1])
    alone = play_together(network, [load]).end_seconds["job"]
    moved = play_together(network, [load], [Change(at_seconds=alone / 2, links=(cable,), factor=0.0)])
    assert moved.end_seconds["job"] == pytest.approx(alone)  # another cable of the same leaf takes the rest
    assert moved.carried_bytes[cable] == pytest.approx(5e8)
    nic = int(flow.links[0])
    with pytest.raises(InputError, match="no live NIC"):
        play_together(network, [load], [Change(at_seconds=alone / 2, links=(nic,), factor=0.0)])
    slow = play_together(network, [load], [Change(at_seconds=alone / 2, links=(nic,), factor=0.5)])
    assert slow.end_seconds["job"] == pytest.approx(1.5 * alone)
    high = play_together(network, [load], [Change(at_seconds=alone / 2, links=(nic,), factor=0.5)], edge_by_edge=True)
    assert high.end_seconds["job"] == pytest.approx(1.5 * alone)


def test_checkpoints_share_the_fabric_unless_they_have_their_own():
    store = Storage(name="files", kind="parallel-file-system", write_bytes_per_second=1e12, read_bytes_per_second=1e12)
    described = SMALL["rail, two tiers"].model_copy(update={"storage": (store,)})
    beside = described.model_copy(update={"storage_network": StorageNetwork(bandwidth_bytes_per_second=100e9)})
    training = collective_load("training", "all_reduce", np.arange(128), 8e9)
    saving = storage_load("saving", np.arange(16), 0, 40e9)
    alone = play_together(link_map(described), [training]).end_seconds["training"]
    shared = play_together(link_map(described), [training, saving]).end_seconds
    apart = play_together(link_map(beside), [training, saving]).end_seconds
    assert apart["training"] == pytest.approx(alone)
    assert apart["saving"] == pytest.approx(16 * 40e9 / 1e12)
    on_a_nic = 1e12 / 16 / 8  # the storage holds a node's flow over eight NICs below its fair share; rings get the rest
    assert shared["training"] == pytest.approx(alone / (1 - on_a_nic / 50e9))
    assert shared["saving"] >= 16 * 40e9 / 1e12


def test_a_training_step_of_16384_gpus_with_a_checkpoint_is_small():
    network = link_map(
        rail_16k().model_copy(
            update={
                "storage": (
                    Storage(
                        name="files",
                        kind="parallel-file-system",
                        write_bytes_per_second=2e12,
                        read_bytes_per_second=2e12,
                    ),
                )
            }
        )
    )
    loads = [
        collective_load("reduce", "reduce_scatter", np.arange(16384), 8e9),
        collective_load("half", "all_gather", np.arange(8192), 8e9, start_seconds=0.005),
        storage_load("save", np.arange(2048), 0, 1e9),
    ]
    done = play_together(network, loads, edge_by_edge=True)
    assert done.counters.solves < 60
    assert done.classes < 100
    assert done.end_seconds["save"] > 2048 * 1e9 / 2e12 * (1 - 1e-9)
