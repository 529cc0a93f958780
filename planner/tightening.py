"""Bounds from whole layers, where the relaxation would share a layer between ranks.

If the even share is 7.9 layers, some rank has at least 8: the makespan knows that, the relaxation does not. Either a
rank holds more than the share rounded up, or nearly all ranks hold just that many; both cases have good bounds.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from planner.partition_dp import shortest, stage_table
from planner.recompute import MAX_PRODUCT, least_recompute
from planner.stage_problem import StageProblem

Floats = npt.NDArray[np.float64]

MAX_WAYS = 40
"""Ways to spread a rank's layers over its chunks that are compared one by one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shares:
    """Layers of the commonest kind that every rank can hold while no rank works longer than needed."""

    kind: str
    full: tuple[int, ...]
    """Of each rank."""
    spare: int
    """How many more these are than the layers of the kind."""
    seconds: float
    """Work per micro-batch of the slowest rank, at least."""
    beyond: tuple[float, ...]
    """Work per micro-batch of each rank with one layer more; infinite: the trust region excludes that."""

    def cases(self, step: Floats, cutoff: float) -> list[list[tuple[float, float]]]:
        """Least and most layers of every rank, case by case; together they leave nothing out.

        A rank holds more than its share (unless that alone takes until ``cutoff``), or none does; then no more than
        ``spare`` ranks hold less, and one of the last ones is the last to hold all of it.
        """
        ranks = range(len(self.full))
        found = [
            [(self.full[one] + 1.0 if one == rank else 0.0, math.inf) for one in ranks]
            for rank in ranks
            if step[rank] < cutoff
        ]
        ends = [rank for rank in ranks if len(self.full) - 1 - rank <= self.spare]
        return found + [
            [(self.full[one] * float(one == last), float(self.full[one] - (one > last))) for one in ranks]
            for last in reversed(ends)
        ]


def whole_shares(problem: StageProblem) -> Shares:
    """Share out whole layers so that the slowest rank is as fast as can be, recompute and other kinds left out."""
    pieces = problem.pieces
    totals: dict[str, int] = {}
    for run in problem.runs:
        totals[run.kind] = totals.get(run.kind, 0) + run.layers
    kind = max(totals, key=lambda one: totals[one])
    work = pieces.forward + pieces.backward
    each = min(float(work[i]) for i, column in enumerate(pieces.columns) if column.kind == kind)
    ends = np.zeros(problem.pp)
    ends[problem.walks.ranks[0]] += sum(pieces.first)
    ends[problem.walks.ranks[-1]] += sum(pieces.last[:2])
    times = np.unique(ends[:, None] + np.arange(totals[kind] + 1)[None] * each)
    held = np.floor((times[:, None] - ends[None]) / each + 1e-9).clip(0)
    enough = int(np.argmax(held.sum(axis=1) >= totals[kind]))
    full = np.minimum(held[enough], problem.most_layers)
    possible = full + 1 <= problem.most_layers
    more = np.where(possible, (full + 1) * each + ends, math.inf)
    return Shares(
        kind=kind,
        full=tuple(int(one) for one in full),
        spare=max(int(full.sum()) - totals[kind], 0),
        seconds=float(max(times[enough], ends.max(), (each * totals[kind] + ends.sum()) / problem.pp)),
        beyond=tuple(float(one) for one in more),
    )


def share_rows(problem: StageProblem, shares: Shares, size: int) -> list[Floats]:
    """Layers of the kind on every rank, as rows of the program."""
    places = [i for i, run in enumerate(problem.runs) if run.kind == shares.kind]
    counts = np.array([sum(column.window[i] for i in places) for column in problem.columns], dtype=np.float64)
    stage = problem.arrays["stage"]
    rows = []
    for chunk in problem.chunks:
        row = np.zeros(size)
        row[: len(counts)] = np.where(np.isin(stage, chunk), counts, 0.0)
        rows.append(row)
    return rows


def chunk_bound(problem: StageProblem, shares: Shares, load: float) -> float:
    """Bound of virtual stages without a program, from ranks that hold all of their share.

    Such a rank works through all micro-batches, and waits before that for the first chunks of the ranks before it. They
    hold what the ranks' other chunks and the later ranks leave. No more than ``spare`` ranks hold less, so of the ranks
    with the largest bounds one more than that cannot all escape. ``load`` is the longest that a rank may work.
    """
    if problem.vpp == 1 or problem.layout.schedule != "interleaved" or shares.spare >= problem.pp:
        return 0.0
    pieces, work = problem.pieces, problem.pieces.forward + problem.pieces.backward
    each = min(float(work[i]) for i, column in enumerate(pieces.columns) if column.kind == shares.kind)
    place = next(i for i, run in enumerate(problem.runs) if run.kind == shares.kind)
    total = sum(run.layers for run in problem.runs if run.kind == shares.kind)
    passes = 2 * problem.vpp * pieces.host + (2 * problem.vpp - 1) * pieces.send
    bounds = []
    for rank, full in enumerate(shares.full):
        before = total - full - sum(shares.full[rank + 1 :])
        first_chunks = max(before - rank * (problem.vpp - 1) * problem.high, 0)
        ends = (rank == 0) * sum(pieces.first) + (rank == problem.pp - 1) * sum(pieces.last[:2])
        exact = least_work(problem, rank, place, full)
        slowest = (each * full if exact is None else exact) + ends
        ramp = first_chunks * each + rank * (2 * pieces.host + 1.5 * pieces.send)
        bounds.append(pieces.num_microbatches * (slowest + passes) + ramp)
    return sorted(bounds)[-1 - shares.spare] + least_tail(problem, load) + pieces.tail.update.constant


def work_rows(problem: StageProblem, shares: Shares, size: int) -> list[tuple[Floats, float]]:
    """Rows ``work of a rank >= its least work with so many layers``, recompute in whole layers included.

    The relaxation recomputes a third of a layer, and pays a third of what the first recomputed layer needs for a
    moment. A rank with all of its share cannot: a line through that point, below all other numbers of layers, is valid.
    With one chunk per rank the contents of a stage say it all.
    """
    if problem.vpp == 1:
        return []
    pieces, numbers = problem.pieces, problem.arrays
    place = next(i for i, run in enumerate(problem.runs) if run.kind == shares.kind)
    work = pieces.forward + pieces.backward
    each = min(float(work[i]) for i, column in enumerate(pieces.columns) if column.kind == shares.kind)
    found = []
    for rank, row in enumerate(share_rows(problem, shares, size)):
        full, chunk = shares.full[rank], problem.chunks[rank]
        first, last = 0 in chunk, problem.stages - 1 in chunk
        ends = first * sum(pieces.first) + last * sum(pieces.last[:2])
        least = {count: ends + each * count for count in range(problem.most_layers + 1)}
        for count in range(max(full - 1, 0), min(full + 1, problem.most_layers) + 1):
            exact = least_work(problem, rank, place, count)
            if exact is not None:
                least[count] = exact + ends
        if not math.isfinite(least[full]) or least[full] <= ends + each * full * (1 + 1e-9):
            continue
        slope = max((least[full] - least[count]) / (full - count) for count in range(full)) if full else 0.0
        if any(least[count] < least[full] + slope * (count - full) - 1e-12 for count in least if count > full):
            continue
        line = -slope * row
        mine = np.isin(numbers["stage"], chunk)
        line[: len(mine)] += np.where(mine, numbers["forward"] + numbers["backward"], 0.0)
        found.append((line, least[full] - slope * full))
    return found


def least_work(problem: StageProblem, rank: int, place: int, count: int) -> float | None:
    """Least work of a rank's chunks with so many layers of one run; infinite: nothing fits; None: too many ways."""
    key = (rank, place, count)
    if key not in problem.least_works:
        problem.least_works[key] = _least_work_of(problem, rank, place, count)
    return problem.least_works[key]


def _least_work_of(problem: StageProblem, rank: int, place: int, count: int) -> float | None:
    chunks, alone = problem.chunks[rank], len(problem.runs) == 1
    ranges = [
        range((problem.low_ends if stage in (0, problem.stages - 1) else problem.low) if alone else 0, problem.high + 1)
        for stage in chunks
    ]
    if math.prod(len(one) for one in ranges) > MAX_PRODUCT:
        return None
    best = math.inf
    ways = [sizes for sizes in itertools.product(*ranges) if sum(sizes) == count]
    if len(ways) > MAX_WAYS:
        return None
    work = problem.pieces.forward + problem.pieces.backward
    for sizes in ways:
        held = [tuple(size if i == place else 0 for i in range(len(problem.runs))) for size in sizes]
        layers = least_recompute(problem, rank, chunks, held)
        if layers is not None:
            best = min(best, sum(float(one @ work) for one in layers))
    return best


def beyond_bounds(problem: StageProblem, shares: Shares) -> Floats:
    """Step if a rank holds more than its share: its work alone, and the least that follows the pipeline."""
    pieces, tail = problem.pieces, problem.pieces.tail
    passes = 2 * problem.vpp * pieces.host + (2 * problem.vpp - 1) * pieces.send
    pipeline = pieces.num_microbatches * (np.array(shares.beyond) + passes + pieces.per_microbatch)
    return np.asarray(pipeline + least_tail(problem, math.inf) + tail.update.constant)


def mean_params(problem: StageProblem) -> tuple[float, float]:
    """Parameters of the heaviest rank, at least: the mean, outside and inside routed experts."""
    pieces = problem.pieces
    held = {column.kind: (pieces.dense[i], pieces.expert[i]) for i, column in enumerate(pieces.columns)}
    ends = [problem.end_params(rank) for rank in range(problem.pp)]
    dense = sum(run.layers * held[run.kind][0] for run in problem.runs) + sum(one for one, _ in ends)
    expert = sum(run.layers * held[run.kind][1] for run in problem.runs) + sum(one for _, one in ends)
    return float(dense) / problem.pp, float(expert) / problem.pp


def least_tail(problem: StageProblem, load: float) -> float:
    """Seconds after the pipeline without the update's constant, where the slowest rank is busy no longer than so."""
    tail, (dense, expert) = problem.pieces.tail, mean_params(problem)
    reduce = tail.reduce(dense, expert)
    exposed = tail.exposed_share * reduce
    if math.isfinite(tail.hidden_share) and math.isfinite(load):
        exposed = max(exposed, reduce - tail.hidden_share * load)
    return exposed + tail.update(dense, expert) - tail.update.constant


def interval_bound(problem: StageProblem) -> tuple[float, list[list[int]]]:
    """Bound of 1F1B with one chunk per rank from a dynamic program, and the stage sizes that it met.

    For the slowest stage s of P two paths together give ``makespan >= 2 sum t + (m - P - 1) t_s`` (add what passes s
    first, all micro-batches there, and what follows), so the smallest value of the right side over all stages bounds
    every plan. Needs m > P.
    """
    pieces, m = problem.pieces, problem.pieces.num_microbatches
    if problem.vpp > 1 or problem.layout.schedule != "1f1b" or m <= problem.pp + 1 or problem.pp == 1:
        return 0.0, []
    table = stage_table(problem)
    sends = 2.0 * pieces.send * np.ones(problem.pp)
    sends[[0, -1]] = pieces.send
    table += (2.0 * pieces.host + sends)[:, None, None]
    constant = pieces.tail.update.constant
    slope = m - problem.pp - 1
    rest = shortest(table)
    if rest is None:
        return math.inf, []
    best, met = math.inf, list[list[int]]()
    for slowest in np.unique(table[np.isfinite(table)]):
        load = float(slowest) / pieces.straggler + pieces.loaded
        after = least_tail(problem, load) + constant
        if 2.0 * rest[0] + slope * float(slowest) + least_tail(problem, math.inf) + constant >= best:
            break
        found = shortest(np.where(table <= slowest, table, math.inf))
        if found is None:
            continue
        value = 2.0 * found[0] + slope * float(slowest) + after
        if value < best:
            best = value
            met.append(found[1])
    return best, met[-3:]
