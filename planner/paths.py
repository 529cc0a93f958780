"""Longest paths through a pipeline, and what each says: a path is a sum of stage times, so it bounds every other plan.

For fixed op orders the makespan is the largest of finitely many sums of durations. The longest path of any plan is one
of these sums, and therefore a lower bound (a cut) for all plans with the same schedule and degrees.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from scenarios.layout import Schedule
from simulator.longest_path import op_graph
from simulator.schedule import op_orders, schedule_complaint, stage_rank

Floats = npt.NDArray[np.float64]

MAX_OPS = 60_000
"""Longer steps are not solved exactly."""
SLOWER = (1.08, 1.3)
"""Seed paths: those that appear where one rank, or one virtual stage, is so much slower than the others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Path:
    """How often a path meets each virtual stage: ``forward @ F + backward @ B + weight @ W + sends s + passes p``."""

    forward: Floats
    backward: Floats
    weight: Floats
    sends: float
    passes: float

    def key(self) -> bytes:
        """Equal for equal paths."""
        parts = np.concatenate([self.forward, self.backward, self.weight, [self.sends, self.passes]])
        return np.round(parts, 6).tobytes()


@dataclass(frozen=True, slots=True, kw_only=True)
class Pipeline:
    """The ops of one schedule in a form that is walked fast."""

    num_stages: int
    ranks: tuple[int, ...]
    """Pipeline rank of each virtual stage."""
    topological: list[int]
    previous: list[int]
    inputs: list[int]
    """The first input of each op; -1: none. Index -1 answers with time 0."""
    more_inputs: dict[int, int]
    """The second input of the first op of a fused pair."""
    types: npt.NDArray[np.int64]
    """Ops of one type take equally long."""
    terms: Floats
    """Shape (types, 3 stages + 2): the duration of a type as a sum of F, B and W of stages, sends and passes."""

    def longest(
        self, forward: Floats, backward: Floats, weight: Floats, send: float, host: float
    ) -> tuple[float, Path]:
        """Return the makespan for these seconds per virtual stage, and a path that takes so long.

        ``send`` is added to ops whose result another rank needs, ``host`` to every forward and backward.
        """
        seconds = (self.terms @ np.concatenate([forward, backward, weight, [send, host]]))[self.types].tolist()
        previous, inputs, more = self.previous, self.inputs, self.more_inputs
        end = [0.0] * (len(seconds) + 1)
        parent = [-1] * len(seconds)
        for i in self.topological:
            before, source = previous[i], inputs[i]
            start = end[before]
            if end[source] > start:
                start, before = end[source], source
            if i in more and end[more[i]] > start:
                start, before = end[more[i]], more[i]
            parent[i] = before
            end[i] = start + seconds[i]
        end.pop()
        at = int(np.argmax(end))
        makespan, met = end[at], []
        while at >= 0:
            met.append(at)
            at = parent[at]
        terms = np.bincount(self.types[met], minlength=len(self.terms)) @ self.terms
        n = self.num_stages
        return makespan, Path(
            forward=terms[:n],
            backward=terms[n : 2 * n],
            weight=terms[2 * n : 3 * n],
            sends=float(terms[-2]),
            passes=float(terms[-1]),
        )


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
    rank_of = dict(zip((op.stage for op in ops), graph.ranks, strict=True))
    return Pipeline(
        num_stages=stages,
        ranks=tuple(rank_of[stage] for stage in range(stages)),
        topological=list(graph.topological),
        previous=list(graph.previous),
        inputs=[one[0] if one else -1 for one in graph.inputs],
        more_inputs={i: one[1] for i, one in enumerate(graph.inputs) if len(one) > 1},
        types=np.array(types),
        terms=np.array(terms),
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
    def paths(self) -> list[Path]:
        """All paths that are known."""
        if not self._seeded:
            self._seeded = True
            for times in self._seeds():  # a backward of twice the forward, half of it the weight gradient
                self.add(self.walks.longest(times, 2.0 * times, times, 0.0, 0.0)[1])
        return self._paths

    def add(self, path: Path) -> None:
        """Keep a path."""
        key = path.key()
        if key not in self._keys:
            self._keys.add(key)
            self._paths.append(path)

    def _seeds(self) -> list[Floats]:
        _, pp, vpp, _ = self.degrees
        ranks = np.array(self.ranks)
        slower = [np.ones(len(ranks)), *(np.where(ranks == rank, SLOWER[0], 1.0) for rank in range(pp))]
        if vpp > 1 and len(ranks) * self.walks.types.size <= MAX_OPS * 8:
            slower += [np.where(np.arange(len(ranks)) == stage, SLOWER[1], 1.0) for stage in range(len(ranks))]
        return slower


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
