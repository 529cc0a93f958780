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

from planner.partition_dp import by_slowest, shortest, stage_table
from planner.recompute import MAX_PRODUCT, least_recompute, too_many
from planner.stage_problem import StageProblem

Floats = npt.NDArray[np.float64]

MAX_WAYS = 40
"""Ways to spread a rank's layers over its chunks that are compared one by one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shares:
    """Layers of the commonest kind, and what a rank with so many works at least."""

    kind: str
    place: int
    """Its first run."""
    total: int
    each: float
    """Seconds of one layer and micro-batch without recompute."""
    ends: tuple[float, ...]
    """Seconds of embedding and head on each rank."""

    def even_seconds(self, ranks: int) -> float:
        """Work per micro-batch of the slowest rank, at least, where whole layers are shared out as well as can be."""
        ends = np.array(self.ends)
        times = np.unique(ends[:, None] + np.arange(self.total + 1)[None] * self.each)
        held = np.floor((times[:, None] - ends[None]) / self.each + 1e-9).clip(0).sum(axis=1)
        enough = float(times[int(np.argmax(held >= self.total))])
        return max(enough, float(ends.max()), (self.each * self.total + float(ends.sum())) / ranks)


def whole_shares(problem: StageProblem) -> Shares:
    """Pick the commonest layer kind, recompute and other kinds left out."""
    pieces = problem.pieces
    totals: dict[str, int] = {}
    for run in problem.runs:
        totals[run.kind] = totals.get(run.kind, 0) + run.layers
    kind = max(totals, key=lambda one: totals[one])
    work = pieces.forward + pieces.backward
    ends = np.zeros(problem.pp)
    ends[problem.ranks[0]] += sum(pieces.first)
    ends[problem.ranks[-1]] += sum(pieces.last[:2])
    return Shares(
        kind=kind,
        place=next(i for i, run in enumerate(problem.runs) if run.kind == kind),
        total=totals[kind],
        each=min(float(work[i]) for i, column in enumerate(pieces.columns) if column.kind == kind),
        ends=tuple(float(one) for one in ends),
    )


def most_each(problem: StageProblem, shares: Shares, limit: float) -> list[int]:
    """Layers that each rank can hold in a step of less than ``limit`` seconds, by its work alone."""
    pieces = problem.pieces
    after = least_tail(problem, math.inf) + pieces.tail.update.constant
    passes = 2 * problem.vpp * pieces.host + sends_each(problem) * pieces.send
    time = (limit - after) / pieces.num_microbatches - passes - pieces.per_microbatch
    most = problem.most_layers if problem.vpp > 1 else problem.high
    return [max(0, min(most, math.floor((time - ends) / shares.each + 1e-9))) for ends in shares.ends]


def share_cases(most: list[int], total: int) -> list[list[tuple[float, float]]] | None:
    """Least and most layers of every rank, case by case; together they leave nothing out. None: there is no way.

    Ranks hold no more than ``most``, and no more of them hold less than these have to spare. So one of the last ranks
    is the last to hold all that it can; where all of them can hold less, nothing is said.
    """
    spare = sum(most) - total
    if spare < 0:
        return None
    if spare >= len(most):
        return [[(0.0, float(one)) for one in most]]
    ranks = range(len(most))
    ends = [rank for rank in ranks if len(most) - 1 - rank <= spare]
    return [
        [(most[one] * float(one == last), float(most[one] - (one > last))) for one in ranks] for last in reversed(ends)
    ]


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
    hold what the ranks' other chunks and the later ranks leave. No more ranks hold less than there is room to spare, so
    of the ranks with the largest bounds one more than that cannot all escape. No rank works longer than ``load``.
    """
    spare = problem.pp * problem.most_layers - shares.total
    if problem.vpp == 1 or problem.layout.schedule not in ("interleaved", "zbv", "dualpipe") or spare >= problem.pp:
        return 0.0
    pieces, full = problem.pieces, problem.most_layers
    passes = 2 * problem.vpp * pieces.host + sends_each(problem) * pieces.send
    bounds = []
    for rank, ends in enumerate(shares.ends):
        ramp = 0.0
        if problem.layout.schedule == "interleaved":
            before = shares.total - full * (problem.pp - rank)
            first_chunks = max(before - rank * (problem.vpp - 1) * problem.high, 0)
            ramp = first_chunks * shares.each + 2 * rank * pieces.host + max(2 * rank - 1, 0) * pieces.send
        exact = least_work(problem, rank, shares.place, full)
        slowest = (shares.each * full if exact is None else exact) + ends
        bounds.append(pieces.num_microbatches * (slowest + passes) + ramp)
    return sorted(bounds)[-1 - spare] + least_tail(problem, load) + pieces.tail.update.constant


def work_rows(problem: StageProblem, shares: Shares, size: int) -> list[tuple[Floats, float]]:
    """Rows ``work of a rank >= its least work with so many layers``, recompute in whole layers included.

    The relaxation recomputes a third of a layer, and pays a third of what the first recomputed layer needs for a
    moment. A rank with all of its share cannot: a line through that point, below all other numbers of layers, is valid.
    With one chunk per rank the contents of a stage say it all.
    """
    if problem.vpp == 1:
        return []
    numbers, most = problem.arrays, problem.most_layers
    found = []
    for rank, row in enumerate(share_rows(problem, shares, size)):
        chunk, ends, each = problem.chunks[rank], shares.ends[rank], shares.each
        least = {count: ends + each * count for count in range(most + 1)}
        even = min(most, math.ceil(shares.total / problem.pp))
        for count in range(max(even - 1, 0), most + 1):
            exact = least_work(problem, rank, shares.place, count)
            if exact is not None:
                least[count] = exact + ends
        mine = np.isin(numbers["stage"], chunk)
        work = np.where(mine, numbers["forward"] + numbers["backward"], 0.0)
        for at in range(max(even - 1, 1), most + 1):
            if not math.isfinite(least[at]) or least[at] <= ends + each * at * (1 + 1e-9):
                continue
            slope = max((least[at] - least[count]) / (at - count) for count in range(at))
            if any(least[count] < least[at] + slope * (count - at) - 1e-12 for count in least if count > at):
                continue
            line = -slope * row
            line[: len(work)] += work
            found.append((line, least[at] - slope * at))
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
        if too_many([problem.options(stage, window) for stage, window in zip(chunks, held, strict=True)]):
            return None
        layers = least_recompute(problem, rank, chunks, held)
        if layers is not None:
            best = min(best, sum(float(one @ work) for one in layers))
    return best


def sends_each(problem: StageProblem) -> int:
    """Results of a micro-batch that a rank sends at least; in a V the turn stays on its rank."""
    if problem.pp == 1:
        return 0
    return 2 if problem.ranks[problem.pp : problem.pp + 1] == (problem.pp - 1,) else 2 * problem.vpp - 1


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
    for slowest, total, sizes in by_slowest(table, np.unique(table[np.isfinite(table)])):
        if 2.0 * rest[0] + slope * slowest + least_tail(problem, math.inf) + constant >= best:
            break
        value = 2.0 * total + slope * slowest + least_tail(problem, slowest / pieces.straggler + pieces.loaded)
        if value + constant < best:
            best = value + constant
            met.append(sizes)
    return best, met[-3:]
