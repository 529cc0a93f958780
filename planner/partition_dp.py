"""The dynamic program over intervals of layers, for one chunk per rank: what is left where no solver works.

It is exact for the classical objective, ``(micro-batches - 1) x slowest stage + sum of stages`` (Zheng et al. 2022,
Alpa, section 5.2), by trying every time of the slowest stage.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from planner.stage_problem import Choice, StageProblem

Floats = npt.NDArray[np.float64]

MAX_SLOWEST = 400
"""Times of the slowest stage that are tried, from the smallest on."""
AT_ONCE = 32
"""Of them, those that are worked on together."""


def best_intervals(problem: StageProblem) -> Iterator[Choice]:
    """Yield the best stages for each time of the slowest stage that could win, best by the classical objective last.

    Every stage holds consecutive layers and the fastest recompute mix that fits. Nothing is yielded where none fits.
    """
    table = stage_table(problem)
    micro = problem.pieces.num_microbatches
    best = math.inf
    for slowest, total, sizes in by_slowest(table, np.unique(table[np.isfinite(table)])[:: max(1, _too_many(table))]):
        if (micro - 1) * slowest + total < best:
            best = (micro - 1) * slowest + total
            yield choice_of(problem, sizes)
        if (micro - 1) * slowest >= best:
            return


def by_slowest(table: Floats, times: Floats) -> Iterator[tuple[float, float, list[int]]]:
    """For each time of the slowest stage, rising: it, the smallest sum of stages (infinite: none), their sizes."""
    for start in range(0, len(times), AT_ONCE):
        some = times[start : start + AT_ONCE]
        sums, sizes = shortest_under(table, some)
        yield from zip(some.tolist(), sums.tolist(), sizes, strict=True)


def stage_table(problem: StageProblem) -> Floats:
    """Seconds of every stage from a layer on with so many layers: (stages, layers + 1, sizes); infinite: no fit."""
    layers = problem.num_layers
    table = np.full((problem.stages, layers + 1, problem.high + 1), math.inf)
    for stage in range(problem.stages):
        first, last = stage == 0, stage == problem.stages - 1
        ends = sum(first * problem.pieces.first[part] + last * problem.pieces.last[part] for part in (0, 1))
        known: dict[tuple[int, ...], float] = {}
        for start in range(layers + 1):
            for size in range(min(problem.high, layers - start) + 1):
                window = _window(problem, start, size)
                if window not in known:
                    mixes = problem.options(stage, window)
                    known[window] = float((mixes.forward + mixes.backward).min(initial=math.inf)) + ends
                table[stage, start, size] = known[window]
    return table


def _too_many(table: Floats) -> int:
    return len(np.unique(table[np.isfinite(table)])) // MAX_SLOWEST


def _window(problem: StageProblem, start: int, size: int) -> tuple[int, ...]:
    held, begin = [], 0
    for run in problem.runs:
        end = begin + run.layers
        held.append(max(0, min(start + size, end) - max(start, begin)))
        begin = end
    return tuple(held)


def shortest(table: Floats) -> tuple[float, list[int]] | None:
    """Smallest sum of stages that together hold all layers, and their sizes."""
    sums, sizes = shortest_under(table, np.array([math.inf]))
    return (float(sums[0]), sizes[0]) if math.isfinite(sums[0]) else None


def shortest_under(table: Floats, slowest: Floats) -> tuple[Floats, list[list[int]]]:
    """Smallest sums of stages where none takes longer than ``slowest``, one for each of these, and the sizes."""
    stages, places, sizes = table.shape
    cases, limits = np.arange(len(slowest)), slowest[:, None]
    reach = np.full((len(slowest), places), math.inf)
    reach[:, 0] = 0.0
    taken: list[npt.NDArray[np.int64]] = []
    for stage in range(stages):
        values = np.full((min(sizes, places), len(slowest), places), math.inf)
        for size in range(len(values)):
            own = table[stage, : places - size, size]
            values[size, :, size:] = np.where(own <= limits, reach[:, : places - size] + own, math.inf)
        best = values.argmin(axis=0)
        taken.append(best)
        reach = np.take_along_axis(values, best[None], axis=0)[0]
    found, at = [], np.full(len(slowest), places - 1)
    for size_of in reversed(taken):
        found.append(size_of[cases, at])
        at = at - found[-1]
    return reach[:, -1], [[int(one) for one in sizes] for sizes in np.array(found[::-1]).T]


def choice_of(problem: StageProblem, sizes: list[int]) -> Choice:
    """Stages of these sizes with the fastest mixes that fit."""
    held, layers, start = [], [], 0
    for stage, size in enumerate(sizes):
        window = _window(problem, start, size)
        mixes = problem.options(stage, window)
        held.append(window)
        layers.append(mixes.layers[int(np.argmin(mixes.forward + mixes.backward))])
        start += size
    return Choice(windows=tuple(held), layers=tuple(layers))
