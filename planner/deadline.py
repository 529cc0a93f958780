"""A run that must end in time: the fastest layout where the best one is late, or a no with the closest there is."""

from __future__ import annotations

import math
from dataclasses import replace

from planner.outlook import DAY, Outlook
from planner.plan import Plan
from scenarios.scenario import Scenario
from topologies.errors import Infeasible, InputError
from topologies.units import format_quantity


def in_time(scenario: Scenario, found: Outlook) -> bool:
    """Whether a layout is expected to end before the deadline; always where there is none.

    Raises:
        InputError: there is a deadline and no number of tokens to train.
    """
    deadline = scenario.job.deadline_seconds
    if deadline is None:
        return True
    if scenario.job.target_tokens is None:
        raise InputError(
            "a deadline needs something to finish", hint="say how many target_tokens to train", key="job.deadline"
        )
    return _wall(found) <= deadline


def deadline_refusal(scenario: Scenario, fastest: Outlook) -> Infeasible:
    """Say how early the run can end, and what would have to change."""
    wall, deadline = _wall(fastest), scenario.job.deadline_seconds or math.inf
    tokens = scenario.job.target_tokens or 0.0
    gpus = math.ceil(fastest.layout.world_size * wall / deadline)
    fewer = format_quantity(tokens * deadline / wall, "tokens", 3)
    return Infeasible(
        f"{scenario.name} cannot end by its deadline on {scenario.cluster.name}",
        needed=f"{wall / DAY:.4g} days",
        available=f"{deadline / DAY:.4g} days",
        nearest=f"{fastest.layout.label()}, {fastest.step.total_seconds:.4g} s a step, {fastest.goodput:.2%} of the "
        "time useful",
        relax=(
            f"a deadline of {math.ceil(10 * wall / DAY) / 10:g} days",
            f"{fewer} instead of {format_quantity(tokens, 'tokens', 3)}",
            f"more than {gpus} GPUs of this kind",
        ),
    )


def hurried(asked: Scenario, fastest: Plan, late: Outlook) -> Plan:
    """The fastest plan in the place of one that is better by the objective and late, with a note that says so."""
    note = (
        f"the deadline decides: {late.layout.label()} has the least {asked.objective} and would take "
        f"{_wall(late) / DAY:.4g} days"
    )
    predicted = fastest.predicted | {"notes": [note, *fastest.predicted["notes"]]}
    return replace(fastest, scenario=asked, predicted=predicted)


def _wall(found: Outlook) -> float:
    return found.seconds(found.step.total_seconds) or math.inf
