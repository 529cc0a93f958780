"""One layout's stages as a problem: what each virtual stage may hold, and what a choice costs exactly."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from planner.contents import Contents, Mixes, Run, windows
from planner.paths import Path, PathPool
from scenarios.layout import Layout
from simulator.arrays import LayoutArrays
from simulator.live import live_microbatches
from simulator.pieces import Pieces
from simulator.schedule import chunk_vectors
from simulator.stages import stage_layers

Floats = npt.NDArray[np.float64]

MAX_COLUMNS = 4_000
"""More binaries than this are not given to a solver (models whose layer kinds alternate)."""
END_SLOTS = 2
"""Layers fewer than on inner virtual stages that the first and the last one may hold, beside embedding and head."""


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
        pool: PathPool,
        spread: int,
        tail_layers: int = 0,
    ) -> None:
        self.layout, self.pieces, self.runs, self.pool, self.ranks = layout, pieces, runs, pool, pool.ranks
        self.contents = Contents(pieces, runs)
        self.stages, self.pp, self.vpp = layout.pp * layout.vpp, layout.pp, layout.vpp
        self.num_layers, self.tail_layers = sum(run.layers for run in runs), tail_layers
        self.least_works: dict[tuple[int, int, int], float | None] = {}
        self.known_options: dict[tuple[tuple[float, float], tuple[int, ...]], Mixes] = {}
        self._trust_region(spread)

    def _trust_region(self, spread: int) -> None:
        """Layers that a stage and a rank may hold: near the even split; equal stages by the uniform rule always."""
        layers, average = self.num_layers, self.num_layers / self.stages
        sizes = stage_layers(layers, self.pp, self.vpp, self.tail_layers)
        self.high = min(layers, max(math.ceil(average) + spread, *sizes, 0))
        self.low = 0 if self.vpp == 1 else max(0, math.floor(average) - spread)
        self.low_ends = min(max(0, self.low - END_SLOTS), *sizes, layers)
        self.low = min(self.low, *sizes[1:-1], layers)
        equal = max(sum(sizes[stage] for stage in chunk) for chunk in self.chunks)
        even = max(math.ceil(layers / self.pp), equal) if self.vpp > 1 else layers
        self.most_layers = min(even, self.vpp * self.high)
        if self.pp == 1:
            self.low = self.low_ends = self.high = self.most_layers = layers

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
        return [[stage for stage in range(self.stages) if self.ranks[stage] == rank] for rank in range(self.pp)]

    def room(self, rank: int) -> float:
        """Bytes of a rank that are left for layers."""
        pieces, first, last = self.pieces, self.ranks[0] == rank, self.ranks[-1] == rank
        ends = pieces.both_bytes if first and last else first * pieces.first_bytes + last * pieces.last_bytes
        return pieces.capacity_bytes - pieces.base_bytes - ends

    def end_params(self, rank: int) -> tuple[float, float]:
        """Parameters of the ends on a rank, outside and inside routed experts."""
        pieces, first, last = self.pieces, self.ranks[0] == rank, self.ranks[-1] == rank
        dense = first * pieces.first_dense + last * (pieces.last_dense + (0.0 if first else pieces.tied_copy))
        return dense, last * pieces.last_expert

    # what a choice costs -----------------------------------------------------------------------------------------

    def seconds(self, choices: Sequence[Choice]) -> tuple[Floats, list[Path]]:
        """Step of each choice, and the path that takes so long; the same as the simulator's."""
        pieces, after, times = self.pieces, [], []
        for choice in choices:
            dense, expert = self._rank_params(np.array(choice.layers))
            forward, backward, _ = parts = self.choice_seconds(choice)
            work = [sum(float(forward[q] + backward[q]) for q in chunk) for chunk in self.chunks]
            microbatch = max(work) / pieces.straggler + pieces.loaded
            gather = pieces.straggler * pieces.tail.beside(dense, expert, microbatch) / (2 * self.vpp)
            times.append(np.concatenate([*parts, [pieces.send, pieces.host + gather]]))
            after.append(pieces.tail.after(dense, expert, microbatch))
        pipelines, paths = self.pool.walks.longest(np.array(times))
        return pipelines + pieces.num_microbatches * pieces.per_microbatch + np.array(after), paths

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
        limits = self.limits[stage]
        if (limits, window) not in self.known_options:
            (room, live), mixes = limits, self.contents.mixes(window)
            rows = np.flatnonzero(mixes.held + mixes.again + live * mixes.saved <= room)
            if self.vpp == 1 and len(rows) > 1:
                rows = rows[~mixes.slower[np.ix_(rows, rows)].any(axis=0)]
            self.known_options[limits, window] = mixes.take(rows)
        return self.known_options[limits, window]

    @cached_property
    def limits(self) -> list[tuple[float, float]]:
        """Of every stage the bytes that its rank has left for layers, and the most live micro-batches."""
        found = [(0.0, 0.0)] * self.stages
        for rank, chunk in enumerate(self.chunks):
            for place, stage in enumerate(chunk):
                found[stage] = (self.room(rank), float(self.live[rank][:, place].max()))
        return found

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

    @cached_property
    def arrays(self) -> dict[str, Floats]:
        """Numbers of the columns by name."""
        names = ("stage", "forward", "backward", "weight", "saved", "again", "held", "dense", "expert")
        return {name: np.array([getattr(one, name) for one in self.columns], dtype=np.float64) for name in names}

    @property
    def extra(self) -> dict[str, int]:
        """Places of the continuous variables, behind the binaries."""
        start = self.wholes + (self.pp if self.vpp > 1 else 0)
        return {name: start + i for i, name in enumerate(("pipeline", "exposed", "dense", "expert", "load", "gather"))}

    @property
    def slowest(self) -> range:
        """Places of the binaries that say which rank is the slowest."""
        start = len(self.columns) + self.order_size
        return range(start, start + (self.pp if self.pp > 1 else 0))

    @property
    def wholes(self) -> int:
        """Binaries of the program: contents, ends of runs, the slowest rank."""
        return len(self.columns) + self.order_size + len(self.slowest)

    @property
    def order_size(self) -> int:
        """Binaries that say in which stage a run ends."""
        return (len(self.runs) - 1) * self.stages if len(self.columns) <= MAX_COLUMNS else 0
