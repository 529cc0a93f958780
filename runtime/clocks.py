"""Timing something many times, robust against other work on the machine."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Timing:
    """Lower decile of the seconds of one call (of few calls the fastest), and the spread of all of them.

    Other work on the machine only ever makes a call slower, so the fast end says what the machine can do. ``spread`` is
    half the interquartile range over the median.
    """

    seconds: float
    spread: float


def timed(
    run: Callable[[], object],
    *,
    budget_seconds: float,
    clock: Callable[[], float] = time.process_time,
    least: int = 5,
    most: int = 200,
) -> Timing:
    """Time a call over and over.

    Args:
        run: the call.
        budget_seconds: about how long to go on.
        clock: CPU time of this process for what computes (others on the core do not disturb it), perf_counter for
            what waits.
        least: calls at least.
        most: calls at most.
    """
    run()
    seconds: list[float] = []
    end = time.perf_counter() + budget_seconds
    while len(seconds) < least or (time.perf_counter() < end and len(seconds) < most):
        before = clock()
        run()
        seconds.append(clock() - before)
    return summary(seconds)


def summary(seconds: list[float]) -> Timing:
    """Summarise single timings."""
    ordered = sorted(seconds)
    low, middle, high = statistics.quantiles(ordered, n=4) if len(ordered) > 1 else ordered * 3
    return Timing(ordered[len(ordered) // 10], (high - low) / 2 / middle if middle > 0 else 0.0)
