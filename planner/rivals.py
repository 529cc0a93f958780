"""The runners-up, and why each lost."""

from __future__ import annotations

from typing import Any

import numpy as np

from planner.judging import Judged
from planner.outlook import Outlook, with_stages
from planner.playing import played_step
from planner.pricing import DEGREES, Priced, best_of_each
from planner.reasons import does_not_fit, lost_because
from scenarios.layout import Layout
from scenarios.scenario import Scenario
from simulator.memory import memory_use
from simulator.outcome import MemoryUse, StepTime

TOO_LARGE = 2
"""Layouts told that would be faster and do not fit."""


def rivals(scenario: Scenario, priced: Priced, judged: Judged, top: int) -> list[dict[str, Any]]:
    """The best layout of each other set of degrees, and the faster ones that do not fit."""
    best = judged.outlooks[0]
    too_large = [_told(scenario, layout, best) for layout in _faster_but_too_large(scenario, priced, judged, top)]
    seen = {_degrees(best.layout)}
    told: list[dict[str, Any]] = []
    for one in judged.outlooks[1:]:
        if _degrees(one.layout) not in seen and len(told) + len(too_large) < top:
            seen.add(_degrees(one.layout))
            told.append(alternative(scenario, one.layout, one.step, one.memory, best))
    return told + too_large


def _faster_but_too_large(scenario: Scenario, priced: Priced, judged: Judged, top: int) -> list[Layout]:
    """Of the layouts that could be faster, those that miss the memory by least."""
    value = judged.outlooks[0].step.total_seconds * float(priced.rates.min(initial=1.0))
    rows = np.flatnonzero(~priced.fits & (priced.values < value))
    chosen = best_of_each(priced.layouts, priced.floors.memory_bytes, rows, DEGREES)[: min(TOO_LARGE, top // 2)]
    again = {"recompute": "full"}
    layouts = [with_stages(priced.layouts.row(int(row)).model_copy(update=again), scenario.model) for row in chosen]
    return [one for one in layouts if memory_use(scenario.cluster, scenario.job, one).headroom_bytes < 0]


def _told(scenario: Scenario, layout: Layout, best: Outlook) -> dict[str, Any]:
    step = played_step(scenario.cluster, scenario.job, layout)
    return alternative(scenario, layout, step, memory_use(scenario.cluster, scenario.job, layout), best)


def alternative(
    scenario: Scenario, layout: Layout, step: StepTime, memory: MemoryUse, best: Outlook, *, reason: str = ""
) -> dict[str, Any]:
    """One entry of the plan's ``alternatives``."""
    fits = memory.headroom_bytes >= 0
    why = lost_because(step, best.step) if fits else does_not_fit(memory, step, best.step)
    return {
        "layout": layout.model_dump(mode="json") | {"num_microbatches": layout.num_microbatches(scenario.job)},
        "label": layout.label(),
        "step_seconds": step.total_seconds,
        "mfu": step.mfu,
        "peak_bytes": memory.peak_bytes,
        "lost_because": reason + why,
    }


def _degrees(layout: Layout) -> tuple[int, ...]:
    return tuple(int(getattr(layout, axis)) for axis in DEGREES)
