"""Best first over layouts: bound all, open the one with the smallest bound, stop when no other can be better.

A layout is opened in three steps, each of which raises its bound: equal stages and a quick bound, the relaxation with
paths, the integer program. After each it goes back into the queue, so that work is done only where it can matter.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from planner.contents import Run, runs_of, stage
from planner.partition import Effort, Partition, Solving
from planner.paths import PathPools, pipeline, playable
from planner.question import Question
from planner.stage_problem import Choice, StageProblem
from scenarios.layout import Layout, Recompute, Stage
from simulator.arrays import LayoutArrays
from simulator.pieces import Pieces, pieces
from simulator.stages import tail_layers

Floats = npt.NDArray[np.float64]

TARGET, CHUNK_TARGET = 0.008, 0.025
"""Gaps at which a layout is left alone: with one chunk per rank, and with virtual stages."""
SPREAD = 2
"""Trust region with one chunk per rank: layers beyond the even split, rounded up. Virtual stages hold the even split
rounded down or up."""
MOST_OPENED = 400
"""Layouts that are opened at most."""
MOST_RELAXED = 60
"""Of them, those that are relaxed."""
MOST_SOLVED = 10
"""Of them, those that are given to the integer program."""

Value = Callable[[float, Layout], float]
"""What a step of so many seconds is worth (smaller is better) for a layout; rises with the seconds."""


@dataclass(slots=True)
class Opened:
    """A layout under work."""

    layout: Layout
    row: int
    work: Solving

    @property
    def found(self) -> Partition:
        """What is known about its stages."""
        return self.work.found


@dataclass(slots=True)
class Found:
    """Where a search ended. Values are in the unit of the objective per step."""

    opened: list[Opened] = field(default_factory=list)
    best: Opened | None = None
    value: float = math.inf
    bound: float = math.inf
    """No layout with any stages inside the trust regions is better."""
    relaxed: int = 0
    solved: int = 0
    bounded: int = 0
    """Layouts that were never opened: their bound was enough."""
    unplayable: int = 0
    """Opened layouts whose step has too many ops to be walked; they are left with their bound."""
    stopped_by: str = "proof"
    notes: set[str] = field(default_factory=set)

    @property
    def gap(self) -> float:
        """Value over bound less 1."""
        return self.value / self.bound - 1 if 0 < self.bound < math.inf else math.inf


class Search:
    """One question's search; ``modes`` are the recompute modes that layers may have."""

    def __init__(
        self,
        question: Question,
        layouts: LayoutArrays,
        bounds: Floats,
        value: Value,
        modes: tuple[Recompute, ...],
        effort: Effort,
        told: Callable[[Found], None] | None = None,
    ) -> None:
        self.question, self.layouts, self.value, self.modes = question, layouts, value, modes
        self.effort, self.told = effort, told
        self.runs: tuple[Run, ...] = runs_of(question.job.model.pattern)
        self.pools, self.found = PathPools(), Found()
        self.ticket = itertools.count()
        self.queue: list[tuple[float, int, int, Opened | int]] = [
            (bounds[row], next(self.ticket), 0, int(row)) for row in np.argsort(bounds, kind="stable")
        ]

    def run(self) -> Found:
        """Work until the bound proves the best layout, or a limit is reached."""
        found, rest = self.found, math.inf
        while self.queue:
            bound, _, step, item = heapq.heappop(self.queue)
            if self._hopeless(bound, item):
                rest = min(rest, bound)
                if bound >= found.value:
                    break
                continue
            if self.effort.over or self._limit_reached(step):
                rest = min(rest, bound)
                found.stopped_by = "time limit" if self.effort.over else f"limit of {self._limit(step)}"
                break
            opened = self._open(item) if isinstance(item, int) else item
            if opened is None:
                rest = min(rest, bound)
                continue
            if not isinstance(item, int):
                self._advance(opened, step)
            self._keep_best(opened)
            bound = self.value(opened.found.bound, opened.layout) if math.isfinite(opened.found.bound) else math.inf
            if step < LAST_STEP and opened.found.gap > self.effort.gap and math.isfinite(bound):
                heapq.heappush(self.queue, (bound, next(self.ticket), step + 1, opened))
            else:
                rest = min(rest, bound)
            if self.told is not None:
                self.told(found)
        waiting = min((entry[0] for entry in self.queue), default=math.inf)
        found.bound = min(rest, waiting, found.value)
        found.bounded = sum(isinstance(entry[3], int) for entry in self.queue)
        return found

    def _hopeless(self, bound: float, item: Opened | int) -> bool:
        vpp = int(self.layouts.vpp[item]) if isinstance(item, int) else item.layout.vpp
        return bound * (1 + (TARGET if vpp == 1 else CHUNK_TARGET)) >= self.found.value

    def _limit_reached(self, step: int) -> bool:
        found = self.found
        return (len(found.opened) >= MOST_OPENED, found.relaxed >= MOST_RELAXED, found.solved >= MOST_SOLVED)[step]

    def _limit(self, step: int) -> str:
        return (f"{MOST_OPENED} opened", f"{MOST_RELAXED} relaxed", f"{MOST_SOLVED} solved layouts")[step]

    def _open(self, row: int) -> Opened | None:
        layout = self.layouts.row(row)
        micro = layout.num_microbatches(self.question.job)
        if not playable(layout.schedule, layout.pp, layout.vpp, micro):
            self.found.unplayable += 1
            return None
        problem = self.problem(layout)
        opened = Opened(layout, row, Solving(problem))
        self.found.opened.append(opened)
        opened.work.start()
        return opened

    def problem(self, layout: Layout) -> StageProblem:
        """The stages of one layout as a problem."""
        job, micro = self.question.job, layout.num_microbatches(self.question.job)
        taken = pieces(self.question.cluster, job, layout, self._modes(layout))
        return StageProblem(
            layout,
            taken,
            self.runs,
            pipeline(layout.schedule, layout.pp, layout.vpp, micro),
            self.pools.of(layout.schedule, layout.pp, layout.vpp, micro),
            SPREAD if layout.vpp == 1 else 0,
            tail_layers(job.model),
        )

    def _modes(self, layout: Layout) -> tuple[Recompute, ...]:
        """Selective recompute only where it keeps less than none."""
        if "selective" not in self.modes or len(self.modes) == 1:
            return self.modes
        taken = pieces(self.question.cluster, self.question.job, layout, ("selective", "none"))
        return self.modes if saves(taken) else tuple(mode for mode in self.modes if mode != "selective")

    def _advance(self, opened: Opened, step: int) -> None:
        cutoff = self._cutoff(opened)
        if step == 1:
            self.found.relaxed += 1
            opened.work.relax(cutoff, self.effort)
        else:
            self.found.solved += 1
            opened.work.solve(cutoff, self.effort)
        self.found.notes |= opened.found.notes

    def _cutoff(self, opened: Opened) -> float:
        """Step seconds above which a layout's bound is of no interest."""
        if not math.isfinite(self.found.value):
            return math.inf
        target = TARGET if opened.layout.vpp == 1 else CHUNK_TARGET
        rate = self.value(1.0, opened.layout)
        return self.found.value / (1 + target) / rate

    def _keep_best(self, opened: Opened) -> None:
        if opened.found.choice is None:
            return
        value = self.value(opened.found.seconds, opened.layout)
        if value < self.found.value:
            self.found.value, self.found.best = value, opened


LAST_STEP = 2
"""Steps are: opened, relaxed, solved."""


def saves(taken: Pieces) -> bool:
    """Whether selective recompute keeps less of any layer kind than no recompute."""
    half = len(taken.columns) // 2
    return bool(np.any(taken.saved[:half] < taken.saved[half:] * (1 - 1e-9)))


def spelled_out(opened: Opened, choice: Choice, pattern: tuple[str, ...]) -> Layout:
    """The layout with its stages, and the recompute mode that they need."""
    taken = opened.work.problem.pieces
    used = {column.recompute for layers in choice.layers for column, n in zip(taken.columns, layers, strict=True) if n}
    recompute: Recompute = "full" if 2 in used else "selective" if 1 in used else "none"
    stages: list[Stage] = []
    start = 0
    for window, layers in zip(choice.windows, choice.layers, strict=True):
        end = start + sum(window)
        stages.append(stage(pattern[start:end], taken, layers, recompute))
        start = end
    changes: dict[str, Any] = {"stages": tuple(stages), "recompute": recompute}
    return opened.layout.model_copy(update=changes)
