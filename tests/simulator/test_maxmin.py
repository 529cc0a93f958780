"""Max-min rates against filling in exact fractions, a linear program, and the property that characterises them."""

from fractions import Fraction

import numpy as np
import pytest
from fabrics import rail_16k
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import linprog

from simulator.maxmin import is_max_min, link_rates, max_min_rates
from topologies.link_map import link_map
from topologies.routes import Routes, routes


def flows_of(paths, loads=None):
    links = [link for path in paths for link in path]
    return Routes(
        starts=np.cumsum([0, *(len(path) for path in paths)]),
        links=np.array(links, np.int64),
        loads=np.ones(len(links)) if loads is None else np.array([x for row in loads for x in row], float),
    )


@st.composite
def problems(draw, most_flows=10):
    links = draw(st.integers(1, 7))
    capacities = draw(st.lists(st.integers(1, 20), min_size=links, max_size=links))
    path = st.lists(st.integers(0, links - 1), min_size=1, max_size=min(links, 4), unique=True)
    paths = draw(st.lists(path, min_size=1, max_size=most_flows))
    loads = [draw(st.lists(st.integers(1, 5), min_size=len(path), max_size=len(path))) for path in paths]
    weights = draw(st.lists(st.integers(1, 4), min_size=len(paths), max_size=len(paths)))
    return capacities, paths, loads, weights


def filled_exactly(capacities, paths, loads, weights):
    """Progressive filling in fractions, one tightest link of all at a time."""
    rates = [None] * len(paths)
    while None in rates:
        left = [Fraction(capacity) for capacity in capacities]
        total = {}
        for k, path in enumerate(paths):
            for link, load in zip(path, loads[k], strict=True):
                if rates[k] is None:
                    total[link] = total.get(link, 0) + Fraction(load * weights[k])
                else:
                    left[link] -= load * rates[k]
        level = min(left[link] / amount for link, amount in total.items())
        tight = {link for link, amount in total.items() if left[link] / amount == level}
        for k, path in enumerate(paths):
            if rates[k] is None and tight & set(path):
                rates[k] = level * weights[k]
    return rates


@settings(max_examples=200, deadline=None)
@given(problems())
def test_equals_exact_filling(problem):
    capacities, paths, loads, weights = problem
    capacity, flows, weight = np.array(capacities, float), flows_of(paths, loads), np.array(weights, float)
    rates = max_min_rates(capacity, flows, weight)
    exact = [float(rate) for rate in filled_exactly(*problem)]
    assert rates == pytest.approx(exact, rel=1e-12)
    assert is_max_min(capacity, flows, rates, weight)


@settings(max_examples=25, deadline=None)
@given(problems(most_flows=5))
def test_equals_repeated_linear_programs(problem):
    capacities, paths, _, _ = problem
    rates = max_min_rates(np.array(capacities, float), flows_of(paths))
    assert rates == pytest.approx(lexicographic(capacities, paths), rel=1e-6)


def lexicographic(capacities, paths):
    """The largest smallest rate, then the next, by linear programs that know nothing of filling."""
    use = np.zeros((len(capacities), len(paths)))
    for k, path in enumerate(paths):
        use[path, k] = 1
    fixed = {}
    while len(fixed) < len(paths):
        free = [k for k in range(len(paths)) if k not in fixed]
        above = np.zeros((len(free), len(paths) + 1))
        above[range(len(free)), free] = -1
        above[:, -1] = 1
        bounds = [(fixed[k], fixed[k]) if k in fixed else (0, None) for k in range(len(paths))]
        common = linprog(
            [*np.zeros(len(paths)), -1],
            A_ub=np.vstack([np.hstack([use, np.zeros((len(use), 1))]), above]),
            b_ub=[*capacities, *np.zeros(len(free))],
            bounds=[*bounds, (0, None)],
        ).x[-1]
        for k in free:
            floor = [(fixed[j], fixed[j]) if j in fixed else (common * (1 - 1e-10), None) for j in range(len(paths))]
            goal = np.zeros(len(paths))
            goal[k] = -1
            if linprog(goal, A_ub=use, b_ub=capacities, bounds=floor).x[k] <= common * (1 + 1e-7):
                fixed[k] = common
    return [fixed[k] for k in range(len(paths))]


@settings(max_examples=100, deadline=None)
@given(problems(), st.data())
def test_a_wider_link_never_lowers_the_slowest_flow(problem, data):
    capacities, paths, loads, _ = problem
    flows = flows_of(paths, loads)
    before = max_min_rates(np.array(capacities, float), flows)
    wider = np.array(capacities, float)
    wider[data.draw(st.integers(0, len(capacities) - 1))] *= 3
    assert max_min_rates(wider, flows).min() >= before.min() * (1 - 1e-12)


@settings(max_examples=100, deadline=None)
@given(problems())
def test_the_unit_of_the_capacities_does_not_matter(problem):
    """Thresholds are relative: rates of 1e-11 and of 1e11 are as exact as those of 1."""
    capacities, paths, loads, _ = problem
    rates = max_min_rates(np.array(capacities, float), flows_of(paths, loads))
    for unit in (1e-11, 1e11):
        scaled = max_min_rates(np.array(capacities) * unit, flows_of(paths, loads))
        assert scaled == pytest.approx(rates * unit, rel=1e-12)


def test_certificate_refuses_what_is_not_fair():
    flows = flows_of([[0], [0, 1], [1]])
    capacity = np.array([10.0, 4.0])
    assert is_max_min(capacity, flows, np.array([8.0, 2.0, 2.0]))
    assert not is_max_min(capacity, flows, np.array([9.0, 1.0, 3.0]))  # unfair
    assert not is_max_min(capacity, flows, np.array([7.0, 2.0, 2.0]))  # wasteful
    assert not is_max_min(capacity, flows, np.array([9.0, 2.0, 2.0]))  # too much


def test_no_links_and_dead_links():
    flows = Routes(starts=np.array([0, 0, 1, 3]), links=np.array([0, 0, 1]), loads=np.ones(3))
    rates = max_min_rates(np.array([4.0, 0.0]), flows)
    assert rates.tolist() == [np.inf, 4.0, 0.0]
    assert link_rates(2, flows, rates).tolist() == [4.0, 0.0]


def test_a_link_that_is_crossed_twice_counts_twice():
    flows = Routes(starts=np.array([0, 2]), links=np.array([0, 0]), loads=np.ones(2))
    assert max_min_rates(np.array([4.0]), flows).tolist() == [2.0]


@pytest.mark.parametrize("bundled", [True, False])
def test_certified_on_65536_random_flows(bundled):
    network = link_map(rail_16k(), bundled=bundled)
    rng = np.random.default_rng(1)
    flows = routes(network, rng.integers(0, 16384, 65536), rng.integers(0, 16384, 65536), labels=np.arange(65536))
    capacity = network.capacities_bytes_per_second
    rates = max_min_rates(capacity, flows)
    moving = np.isfinite(rates)
    assert is_max_min(capacity, flows, rates)
    assert rates[moving].min() > 0
    assert not is_max_min(capacity, flows, rates * np.where(np.arange(65536) == 7, 0.99, 1.0))
