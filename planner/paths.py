"""Longest paths through a pipeline, and what each says: a path is a sum of stage times, so it bounds every other plan.

For fixed op orders the makespan is the largest of finitely many sums of durations. The longest path of any plan is one
of these sums, and therefore a lower bound (a cut) for all plans with the same schedule and degrees.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from scenarios.layout import Schedule
from simulator.longest_path import op_graph
from simulator.schedule import op_orders, schedule_complaint, stage_rank

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

MAX_OPS = 60_000
"""Longer steps are not solved exactly."""
SLOWER = (1.08, 1.3)
"""Seed paths: those that appear where one rank, or one virtual stage, is so much slower than the others."""


Path = Floats
"""How often a path meets each virtual stage, and what stages take, in one row each: F, B and W of all stages in model
order, then sends and passes. Their product is what the path takes."""


def path_key(path: Path) -> bytes:
    """Equal for equal paths."""
    return np.round(path, 6).tobytes()


@dataclass(frozen=True, slots=True, kw_only=True)
class Pipeline:
    """The ops of one schedule, in levels: those of a level wait only for earlier ones, so they are walked together."""

    levels: tuple[tuple[slice, Ints, Ints, Ints | None], ...]
    """Ops of a level, and what each waits for: the op before it on its rank, its input, the second input of a fused
    pair. Index -1 answers with time 0."""
    waits: Ints
    """The same for all ops, one line more for index -1, three columns."""
    types: Ints
    """Ops of one type take equally long; one entry more for index -1."""
    terms: Floats
    """Shape (types, 3 stages + 2): the duration of a type as a sum of F, B and W of stages, sends and passes."""

    def longest(self, times: Floats) -> tuple[Floats, list[Path]]:
        """Return the makespan for each row of times, and a path that takes so long.

        A row holds the seconds of forward, backward and weight gradient of every stage (the backward with the weight
        gradient), then what is added to an op whose result another rank needs, and to every forward and backward.
        """
        seconds = (times @ self.terms.T).T[self.types[:-1]]
        end = np.zeros((len(self.types), len(times)))
        for ops, previous, inputs, more in self.levels:
            start = np.maximum(end[previous], end[inputs])
            if more is not None:
                start = np.maximum(start, end[more])
            end[ops] = start + seconds[ops]
        columns = np.arange(len(times))
        at = np.argmax(end[:-1], axis=0)
        makespans, met = end[at, columns], []
        while np.any(at >= 0):
            met.append(at)
            before = self.waits[at]
            at = before[columns, np.argmax(end[before, columns[:, None]], axis=1)]
        types = self.types[np.array(met)]
        counts = [np.bincount(types[:, column], minlength=len(self.terms) + 1)[:-1] for column in columns]
        return makespans, list(np.array(counts) @ self.terms)


def num_ops(pp: int, vpp: int, num_microbatches: int, schedule: Schedule) -> int:
    """Ops of one step."""
    return (2 if schedule in ("gpipe", "1f1b", "interleaved") else 3) * pp * vpp * num_microbatches


@lru_cache(maxsize=32)
def pipeline(schedule: Schedule, pp: int, vpp: int, num_microbatches: int) -> Pipeline:
    """Prepare the walks through one schedule.

    Raises:
        ValueError: the schedule does not exist for these degrees.
    """
    graph = op_graph(op_orders(schedule, pp, vpp, num_microbatches))
    stages, ops = graph.num_stages, graph.ops
    crossing = {j for i in range(len(ops)) for j in graph.inputs[i] if graph.ranks[j] != graph.ranks[i]}
    places: dict[Any, int] = {}
    types, terms = [], list[Floats]()
    for i, op in enumerate(ops):
        partner = ops[i + 1].stage if op.fused else -1
        second = op.kind == "B" and i > 0 and ops[i - 1].fused
        key = (op.kind, op.stage, partner, second, graph.has_weight[i], i in crossing)
        if key not in places:
            places[key] = len(places)
            row = np.zeros(3 * stages + 2)
            if op.kind == "F":
                row[op.stage] += 1
                if op.fused:
                    row[stages + partner] += 1
            elif op.kind == "W":
                row[2 * stages + op.stage] += 1
            elif not second:
                row[stages + op.stage] += 1
                row[2 * stages + op.stage] -= graph.has_weight[i]
            row[-2], row[-1] = i in crossing, op.kind != "W"
            terms.append(row)
        types.append(places[key])
    waits = np.full((len(ops) + 1, 3), -1)
    waits[:-1, 0] = graph.previous
    for i, inputs in enumerate(graph.inputs):
        waits[i, 1 : 1 + len(inputs)] = inputs
    return _levelled(graph.topological, waits, np.array(types), np.array(terms))


def _levelled(topological: tuple[int, ...], waits: Ints, types: Ints, terms: Floats) -> Pipeline:
    """Number the ops level by level."""
    level, lines = [0] * len(waits), waits.tolist()
    for i in topological:
        level[i] = 1 + max(level[j] if j >= 0 else 0 for j in lines[i])
    order = np.argsort(level[:-1], kind="stable")
    place = np.full(len(waits), -1)
    place[order] = np.arange(len(order))
    sorted_waits = np.concatenate([place[waits[order]], waits[-1:]])
    ends = np.searchsorted(np.array(level)[order], np.arange(1, max(level) + 2))
    levels = []
    for first, last in itertools.pairwise(ends):
        before, inputs, more = sorted_waits[first:last].T
        levels.append((slice(int(first), int(last)), before, inputs, more if np.any(more >= 0) else None))
    return Pipeline(
        levels=tuple(levels),
        waits=sorted_waits,
        types=np.concatenate([types[order], [len(terms)]]),
        terms=terms,
    )


class PathPool:
    """Paths of one schedule that were met so far; every layout with the same degrees may use them.

    The ops are laid out only when something is walked, the first paths (equal stages, then each rank and each stage
    slower in turn) only when some are asked for: many layouts are given up before that.
    """

    def __init__(self, schedule: Schedule, pp: int, vpp: int, num_microbatches: int) -> None:
        self.degrees = (schedule, pp, vpp, num_microbatches)
        self.ranks = tuple(stage_rank(schedule, pp, vpp, stage) for stage in range(pp * vpp))
        self._keys: set[bytes] = set()
        self._paths: list[Path] = []
        self._seeded = False

    @property
    def walks(self) -> Pipeline:
        """The ops, ready to be walked."""
        return pipeline(*self.degrees)

    @property
    def paths(self) -> Floats:
        """All paths that are known, one row each."""
        if not self._seeded:
            self._seeded = True
            times = self._seeds()  # a backward of twice the forward, half of it the weight gradient
            self.add(
                self.walks.longest(np.concatenate([times, 2.0 * times, times, np.zeros((len(times), 2))], axis=1))[1]
            )
        return np.array(self._paths)

    def add(self, paths: Iterable[Path]) -> None:
        """Keep the paths that are new."""
        for path in paths:
            key = path_key(path)
            if key not in self._keys:
                self._keys.add(key)
                self._paths.append(path)

    def _seeds(self) -> Floats:
        """Times of the stages, one row each: equal, then each rank, and each stage of several per rank, slower."""
        _, pp, vpp, _ = self.degrees
        ranks, stages = np.array(self.ranks), np.arange(pp * vpp)
        rows = [np.ones((1, len(ranks))), np.where(ranks == np.arange(pp)[:, None], SLOWER[0], 1.0)]
        if vpp > 1 and len(ranks) * len(self.walks.types) <= MAX_OPS * 8:
            rows.append(np.where(stages == stages[:, None], SLOWER[1], 1.0))
        return np.concatenate(rows)


class PathPools:
    """Path pools by schedule and degrees; one object for one search, so that its results do not depend on others."""

    def __init__(self) -> None:
        self._pools: dict[tuple[str, int, int, int], PathPool] = {}

    def of(self, schedule: Schedule, pp: int, vpp: int, num_microbatches: int) -> PathPool:
        """Return the pool of one pipeline."""
        key = (schedule, pp, vpp, num_microbatches)
        if key not in self._pools:
            self._pools[key] = PathPool(schedule, pp, vpp, num_microbatches)
        return self._pools[key]


def playable(schedule: Schedule, pp: int, vpp: int, num_microbatches: int) -> bool:
    """Whether the schedule exists for these degrees and its step is short enough to be walked op by op."""
    fits = num_ops(pp, vpp, num_microbatches, schedule) <= MAX_OPS and schedule != "zb-h2"  # whose steps overlap
    return fits and schedule_complaint(schedule, pp, vpp, num_microbatches) is None
