"""Closed forms for runs that fail, save and come back: exact for exponential failures, approximate where it says so.

Symbols: ``interval`` useful seconds between saves, ``stall`` seconds that training stops for a save, ``drain`` seconds
from the end of the stall until an asynchronous save is complete, ``mtbf`` mean time between failures of the whole job,
``restart`` seconds from a failure to the first step after it.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


def young_interval(stall: float, mtbf: float) -> float:
    """Young 1974: ``sqrt(2 stall mtbf)``."""
    return math.sqrt(2 * stall * mtbf)


def daly_interval(stall: float, mtbf: float) -> float:
    """Daly 2006, first order: ``sqrt(2 stall mtbf) - stall``."""
    return young_interval(stall, mtbf) - stall


def daly_higher_order_interval(stall: float, mtbf: float) -> float:
    """Daly 2006, higher order; ``mtbf`` where the stall is at least twice that."""
    if stall >= 2 * mtbf:
        return mtbf
    ratio = stall / (2 * mtbf)
    return young_interval(stall, mtbf) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - stall


def optimum_interval(stall: float, mtbf: float) -> float:
    """The interval that minimises ``slowdown``: ``mtbf (1 + W0(-exp(-stall / mtbf - 1)))``, Lambert's W.

    It depends neither on the restart nor on the drain. Below a stall of 1e-9 mtbf, where the formula cancels, Daly's
    higher order is exact to the last digit.
    """
    if stall < 1e-9 * mtbf:
        return daly_higher_order_interval(stall, mtbf)
    from scipy.special import lambertw

    return float(mtbf * (1 + lambertw(-math.exp(-stall / mtbf - 1)).real))


def slowdown(interval: float, stall: float, mtbf: float, restart: float, drain: float = 0.0) -> float:
    """Wall seconds per useful second: ``mtbf e^((restart + drain)/mtbf) (e^((interval + stall)/mtbf) - 1) / interval``.

    Daly's complete model; the drain of an asynchronous save counts as restart time, since a failure falls back to the
    last complete save. Valid for ``drain <= interval + stall``. Infinite where no progress can be expected.
    """
    return float(slowdowns(interval, stall, mtbf, restart, drain))


def slowdowns(
    interval: Floats | float, stall: Floats | float, mtbf: float, restart: float, drain: float = 0.0
) -> Floats:
    """``slowdown`` over arrays of intervals and stalls."""
    tau = np.asarray(interval, np.float64)
    if mtbf <= 0:
        return np.full(tau.shape, np.inf)
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        if math.isinf(mtbf):
            found = 1 + stall / tau
        else:
            exponent = (restart + drain) / mtbf + (tau + stall) / mtbf
            found = mtbf * np.exp((restart + drain) / mtbf) * np.expm1((tau + stall) / mtbf) / tau
            found = np.where(exponent > 700, np.inf, found)
    return np.where(tau > 0, found, np.inf)


def expected_goodput(interval: float, stall: float, mtbf: float, restart: float, drain: float = 0.0) -> float:
    """Useful share of the wall time, one over ``slowdown``; 0 where the job hardly ever lives through an interval."""
    return 1 / slowdown(interval, stall, mtbf, restart, drain)


def two_level_slowdown(
    interval: Floats | float,
    every: Floats | float,
    stalls: tuple[Floats | float, float],
    rates: tuple[float, float],
    restarts: tuple[float, float],
) -> Floats:
    """Wall seconds per useful second with two tiers of checkpoints, over arrays.

    Each save goes to tier 1, each ``every``-th also to tier 2. Failures of rate 1 go back to tier 1, those of rate 2
    (per second) to tier 2 and leave tier 1 empty. Exact: failures of the second kind are Poisson over all time, and
    the form counts how many an ``every * interval`` of work meets. Asynchronous drains are added to the restarts,
    which is exact for one tier and close for two.

    Args:
        interval: useful seconds between saves.
        every: saves to tier 1 per save to tier 2, at least 1.
        stalls: of a save to tier 1, and what tier 2 adds.
        rates: of both kinds, the second above 0.
        restarts: from tier 1 and from tier 2, detection, load and drain included.
    """
    tau, n = np.asarray(interval, np.float64), np.asarray(every, np.float64)
    rate = rates[0] + rates[1]

    def first_kind(x: Floats | float) -> Floats:
        return np.asarray(-rates[0] / rate * np.expm1(-rate * np.asarray(x)))

    def survived(x: Floats | float, restart: float) -> Floats:
        """The chance that ``x`` seconds are completed, over any number of failures of kind 1, before one of kind 2."""
        back = math.exp(-rate * restart) / (1 - first_kind(restart))
        return np.asarray(np.exp(-rate * np.asarray(x)) / (1 - first_kind(x) * back))

    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        plain, both = tau + stalls[0], tau + stalls[0] + stalls[1]
        chain = survived(plain, restarts[0])
        last = survived(both, restarts[0])
        whole = chain ** (n - 1) * last
        after = np.where(
            n > 1, survived(plain, restarts[1]) * chain ** np.maximum(n - 2, 0) * last, survived(both, restarts[1])
        )
        back = math.exp(-rate * restarts[1]) / (1 - first_kind(restarts[1]))
        found = (1 - whole) / (rates[1] * back * after * n * tau)
    return np.where(np.isfinite(found), found, np.inf)


def two_level_optimum(
    stalls: tuple[float, float],
    rates: tuple[float, float],
    restarts: tuple[float, float],
    drains: tuple[float, float] = (0.0, 0.0),
    *,
    interval: float | None = None,
) -> tuple[float, int, float]:
    """Return interval, ``every`` and slowdown that minimise ``two_level_slowdown``; ``interval`` pins the first.

    A save to a tier never starts before the last one there is complete, so drains bound both periods from below.
    """
    back = (restarts[0] + drains[0], restarts[1] + drains[1])
    rate = rates[0] + rates[1]
    every = np.unique(np.geomspace(1, 2000, 160).round())
    low = max(drains[0], optimum_interval(max(stalls[0], 1e-6), 1 / rate) / 8, 1e-3)
    high = max(8 * optimum_interval(max(sum(stalls), 1e-6), 1 / rates[1]), 2 * low, drains[1])
    found = (low, 1, math.inf)
    for _ in range(4):  # a grid, then finer ones around the best point
        tau = np.array([interval]) if interval else np.geomspace(low, high, 60)
        grid = two_level_slowdown(tau[None, :], every[:, None], stalls, rates, back)
        period = every[:, None] * (tau[None, :] + stalls[0]) + stalls[1]
        grid = np.where(period >= drains[1] * (1 - 1e-12), grid, np.inf)
        row, column = np.unravel_index(int(np.argmin(grid)), grid.shape)
        if grid[row, column] < found[2]:
            found = (float(tau[column]), int(every[row]), float(grid[row, column]))
        if interval:
            every = np.arange(max(1, found[1] - 30), found[1] + 31, dtype=np.float64)
            continue
        width = (high / low) ** 0.1
        low, high = max(low, found[0] / width), min(high, found[0] * width)
        every = np.arange(max(1, found[1] - 40), found[1] + 41, dtype=np.float64)
    return found


def first_order_two_level(stalls: tuple[float, float], rates: tuple[float, float]) -> tuple[float, float, float]:
    """Return ``every``, work per pattern and overhead of the first-order two-level pattern (real-valued).

    Benoit, Cavelan, Le Fevre, Robert and Sun 2016: 7 to 9 % below the exact overhead at ordinary rates.
    """
    (c1, c2), (l1, l2) = stalls, rates
    every = math.sqrt(l1 * c2 / (l2 * c1))
    cost, loss = every * c1 + c2, (l1 / every + l2) / 2
    return every, math.sqrt(cost / loss), 2 * math.sqrt(cost * loss)


def rsc_goodput(rate: float, restart: float, interval: float, write: float) -> float:
    """Kokolis et al. (HPCA 2025), expected ETTR: first order, 3 points low at ETTR 0.7; 0 where it turns negative."""
    return max(0.0, (1 - rate * (restart + interval / 2)) / (1 + write / interval))


def erlang_b(servers: int, load: float) -> float:
    """Blocking probability of ``servers`` servers under an offered load in Erlang."""
    return float(erlang_blocking(servers, load)[-1])


def erlang_blocking(most: int, load: Floats | float) -> list[Floats]:
    """Blocking probability of 0, 1, 2 ... ``most`` servers; over an array of loads, an array each."""
    blocked = [np.ones_like(np.asarray(load, np.float64))]
    for servers in range(1, most + 1):
        offered = load * blocked[-1]
        blocked.append(np.asarray(offered / (servers + offered)))
    return blocked


def not_waiting_share(spares: int, losses_per_second: float, repair: float) -> float:
    """Share of the time in which a job does not wait for a node: ``1 - ErlangB(spares + 1, losses x repair)``.

    Exact where nothing fails while the job waits, for any law of the repair time; ``repair`` counts from the failure.
    """
    return 1 - erlang_b(spares + 1, losses_per_second * repair)


def waiting_jobs(spares: int, jobs: int, losses_per_second: float, repair: float) -> float:
    """Mean number of jobs that wait for a node where several take from the same spares.

    Nodes in repair are a birth-death chain: ``losses_per_second`` while nobody waits, less by each job that does, since
    it loses no more nodes. Exact for exponential repairs and jobs that lose nodes equally often; one job: Erlang B.
    """
    weights, waiting = [1.0], [0]
    for k in range(spares + jobs):
        running = jobs - max(0, k - spares)
        weights.append(weights[-1] * losses_per_second * running / jobs * repair / (k + 1))
        waiting.append(max(0, k + 1 - spares))
    largest = max(weights)
    shares = [weight / largest for weight in weights]
    return sum(n * share for n, share in zip(waiting, shares, strict=True)) / sum(shares)


def spare_limited_goodput(spares: int, losses_per_second: float, repair: float, restart: float) -> float:
    """ETTR without checkpoint costs where nothing fails while the job is down (closed cyclic queue).

    ``mu (1 - B) / rate`` with ``mu = 1 / (1 / rate + restart)``, ``B = ErlangB(spares + 1, mu repair)``.
    """
    mu = 1 / (1 / losses_per_second + restart)
    return mu * (1 - erlang_b(spares + 1, mu * repair)) / losses_per_second


def spares_needed(losses_per_second: float, repair: float, probability: float) -> int:
    """Smallest number of spares that suffices with this probability: nodes in repair are Poisson (M/G/infinity)."""
    from scipy.stats import poisson

    return int(poisson.ppf(probability, losses_per_second * repair))


def straggler_loss(rate: float, speed: float, lasts: float, found: float, restart: float) -> float:
    """Share of the time lost to slow nodes: ``rate ((1 - speed) E min(lasts, found) + P(lasts > found) restart)``."""
    if math.isinf(found):
        return rate * (1 - speed) * lasts
    seen = math.exp(-found / lasts)
    return rate * ((1 - speed) * lasts * (1 - seen) + seen * restart)
