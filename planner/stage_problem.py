"""One layout's stages as a problem: what each virtual stage may hold, what a choice costs exactly, and the program.

The program has one binary per content of each stage (layers of every run, recompute mix) and rows for memory at every
peak of live micro-batches, for the order of the runs, and one for each path that was met (reference: count columns
with critical-path cuts; the paths make the bound one against the simulator and not against a formula).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from planner.contents import Contents, Mixes, Run, undominated, windows
from planner.ilp import Program
from planner.paths import Path, PathPool, Pipeline
from scenarios.layout import Layout
from simulator.activations import live_microbatches
from simulator.arrays import LayoutArrays
from simulator.pieces import Pieces
from simulator.schedule import chunk_vectors

Floats = npt.NDArray[np.float64]

MAX_COLUMNS = 4_000
"""More binaries than this are not given to a solver (models whose layer kinds alternate)."""
END_SLOTS = 2
"""Layers fewer than on inner virtual stages that the first and the last one may hold, beside embedding and head."""
GIGA = 1e-9
"""Bytes and parameters enter the program in billions."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """What every virtual stage holds: rows of ``columns`` arrays of the pieces, in model order."""

    windows: tuple[tuple[int, ...], ...]
    layers: tuple[Floats, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """One content of one virtual stage; seconds hold embedding and head where they lie there."""

    stage: int
    window: tuple[int, ...]
    layers: Floats
    forward: float
    backward: float
    weight: float
    saved: float
    again: float
    held: float
    dense: float
    expert: float


class StageProblem:
    """The stages of one layout. ``spread`` is the trust region: layers beyond the even split that a stage may hold."""

    def __init__(
        self,
        layout: Layout,
        pieces: Pieces,
        runs: tuple[Run, ...],
        walks: Pipeline,
        pool: PathPool,
        spread: int,
        tail_layers: int = 0,
    ) -> None:
        self.layout, self.pieces, self.runs, self.walks, self.pool = layout, pieces, runs, walks, pool
        self.contents = Contents(pieces, runs)
        self.stages, self.pp, self.vpp = layout.pp * layout.vpp, layout.pp, layout.vpp
        self.num_layers, self.tail_layers = sum(run.layers for run in runs), tail_layers
        average = self.num_layers / self.stages
        self.high = min(self.num_layers, math.ceil(average) + spread)
        self.low = 0 if self.vpp == 1 else max(0, math.floor(average) - spread)
        self.low_ends = max(0, self.low - END_SLOTS)
        even = math.ceil(self.num_layers / self.pp) if self.vpp > 1 else self.num_layers
        self.most_layers = min(even, self.vpp * self.high)
        self.least_works: dict[tuple[int, int, int], float | None] = {}
        if self.pp == 1:
            self.low = self.low_ends = self.high = self.most_layers = self.num_layers

    # what is where -----------------------------------------------------------------------------------------------

    @cached_property
    def live(self) -> list[Floats]:
        """Of every rank the live micro-batches of its chunks at every peak: (peaks, chunks)."""
        m = self.pieces.num_microbatches
        if self.vpp > 1:
            found = chunk_vectors(self.layout.schedule, self.pp, self.vpp, m)
            return [np.array(one, dtype=np.float64) for one in found]
        first, _, _ = live_microbatches(
            LayoutArrays.of([self.layout]), np.arange(self.pp, dtype=np.float64)[None], np.array([float(m)])
        )
        return [np.array([[count]]) for count in first[0]]

    @cached_property
    def chunks(self) -> list[list[int]]:
        """Virtual stages of every rank, in model order."""
        return [[stage for stage in range(self.stages) if self.walks.ranks[stage] == rank] for rank in range(self.pp)]

    def room(self, rank: int) -> float:
        """Bytes of a rank that are left for layers."""
        pieces, first, last = self.pieces, self.walks.ranks[0] == rank, self.walks.ranks[-1] == rank
        ends = pieces.both_bytes if first and last else first * pieces.first_bytes + last * pieces.last_bytes
        return pieces.capacity_bytes - pieces.base_bytes - ends

    def end_params(self, rank: int) -> tuple[float, float]:
        """Parameters of the ends on a rank, outside and inside routed experts."""
        pieces, first, last = self.pieces, self.walks.ranks[0] == rank, self.walks.ranks[-1] == rank
        dense = first * pieces.first_dense + last * (pieces.last_dense + (0.0 if first else pieces.tied_copy))
        return dense, last * pieces.last_expert

    # what a choice costs -----------------------------------------------------------------------------------------

    def seconds(self, choice: Choice) -> tuple[float, Path]:
        """Step of a choice, and the path that takes so long; the same as the simulator's."""
        layers, pieces = np.array(choice.layers), self.pieces
        forward, backward, weight = self.choice_seconds(choice)
        dense, expert = self._rank_params(layers)
        work = [sum(float(forward[q] + backward[q]) for q in chunk) for chunk in self.chunks]
        microbatch = max(work) / pieces.straggler + pieces.loaded
        gather = pieces.straggler * pieces.tail.beside(dense, expert, microbatch) / (2 * self.vpp)
        pipeline, path = self.walks.longest(forward, backward, weight, pieces.send, pieces.host + gather)
        constant = pieces.num_microbatches * pieces.per_microbatch
        return pipeline + constant + pieces.tail.after(dense, expert, microbatch), path

    def fits(self, choice: Choice) -> bool:
        """Whether every rank can hold its part."""
        return all(self._free(choice.layers, rank) >= 0 for rank in range(self.pp))

    def _free(self, layers: tuple[Floats, ...], rank: int) -> float:
        pieces, mine = self.pieces, np.array([layers[stage] for stage in self.chunks[rank]])
        again = np.where(mine.sum(axis=0) > 0, pieces.again, 0.0).max(initial=0.0)
        kept = float((self.live[rank] @ (mine @ pieces.saved)).max())
        return self.room(rank) - float((mine @ pieces.held).sum()) - kept - float(again)

    def choice_seconds(self, choice: Choice) -> tuple[Floats, Floats, Floats]:
        """Forward, backward and weight seconds of every stage of a choice."""
        layers, pieces = np.array(choice.layers), self.pieces
        forward, backward, weight = layers @ pieces.forward, layers @ pieces.backward, layers @ pieces.weight
        forward[0] += pieces.first[0]
        backward[0] += pieces.first[1]
        forward[-1] += pieces.last[0]
        backward[-1] += pieces.last[1]
        weight[-1] += pieces.last[2]
        return forward, backward, weight

    def _rank_params(self, layers: Floats) -> tuple[float, float]:
        pieces = self.pieces
        held = [
            (
                float((layers[chunk] @ pieces.dense).sum()) + self.end_params(rank)[0],
                float((layers[chunk] @ pieces.expert).sum()) + self.end_params(rank)[1],
            )
            for rank, chunk in enumerate(self.chunks)
        ]
        return max(dense for dense, _ in held), max(expert for _, expert in held)

    # contents of a stage -----------------------------------------------------------------------------------------

    def options(self, stage: int, window: tuple[int, ...]) -> Mixes:
        """Mixes of a window on a stage that could fit; with one chunk per rank only those that no other one beats."""
        mixes, rank = self.contents.mixes(window), self.walks.ranks[stage]
        place = self.chunks[rank].index(stage)
        need = mixes.held + mixes.again + self.live[rank][:, place].max() * mixes.saved
        rows = np.flatnonzero(need <= self.room(rank))
        if self.vpp == 1 and len(rows) > 1:
            work = np.column_stack([mixes.forward, mixes.backward - mixes.weight, mixes.weight])[rows]
            rows = rows[undominated(work)]
        return mixes.take(rows)

    @cached_property
    def columns(self) -> list[Column]:
        """Every content of every stage inside the trust region."""
        inner = windows(self.runs, self.low, self.high)
        outer = windows(self.runs, self.low_ends, self.high)
        found = []
        for stage in range(self.stages):
            for window in outer if stage in (0, self.stages - 1) else inner:
                found += self._columns(stage, window)
        return found

    def _columns(self, stage: int, window: tuple[int, ...]) -> list[Column]:
        mixes = self.options(stage, window)
        first, last = stage == 0, stage == self.stages - 1
        ends = [first * self.pieces.first[part] + last * self.pieces.last[part] for part in (0, 1)]
        return [
            Column(
                stage=stage,
                window=window,
                layers=mixes.layers[row],
                forward=float(mixes.forward[row]) + ends[0],
                backward=float(mixes.backward[row]) + ends[1],
                weight=float(mixes.weight[row]) + last * self.pieces.last[2],
                saved=float(mixes.saved[row]),
                again=float(mixes.again[row]),
                held=mixes.held,
                dense=mixes.dense,
                expert=mixes.expert,
            )
            for row in range(len(mixes.layers))
        ]

    def choice(self, values: Floats) -> Choice:
        """Read a choice off the binaries of a solution."""
        chosen = {column.stage: column for column, value in zip(self.columns, values, strict=False) if value > 0.5}
        order = [chosen[stage] for stage in range(self.stages)]
        return Choice(windows=tuple(one.window for one in order), layers=tuple(one.layers for one in order))

    # the program -------------------------------------------------------------------------------------------------

    @cached_property
    def arrays(self) -> dict[str, Floats]:
        """Numbers of the columns by name."""
        names = ("stage", "forward", "backward", "weight", "saved", "again", "held", "dense", "expert")
        return {name: np.array([getattr(one, name) for one in self.columns], dtype=np.float64) for name in names}

    @property
    def extra(self) -> dict[str, int]:
        """Places of the continuous variables, behind the binaries."""
        start = self._wholes + (self.pp if self.vpp > 1 else 0)
        return {name: start + i for i, name in enumerate(("pipeline", "exposed", "dense", "expert", "load", "gather"))}

    @property
    def slowest(self) -> range:
        """Places of the binaries that say which rank is the slowest."""
        start = len(self.columns) + self._order_size
        return range(start, start + (self.pp if self.pp > 1 else 0))

    @property
    def _wholes(self) -> int:
        return len(self.columns) + self._order_size + len(self.slowest)

    @property
    def _order_size(self) -> int:
        return (len(self.runs) - 1) * self.stages if len(self.columns) <= MAX_COLUMNS else 0

    def program(self) -> Program:
        """Everything but the paths that are yet to be met."""
        at, tail = self.extra, self.pieces.tail
        size = at["gather"] + 1
        costs = np.zeros(size)
        costs[[at["pipeline"], at["exposed"]]] = 1.0
        costs[at["dense"]], costs[at["expert"]] = tail.update.dense / GIGA, tail.update.expert / GIGA
        high = np.full(size, math.inf)
        high[: self._wholes] = 1.0
        constant = tail.update.constant + self.pieces.num_microbatches * self.pieces.per_microbatch
        integer = np.arange(size) < self._wholes
        program = Program(costs=costs, low=np.zeros(size), high=high, integer=integer, constant=constant)
        self._one_content_per_stage(program)
        self._order_of_runs(program)
        if self.vpp > 1:
            self._layers_per_rank(program)
            self._memory(program)
        self._tail(program)
        return program

    def _one_content_per_stage(self, program: Program) -> None:
        stage = self.arrays["stage"]
        for one in range(self.stages):
            row = np.zeros(len(program.costs))
            row[: len(stage)] = stage == one
            program.add(row, 1.0, 1.0)
        for place, run in enumerate(self.runs):
            row = np.zeros(len(program.costs))
            row[: len(stage)] = [column.window[place] for column in self.columns]
            program.add(row, float(run.layers), float(run.layers))

    def _layers_per_rank(self, program: Program) -> None:
        """Trust region of virtual stages: no rank holds more than the even share, rounded up."""
        layers = np.array([sum(column.window) for column in self.columns], dtype=np.float64)
        for chunk in self.chunks:
            row = np.zeros(len(program.costs))
            row[: len(layers)] = np.where(np.isin(self.arrays["stage"], chunk), layers, 0.0)
            program.add(row, right=float(self.most_layers))

    def _order_of_runs(self, program: Program) -> None:
        """``done[r, q]``: run r ends in stage q or before; later stages hold none of it, earlier ones nothing after."""
        if not self._order_size:
            return
        held = np.array([column.window for column in self.columns]) > 0
        stage = self.arrays["stage"]
        for r in range(len(self.runs) - 1):
            for q in range(self.stages):
                done = len(self.columns) + r * self.stages + q
                row = np.zeros(len(program.costs))
                row[: len(stage)] = (stage == q) & held[:, r + 1 :].any(axis=1)
                row[done] = -1.0
                program.add(row, right=0.0)
                if q == 0:
                    continue
                row = np.zeros(len(program.costs))
                row[: len(stage)] = (stage == q) & held[:, r]
                row[done - 1] = 1.0
                program.add(row, right=1.0)
                row = np.zeros(len(program.costs))
                row[[done - 1, done]] = 1.0, -1.0
                program.add(row, right=0.0)

    def _memory(self, program: Program) -> None:
        """Every rank at every peak; of its layers' transient bytes the largest counts."""
        numbers, start, count = self.arrays, self._wholes, len(self.columns)
        for rank in range(self.pp):
            for stage in self.chunks[rank]:
                row = np.zeros(len(program.costs))
                row[:count] = -GIGA * np.where(numbers["stage"] == stage, numbers["again"], 0.0)
                row[start + rank] = 1.0
                program.add(row, left=0.0)
            for peak in self.live[rank]:
                row = np.zeros(len(program.costs))
                for stage, live in zip(self.chunks[rank], peak, strict=True):
                    mine = numbers["stage"] == stage
                    row[:count] += GIGA * np.where(mine, numbers["held"] + live * numbers["saved"], 0.0)
                row[start + rank] = 1.0
                program.add(row, right=GIGA * self.room(rank))

    def _tail(self, program: Program) -> None:
        """Heaviest weights, slowest load, and the forms of traffic after and beside the pipeline."""
        numbers, at, pieces, tail = self.arrays, self.extra, self.pieces, self.pieces.tail
        count, slow = len(self.columns), self.pieces.straggler

        def row(**values: float) -> Floats:
            found = np.zeros(len(program.costs))
            for name, value in values.items():
                found[at[name]] = value
            return found

        for rank in range(self.pp):
            mine = np.isin(numbers["stage"], self.chunks[rank])
            for name, params in zip(("dense", "expert"), self.end_params(rank), strict=True):
                one = row(**{name: 1.0})
                one[:count] = -GIGA * np.where(mine, numbers[name], 0.0)
                program.add(one, left=GIGA * params)
        reduce, each = tail.reduce, tail.each
        for share, load in ((tail.exposed_share, 0.0), (1.0, tail.hidden_share)):
            if math.isfinite(load):
                costs = {"dense": -share * reduce.dense / GIGA, "expert": -share * reduce.expert / GIGA}
                program.add(row(exposed=1.0, load=load, **costs), left=share * reduce.constant)
        if each.dense or each.expert or each.constant:
            for share, load in ((tail.beside_share, 0.0), (1.0, 1.0 - tail.beside_share)):
                costs = {"dense": -share * each.dense / GIGA, "expert": -share * each.expert / GIGA}
                program.add(row(gather=1.0, load=load, **costs), left=share * each.constant)
        self._load(program)
        # the slowest rank works through all micro-batches, so its load cannot be larger than this
        m = pieces.num_microbatches
        program.add(row(pipeline=1.0, load=-m * slow), left=-m * slow * pieces.loaded)

    def _load(self, program: Program) -> None:
        """One rank is the slowest, and what hides behind its work cannot be longer than that."""
        numbers, count, slow = self.arrays, len(self.columns), self.pieces.straggler
        if not self.slowest:
            return
        work = (numbers["forward"] + numbers["backward"]) / slow
        most = self.vpp * float(work.max()) + self.pieces.loaded
        one = np.zeros(len(program.costs))
        one[self.slowest] = 1.0
        program.add(one, 1.0, 1.0)
        for rank, place in enumerate(self.slowest):
            row = np.zeros(len(program.costs))
            row[self.extra["load"]], row[place] = 1.0, most
            row[:count] = -np.where(np.isin(numbers["stage"], self.chunks[rank]), work, 0.0)
            program.add(row, right=most + self.pieces.loaded)

    def cut(self, path: Path) -> Floats:
        """The pipeline takes at least as long as a path: row of ``pipeline - path >= constant``."""
        numbers, at = self.arrays, self.extra
        stage = numbers["stage"].astype(np.int64)
        row = np.zeros(at["gather"] + 1)
        row[: len(stage)] = -(
            path.forward[stage] * numbers["forward"]
            + path.backward[stage] * numbers["backward"]
            + path.weight[stage] * numbers["weight"]
        )
        row[at["pipeline"]] = 1.0
        row[at["gather"]] = -path.passes * self.pieces.straggler / (2 * self.vpp)
        return row

    def cut_constant(self, path: Path) -> float:
        """What a path takes whatever the stages hold."""
        return path.sends * self.pieces.send + path.passes * self.pieces.host

    def stage_seconds(self, values: Any) -> tuple[Floats, Floats, Floats]:
        """Forward, backward and weight seconds of every stage in a (perhaps fractional) solution."""
        numbers, count = self.arrays, len(self.columns)
        stage = numbers["stage"].astype(np.int64)
        found = np.zeros((3, self.stages))
        for part, name in zip(found, ("forward", "backward", "weight"), strict=True):
            np.add.at(part, stage, numbers[name] * values[:count])
        return found[0], found[1], found[2]
