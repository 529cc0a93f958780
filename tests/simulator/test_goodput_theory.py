"""Closed forms of failing and saving: worked values, brute force and each other."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from simulator.goodput_theory import (
    daly_higher_order_interval,
    daly_interval,
    erlang_b,
    expected_goodput,
    first_order_two_level,
    not_waiting_share,
    optimum_interval,
    rsc_goodput,
    slowdown,
    spare_limited_goodput,
    spares_needed,
    straggler_loss,
    two_level_optimum,
    two_level_slowdown,
    young_interval,
)

DAY = 86400.0

# stall, MTBF, restart -> Young 1974, Daly 2006 first and higher order, exact optimum, slowdown there and at Young's;
# computed from the formulas in 50-digit arithmetic, rounded.
WORKED = [
    ((20, 6480, 300), (509.1, 489.1, 495.9, 495.9, 1.13418, 1.13421)),
    ((60, 6480, 300), (881.8, 821.8, 842.3, 842.3, 1.20386, 1.20403)),
    ((40, 43200, 900), (1859.0, 1819.0, 1832.5, 1832.5, 1.06628, 1.06629)),
    ((5, 28440, 120), (533.3, 528.3, 530.0, 530.0, 1.02330, 1.02330)),
    ((300, 7200, 600), (2078.5, 1778.5, 1883.3, 1883.5, 1.47196, 1.47384)),
    ((600, 1800, 600), (1469.7, 869.7, 1096.9, 1100.0, 3.58862, 3.68801)),
]


@pytest.mark.parametrize(("given_values", "expected"), WORKED)
def test_worked_values(given_values, expected):
    stall, mtbf, restart = given_values
    young, daly, higher, best, at_best, at_young = expected
    assert young_interval(stall, mtbf) == pytest.approx(young, abs=0.05)
    assert daly_interval(stall, mtbf) == pytest.approx(daly, abs=0.05)
    assert daly_higher_order_interval(stall, mtbf) == pytest.approx(higher, abs=0.05)
    assert optimum_interval(stall, mtbf) == pytest.approx(best, abs=0.05)
    assert slowdown(optimum_interval(stall, mtbf), stall, mtbf, restart) == pytest.approx(at_best, abs=6e-6)
    assert slowdown(young_interval(stall, mtbf), stall, mtbf, restart) == pytest.approx(at_young, abs=6e-6)


@settings(deadline=None)
@given(st.floats(1e-3, 1e4), st.floats(10, 1e7), st.floats(0, 1e4))
def test_the_optimum_beats_its_neighbours(stall, mtbf, restart):
    best = optimum_interval(stall, mtbf)
    assert 0 < best < mtbf * (1 + 1e-12)
    here = slowdown(best, stall, mtbf, restart)
    for factor in (0.5, 0.9, 1.1, 2.0):
        assert slowdown(factor * best, stall, mtbf, restart) >= here * (1 - 1e-9)


@settings(deadline=None)
@given(st.floats(1e-12, 1e-6), st.floats(1, 1e8))
def test_the_optimum_of_a_tiny_stall_does_not_cancel(ratio, mtbf):
    assert optimum_interval(ratio * mtbf, mtbf) == pytest.approx(
        daly_higher_order_interval(ratio * mtbf, mtbf), rel=1e-6
    )


def test_an_asynchronous_drain_counts_as_restart_time():
    assert slowdown(600, 2, 6480, 300, 600) == pytest.approx(1.20807, abs=6e-6)
    assert slowdown(600, 2, 6480, 300, 600) == pytest.approx(slowdown(600, 2, 6480, 900), rel=1e-12)


def test_hopeless_and_failure_free_runs_have_an_answer():
    assert expected_goodput(600, 10, 1.0, 300) == 0.0
    assert expected_goodput(600, 10, math.inf, 300) == pytest.approx(600 / 610)
    assert slowdown(600, 10, 0.0, 300) == math.inf


RSC = [
    # nodes, failures per 1,000 node-days, restart, interval, write -> expected ETTR (Kokolis et al. 2025, formula)
    ((2048, 6.50, 300, 600, 20), 0.87828),
    ((2048, 6.50, 300, 1800, 20), 0.80615),
    ((2048, 6.50, 300, 3600, 60), 0.66536),
    ((2048, 3.789, 300, 600, 20), 0.91559),
    ((2048, 3.789, 300, 1800, 20), 0.88242),
    ((2048, 2.34, 300, 600, 20), 0.93554),
    ((128, 6.50, 300, 1800, 20), 0.97758),
    ((128, 6.50, 600, 1800, 1), 0.98501),
]


@pytest.mark.parametrize(("values", "expected"), RSC)
def test_rsc_formula(values, expected):
    nodes, per_thousand, restart, interval, write = values
    rate = nodes * per_thousand / 1000 / DAY
    assert rsc_goodput(rate, restart, interval, write) == pytest.approx(expected, abs=6e-6)
    exact = expected_goodput(interval, write, 1 / rate, restart)
    assert expected == pytest.approx(exact, abs=0.036)  # first order: up to 3.4 points off at 0.7


@pytest.mark.parametrize(("nodes", "hours"), [(2048, 1.803), (16384, 0.2254)])
def test_mean_time_to_failure_by_size(nodes, hours):
    """arXiv 2410.21680: 6.50 failures per 1,000 node-days."""
    assert 24 / (nodes * 6.5e-3) == pytest.approx(hours, abs=5e-4)


def test_two_levels_first_order_and_exact():
    """Stalls 5 and 120 s, a failure of the first kind each 2 h, of the second each day."""
    case = (5.0, 120.0), (1 / 7200, 1 / 86400)
    every, work, overhead = first_order_two_level(*case)
    assert (every, overhead) == (pytest.approx(16.97, abs=0.005), pytest.approx(0.0900, abs=5e-5))
    assert work == pytest.approx(4557, rel=1e-3)
    assert float(two_level_slowdown(work / 17, 17, *case, (0, 0))) - 1 == pytest.approx(0.0962, abs=1e-4)
    interval, best, least = two_level_optimum(*case, (0, 0))
    assert (best, least - 1) == (17, pytest.approx(0.0962, abs=1e-4))
    assert interval == pytest.approx(259, abs=1)


@settings(deadline=None)
@given(st.floats(60, 3000), st.floats(0, 100), st.floats(1e-6, 5e-4), st.floats(0, 1000))
def test_two_levels_with_one_save_each_are_one_level(interval, stall, rate, restart):
    two = float(two_level_slowdown(interval, 1, (stall, 0.0), (1e-12, rate), (restart, restart)))
    assert two == pytest.approx(slowdown(interval, stall, 1 / (rate + 1e-12), restart), rel=1e-6)


@settings(deadline=None)
@given(st.integers(2, 40), st.floats(60, 2000), st.floats(0.1, 50), st.floats(1e-6, 1e-4), st.floats(0, 900))
def test_two_equal_levels_are_one(every, interval, stall, rate, restart):
    """Where failures of both kinds are undone by the near tier there is nothing to lose: rate 2 very small."""
    two = float(two_level_slowdown(interval, every, (stall, 0.0), (rate, 1e-6 * rate), (restart, restart)))
    assert two == pytest.approx(slowdown(interval, stall, 1 / rate, restart), rel=1e-4)


def test_the_two_level_optimum_is_the_best_of_a_fine_grid():
    case = (0.6, 0.6), (3e-5, 8e-6), (390.0, 450.0)
    interval, every, least = two_level_optimum(*case, (20.0, 60.0))
    grid = two_level_slowdown(
        np.geomspace(20, 3000, 800)[None, :], np.arange(1, 60)[:, None], *case[:2], (410.0, 510.0)
    )
    assert least <= grid.min() * (1 + 1e-6)
    assert every * interval >= 60


def test_erlang_b_by_its_definition():
    load = 22.871
    terms = [load**k / math.factorial(k) for k in range(31)]
    assert erlang_b(30, load) == pytest.approx(terms[30] / sum(terms), rel=1e-12)


SPARES = {4: 0.1714, 8: 0.3051, 16: 0.5538, 20: 0.6593, 26: 0.7715, 30: 0.8079}


def test_spare_limited_goodput():
    """2,048 nodes, 6.5 failures per 1,000 node-days, 23 min a restart, 50 h of repair: closed cyclic queue."""
    rate = 2048 * 6.5e-3 / DAY
    found = {spares: spare_limited_goodput(spares, rate, 50 * 3600.0, 23 * 60.0) for spares in SPARES}
    assert found == pytest.approx(SPARES, abs=6e-5)
    assert spare_limited_goodput(400, rate, 50 * 3600.0, 23 * 60.0) == pytest.approx(1 / (1 + rate * 23 * 60))


def test_spares_by_poisson():
    """2,048 nodes at 6.5 per 1,000 node-days and 2 days of repair: 26.6 nodes are in repair on average."""
    rate = 2048 * 6.5e-3 / DAY
    assert rate * 2 * DAY == pytest.approx(26.6, abs=0.05)
    spares = spares_needed(rate, 2 * DAY, 0.99)

    def enough(count):
        return sum(math.exp(-26.624) * 26.624**k / math.factorial(k) for k in range(count + 1))

    assert enough(spares) >= 0.99 > enough(spares - 1)
    assert not_waiting_share(60, rate, 2 * DAY) == pytest.approx(1, abs=1e-6)


def test_stragglers_by_integration():
    rate, speed, lasts, found, restart = 1 / DAY, 0.7, 14400.0, 1800.0, 300.0
    time = np.linspace(0, 40 * lasts, 400_001)
    density = np.exp(-time / lasts) / lasts
    slow = np.trapezoid(density * np.minimum(time, found), time) * (1 - speed)
    expected = rate * (slow + math.exp(-found / lasts) * restart)
    assert straggler_loss(rate, speed, lasts, found, restart) == pytest.approx(expected, rel=1e-4)
    assert straggler_loss(rate, speed, lasts, math.inf, restart) == pytest.approx(rate * 0.3 * lasts)


@pytest.mark.parametrize(
    ("interval", "goodput"),
    [(120, 0.950), (300, 0.947), (600, 0.936), (1200, 0.912), (1800, 0.887), (3600, 0.816)],
)
def test_saving_too_seldom(interval, goodput):
    """405 B parameters, 200 GB/s, asynchronous, a failure each 3.09 h, 6 min and the load to come back."""
    write = 14 * 405e9 / 200e9
    assert expected_goodput(interval, 1, 54 * DAY / 419, 360 + write, write) == pytest.approx(goodput, abs=6e-4)
