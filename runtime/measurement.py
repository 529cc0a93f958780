"""From what the ranks saw to a Measurement, in the unit of the promise: steady steps, MFU of this cluster's peak."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

from planner.plan import Plan
from runtime.accounting import outcome_of, told
from runtime.environment import CONTENDED_SHARE, usable_cores, versions
from runtime.journal import Event
from runtime.pace import Pace
from runtime.request import TrainRequest
from simulator.outcome import Measurement, plain
from topologies.document import to_json, write_atomically


def measurement_from(
    plan: Plan, request: TrainRequest, report: dict[str, Any], events: list[Event] | None = None
) -> Measurement:
    """Summarise a job.

    Args:
        plan: that was run; its cluster gives the peak. An unknown peak means no MFU.
        request: what the ranks were asked.
        report: a ``runtime.train.TrainReport`` as plain data, of the last attempt.
        events: of the journal: with them all attempts are counted.
    """
    cores, world_size = usable_cores(), request.world_size
    steady = list(range(min(request.warmup_steps, len(report["losses"]) - 1), len(report["losses"])))
    if events:
        report, steady = all_attempts(report, events, request.warmup_steps)
    seconds = _chosen(report["step_seconds"], steady)
    median = statistics.median(seconds)
    pace = Pace.of(plan)
    phases = {name: statistics.fmean(_chosen(values, steady)) for name, values in report["phases_seconds"].items()}
    share = report["foreign_cpu_share"]
    environment = versions() | {
        "device": request.device,
        "cores": cores,
        "threads_per_rank": 1,
        "oversubscription": max(1.0, world_size / cores) if request.device == "cpu" else 1.0,
        "foreign_cpu_share": share,
        "contended": share is not None and share > CONTENDED_SHARE,
        "cpu_seconds_per_rank": statistics.median(_chosen(report["cpu_seconds"], steady)),
        "communication_seconds": report["communication_seconds"],
        "product_seconds": report.get("product_seconds"),
        "warmup_steps": request.warmup_steps,
        "seed": request.seed,
        "peak_memory_bytes_by_rank": report["peak_memory_bytes"],
        "baseline_memory_bytes": max(report["baseline_memory_bytes"]),
        "all_step_seconds": report["step_seconds"],
        "notes": notes(request, cores),
    }
    return Measurement(
        plan_sha256=plan.sha256(),
        world_size=world_size,
        steps=len(report["losses"]),
        step_seconds={"median": median, "p10": percentile(seconds, 10), "p90": percentile(seconds, 90)},
        mfu=pace.mfu(median),
        tokens_per_second_per_gpu=pace.tokens_per_second(median) / world_size,
        peak_memory_bytes=max(report["peak_memory_bytes"]),
        losses=report["losses"],
        phases_seconds=phases,
        environment=environment,
        run=_whole_job(request, events) if events else {},
    )


def _whole_job(request: TrainRequest, events: list[Event]) -> dict[str, Any]:
    """The books of the job, and the checkpoints that it was asked for."""
    outcome = outcome_of(events, tokens_per_step=request.job.tokens_per_step, seed=request.seed)
    asked = request.checkpoint
    saves = None if asked is None else {"interval_steps": asked.interval_steps, "mode": asked.mode}
    return told(outcome, events) | {"checkpoint": saves}


def all_attempts(report: dict[str, Any], events: list[Event], warmup_steps: int) -> tuple[dict[str, Any], list[int]]:
    """Put the steps of all attempts together, each as it ran last.

    Returns:
        The report with the lists of these steps, and the places in them of the steps that are not warm-up.
    """
    last_run: dict[int, Event] = {}
    warm: set[int] = set()
    since = 0
    for event in events:
        if event["event"] == "begin":
            since = 0
        elif event["event"] == "step":
            last_run[event["step"]] = event
            warm.discard(event["step"])
            if since < warmup_steps:
                warm.add(event["step"])
            since += 1
    steps = [last_run[step] for step in sorted(last_run)]
    names = report["phases_seconds"]
    joined = report | {
        "losses": [step["loss"] for step in steps],
        "step_seconds": [step["seconds"] for step in steps],
        "cpu_seconds": [step["cpu_seconds"] for step in steps],
        "phases_seconds": {name: [step["phases_seconds"][name] for step in steps] for name in names},
    }
    steady = [place for place, step in enumerate(steps) if step["step"] not in warm]
    return joined, steady or [len(steps) - 1]


def _chosen(values: list[float], places: list[int]) -> list[float]:
    return [values[place] for place in places]


def percentile(values: list[float], percent: float) -> float:
    """Interpolate linearly between the sorted values.

    >>> percentile([1.0, 2.0, 3.0], 50)
    2.0
    """
    ordered = sorted(values)
    place = (len(ordered) - 1) * percent / 100
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def notes(request: TrainRequest, cores: int) -> list[str]:
    """Say what a reader of the measurement should know."""
    told = ["phases are means over ranks and steady steps; communication_seconds lies inside them (one profiled step)"]
    if request.device == "cpu":
        told.append(
            "peak memory is that of the whole process; baseline_memory_bytes of it are interpreter and libraries"
        )
    if request.device == "cpu" and request.world_size > cores:
        told.append(
            f"{request.world_size} ranks share {cores} cores: times show the machine's scheduler, not the layout"
        )
    return told


def write_measurement(measurement: Measurement, path: str | Path) -> None:
    """Write a measurement file, whole or not at all."""
    write_atomically(path, to_json(plain(measurement)) + "\n")
