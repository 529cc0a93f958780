"""A dead switch: what it takes along, who still reaches whom, and how much slower a collective gets."""

import numpy as np
import pytest
from fabrics import SMALL, cluster, rail_16k

from simulator.flows import play_collective
from topologies.errors import InputError
from topologies.fabric import count
from topologies.link_map import link_map
from topologies.outages import without_switch
from topologies.routes import routes

SIZE = 8e9


def seconds(network, gpus, **options):
    found = play_collective(network, "all_reduce", gpus, SIZE, **options)
    return found.seconds - found.latency_seconds


@pytest.mark.parametrize(
    "name", ["rail, two tiers", "rail, three tiers", "dual-plane", "fat tree", "rail-only, three tiers"]
)
@pytest.mark.parametrize("level", ["spine", "core"])
def test_bundles_lose_what_cables_lose(name, level):
    levels = {one.name: one.switches for one in count(SMALL[name]).levels}
    for number in range(0, levels.get(level, 0), 3):
        left = []
        for bundled in (True, False):
            network = link_map(SMALL[name], bundled=bundled)
            broken = without_switch(network, level, number)
            lost = network.capacities_bytes_per_second - broken.capacities_bytes_per_second
            left.append(lost.sum())
        assert left[0] == pytest.approx(left[1])
        assert left[0] > 0


@pytest.mark.parametrize("level", ["spine", "core"])
def test_hashed_flows_go_around_a_dead_switch(level):
    network = link_map(SMALL["rail, three tiers"], bundled=False)
    broken = without_switch(network, level, 1)
    dead = broken.capacities_bytes_per_second == 0
    assert dead.any()
    rng = np.random.default_rng(0)
    source, target = rng.integers(0, 128, 2000), rng.integers(0, 128, 2000)
    flows = routes(broken, source, target, labels=np.arange(2000))
    assert not dead[flows.links].any()
    touched = [network.name(int(link)) for link in np.flatnonzero(dead)]
    assert all(f"{level}0.0.1" in one for one in touched)


def test_a_leaf_of_a_rail_cuts_its_gpus_off():
    """No other way exists with one plane: the job restarts without those nodes, or gives up the rail."""
    network = without_switch(link_map(SMALL["rail, two tiers"]), "leaf", 3)
    with pytest.raises(InputError, match=r"GPU \d+ has no live NIC towards .*or give up the rail"):
        play_collective(network, "all_reduce", np.arange(128), SIZE)
    others = np.arange(32, 128)  # the units whose leaf of that rail lives
    healthy = link_map(SMALL["rail, two tiers"])
    assert seconds(network, others) == pytest.approx(seconds(healthy, others))


def test_a_dead_leaf_of_two_planes_halves_its_ports():
    described = cluster(8, 4, 16, kind="dual-plane", ports=16)
    healthy, gpus = link_map(described), np.arange(64)
    broken = without_switch(healthy, "leaf", 0)
    ring = seconds(healthy, gpus, algorithm="hierarchical")
    half = seconds(broken, gpus, algorithm="hierarchical")
    across = 2 * 7 / 8 * SIZE / 8 / 50e9
    assert half - ring == pytest.approx(across, rel=1e-6)  # the ring of that rail takes twice as long


def test_a_spine_less_in_every_pod_is_as_much_slower():
    network = link_map(rail_16k())
    gpus = (np.random.default_rng(0).permutation(2048)[:, None] * 8 + np.arange(8)).ravel()
    tapered = network.degraded(np.arange(network.first["leaf_up"], network.first["spine_up"]), 0.5)
    before, spines, broken = seconds(tapered, gpus), network.wires.spines_per_pod, tapered
    for pod in range(network.wires.pods):
        broken = without_switch(broken, "spine", pod * spines)
        assert pod % 6 or seconds(broken, gpus) >= before
    assert seconds(broken, gpus) == pytest.approx(before * spines / (spines - 1))


def test_what_is_not_there_cannot_fail():
    with pytest.raises(InputError, match="test has 16 spine switches, and none is number 99"):
        without_switch(link_map(cluster(128, 32, 256)), "spine", 99)
    with pytest.raises(InputError, match="has 0 core switches"):
        without_switch(link_map(SMALL["rail, one leaf"]), "core", 0)
