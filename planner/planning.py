"""From a scenario to a plan: enumerate, price, drop what does not fit, judge the best few closely, say why."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from planner.candidates import Candidates, legal_layouts
from planner.judging import Judged, judge
from planner.notes import notes
from planner.outlook import Outlook, promise
from planner.placement import arranged, healthy
from planner.plan import Plan
from planner.pricing import Priced, price, times
from planner.question import Question
from planner.refusal import memory_refusal, pins_text, rule_refusal
from planner.rivals import alternative, rivals
from scenarios.scenario import Scenario
from topologies.document import InputFile

LEAST_ALLOWED = 0.5
"""Where idle GPUs are allowed, at least this share of the cluster works."""
LEAST_TOLD = 0.9
"""Where they are not, layouts on at least this share are told if they are faster ..."""
WORTH_TELLING = 0.98
"""... than this share of the chosen step."""
RESTRICTIONS = (
    "stages are split uniformly (slots to spare at both ends) and recompute is the same for all layers: other splits "
    "are not searched, so this is no proof against them",
    "all candidates are priced by the closed form, the most promising are played event by event and compared by that",
    "the bound is the smallest closed-form step of a layout that fits: an estimate, not a certificate",
)


def plan(
    scenario: Scenario, *, pins: Mapping[str, Any] | None = None, top: int = 5, inputs: Sequence[InputFile] = ()
) -> Plan:
    """Choose the layout for a scenario.

    Args:
        scenario: model, job, cluster, goal; its ``layout`` pins count too.
        pins: more fields of ``Layout`` that must not change.
        top: alternatives to tell.
        inputs: the files that the scenario came from.

    Raises:
        Infeasible: no layout keeps all rules, or none fits in memory; the nearest miss is named.
    """
    started = time.perf_counter()
    asked, scenario = scenario, healthy(scenario)
    fixed = {**scenario_pins(scenario), **(pins or {})}
    question, found = enumerate_layouts(scenario, fixed)
    priced = price(scenario, question, found)
    judged = judge(scenario, priced, fixed, top)
    if judged is None:
        raise memory_refusal(question, fixed, priced.layouts, priced.peak_bytes)
    best = judged.outlooks[0]
    unpinned = free_choice(scenario, best, fixed) if fixed else []
    smaller = with_idle_gpus(scenario, best) if question.all_gpus and not fixed else []
    alternatives = [*unpinned, *smaller, *rivals(scenario, priced, judged, top)]
    return Plan(
        scenario=asked,
        layout=best.layout,
        placement=arranged(asked, best.layout).as_json(),
        checkpoint=best.checkpoint.as_json(),
        predicted=promise(best) | {"notes": notes(question, best.layout, best.placement)},
        alternatives=alternatives[:top],
        solver=certificate(scenario, priced, judged, fixed) | {"seconds": time.perf_counter() - started},
        inputs=[asdict(one) for one in inputs],
    )


def certificate(scenario: Scenario, priced: Priced, judged: Judged, pins: dict[str, Any]) -> dict[str, Any]:
    """What was searched, what was not, and how good the answer is: the ``solver`` part of a plan."""
    found, best = priced.found, judged.outlooks[0]
    fastest = float(priced.step_seconds[priced.fits].min()) if priced.fits.any() else judged.closed_form_seconds[0]
    bound = min(fastest, best.step.total_seconds)
    return {
        "name": "enumeration",
        "status": "best of the enumerated candidates",
        "objective": scenario.objective,
        "objective_seconds": best.step.total_seconds,
        "closed_form_seconds": judged.closed_form_seconds[0],
        "bound_seconds": bound,
        "gap": best.step.total_seconds / bound - 1,
        "candidates": len(priced.layouts) + sum(found.rejected.values()),
        "legal": len(priced.layouts),
        "feasible": int(priced.fits.sum()),
        "solved_exactly": 0,
        "played": len(judged.outlooks),
        "played_over_closed_form": judged.factors,
        "rejected_by_rule": {
            name: {"count": count, "example": found.examples[name].sentence}
            for name, count in sorted(found.rejected.items(), key=lambda item: -item[1])
        },
        "rejected_by_memory": int((~priced.fits).sum()),
        "pins": {name: _plain(value) for name, value in pins.items()},
        "note": "; ".join(RESTRICTIONS),
    }


def scenario_pins(scenario: Scenario) -> dict[str, Any]:
    """Fields that the scenario's ``layout`` fixes."""
    pins = {name: getattr(scenario.layout, name) for name in type(scenario.layout).model_fields}
    return {name: value for name, value in pins.items() if value is not None}


def enumerate_layouts(scenario: Scenario, pins: dict[str, Any]) -> tuple[Question, Candidates]:
    """All legal layouts on every GPU, or on the largest number that works (many, where idle GPUs are allowed)."""
    whole = _question(scenario)
    if whole.allows("fewer-gpus"):
        partly = _question(scenario, least_share=LEAST_ALLOWED)
        found = legal_layouts(partly, pins)
        if len(found.layouts):
            return partly, found
    found = legal_layouts(whole, pins)
    if len(found.layouts):
        return whole, found
    pins_are_to_blame = bool(pins) and "dp" not in pins and len(legal_layouts(whole).layouts) > 0
    partly = _question(scenario, least_share=0.0)
    smaller = legal_layouts(partly, pins) if not pins_are_to_blame else found
    if not len(smaller.layouts):
        raise rule_refusal(whole, pins, found)
    used = smaller.layouts.world_size
    return partly, replace(smaller, layouts=smaller.layouts.take(used == used.max()))


def _question(scenario: Scenario, *, least_share: float | None = None) -> Question:
    least = None if least_share is None else max(1, math.ceil(least_share * scenario.cluster.num_gpus))
    return Question(cluster=scenario.cluster, job=scenario.job, allow=scenario.allow, least_gpus=least)


def with_idle_gpus(scenario: Scenario, best: Outlook) -> list[dict[str, Any]]:
    """What would be faster with a few GPUs idle: an awkward count of GPUs can force an awkward layout."""
    question = _question(scenario, least_share=LEAST_TOLD)
    alike = {"recompute": best.layout.recompute, "etp": best.layout.etp}  # a quick look, not the whole search again
    found = legal_layouts(question, alike)
    layouts = found.layouts.take(found.layouts.world_size < best.layout.world_size)
    fast = layouts.take(times(question, layouts) < WORTH_TELLING * best.step.total_seconds)
    judged = judge(scenario, price(scenario, question, replace(found, layouts=fast)), {}, 0) if len(fast) else None
    if judged is None or judged.outlooks[0].step.total_seconds >= WORTH_TELLING * best.step.total_seconds:
        return []
    one = judged.outlooks[0]
    idle = scenario.cluster.num_gpus - one.layout.world_size
    reason = f"leaves {idle} GPUs idle, which the scenario does not allow (allow: [fewer-gpus]): "
    return [alternative(scenario, one.layout, one.step, one.memory, best, reason=reason)]


def free_choice(scenario: Scenario, best: Outlook, pins: dict[str, Any]) -> list[dict[str, Any]]:
    """What would be chosen without the pins, where that is another layout."""
    question, found = enumerate_layouts(scenario, {})
    judged = judge(scenario, price(scenario, question, found), {}, 0)
    if judged is None or judged.outlooks[0].layout == best.layout:
        return []
    free = judged.outlooks[0]
    reason = f"excluded by the pins ({pins_text(pins)}): "
    return [alternative(scenario, free.layout, free.step, free.memory, best, reason=reason)]


def _plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return [_plain(one) for one in value]
    return value.model_dump(mode="json") if hasattr(value, "model_dump") else value
