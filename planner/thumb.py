"""Rules of thumb, checked: what a customary layout or interval costs against headway's choice, case by case."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from planner.checkpointing import CUSTOMARY_SECONDS, operation
from planner.planning import plan
from scenarios.layout import Layout
from scenarios.scenario import Scenario, load_scenario
from simulator.step import predict_step
from topologies.errors import Infeasible, InputError
from topologies.units import format_quantity

GOOD = 0.02
"""A rule that costs at most this share of the step is called good."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Thumb:
    """A rule of thumb, the shipped scenario that it is tried on, and the sizes at which it is tried."""

    name: str
    saying: str
    scenario: str
    choices: tuple[dict[str, Any], ...] = ()
    """Pins that follow the rule; of several the best is taken. Empty: those of the scenario."""
    cases: tuple[tuple[str, ...], ...] = ((),)
    """Changes of the scenario, one try each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """One try of one rule."""

    rule: str
    saying: str
    case: str
    ruled: str
    """Layout (or interval) by the rule."""
    chosen: str
    """headway's own."""
    cost: float | None
    """Share by which the rule is slower; None: it does not work at all."""
    verdict: str


def _nodes(*counts: int) -> tuple[tuple[str, ...], ...]:
    return tuple((f"cluster.num_nodes={count}",) for count in counts)


LAYOUTS = (
    Thumb(name="10b", saying="10B parameters: TP4 PP2", scenario="thumb-10b", cases=_nodes(2, 8, 32)),
    Thumb(name="100b", saying="100B parameters: TP8 PP4", scenario="thumb-100b", cases=_nodes(16, 64, 128)),
    Thumb(name="1t", saying="1T parameters: TP16 PP8", scenario="thumb-1t", cases=_nodes(512, 1024)),
    Thumb(
        name="pp4",
        saying="PP at most 4 on small clusters",
        scenario="thumb-small-cluster",
        choices=({"pp": 1}, {"pp": 2}, {"pp": 4}),
        cases=_nodes(4, 8, 16),
    ),
)
CHECKPOINTS = Thumb(
    name="checkpoint",
    saying="a checkpoint every 10 to 30 minutes",
    scenario="llama3-405b-16k-h100",
    cases=_nodes(64, 256, 2048),
)
NAMES = (*(one.name for one in LAYOUTS), CHECKPOINTS.name)


def check_rules(names: Sequence[str] = (), tell: Callable[[str], None] | None = None) -> Iterator[Verdict]:
    """Try the rules of thumb.

    Args:
        names: some of ``NAMES``; empty: all.
        tell: is given a line before each try.

    Raises:
        InputError: no rule of that name.
    """
    unknown = [name for name in names if name not in NAMES]
    if unknown:
        raise InputError(f"there is no rule {unknown[0]!r}", hint=f"the rules are {', '.join(NAMES)}")
    for thumb in LAYOUTS:
        if names and thumb.name not in names:
            continue
        for case in thumb.cases:
            if tell is not None:
                tell(f"{thumb.saying}: {' '.join(case)}")
            yield tried(thumb, load_scenario(thumb.scenario, overrides=case))
    if not names or CHECKPOINTS.name in names:
        for case in CHECKPOINTS.cases:
            yield from _intervals(load_scenario(CHECKPOINTS.scenario, overrides=case))


def tried(thumb: Thumb, scenario: Scenario) -> Verdict:
    """Plan a scenario by the rule and freely."""
    case = f"{scenario.model.name} on {scenario.cluster.num_gpus:,} {scenario.cluster.gpu.name}"
    pinned = list(thumb.choices) or [_pins(scenario)]
    bare = scenario.model_copy(update={"layout": type(scenario.layout)()})
    free = plan(bare, top=0)
    ruled, refusals = [], []
    for pins in pinned:
        try:
            ruled.append(plan(bare, pins=pins, top=0))
        except Infeasible as refusal:
            refusals.append(refusal.constraint)
    chosen = free.layout.label()
    if not ruled:
        return Verdict(
            rule=thumb.name, saying=thumb.saying, case=case, ruled="-", chosen=chosen, cost=None,
            verdict=f"does not work: {refusals[0]}",
        )  # fmt: skip
    best = min(ruled, key=lambda one: float(one.predicted["step_seconds"]))
    cost = best.predicted["step_seconds"] / free.predicted["step_seconds"] - 1
    return Verdict(
        rule=thumb.name,
        saying=thumb.saying,
        case=case,
        ruled=best.layout.label(),
        chosen=chosen,
        cost=cost,
        verdict=_words(cost, best.predicted, free.predicted),
    )


def _pins(scenario: Scenario) -> dict[str, Any]:
    pins = {name: getattr(scenario.layout, name) for name in type(scenario.layout).model_fields}
    return {name: value for name, value in pins.items() if value is not None}


def _words(cost: float, ruled: dict[str, Any], chosen: dict[str, Any]) -> str:
    steps = f"{ruled['step_seconds']:.4g} s a step instead of {chosen['step_seconds']:.4g} s"
    return f"good ({steps})" if cost <= GOOD else f"costs {100 * cost:.1f} % ({steps})"


def _intervals(scenario: Scenario) -> Iterator[Verdict]:
    """The customary intervals under the choice's own way to save, on a job of one stage per node group."""
    cluster = scenario.cluster
    layout = Layout(tp=8, pp=16, dp=cluster.num_gpus // 128, sequence_parallel=True)
    batch = scenario.job.model_copy(update={"global_batch_size": 16 * layout.dp})
    asked = scenario.model_copy(update={"job": batch})
    step = predict_step(cluster, batch, layout).total_seconds
    for mode in ("async", "sync"):
        wish = asked.checkpoint.model_copy(update={"mode": mode})
        one = operation(asked.model_copy(update={"checkpoint": wish}), layout, step)
        for seconds in CUSTOMARY_SECONDS:
            pinned = wish.model_copy(update={"interval_seconds": seconds})
            ruled = operation(asked.model_copy(update={"checkpoint": pinned}), layout, step)
            cost = one.goodput / ruled.goodput - 1 if ruled.goodput > 0 else None
            points = 100 * (one.goodput - ruled.goodput)
            yield Verdict(
                rule=CHECKPOINTS.name,
                saying=CHECKPOINTS.saying,
                case=f"{scenario.model.name} on {cluster.num_gpus:,} {cluster.gpu.name}, {mode} saves",
                ruled=f"every {format_quantity(seconds, 'seconds')}",
                chosen=f"every {format_quantity(one.policy.interval_seconds, 'seconds')}",
                cost=cost,
                verdict=f"{'good' if cost is not None and cost <= GOOD else 'costs'} ({points:.2f} points of goodput)",
            )
