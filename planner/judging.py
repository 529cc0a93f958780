"""From bounds to the best few layouts with their stages, predicted in full, and the proof that comes with them."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from planner.outlook import Outlook, objective_value, outlook, with_stages
from planner.partition import Effort
from planner.playing import played_step
from planner.pricing import DEGREES, Priced, best_of_each, times
from planner.question import Question
from planner.rule import DUALPIPE
from planner.search import Found, Opened, Search, spelled_out
from scenarios.layout import Recompute
from scenarios.scenario import Scenario
from simulator.arrays import LayoutArrays
from simulator.memory import memory_use

EQUAL_STEP = 1.02
"""With the goodput as objective, layouts up to 2 % slower than the fastest compete: idling is no way to lose less."""
ROUNDING = 1.0
"""Bytes by which sums over stages may differ from the simulator's."""
FIXED = 24
"""Layouts whose stages are pinned, or that the search cannot take apart, are judged as they are: so many at most."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """Layouts with their stages, best first by the objective."""

    outlooks: list[Outlook]
    found: Found | None
    """The search; None where stages are pinned, so that there was nothing to choose."""
    chosen: Opened | None
    """The work on the best layout."""

    @property
    def gap(self) -> float:
        """How far the best layout may be from the optimum, over the search's bound."""
        if self.found is None or self.chosen is None:
            return 0.0
        value = self.outlooks[0].step.total_seconds * self.chosen.rate
        return max(value / self.found.bound - 1.0, 0.0)


def judge(
    scenario: Scenario,
    question: Question,
    priced: Priced,
    pins: dict[str, Any],
    top: int,
    *,
    effort: Effort | None = None,
    beat: float = math.inf,
    told: Callable[[Found], None] | None = None,
) -> Judged | None:
    """Search the layouts and predict the best ones in full; None where none fits (or none beats ``beat`` seconds)."""
    mirrored = _mirrored(priced.layouts)
    if "stages" in pins or (len(mirrored) and mirrored.all()):
        return _as_they_are(scenario, question, priced, pins)
    rows = np.flatnonzero(priced.fits & ~mirrored)
    if not len(rows):
        return None
    search = Search(
        question,
        priced.layouts.take(rows),
        priced.floors.step_seconds[rows],
        priced.rates[rows],
        recompute_modes(pins),
        effort or Effort(),
        told,
        beat,
    )
    found = search.run()
    if found.best is None:
        return None
    search.polish()
    search.open_more(top + 1, DEGREES)
    return _predicted(scenario, found, top)


def recompute_modes(pins: dict[str, Any]) -> tuple[Recompute, ...]:
    """Modes that layers may have: all, or the pinned one for every layer."""
    pinned: Recompute | None = pins.get("recompute")
    return ("full", "selective", "none") if pinned is None else (pinned,)


def _predicted(scenario: Scenario, found: Found, top: int) -> Judged | None:
    """The best stages of each set of degrees, spelled out and predicted by the simulator, which has the last word."""
    walked = [one for one in found.opened if one.found.choice is not None]
    walked.sort(key=lambda one: one.found.seconds * one.rate)
    told: list[tuple[Outlook, Opened]] = []
    seen: set[tuple[int, ...]] = set()
    for one in walked:
        degrees = tuple(int(getattr(one.layout, axis)) for axis in DEGREES)
        if (degrees in seen and scenario.objective != "goodput") or len(told) > top + 1:
            continue
        layout = spelled_out(one, scenario.model.pattern)
        judged = outlook(scenario, layout, played_step(scenario.cluster, scenario.job, layout))
        if judged.memory.headroom_bytes < -ROUNDING:
            continue
        seen.add(degrees)
        told.append((judged, one))
    if not told:
        return None
    if scenario.objective == "goodput":
        limit = EQUAL_STEP * min(one.step.total_seconds for one, _ in told)
        told = [one for one in told if one[0].step.total_seconds <= limit]
    told.sort(key=lambda one: objective_value(one[0], scenario.objective))
    return Judged(outlooks=[one for one, _ in told], found=found, chosen=told[0][1])


def _mirrored(layouts: LayoutArrays) -> npt.NDArray[np.bool_]:
    """Bidirectional DualPipe, whose ranks hold two stages each: only as pinned, with equal stages."""
    return np.asarray((layouts.schedule == DUALPIPE) & (layouts.vpp == 1) & (layouts.pp > 1))


def _as_they_are(scenario: Scenario, question: Question, priced: Priced, pins: dict[str, Any]) -> Judged | None:
    """Judge layouts with pinned (or equal) stages: the most promising by the closed form, each walked once."""
    cluster, job = scenario.cluster, scenario.job
    estimate = times(question, priced.layouts) * priced.rates
    rows = best_of_each(priced.layouts, estimate, np.arange(len(priced.layouts)), (*DEGREES, "schedule", "sharding"))
    stages: dict[str, Any] = {"stages": tuple(pins["stages"])} if "stages" in pins else {}
    if stages and "recompute" not in pins:
        stages["recompute"] = _needed_mode(stages["stages"])
    layouts = [
        with_stages(priced.layouts.row(int(row)).model_copy(update=stages), scenario.model) for row in rows[:FIXED]
    ]
    fitting = [one for one in layouts if memory_use(cluster, job, one).headroom_bytes >= 0]
    outlooks = [outlook(scenario, one, played_step(cluster, job, one)) for one in fitting]
    outlooks.sort(key=lambda one: objective_value(one, scenario.objective))
    if not outlooks:
        return None
    return Judged(outlooks=outlooks, found=None, chosen=None)


def _needed_mode(stages: Any) -> Recompute:
    if any(stage.recompute_layers for stage in stages):
        return "full"
    return "selective" if any("s" in stage.recompute for stage in stages) else "none"
