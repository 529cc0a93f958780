"""How fast routes, max-min rates, folding and the event engine are; prints one line per case."""

import time

import numpy as np
import pytest
import simpy
from fabrics import rail_16k

from simulator.flows import play_collective
from simulator.folding import fold
from simulator.maxmin import is_max_min, max_min_rates
from simulator.network import Network
from simulator.patterns import ring, units_of
from simulator.sharing import collective_load, play_together
from topologies.catalog import load_cluster
from topologies.console import say
from topologies.link_map import link_map
from topologies.routes import routes

GPUS, SIZE = 16384, 8 * 2**30


def timed(work, repeats=3):
    best, result = np.inf, None
    for _ in range(repeats):
        start = time.perf_counter()
        result = work()
        best = min(best, time.perf_counter() - start)
    return best, result


@pytest.mark.parametrize("routing", ["adaptive", "ecmp"])
@pytest.mark.parametrize("algorithm", ["ring", "tree", "hierarchical"])
def test_one_all_reduce_over_16384_gpus(algorithm, routing):
    """Everything from the description on: links, routes, folding with its exact check, rates, bottleneck."""

    def whole():
        network = link_map(rail_16k(routing=routing))
        return play_collective(network, "all_reduce", np.arange(GPUS), SIZE, algorithm=algorithm)

    seconds, found = timed(whole)
    say(
        f"\nall_reduce {algorithm}, 16,384 GPUs, three tiers, {routing}: {seconds:.3f} s; {found.flows:,} flows in "
        f"{found.flow_classes:,} classes, {found.seconds * 1e3:.2f} ms, bound by {found.bottleneck}"
    )
    assert seconds < (1.0 if routing == "adaptive" else 2.0)


@pytest.mark.parametrize("kind", ["all_to_all", "broadcast", "send_recv", "reduce_scatter"])
def test_other_collectives_over_16384_gpus(kind):
    seconds, found = timed(lambda: play_collective(link_map(rail_16k()), kind, np.arange(GPUS), SIZE))
    say(f"\n{kind}, 16,384 GPUs: {seconds:.3f} s; {found.seconds * 1e3:.2f} ms, bound by {found.bottleneck}")
    assert seconds < 1.0


def test_the_parts():
    network = link_map(rail_16k())
    pattern = ring("all_reduce", units_of(network, np.arange(GPUS)), SIZE)
    rng = np.random.default_rng(0)
    source, target = rng.integers(0, GPUS, (2, 200_000))
    building, _ = timed(lambda: link_map(rail_16k(routing="ecmp")))
    cables = link_map(rail_16k(routing="ecmp"))
    routing, spread = timed(lambda: routes(cables, source, target, labels=np.arange(200_000)))
    flows = routes(network, pattern.sources, pattern.targets)
    folding, small = timed(lambda: fold(network.capacities_bytes_per_second, flows))
    folded, _ = timed(lambda: max_min_rates(small.capacities, small.flows))
    whole, rates = timed(lambda: max_min_rates(network.capacities_bytes_per_second, flows))
    unlike, other = timed(lambda: max_min_rates(cables.capacities_bytes_per_second, spread), repeats=1)
    assert is_max_min(network.capacities_bytes_per_second, flows, rates)
    assert is_max_min(cables.capacities_bytes_per_second, spread, other)
    say(
        f"\nnumber {cables.num_links:,} links {building * 1e3:.1f} ms; 200,000 routes {routing * 1e3:.0f} ms; fold "
        f"{len(pattern.sources):,} flows {folding * 1e3:.0f} ms to {len(small.sizes)} classes; solve folded "
        f"{folded * 1e3:.2f} ms, unfolded {whole * 1e3:.0f} ms; 200,000 random flows {unlike:.2f} s"
    )


def test_events():
    """Two jobs and a third over all nodes with different sizes, on a fabric of 16,384 GPUs with a thin spine."""
    described = load_cluster("llama3-roce-16k")
    for name, network in (("rail", link_map(rail_16k())), ("Llama 3 RoCE", link_map(described, bundled=True))):
        nodes = np.random.default_rng(0).permutation(2048)
        members = [nodes[start::2][:, None] * 8 + np.arange(8) for start in (0, 1)] + [
            np.sort(nodes)[:, None] * 8 + np.arange(8)
        ]
        loads = [
            collective_load(str(k), "all_reduce", gpus.ravel(), size)
            for k, (gpus, size) in enumerate(zip(members, (SIZE, 2 * SIZE, SIZE / 2), strict=True))
        ]
        step, low = timed(lambda network=network, loads=loads: play_together(network, loads), repeats=1)
        edge, high = timed(
            lambda network=network, loads=loads: play_together(network, loads, edge_by_edge=True, window=0.01),
            repeats=1,
        )
        say(
            f"\nthree jobs, random nodes, {name}: lockstep {step:.2f} s, {low.counters.solves} solves, {told(low)}; "
            f"edge by edge {edge:.2f} s, {high.classes:,} classes, {high.counters.solves} solves, {told(high)}"
        )


def told(done):
    return "ends after " + ", ".join(f"{end * 1e3:.0f}" for end in done.end_seconds.values()) + " ms"


def test_unlike_transfers():
    network = link_map(rail_16k(routing="ecmp"))
    rng = np.random.default_rng(0)
    source = rng.integers(0, GPUS, 4000)
    flows = routes(network, source, (source + 8 * rng.integers(1, 2048, 4000)) % GPUS, labels=np.arange(4000))
    sizes = rng.uniform(1e8, 2e9, 4000)
    for window in (0.0, 0.01):
        environment = simpy.Environment()
        engine = Network(environment, network.capacities_bytes_per_second, window=window)
        engine.transfer_all(flows, sizes)
        start = time.perf_counter()
        environment.run()
        say(
            f"\n4,000 transfers of random size, window {window:g}: {engine.counters.solves} solves, "
            f"{time.perf_counter() - start:.2f} s, end {environment.now:.4f} s"
        )
