"""What a few measured runs say about the predictions for their stack: ``headway calibrate --runs``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from planner.plan import Plan, read_plan
from simulator.logs.against import choose_run, hold_against
from simulator.logs.reading import is_measurement, read_logs
from simulator.offsets import Offset, shrunk_offset
from simulator.outcome import read_measurement
from topologies.document import FORMAT_VERSION
from topologies.errors import InputError

SHIFTED = ("step_seconds", "step_seconds_low", "step_seconds_high")


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredRun:
    """One run beside the plan of it."""

    file: str
    plan: str
    predicted_seconds: float
    measured_seconds: float
    notes: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOffset:
    """The offset of a stack, the runs that it rests on, and what each plan promises with it."""

    offset: Offset
    runs: tuple[MeasuredRun, ...]
    shifted: dict[str, dict[str, float]]
    """By plan file: step_seconds, step_seconds_low, step_seconds_high times the factor."""
    step_factor: float
    """What ``stack.step_factor`` of the scenario should be: the factor times the one that the plans already had."""

    def as_json(self) -> dict[str, Any]:
        """Plain data with stable keys."""
        offset = self.offset
        runs = [
            {
                "file": one.file,
                "plan": one.plan,
                "predicted_step_seconds": one.predicted_seconds,
                "measured_step_seconds": one.measured_seconds,
                "measured_over_predicted": one.measured_seconds / one.predicted_seconds,
                "notes": list(one.notes),
            }
            for one in self.runs
        ]
        return {
            "format_version": FORMAT_VERSION,
            "factor": offset.factor,
            "step_factor": self.step_factor,
            "at_face_value": offset.at_face_value,
            "weight": offset.weight,
            "spread": offset.spread,
            "runs": runs,
            "shifted": self.shifted,
            "warnings": list(offset.warnings),
        }


def offset_of_runs(plan_files: Sequence[str], run_files: Sequence[str]) -> RunOffset:
    """Hold runs against their plans and estimate the offset of the stack.

    Args:
        plan_files: one for all runs, or one for each in the same order.
        run_files: logs of other trainers, or measurements of ``headway run``.

    Raises:
        InputError: the numbers do not match, a file is unreadable, or a run is not that of its plan.
    """
    if not plan_files:
        raise InputError("--runs needs the plan of the runs", hint="add --plan plan.json", key="--plan")
    if len(plan_files) not in (1, len(run_files)):
        raise InputError(
            f"{len(plan_files)} plans are given for {len(run_files)} runs",
            hint="give one plan for all runs, or one for each in the same order",
            key="--plan",
        )
    plans = {file: read_plan(file) for file in plan_files}
    by_run = plan_files if len(plan_files) == len(run_files) else [plan_files[0]] * len(run_files)
    runs = tuple(_measured(file, name, plans[name]) for file, name in zip(run_files, by_run, strict=True))
    kinds = {_kind(plan) for plan in plans.values()}
    if len(kinds) > 1:
        told = "; ".join(sorted(" ".join(kind) for kind in kinds))
        raise InputError(
            f"the plans are of different GPUs, precisions or step factors ({told})", hint="an offset holds for one only"
        )
    offset = shrunk_offset([one.predicted_seconds for one in runs], [one.measured_seconds for one in runs])
    shifted = {
        name: {key: float(plan.predicted[key]) * offset.factor for key in SHIFTED} for name, plan in plans.items()
    }
    already = next(iter(plans.values())).scenario.job.stack.step_factor
    return RunOffset(offset=offset, runs=runs, shifted=shifted, step_factor=already * offset.factor)


def _kind(plan: Plan) -> tuple[str, ...]:
    job = plan.scenario.job
    factor = () if job.stack.step_factor == 1.0 else (f"step_factor {job.stack.step_factor:g}",)
    return (plan.scenario.cluster.gpu.name, job.precision, *factor)


def _measured(file: str, plan_file: str, plan: Plan) -> MeasuredRun:
    cluster, job, layout = plan.scenario.cluster, plan.scenario.job, plan.layout
    if is_measurement(file):
        measurement = read_measurement(file)
        if measurement.plan_sha256 != plan.sha256():
            raise InputError("is the measurement of another plan", hint="give the plan that was run", file=file)
        seconds, notes = measurement.step_seconds["median"], tuple[str, ...]()
    else:
        log = choose_run(read_logs(file), cluster, job, layout, file)
        run = hold_against(log, cluster, job, layout, file=file)
        if run.contradictions:
            raise InputError(
                f"is the log of another run than {Path(plan_file).name}: {'; '.join(run.contradictions)}",
                hint="give the plan of that run",
                file=file,
            )
        seconds, notes = run.step_seconds, run.notes
    predicted = float(plan.predicted["step_seconds"])
    return MeasuredRun(file=file, plan=plan_file, predicted_seconds=predicted, measured_seconds=seconds, notes=notes)
