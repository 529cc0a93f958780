"""The least recompute with which given layers fit: of one rank's chunks, and of equal stages."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from planner.contents import Mixes
from planner.stage_problem import Choice, StageProblem
from simulator.stages import stage_layers

Floats = npt.NDArray[np.float64]

MAX_PRODUCT = 3_000
"""Mixes of the chunks of one rank that are compared one by one; more are chosen greedily."""


def uniform_choice(problem: StageProblem, preferred: int = 0) -> Choice | None:
    """Equal stages (by the simulator's rule) with the least recompute that fits; None: not even full recompute does.

    Where chunks of a rank can recompute equally well, those near the preferred one do.
    """
    held, layers = uniform_windows(problem), dict[int, Floats]()
    for rank, chunks in enumerate(problem.chunks):
        mine = least_recompute(problem, rank, chunks, [held[stage] for stage in chunks], preferred)
        if mine is None:
            return None
        layers.update(zip(chunks, mine, strict=True))
    return Choice(windows=held, layers=tuple(layers[stage] for stage in range(problem.stages)))


def uniform_windows(problem: StageProblem) -> tuple[tuple[int, ...], ...]:
    """Layers of each run on every stage by the simulator's uniform rule."""
    sizes = stage_layers(problem.num_layers, problem.pp, problem.vpp, problem.tail_layers)
    ends = np.cumsum(sizes)
    run_ends = np.cumsum([run.layers for run in problem.runs])
    run_starts = run_ends - [run.layers for run in problem.runs]
    return tuple(
        tuple(int(one) for one in np.clip(np.minimum(end, run_ends) - np.maximum(end - size, run_starts), 0, None))
        for end, size in zip(ends, sizes, strict=True)
    )


def least_recompute(
    problem: StageProblem, rank: int, chunks: list[int], held: list[tuple[int, ...]], preferred: int = 0
) -> list[Floats] | None:
    """Of the mixes of a rank's chunks the fastest combination that fits; greedy where there are too many.

    Of equally fast ones that which recomputes in chunks near the preferred one.
    """
    options = [problem.options(stage, window) for stage, window in zip(chunks, held, strict=True)]
    if any(not len(one.layers) for one in options):
        return None
    live, room = problem.live[rank], problem.room(rank) - sum(one.held for one in options)
    far = [abs(place - preferred) for place in range(len(options))]
    seconds = [one.forward + one.backward for one in options]
    if too_many(options):
        rows = _greedy(options, seconds, far, live, room)
        return None if rows is None else [one.layers[row] for one, row in zip(options, rows, strict=True)]
    rows_of = np.stack(np.meshgrid(*(np.arange(len(one.layers)) for one in options), indexing="ij")).reshape(
        len(options), -1
    )
    saved = np.array([one.saved[row] for one, row in zip(options, rows_of, strict=True)])
    again = np.array([one.again[row] for one, row in zip(options, rows_of, strict=True)]).max(axis=0)
    fits = (live @ saved).max(axis=0) + again <= room
    if not fits.any():
        return None
    work = np.array([one[row] for one, row in zip(seconds, rows_of, strict=True)])
    least = np.array([one.min() for one in seconds])[:, None]
    distance = (np.array(far)[:, None] * (work - least)).sum(axis=0)
    total = np.round(work.sum(axis=0), 12)
    order = np.lexsort((distance, total, ~fits))
    return [one.layers[row] for one, row in zip(options, rows_of[:, order[0]], strict=True)]


def too_many(options: list[Mixes]) -> bool:
    """Whether the combinations are too many to compare."""
    return math.prod(len(one.layers) for one in options) > MAX_PRODUCT


def _greedy(options: list[Mixes], seconds: list[Floats], far: list[int], live: Floats, room: float) -> list[int] | None:
    """Recompute more, mix by mix, in the chunks nearest to the preferred one until everything fits."""
    ranked = [np.argsort(one, kind="stable") for one in seconds]
    at = [0] * len(options)
    while True:
        rows = [int(order[place]) for order, place in zip(ranked, at, strict=True)]
        saved = np.array([one.saved[row] for one, row in zip(options, rows, strict=True)])
        again = max(float(one.again[row]) for one, row in zip(options, rows, strict=True))
        if float((live @ saved).max()) + again <= room:
            return rows
        movable = [i for i, order in enumerate(ranked) if at[i] + 1 < len(order)]
        if not movable:
            return None
        at[min(movable, key=lambda i: (far[i], -float(live[:, i].max()), at[i]))] += 1
