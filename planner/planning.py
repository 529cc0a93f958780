"""From a scenario to a plan: enumerate, bound, drop what cannot fit, search best first, predict the best, say why."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from planner.candidates import Candidates, legal_layouts
from planner.certificate import certificate, plain
from planner.confirming import confirmed
from planner.deadline import deadline_refusal, hurried, in_time
from planner.judging import Judged, judge
from planner.notes import notes
from planner.outlook import Outlook, promise
from planner.partition import Effort
from planner.placement import arranged, healthy
from planner.plan import Plan
from planner.pooled import plan_pools
from planner.pricing import DEGREES, price
from planner.question import Question
from planner.refusal import memory_refusal, pins_text, rule_refusal
from planner.rivals import alternative, rivals
from planner.search import Found
from planner.story import per_token
from scenarios.scenario import Scenario
from topologies.document import InputFile
from topologies.errors import Infeasible
from topologies.units import format_quantity

LEAST_ALLOWED = 0.5
"""Where idle GPUs are allowed, at least this share of the cluster works."""
LEAST_TOLD = 0.9
"""Where they are not, layouts on at least this share are told if they are faster ..."""
WORTH_TELLING = 0.98
"""... than this share of the chosen step, ..."""
LOOKED_AT = 16
"""... with equal stages, if they are among this many: a hint, not a search."""


def plan(
    scenario: Scenario,
    *,
    pins: Mapping[str, Any] | None = None,
    top: int = 5,
    inputs: Sequence[InputFile] = (),
    time_limit_seconds: float | None = None,
    told: Callable[[Found], None] | None = None,
) -> Plan:
    """Choose the layout for a scenario.

    Args:
        scenario: model, job, cluster, goal; its ``layout`` pins count too.
        pins: more fields of ``Layout`` that must not change.
        top: alternatives to tell.
        inputs: the files that the scenario came from.
        time_limit_seconds: the search ends then, with the best layout so far and its gap; without a limit the answer
            does not depend on the machine's speed.
        told: is called with the state of the search after each step of it.

    Raises:
        Infeasible: no layout keeps all rules, none fits in memory, the time limit passed before one was found, or the
            deadline cannot be met; the nearest miss is named.
    """
    started = time.perf_counter()
    asked, scenario = scenario, healthy(scenario)
    effort = Effort(deadline=math.inf if time_limit_seconds is None else started + time_limit_seconds)
    fixed = {**scenario_pins(scenario), **(pins or {})}
    if len(scenario.cluster.kinds) > 1:
        return plan_pools(asked, fixed, top=top, inputs=inputs)
    idle_asked = "fewer-gpus" in asked.allow
    question, found = enumerate_layouts(scenario, fixed, LEAST_ALLOWED if idle_asked else LEAST_TOLD)
    priced = price(scenario, question, found)
    judged = judge(scenario, question, priced, fixed, top, effort=effort, told=told)
    if judged is None:
        if effort.over and priced.fits.any():
            raise _out_of_time(time_limit_seconds or 0.0)
        raise memory_refusal(question, fixed, priced.layouts, priced.floors.full_recompute_bytes)
    best = judged.outlooks[0]
    if not in_time(scenario, best):
        if scenario.objective == "time":
            raise deadline_refusal(scenario, best)
        fastest = asked.model_copy(update={"objective": "time"})
        made = plan(fastest, pins=pins, top=top, inputs=inputs, time_limit_seconds=time_limit_seconds, told=told)
        return hurried(asked, made, best)
    others = replace(effort, steps=1, opened=LOOKED_AT)
    looks = top > 0 and not effort.over
    unpinned = free_choice(scenario, best, fixed, effort) if fixed and looks else []
    smaller = with_idle_gpus(scenario, best, others) if question.all_gpus and not fixed and looks else []
    alternatives = [*unpinned, *smaller, *rivals(scenario, priced, judged, top)]
    made = Plan(
        scenario=asked,
        layout=best.layout,
        placement=arranged(asked, best.layout).as_json(),
        checkpoint=best.checkpoint.as_json(),
        predicted=promise(best, scenario.job)
        | {"notes": notes(question, best.layout, best.placement)}
        | (confirmed(scenario, best) if looks else {}),
        alternatives=alternatives[:top],
        solver=certificate(scenario, priced, judged)
        | {"pins": {name: plain(value) for name, value in fixed.items()}, "seconds": time.perf_counter() - started},
        inputs=[asdict(one) for one in inputs],
    )
    proved = judged.found is not None and judged.found.stopped_by == "proof"
    if asked.exclude_nodes and not proved and not fixed.keys() & set(DEGREES) and not effort.over:
        left = None if time_limit_seconds is None else max(started + time_limit_seconds - time.perf_counter(), 0.1)
        return _or_as_without_gaps(made, pins or {}, top, inputs, left)
    return made


def _or_as_without_gaps(
    made: Plan, pins: Mapping[str, Any], top: int, inputs: Sequence[InputFile], limit_seconds: float | None
) -> Plan:
    """The plan, or with fewer replicas that of the cluster before nodes broke, where that is better.

    With a few nodes away very many numbers of GPUs are possible, most of them awkward, and the search may not get to
    the plain answer; the bound stays that of the search over all of them.
    """
    before = made.scenario.model_copy(update={"exclude_nodes": ""})
    try:
        shape = plan(before, pins=pins, top=0, time_limit_seconds=limit_seconds).layout
        degrees = {axis: getattr(shape, axis) for axis in DEGREES if axis != "dp"}
        other = plan(made.scenario, pins={**pins, **degrees}, top=0, inputs=inputs, time_limit_seconds=limit_seconds)
    except Infeasible:
        return made
    if per_token(other) >= per_token(made):
        return made
    seconds, bound = other.predicted["step_seconds"], min(made.solver["bound_seconds"], other.predicted["step_seconds"])
    told = {"objective_seconds": seconds, "bound_seconds": bound, "gap": seconds / bound - 1}
    status = f"{made.solver['status']}; better with the degrees of the cluster without gaps and fewer replicas"
    lost = (
        f"first found: {100 * (made.predicted['step_seconds'] / seconds - 1):+.1f} % on {made.layout.world_size} GPUs"
    )
    first = {
        "layout": made.as_json()["layout"],
        "label": made.layout.label(),
        "step_seconds": made.predicted["step_seconds"],
        "mfu": made.predicted["mfu"],
        "peak_bytes": made.predicted["memory_bytes"]["peak"],
        "lost_because": lost,
    }
    return replace(
        other, solver=made.solver | told | {"status": status}, alternatives=[first, *made.alternatives][:top]
    )


def _out_of_time(limit_seconds: float) -> Infeasible:
    return Infeasible(
        f"no layout was found within {format_quantity(limit_seconds, 'seconds')}",
        relax=("a longer --time-limit", "pins, which leave fewer layouts"),
    )


def scenario_pins(scenario: Scenario) -> dict[str, Any]:
    """Fields that the scenario's ``layout`` fixes."""
    pins = {name: getattr(scenario.layout, name) for name in type(scenario.layout).model_fields}
    return {name: value for name, value in pins.items() if value is not None}


def enumerate_layouts(
    scenario: Scenario, pins: dict[str, Any], least_share: float = LEAST_ALLOWED
) -> tuple[Question, Candidates]:
    """All legal layouts on every GPU, or on the largest number that works.

    Where idle GPUs are allowed: on all numbers from ``least_share`` of the cluster up.
    """
    whole = _question(scenario)
    if whole.allows("fewer-gpus"):
        for share in dict.fromkeys((least_share, LEAST_ALLOWED)):
            partly = _question(scenario, least_share=share)
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


def with_idle_gpus(scenario: Scenario, best: Outlook, effort: Effort) -> list[dict[str, Any]]:
    """What would be faster with a few GPUs idle: an awkward count of GPUs can force an awkward layout."""
    question = _question(scenario, least_share=LEAST_TOLD)
    alike = {axis: getattr(best.layout, axis) for axis in ("etp", "optimizer_sharding")}
    found = legal_layouts(question, alike)  # a quick look, not the whole search again
    smaller = replace(found, layouts=found.layouts.take(found.layouts.world_size < best.layout.world_size))
    beat = WORTH_TELLING * best.step.total_seconds
    priced = price(scenario.model_copy(update={"objective": "time"}), question, smaller)
    fast = priced.floors.step_seconds < beat
    if not fast.any():
        return []
    judged = _judged_quickly(scenario, question, smaller, fast, beat, effort)
    if judged is None or judged.outlooks[0].step.total_seconds >= beat:
        return []
    one = judged.outlooks[0]
    idle = scenario.cluster.num_gpus - one.layout.world_size
    reason = f"leaves {idle} GPUs idle, which the scenario does not allow (allow: [fewer-gpus]): "
    return [alternative(scenario, one.layout, one.step, one.memory, best, reason=reason)]


def _judged_quickly(
    scenario: Scenario, question: Question, found: Candidates, rows: Any, beat: float, effort: Effort
) -> Judged | None:
    """Search some layouts for one that takes less than ``beat`` seconds."""
    by_time = scenario.model_copy(update={"objective": "time"})
    priced = price(by_time, question, replace(found, layouts=found.layouts.take(rows)))
    slowest = float(priced.rates.max(initial=1.0))
    return judge(by_time, question, priced, {}, 0, effort=effort, beat=beat * slowest)


def free_choice(scenario: Scenario, best: Outlook, pins: dict[str, Any], effort: Effort) -> list[dict[str, Any]]:
    """What would be chosen without the pins, where that is another layout."""
    question, found = enumerate_layouts(scenario, {})
    judged = judge(scenario, question, price(scenario, question, found), {}, 0, effort=effort)
    if judged is None or judged.outlooks[0].layout == best.layout:
        return []
    free = judged.outlooks[0]
    reason = f"excluded by the pins ({pins_text(pins)}): "
    return [alternative(scenario, free.layout, free.step, free.memory, best, reason=reason)]
