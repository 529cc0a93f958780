"""The promise of a plan beside what a real job showed."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from planner.plan import Plan
from reports.goodput_comparison import GoodputComparison, compare_goodput
from simulator.outcome import Measurement
from simulator.phases import phase_parts
from topologies.errors import InputError

FLOP_CONVENTION = "MFU counts model FLOPs over the dense peak: causal attention once, no recomputation"

WAITING = ("pp_bubble", "pp_comm", "straggler")
"""Parts of a step in which a rank on a CPU core waits and uses no CPU time. Collectives are counted in full, although
ranks wait in them too: where they are long, the predicted CPU time is an upper end."""

SAME_YARDSTICK = 0.05
"""FLOPs per token over peak, as implied by MFU and tokens per second, may differ by this much (rounding, spread)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Predicted beside measured; ``error`` is predicted over measured, less one, and None where one side is unknown."""

    layout: str
    predicted: dict[str, float | None]
    """step_seconds, step_seconds_low, step_seconds_high, mfu, tokens_per_second_per_gpu, memory_bytes."""
    measured: dict[str, float | None]
    """step_seconds (median), step_seconds_p10, step_seconds_p90, mfu, tokens_per_second_per_gpu, memory_bytes (peak of
    the fullest rank less what it held before the model was built, which no plan promises), cpu_seconds,
    collective_seconds and product_seconds (of one rank, where they were told)."""
    error: dict[str, float | None]
    """step_seconds, mfu, memory, cpu_seconds (of ranks on CPU cores), goodput (of jobs that were recorded)."""
    phases: dict[str, dict[str, float | None]]
    """predicted_seconds, measured_seconds and error of each phase that the job timed."""
    within_band: bool
    """The measured median lies in the band that was predicted with a probability of 80 %."""
    contended: bool
    same_plan: bool
    same_world_size: bool
    notes: tuple[str, ...]
    """What a reader must know before trusting the errors."""
    remarks: tuple[str, ...]
    """What the job itself said about its measurement."""
    source: str = "headway run"
    """What measured."""
    run: GoodputComparison | None = None
    """The whole job; None where it was not recorded."""

    def as_json(self) -> dict[str, Any]:
        """Plain data with the keys of the JSON contract."""
        return asdict(self) | {"notes": list(self.notes), "remarks": list(self.remarks)}


def compare(plan: Plan, measurement: Measurement, *, force: bool = False) -> Comparison:
    """Hold a measurement against the plan that it was made from.

    Args:
        plan: the promise.
        measurement: what a job showed.
        force: compare even where the measurement belongs to another plan.

    Raises:
        InputError: the measurement belongs to another plan and ``force`` is off; the plan lacks a figure.
    """
    same_plan = measurement.plan_sha256 == plan.sha256()
    if not same_plan and not force:
        raise InputError(
            f"the measurement belongs to another plan (sha256 {measurement.plan_sha256[:12]}..., "
            f"this plan has {plan.sha256()[:12]}...)",
            hint="give the plan that was run, or compare all the same with --force",
            key="plan_sha256",
        )
    predicted, measured, run = promised(plan), _shown(measurement), compare_goodput(plan, measurement)
    comparable = _same_yardstick(predicted, measured)
    error = {
        "step_seconds": relative_error(predicted["step_seconds"], measured["step_seconds"]),
        "mfu": relative_error(predicted["mfu"], measured["mfu"]) if comparable else None,
        "memory": relative_error(predicted["memory_bytes"], measured["memory_bytes"]),
        "cpu_seconds": relative_error(predicted["cpu_seconds"], measured["cpu_seconds"]),
        "goodput": relative_error(run.predicted["goodput"], run.measured["goodput"]) if run else None,
    }
    low, high = float(predicted["step_seconds_low"] or 0), float(predicted["step_seconds_high"] or 0)
    return Comparison(
        layout=plan.layout.label(),
        predicted=predicted,
        measured=measured,
        error=error,
        phases=_phases(plan, measurement.phases_seconds),
        within_band=low <= measurement.step_seconds["median"] <= high,
        contended=bool(measurement.environment.get("contended")),
        same_plan=same_plan,
        same_world_size=plan.layout.world_size == measurement.world_size,
        notes=_notes(plan, measurement, same_plan, comparable),
        remarks=tuple(map(str, measurement.environment.get("notes") or ())),
        run=run,
    )


def promised(plan: Plan) -> dict[str, float | None]:
    """Return the figures of a plan that a measurement can be held against.

    Raises:
        InputError: the plan lacks one of them.
    """
    keys = ("step_seconds", "step_seconds_low", "step_seconds_high", "mfu", "tokens_per_second_per_gpu")
    found: dict[str, float | None] = {}
    for key in (*keys, "memory_bytes", "breakdown_seconds"):
        if key not in plan.predicted:
            raise InputError("is missing in the plan", hint="make the plan again", key=f"predicted.{key}")
    for key in keys:
        found[key] = plan.predicted[key]
    found["memory_bytes"] = plan.predicted["memory_bytes"]["peak"]
    waiting = sum(plan.predicted["breakdown_seconds"].get(part, 0.0) for part in WAITING)
    on_cpu = plan.scenario.cluster.gpu.architecture == "cpu"
    found["cpu_seconds"] = plan.predicted["step_seconds"] - waiting if on_cpu else None
    return found


def _shown(measurement: Measurement) -> dict[str, float | None]:
    return {
        "step_seconds": measurement.step_seconds["median"],
        "step_seconds_p10": measurement.step_seconds["p10"],
        "step_seconds_p90": measurement.step_seconds["p90"],
        "mfu": measurement.mfu,
        "tokens_per_second_per_gpu": measurement.tokens_per_second_per_gpu,
        "memory_bytes": max(0.0, measurement.peak_memory_bytes - _baseline(measurement)) or None,
        "cpu_seconds": measurement.environment.get("cpu_seconds_per_rank"),
        "collective_seconds": measurement.environment.get("communication_seconds"),
        "product_seconds": measurement.environment.get("product_seconds"),
    }


def _baseline(measurement: Measurement) -> float:
    """Bytes that a rank held before it built the model: interpreter and libraries, where they share the memory."""
    baseline = measurement.environment.get("baseline_memory_bytes")
    return float(baseline) if isinstance(baseline, int | float) else 0.0


def relative_error(predicted: float | None, measured: float | None) -> float | None:
    """Return predicted over measured, less one; None where one of them is unknown."""
    return predicted / measured - 1 if predicted is not None and measured else None


def _same_yardstick(predicted: dict[str, float | None], measured: dict[str, float | None]) -> bool:
    """MFU over tokens per second is FLOPs per token over peak: two MFUs compare only where that ratio is the same."""
    ratios = [
        mfu / rate
        for side in (predicted, measured)
        if (mfu := side["mfu"]) and (rate := side["tokens_per_second_per_gpu"])
    ]
    return len(ratios) == 2 and abs(ratios[0] / ratios[1] - 1) <= SAME_YARDSTICK


def _phases(plan: Plan, measured: dict[str, float]) -> dict[str, dict[str, float | None]]:
    predicted, parts_of = plan.predicted["breakdown_seconds"], phase_parts(plan.layout)
    phases: dict[str, dict[str, float | None]] = {}
    for name, seconds in measured.items():
        parts = parts_of.get(name)
        promise = sum(predicted.get(part, 0.0) for part in parts) if parts else None
        phases[name] = {
            "predicted_seconds": promise,
            "measured_seconds": seconds,
            "error": relative_error(promise, seconds),
        }
    return phases


def _notes(plan: Plan, measurement: Measurement, same_plan: bool, comparable: bool) -> tuple[str, ...]:
    notes = []
    if not same_plan:
        notes.append("the measurement belongs to another plan: compared because of --force")
    if measurement.world_size != plan.layout.world_size:
        notes.append(f"measured on {measurement.world_size} ranks, planned for {plan.layout.world_size}")
    if measurement.environment.get("contended"):
        share = measurement.environment.get("foreign_cpu_share")
        taken = f" (others took {100 * share:.0f} % of the CPU)" if isinstance(share, int | float) else ""
        notes.append(
            f"the machine was contended while it was measured{taken}: its step time is too long, and the CPU time of a "
            "rank is what compares"
        )
    if plan.predicted["mfu"] is None:
        notes.append("no MFU was predicted: the dense peak of the GPU at this precision is unknown")
    elif measurement.mfu is None:
        notes.append("no MFU was measured: the peak of the device is unknown")
    elif not comparable:
        notes.append(
            "the two MFUs do not compare: MFU and tokens per second imply another peak or another count of FLOPs"
        )
    return tuple(notes)
