"""Memory and collectives of one rank of a plan of any size, traced without weights and without GPUs.

torch runs the rank's step on shapes alone in a process of its own (``runtime.traced_rank``), for two small depths of
the model; layers repeat, so that the full depth follows on a straight line. No torch in this process.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import asdict, dataclass
from typing import Any

from planner.plan import Plan
from runtime.launch import require_torch
from runtime.request import TrainRequest
from runtime.support import check_runnable
from scenarios.job import Job
from scenarios.layout import Layout
from simulator.memory import memory_use
from topologies.errors import InputError, RunFailed

DEPTHS = (3, 4)
"""The least with a layer that is neither first, nor last, nor beside the last: FSDP fetches one layer ahead."""
STATE = ("weights", "gradients", "optimizer")


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedCollective:
    """Equal collectives of one step on one axis."""

    operation: str
    axis: str
    dtype: str
    bytes: int
    """Of the whole buffer: what all ranks of the group gather or reduce together."""
    count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedMemory:
    """Rank 0 of a job: bytes by purpose, without what the allocator, NCCL and CUDA need for themselves."""

    layers: int
    traced_layers: tuple[int, ...]
    weights_bytes: float
    """fp32 parameters: weight and master copy in one."""
    gradients_bytes: float
    optimizer_bytes: float
    kept_bytes: float
    """Activations that the layers keep for their backward, of one micro-batch."""
    peak_moment: str
    """When memory is fullest: forward (loss and head included), a layer's backward, or the update."""
    peak_bytes: float
    peak_parts_bytes: dict[str, float]
    collectives: tuple[TracedCollective, ...]

    def as_json(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self)


def traced_memory(plan: Plan, *, timeout_seconds: float = 600.0) -> dict[str, Any]:
    """Trace rank 0 of a plan beside what the simulator predicts for it.

    Returns:
        ``traced_memory``, ``collectives`` and ``predicted_memory`` (of the first stage), as plain data.

    Raises:
        InputError: the runtime does not execute such a plan, or it is a pipeline.
        RunFailed: torch could not trace it.
        MissingExtra: torch is not installed.
    """
    job, layout = plan.scenario.job, plan.layout
    traced = trace_rank(job, layout, timeout_seconds=timeout_seconds).as_json()
    predicted = memory_use(plan.scenario.cluster, job, layout).as_json()["per_stage"][0]
    return {"collectives": traced.pop("collectives"), "traced_memory": traced, "predicted_memory": predicted}


def trace_rank(
    job: Job, layout: Layout, *, depths: tuple[int, ...] | None = None, timeout_seconds: float = 600.0
) -> TracedMemory:
    """Trace rank 0 of a job; ``depths`` are the layers to trace, one or two numbers.

    Raises:
        InputError: the runtime does not execute such a job, or it is a pipeline.
        RunFailed: torch could not trace it.
        MissingExtra: torch is not installed.
    """
    require_torch("tracing the memory of a rank")
    check_runnable(job, layout)
    if layout.pp > 1:
        raise InputError(
            f"the memory of a rank is traced without a pipeline, and the plan has pp {layout.pp}",
            hint="pin pp=1, or leave the trace out",
            key="layout.pp",
        )
    depths = depths or depths_of(job, layout)
    request = TrainRequest(job=job, layout=layout)
    asked = json.dumps({"request": request.model_dump(mode="json"), "depths": depths})
    try:
        done = subprocess.run(
            [sys.executable, "-P", "-m", "runtime.traced_rank"],
            input=asked,
            capture_output=True,
            text=True,
            timeout=timeout_seconds,
            env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"},
        )
    except subprocess.TimeoutExpired:
        raise RunFailed(f"the trace of {layout.label()} took longer than {timeout_seconds:g} s and was ended") from None
    if done.returncode:
        last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        raise RunFailed(f"torch could not trace a rank of {layout.label()}: {last}")
    return extrapolate(json.loads(done.stdout), job.model.num_layers, layout.num_microbatches(job))


def depths_of(job: Job, layout: Layout) -> tuple[int, ...]:
    """Two small depths where all layers are alike, else all layers."""
    layers = job.model.num_layers
    modes = layout.stages[0].modes(layout.recompute) if layout.stages else ""
    alike = len(set(job.model.pattern)) == 1 and len(set(modes)) <= 1
    return DEPTHS if alike and layers > max(DEPTHS) else (layers,)


def extrapolate(traces: list[dict[str, Any]], layers: int, num_microbatches: int) -> TracedMemory:
    """Continue the traces of one or two depths on a straight line, each moment and each purpose by itself."""
    moments = [named_moments(trace) for trace in traces]
    depths = tuple(int(trace["depth"]) for trace in traces)

    def line(values: list[float]) -> float:
        if len(values) == 1:
            return values[0]
        slope = (values[1] - values[0]) / (depths[1] - depths[0])
        return values[0] + slope * (layers - depths[0])

    peaks = {
        moment: {part: max(line([seen[moment][part] for seen in moments]), 0.0) for part in parts}
        for moment, parts in moments[0].items()
    }
    fullest = max((moment for moment in peaks if moment != "kept"), key=lambda moment: sum(peaks[moment].values()))
    state = {part: line([float(trace["state"][part]) for trace in traces]) for part in STATE}
    found = [{tuple(row[:4]): row[4:] for row in trace["collectives"]} for trace in traces]
    collectives = []
    for key in sorted({key for rows in found for key in rows}):
        one, more = (line([float(rows.get(key, (0, 0))[place]) for rows in found]) for place in (0, 1))
        count = one + (more - one) * (num_microbatches - 1)
        operation, axis, dtype, size = key
        collectives.append(
            TracedCollective(operation=operation, axis=axis, dtype=dtype, bytes=size, count=round(count))
        )
    return TracedMemory(
        layers=layers,
        traced_layers=depths,
        weights_bytes=state["weights"],
        gradients_bytes=state["gradients"],
        optimizer_bytes=state["optimizer"],
        kept_bytes=peaks["kept"]["activations"],
        peak_moment=fullest,
        peak_bytes=sum(peaks[fullest].values()),
        peak_parts_bytes=peaks[fullest],
        collectives=tuple(collectives),
    )


def named_moments(trace: dict[str, Any]) -> dict[str, dict[str, float]]:
    """Name the backward of layers by their place, so that models of different depth can be compared."""
    depth, peaks = int(trace["depth"]), trace["peaks"]
    names = {"backward of the last layer": depth - 1, "backward of the last but one": depth - 2}
    names |= {"backward of the second layer": 1, "backward of the first layer": 0}
    named = {name: f"layer {place}" for name, place in names.items()}
    named |= {"forward": "forward", "update": "update", "kept": "kept"}
    return {name: peaks[moment] for name, moment in named.items() if moment in peaks}
