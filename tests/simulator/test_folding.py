"""Folded rates are the rates: on every fabric, for every pattern, healthy or broken."""

import numpy as np
import pytest
from fabrics import SMALL, cluster, rail_16k
from hypothesis import given, settings
from hypothesis import strategies as st

from simulator.flows import finish_seconds
from simulator.folding import fold
from simulator.maxmin import max_min_rates
from simulator.patterns import double_tree, ring, units_of
from topologies.link_map import link_map
from topologies.routes import Routes, routes


def routed(network, pattern):
    return routes(network, pattern.sources, pattern.targets, labels=pattern.channels)


def assert_folds(network, flows, sizes=None):
    capacities = network.capacities_bytes_per_second
    small = fold(capacities, flows, sizes)
    rates = max_min_rates(small.capacities, small.flows)[small.flow_class]
    whole = max_min_rates(capacities, flows)
    np.testing.assert_allclose(rates, whole, rtol=1e-12)
    assert np.array_equal(np.bincount(small.flow_class), small.sizes)
    return small


@pytest.mark.parametrize("bundled", [True, False])
@pytest.mark.parametrize("name", SMALL)
def test_equal_to_the_whole_problem_on_every_fabric(name, bundled):
    network = link_map(SMALL[name], bundled=bundled)
    units = units_of(network, np.arange(SMALL[name].num_gpus))
    for pattern in (ring("all_reduce", units, 1e9), double_tree(units, 1e9)):
        assert_folds(network, routed(network, pattern), pattern.size_bytes)


@pytest.mark.parametrize("gpus", [64, 256, 1024, 2048])
def test_a_ring_on_a_sprayed_rail_fabric_is_a_handful_of_classes(gpus):
    network = link_map(cluster(gpus // 8, 32, 256))
    small = assert_folds(network, routed(network, ring("all_reduce", units_of(network, np.arange(gpus)), 1e9)))
    assert len(small.sizes) <= 6
    assert len(small.capacities) <= 9


@pytest.mark.parametrize("what", ["dead uplink", "slow NIC", "all NICs differ", "random order", "second job"])
@pytest.mark.parametrize("bundled", [True, False])
def test_a_broken_symmetry_stays_exact(what, bundled):
    network = link_map(cluster(128, 32, 64, 2048), bundled=bundled)
    rng = np.random.default_rng(0)
    nodes = np.arange(128)
    if what == "random order":
        nodes = rng.permutation(nodes)
    if what == "all NICs differ":  # hardly anything folds
        nodes = nodes[:64]
    gpus = (nodes[:, None] * 8 + np.arange(8)).ravel()
    patterns = [ring("all_reduce", units_of(network, gpus), 1e9)]
    if what == "second job":
        even, odd = (gpus.reshape(-1, 8)[start::2].ravel() for start in (0, 1))
        patterns = [ring("all_reduce", units_of(network, job), size) for job, size in ((even, 1e9), (odd, 3e9))]
    match what:
        case "dead uplink":
            factor = 31 / 32 if bundled else 0.0
            network = network.degraded([network.first["leaf_up"] + 5, network.first["leaf_down"] + 5], factor)
        case "slow NIC":
            network = network.degraded([network.first["nic_up"] + 100], 0.5)
        case "all NICs differ":
            for nic in range(1024):
                network.capacities_bytes_per_second[network.first["nic_up"] + nic] *= rng.uniform(0.9, 1.0)
    parts = [routed(network, pattern) for pattern in patterns]
    flows = Routes(
        starts=np.concatenate([[0], np.cumsum(np.concatenate([np.diff(part.starts) for part in parts]))]),
        links=np.concatenate([part.links for part in parts]),
        loads=np.concatenate([part.loads for part in parts]),
    )
    sizes = np.concatenate([pattern.size_bytes for pattern in patterns])
    small = assert_folds(network, flows, sizes)
    folded_sizes = np.zeros(len(small.sizes))
    folded_sizes[small.flow_class] = sizes
    ends = finish_seconds(small.capacities, small.flows, folded_sizes)[small.flow_class]
    whole = finish_seconds(network.capacities_bytes_per_second, flows, sizes)
    np.testing.assert_allclose(ends, whole, rtol=1e-9)


def test_asymmetry_splits_only_what_it_touches():
    network = link_map(rail_16k())
    flows = routed(network, ring("all_reduce", units_of(network, np.arange(16384)), 1e9))
    healthy = fold(network.capacities_bytes_per_second, flows)
    broken = fold(network.degraded([network.first["nic_up"] + 8000], 0.5).capacities_bytes_per_second, flows)
    assert len(flows.starts) - 1 == 131072
    assert len(healthy.sizes) < len(broken.sizes) < 20


def test_sizes_tell_flows_apart():
    network = link_map(SMALL["rail, one leaf"])
    flows = routes(network, [0, 1], [8, 9])
    assert len(fold(network.capacities_bytes_per_second, flows).sizes) == 1
    assert len(fold(network.capacities_bytes_per_second, flows, np.array([1.0, 2.0])).sizes) == 2


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_random_problems_of_few_capacities(data):
    links = data.draw(st.integers(1, 8))
    capacities = np.array(data.draw(st.lists(st.sampled_from([1.0, 2.0]), min_size=links, max_size=links)))
    path = st.lists(st.integers(0, links - 1), min_size=0, max_size=3, unique=True)
    paths = data.draw(st.lists(path, min_size=1, max_size=16))
    flat = [link for one in paths for link in one]
    loads = np.array(data.draw(st.lists(st.sampled_from([1.0, 2.0]), min_size=len(flat), max_size=len(flat))))
    flows = Routes(
        starts=np.cumsum([0, *(len(one) for one in paths)]), links=np.array(flat, np.int64), loads=loads.astype(float)
    )
    small = fold(capacities, flows)
    rates = max_min_rates(small.capacities, small.flows)[small.flow_class]
    np.testing.assert_allclose(rates, max_min_rates(capacities, flows), rtol=1e-12)


def test_links_that_differ_only_in_what_they_carry_stay_apart():
    """Two flows on links of equal capacity, one of which a third flow shares."""
    flows = Routes(starts=np.array([0, 1, 2, 3]), links=np.array([0, 1, 1]), loads=np.ones(3))
    small = fold(np.array([6.0, 6.0]), flows)
    assert max_min_rates(small.capacities, small.flows)[small.flow_class].tolist() == [6.0, 3.0, 3.0]
    assert small.link_class.tolist()[0] != small.link_class.tolist()[1]
