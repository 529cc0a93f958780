"""Best first over layouts: bound all, open the one with the smallest bound, stop when no other can be better.

A layout is opened in three steps, each of which raises its bound: equal stages and a quick bound, the relaxation with
paths, the integer program. After each it goes back into the queue, so that work is done only where it can matter.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from planner.contents import Run, runs_of, stage
from planner.partition import Effort, Partition, Solving
from planner.paths import PathPools, num_ops, playable
from planner.question import Question
from planner.rule import ONE_F_ONE_B
from planner.sharper import sharpened
from planner.stage_problem import StageProblem
from scenarios.layout import Layout, Recompute, Stage
from simulator.arrays import LayoutArrays
from simulator.pieces import Pieces, pieces
from simulator.stages import tail_layers

Floats = npt.NDArray[np.float64]

TARGET, LOOSE_TARGET = 0.009, 0.028
"""Gaps at which a layout is left alone: under 1f1b, and under schedules of virtual stages or split backward passes."""
SPREAD = 2
"""Trust region with one chunk per rank: layers beyond the even split, rounded up. Virtual stages hold the even split
rounded down or up."""
FIRST_SHARPENING = 8
"""Layouts that are opened before the others are bounded with memory."""
LAST_TRIES = 30
"""Layouts that are opened even when the time is over, as long as none was found that fits."""
FREE_STARTS = 60
"""Layouts whose equal stages are walked even where they can be better by no more than the gap that is aimed at."""
MOST_SHARPENED = 20_000
"""Layouts that are bounded with memory while none is known that fits."""
MOST_POLISHED = 400_000
"""Ops times virtual stages of a layout with virtual stages that is polished by the integer program."""
CHUNK_ROUNDS = 2
"""Integer programs for it."""
MOST_RUNNERS = 40
"""Layouts that are opened only to be told as runners-up."""
MOST_RELAXED = 400
"""Of them, those that are relaxed."""
MOST_SOLVED = 10
"""Of them, those that are given to the integer program."""


@dataclass(slots=True)
class Opened:
    """A layout under work."""

    layout: Layout
    row: int
    rate: float
    """What a second of its step is worth."""
    work: Solving
    playable: bool = True
    """Its step has not too many ops to be walked; otherwise it is left with the bound that needs no walk."""

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
    started: int = 0
    relaxed: int = 0
    solved: int = 0
    unplayable: int = 0
    """Opened layouts that were not walked, see ``Opened.playable``."""
    stopped_by: str = "proof"
    notes: set[str] = field(default_factory=set)

    @property
    def gap(self) -> float:
        """Value over bound less 1."""
        return self.value / self.bound - 1 if 0 < self.bound < math.inf else math.inf


class Search:
    """One question's search.

    ``floors`` bound the step of each layout, ``rates`` say what a second of it is worth, ``modes`` are the recompute
    modes that layers may have, and only what is better than ``beat`` (in the unit of the objective) is of interest.
    """

    def __init__(
        self,
        question: Question,
        layouts: LayoutArrays,
        floors: Floats,
        rates: Floats,
        modes: tuple[Recompute, ...],
        effort: Effort,
        told: Callable[[Found], None] | None = None,
        beat: float = math.inf,
    ) -> None:
        self.values, self.rates = floors * rates, rates
        self.question, self.layouts, self.modes = question, layouts, modes
        self.effort, self.told, self.floors = effort, told, floors
        self.runs: tuple[Run, ...] = runs_of(question.job.model.pattern)
        self.pools, self.found = PathPools(), Found(value=beat)
        self.ticket = itertools.count()
        self.waiting = np.argsort(self.values, kind="stable")[::-1].tolist()
        """Rows that are not opened, the one with the smallest bound last."""
        self.queue: list[tuple[float, int, int, Opened]] = []
        self.given_up = math.inf
        """The smallest bound of rows that were given up unopened."""
        self._sharpened: Literal["none", "some", "all"] = "none"
        self._used_modes: tuple[Recompute, ...] | None = None

    def run(self) -> Found:
        """Work until the bound proves the best layout, or a limit is reached."""
        found = self.found
        while self.waiting or self.queue:
            opens = bool(self.waiting) and (not self.queue or self.values[self.waiting[-1]] <= self.queue[0][0])
            bound, step = (float(self.values[self.waiting[-1]]), 0) if opens else (self.queue[0][0], self.queue[0][2])
            if bound >= found.value:
                break
            if self._hopeless(bound, step, self.waiting[-1] if opens else self.queue[0][3].row):
                if opens:
                    self.given_up = min(self.given_up, bound)
                    self.waiting.pop()
                else:
                    heapq.heappop(self.queue)
                continue
            late = self.effort.over
            if (late and (found.best is not None or len(found.opened) >= LAST_TRIES)) or self._limit_reached(step):
                found.stopped_by = "time limit" if late else f"limit of {self._limit(step)}"
                break
            if opens and self._sharpening_is_due():
                self._sharpen()
                continue
            opened = self._open(self.waiting.pop()) if opens else heapq.heappop(self.queue)[3]
            if opened.playable and (late or not opens):
                self._advance(opened, 1 if late else step)
            self._keep_best(opened)
            bound = self._bound_of(opened)
            playable = opened.playable and step < self.effort.steps
            if playable and opened.found.gap > self.effort.gap and math.isfinite(bound):
                heapq.heappush(self.queue, (bound, next(self.ticket), step + 1, opened))
            if self.told is not None:
                self.told(found)
        self._prove()
        return found

    def _prove(self) -> None:
        """The smallest bound of all layouts, as far as each was opened."""
        unopened = float(self.values[self.waiting[-1]]) if self.waiting else math.inf
        bounds = (self._bound_of(one) for one in self.found.opened)
        self.found.bound = min(unopened, self.given_up, self.found.value, *bounds)

    def _bound_of(self, opened: Opened) -> float:
        bound = opened.found.bound
        return bound * opened.rate if math.isfinite(bound) else math.inf

    def polish(self) -> None:
        """Give the best layout to the integer program, if it is not yet proved to be its own best."""
        best, found = self.found.best, self.found
        if best is None or best.found.gap <= self.effort.gap or best.found.programs or self.effort.over:
            return
        layout = best.layout
        size = num_ops(layout.pp, layout.vpp, layout.num_microbatches(self.question.job), layout.schedule)
        if layout.vpp > 1 and size * layout.pp * layout.vpp > MOST_POLISHED:
            return
        effort = replace(self.effort, rounds=self.effort.rounds if layout.vpp == 1 else CHUNK_ROUNDS)
        best.work.relax(math.inf, effort)
        best.work.solve(math.inf, effort)
        found.relaxed, found.solved = found.relaxed + 1, found.solved + 1
        self._keep_best(best)
        self._prove()

    def open_more(self, wanted: int, axes: tuple[str, ...]) -> None:
        """Open the next layouts until so many sets of degrees are known; they are told as runners-up."""
        known = {tuple(getattr(one.layout, axis) for axis in axes) for one in self._complete()}
        tries = 0
        for row in reversed(self.waiting):
            if len(known) >= wanted or tries >= MOST_RUNNERS or self.effort.over:
                return
            key = tuple(int(getattr(self.layouts, axis)[row]) for axis in axes)
            if key in known:
                continue
            tries += 1
            opened = self._open(row)
            if opened.playable:
                opened.work.start()
            if opened.found.choice is not None:
                known.add(key)

    def _complete(self) -> list[Opened]:
        return [one for one in self.found.opened if one.found.choice is not None]

    def _sharpening_is_due(self) -> bool:
        if self._sharpened == "none":
            return len(self.found.opened) >= FIRST_SHARPENING
        return self._sharpened == "some" and self.found.best is not None

    def _sharpen(self) -> None:
        """Bound the layouts that are still in question once more, with memory; the first ones while none is known."""
        limit, known = self.found.value, self.found.best is not None
        self._sharpened = "all" if known else "some"
        rows = np.array(self.waiting[::-1], dtype=np.int64)
        rows = rows[self.values[rows] < limit][: None if known else MOST_SHARPENED]
        if not len(rows):
            return
        self.floors[rows] = np.maximum(self.floors[rows], sharpened(self.question, self.layouts.take(rows)))
        self.values[rows] = np.maximum(self.values[rows], self.floors[rows] * self.rates[rows])
        waiting = np.array(self.waiting[::-1], dtype=np.int64)
        waiting = waiting[np.isfinite(self.values[waiting])]
        self.waiting = waiting[np.argsort(self.values[waiting], kind="stable")][::-1].tolist()

    def _hopeless(self, bound: float, step: int, row: int) -> bool:
        """Whether a layout cannot be better, or not by more than the gap that is aimed at.

        Walking equal stages is cheap and may give a better layout, so the first ones are not given up for the gap.
        """
        if step <= 1 and self.found.started < FREE_STARTS:
            return bound >= self.found.value
        return bound * (1 + self._target(row)) >= self.found.value

    def _target(self, row: int) -> float:
        return TARGET if self.layouts.schedule[row] == ONE_F_ONE_B else LOOSE_TARGET

    def _limit_reached(self, step: int) -> bool:
        found = self.found
        return (
            len(found.opened) >= self.effort.opened,
            False,
            found.relaxed >= MOST_RELAXED,
            found.solved >= MOST_SOLVED,
        )[step]

    def _limit(self, step: int) -> str:
        return (f"{self.effort.opened} opened", "", f"{MOST_RELAXED} relaxed", f"{MOST_SOLVED} solved layouts")[step]

    def _open(self, row: int) -> Opened:
        layout = self.layouts.row(row)
        micro = layout.num_microbatches(self.question.job)
        opened = Opened(
            layout,
            row,
            float(self.rates[row]),
            Solving(self.problem(layout)),
            playable(layout.schedule, layout.pp, layout.vpp, micro),
        )
        self.found.opened.append(opened)
        self.found.unplayable += not opened.playable
        opened.found.bound = max(opened.found.bound, float(self.floors[row]))
        return opened

    def problem(self, layout: Layout) -> StageProblem:
        """The stages of one layout as a problem."""
        job, micro = self.question.job, layout.num_microbatches(self.question.job)
        taken = pieces(self.question.cluster, job, layout, self._modes(layout))
        return StageProblem(
            layout,
            taken,
            self.runs,
            self.pools.of(layout.schedule, layout.pp, layout.vpp, micro),
            SPREAD if layout.vpp == 1 else 0,
            tail_layers(job.model),
        )

    def _modes(self, layout: Layout) -> tuple[Recompute, ...]:
        """Selective recompute only where it keeps less than none, which is the attention kernel's doing."""
        if self._used_modes is None:
            self._used_modes = self.modes
            if "selective" in self.modes and len(self.modes) > 1:
                taken = pieces(self.question.cluster, self.question.job, layout, ("selective", "none"))
                if not saves(taken):
                    self._used_modes = tuple(mode for mode in self.modes if mode != "selective")
        return self._used_modes

    def _advance(self, opened: Opened, step: int) -> None:
        cutoff = self._cutoff(opened)
        if step == 1:
            self.found.started += 1
            opened.work.start()
        elif step == 2:
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
        return self.found.value / (1 + self._target(opened.row)) / opened.rate

    def _keep_best(self, opened: Opened) -> None:
        if opened.found.choice is None:
            return
        value = opened.found.seconds * opened.rate
        if value < self.found.value:
            self.found.value, self.found.best = value, opened


def saves(taken: Pieces) -> bool:
    """Whether selective recompute keeps less of any layer kind than no recompute."""
    half = len(taken.columns) // 2
    return bool(np.any(taken.saved[:half] < taken.saved[half:] * (1 - 1e-9)))


def spelled_out(opened: Opened, pattern: tuple[str, ...]) -> Layout:
    """The layout with its best stages, and the recompute mode that they need."""
    taken, choice = opened.work.problem.pieces, opened.found.choice
    assert choice is not None
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
