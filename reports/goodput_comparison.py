"""Where the wall time of a real job went, beside what the simulator says about a run of that length."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from planner.plan import Plan
from simulator.ensemble import ensemble_json
from simulator.outcome import Measurement
from simulator.whole_runs import WholeRun, known, play, whole_run
from topologies.errors import InputError

RUNS = 100
"""Simulated runs: enough that the middle 80 % of a goodput is known to a few points."""
SEED = 0
NEGLIGIBLE = 1e-3
"""Share of the wall time that is not worth a line, nor a verdict."""
RESTART = "restart"


@dataclass(frozen=True, slots=True, kw_only=True)
class GoodputComparison:
    """A whole job beside simulated runs of as many steps, with the plan's step time and the scenario's faults."""

    promised: float
    """Goodput that the plan expects in the long run."""
    predicted: dict[str, Any]
    """Of the simulated runs: goodput, goodput_p10, goodput_p90, wall_seconds, lost_seconds by cause, failures by
    component (means), checkpoints."""
    measured: dict[str, Any]
    """The same of the job, with its incidents."""
    within_band: bool
    """The measured goodput lies among the middle 80 % of the simulated runs."""
    notes: tuple[str, ...]

    @property
    def causes(self) -> list[str]:
        """What took time worth telling on one side at least, the largest loss first."""
        sides = (self.predicted["lost_seconds"], self.measured["lost_seconds"])
        total = Counter({cause: sum(side.get(cause, 0.0) for side in sides) for cause in {*sides[0], *sides[1]}})
        least = NEGLIGIBLE * self.measured["wall_seconds"]
        return [cause for cause, seconds in total.most_common() if seconds > least]


def compare_goodput(plan: Plan, measurement: Measurement) -> GoodputComparison | None:
    """Simulate runs of the job that was measured and put the two side by side.

    Returns:
        None where the measurement did not record the whole job.

    Raises:
        InputError: the record is damaged.
    """
    recorded = measurement.run
    if not recorded:
        return None
    measured = _recorded(recorded)
    run = _same_run(plan, measurement)
    told = ensemble_json(play(run, RUNS, SEED, 1), SEED, known(run))
    goodput = told["goodput"]
    lost = _restarts_joined(told["lost_seconds"], plan.scenario.faults.phases_seconds)
    predicted = {
        "goodput": goodput["mean"],
        "goodput_p10": goodput["p10"],
        "goodput_p90": goodput["p90"],
        "wall_seconds": told["wall_seconds"]["mean"],
        "lost_seconds": lost,
        "failures": told["failures"],
        "checkpoints": told["checkpoints"],
    }
    return GoodputComparison(
        promised=float(plan.predicted["goodput"]),
        predicted=predicted,
        measured=measured,
        within_band=goodput["p10"] - NEGLIGIBLE <= measured["goodput"] <= goodput["p90"] + NEGLIGIBLE,
        notes=_notes(plan, recorded, predicted, measured),
    )


def _recorded(run: Mapping[str, Any]) -> dict[str, Any]:
    wanted = {"goodput": float, "wall_seconds": float, "lost_seconds": dict, "failures": dict, "checkpoints": int}
    for key, kind in wanted.items():
        if not isinstance(run.get(key), (kind, int) if kind is float else kind):
            raise InputError("is missing or not of its kind", hint="make the measurement again", key=f"run.{key}")
    return {key: run[key] for key in wanted} | {"incidents": list(run.get("incidents") or ())}


def _same_run(plan: Plan, measurement: Measurement) -> WholeRun:
    """The plan's run, as long as the job and with the checkpoints that the job made."""
    policy = measurement.run.get("checkpoint")
    pins = {"interval_steps": policy["interval_steps"], "mode": policy["mode"]} if policy else {}
    run = whole_run(plan.scenario, plan.layout, float(plan.predicted["step_seconds"]), **pins)
    setup = replace(run.setup, num_steps=measurement.steps)
    if not policy:  # nothing was saved: no stalls, and the end is the only save
        free = replace(setup.tiers[0], every=1, stall_seconds=0.0, drain_seconds=0.0)
        setup = replace(setup, interval_steps=measurement.steps, tiers=(free,))
    return replace(run, setup=setup)


def _restarts_joined(lost: Mapping[str, float], phases: Mapping[str, float]) -> dict[str, float]:
    """Jobs book a restart as a whole, scenarios may state its parts."""
    joined = {cause: seconds for cause, seconds in lost.items() if cause not in phases}
    return joined | {RESTART: lost.get(RESTART, 0.0) + sum(lost[name] for name in phases if name != RESTART)}


def _notes(
    plan: Plan, run: Mapping[str, Any], predicted: Mapping[str, Any], measured: Mapping[str, Any]
) -> tuple[str, ...]:
    notes = []
    struck = sum(measured["failures"].values())
    expected = sum(predicted["failures"].values())
    if struck and not expected:
        notes.append(
            f"{struck} failure{'s' if struck > 1 else ''} struck, and the scenario (faults: "
            f"{plan.scenario.faults.name}) expects none: predicted losses hold only checkpoints"
        )
    elif struck or expected > 0.05:
        notes.append(f"{struck} failures struck; {expected:.2g} were to be expected in a run of this length")
    if not run.get("checkpoint"):
        notes.append("the job saved no checkpoints, so none are predicted")
    return tuple(notes)
