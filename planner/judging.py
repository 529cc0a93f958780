"""The best few layouts, looked at closely: played event by event, with checkpoints and failures, best first."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import numpy as np

from planner.outlook import Outlook, objective_value, outlook, with_stages
from planner.playing import operations, played_step
from planner.pricing import Priced, shortlist
from scenarios.layout import Layout
from scenarios.scenario import Scenario
from simulator.memory import memory_use
from simulator.step import predict_step

PER_SCHEDULE = 12
"""Sets of degrees of each schedule that are candidates for a closer look."""
PLAYS = 24
"""Steps that are played at most."""
OPERATIONS = 150_000
"""Pipeline operations that are played at most, over all steps: a limit that does not depend on the machine's speed."""
EQUAL_STEP = 1.02
"""With the goodput as objective, layouts up to 2 % slower than the fastest compete: idling is no way to lose less."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """Layouts that were played, best first by the objective."""

    outlooks: list[Outlook]
    closed_form_seconds: list[float]
    factors: dict[str, float]
    """Played over closed-form step, by schedule, as last seen: 1 where the closed form is right."""


def judge(scenario: Scenario, priced: Priced, pins: dict[str, Any], top: int) -> Judged | None:
    """Play the most promising layouts until none left can win; None if none fits in memory.

    The closed form, times what playing showed for the same schedule, says which layout is next. The search ends when
    the best played one beats that estimate for all others, and ``top`` rivals are known; or at the limits above.
    """
    pool = [(_closed(scenario, layout), layout) for layout in _fitting(scenario, priced, pins)]
    if not pool:
        return None
    factors: dict[str, float] = defaultdict(lambda: 1.0)
    played: list[tuple[Outlook, float]] = []
    budget = OPERATIONS
    while pool and len(played) < PLAYS:
        pool.sort(key=lambda one: one[0] * factors[_family(one[1])])
        estimate, layout = pool.pop(0)
        best = min((one.step.total_seconds * _rate(scenario, one.layout) for one, _ in played), default=np.inf)
        if estimate * factors[_family(layout)] >= best and len({_degrees(one.layout) for one, _ in played}) > top:
            break
        budget -= operations(layout, scenario.job)
        if budget < 0 and played:
            break
        closed = estimate / _rate(scenario, layout)
        found = outlook(scenario, layout, played_step(scenario.cluster, scenario.job, layout))
        factors[_family(layout)] = found.step.total_seconds / closed
        played.append((found, closed))
    if scenario.objective == "goodput":
        limit = EQUAL_STEP * min(one.step.total_seconds for one, _ in played)
        played = [one for one in played if one[0].step.total_seconds <= limit]
    played.sort(key=lambda one: objective_value(one[0], scenario.objective))
    return Judged(
        outlooks=[one for one, _ in played], closed_form_seconds=[closed for _, closed in played], factors=dict(factors)
    )


def _fitting(scenario: Scenario, priced: Priced, pins: dict[str, Any]) -> list[Layout]:
    """The shortlist as layouts with explicit stages that fit, checked stage by stage."""
    rows = np.arange(len(priced.layouts)) if "stages" in pins else np.flatnonzero(priced.fits)
    layouts = [priced.layouts.row(int(row)) for row in shortlist(priced, rows, PER_SCHEDULE)]
    stages = {"stages": tuple(pins["stages"])} if "stages" in pins else {}
    layouts = [with_stages(layout.model_copy(update=stages), scenario.model) for layout in layouts]
    return [one for one in layouts if memory_use(scenario.cluster, scenario.job, one).headroom_bytes >= 0]


def _closed(scenario: Scenario, layout: Layout) -> float:
    return predict_step(scenario.cluster, scenario.job, layout).total_seconds * _rate(scenario, layout)


def _rate(scenario: Scenario, layout: Layout) -> float:
    """Weight of a second: the GPUs in use where the objective pays for them."""
    return float(layout.world_size) if scenario.objective in ("cost", "energy") else 1.0


def _family(layout: Layout) -> str:
    return layout.schedule if layout.pp > 1 else "none"


def _degrees(layout: Layout) -> tuple[int, ...]:
    return layout.tp, layout.cp, layout.pp, layout.dp, layout.ep
