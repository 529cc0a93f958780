"""Memory and collectives of one rank of a plan of any size, traced without weights and without GPUs.

torch runs the rank's step on shapes alone in a process of its own (``runtime.traced_rank``), for two small depths of
the model; layers repeat, so that the full depth follows on a straight line. No torch in this process.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from planner.plan import Plan
from runtime.launch import require_torch
from runtime.ranks import StageShare, rank_at, shares, stages_of
from runtime.request import TrainRequest
from runtime.support import check_runnable
from scenarios.job import Job
from scenarios.layout import Layout
from scenarios.model import Moe
from scenarios.stack import Stack
from simulator.memory import memory_use
from simulator.outcome import StageMemory
from topologies.errors import InputError, RunFailed

DEPTHS = (3, 4)
"""The least with a layer that is neither first, nor last, nor beside the last: FSDP fetches one layer ahead."""
SPLIT_BACKWARD = ("zb-h1", "zbv", "dualpipe")
"""Schedules that keep activations for weight gradients that come later."""
BALANCED = "balanced routing: every expert gets tokens x top_k / experts of them; only weights know who gets more"
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
    """One rank of a job: bytes by purpose, without what the allocator, NCCL and CUDA need for themselves."""

    layers: int
    """Of each stage on the rank."""
    traced_layers: tuple[int, ...]
    weights_bytes: float
    """fp32 parameters: weight and master copy in one."""
    gradients_bytes: float
    optimizer_bytes: float
    kept_bytes: float
    """Activations that the layers keep for their backward, of all micro-batches that are alive at once."""
    peak_moment: str
    """When memory is fullest: forward (loss and head included), a layer's backward, or the update."""
    peak_bytes: float
    peak_parts_bytes: dict[str, float]
    collectives: tuple[TracedCollective, ...]

    def as_json(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self)


def traced_memory(plan: Plan, *, timeout_seconds: float = 600.0) -> dict[str, Any]:
    """Trace the rank of a plan that is predicted to be fullest, beside what the simulator predicts for it.

    Returns:
        ``rank`` and ``pipeline_rank``, ``traced_memory``, ``collectives``, ``predicted_memory`` of its stage under this
        runtime, ``promised_memory`` under the plan's own software stack, ``memory``: all by part, and what is
        ``assumed`` of the routing of tokens to experts (None: there are none).

    Raises:
        InputError: the runtime does not execute such a plan, or it cannot be traced.
        RunFailed: torch could not trace it.
        MissingExtra: torch is not installed.
    """
    job, layout, cluster = plan.scenario.job, plan.layout, plan.scenario.cluster
    here = job.model_copy(update={"stack": Stack(trainer="headway")})
    stages = memory_use(cluster, here, layout).stages
    fullest = max(range(len(stages)), key=lambda stage: stages[stage].total_bytes)
    promised = memory_use(cluster, job, layout).stages[fullest]
    traced = trace_rank(job, layout, pipeline_rank=fullest, timeout_seconds=timeout_seconds)
    told = traced.as_json()
    return {
        "rank": rank_at(layout, pp=fullest),
        "pipeline_rank": fullest,
        "collectives": told.pop("collectives"),
        "traced_memory": told,
        "predicted_memory": asdict(stages[fullest]) | {"total_bytes": stages[fullest].total_bytes},
        "promised_memory": asdict(promised) | {"total_bytes": promised.total_bytes},
        "memory": beside(traced, stages[fullest], promised),
        "assumed": BALANCED if any(isinstance(layer.feed_forward, Moe) for layer in job.model.layers) else None,
    }


def beside(traced: TracedMemory, predicted: StageMemory, promised: StageMemory) -> list[dict[str, Any]]:
    """Traced and predicted bytes at the peak by part, in the largest parts that all count alike.

    The last part holds gathered and cast weights too. The reserve, which no tracer sees, is left out. ``error`` is
    predicted over traced, less one.
    """
    parts = traced.peak_parts_bytes
    seen = {
        "weights and optimizer": parts["weights"] + parts["optimizer"],
        "gradients": parts["gradients"],
        "activations, copies, buffers": sum(
            parts[part] for part in ("activations", "weight_copies", "temporaries", "buffers")
        ),
    }
    told = [seen, *(_in_parts(one, tuple(seen)) for one in (predicted, promised))]
    for one in told:
        one["peak without reserve"] = sum(one.values())
    return [
        {
            "part": part,
            "traced_bytes": size,
            "predicted_bytes": told[1][part],
            "promised_bytes": told[2][part],
            "error": told[1][part] / size - 1 if size else None,
        }
        for part, size in seen.items()
    ]


def _in_parts(memory: StageMemory, names: tuple[str, ...]) -> dict[str, float]:
    rest = memory.activations_bytes + memory.logits_bytes + memory.buffers_bytes
    return dict(zip(names, (memory.weights_bytes + memory.optimizer_bytes, memory.gradients_bytes, rest), strict=True))


def trace_rank(
    job: Job,
    layout: Layout,
    *,
    pipeline_rank: int = 0,
    depths: tuple[int, ...] | None = None,
    timeout_seconds: float = 600.0,
) -> TracedMemory:
    """Trace the first rank of a pipeline rank.

    Args:
        job: what is trained.
        layout: of any size.
        pipeline_rank: whose stages are traced.
        depths: layers of each stage to trace, one or two numbers.
        timeout_seconds: after this the trace is ended.

    Raises:
        InputError: the runtime does not execute such a job, or its schedule splits the backward pass.
        RunFailed: torch could not trace it.
        MissingExtra: torch is not installed.
    """
    require_torch("tracing the memory of a rank")
    check_runnable(job, layout)
    if layout.pp > 1 and layout.schedule in SPLIT_BACKWARD:
        raise InputError(
            f"the memory of a rank cannot be traced under {layout.schedule}, which splits the backward pass",
            hint="pin schedule=1f1b, or leave the trace out with --no-trace",
            key="layout.schedule",
        )
    depths = depths or depths_of(job, layout, pipeline_rank)
    request = TrainRequest(job=job, layout=layout)
    asked = {"request": request.model_dump(mode="json"), "depths": depths, "pipeline_rank": pipeline_rank}
    try:
        done = subprocess.run(
            [sys.executable, "-P", "-m", "runtime.traced_rank"],
            input=json.dumps(asked),
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
    layers = max(share.last - share.first for share in held_shares(job, layout, pipeline_rank))
    return extrapolate(json.loads(done.stdout), layers, layout.num_microbatches(job))


def held_shares(job: Job, layout: Layout, pipeline_rank: int) -> list[StageShare]:
    """The parts of the model on a pipeline rank."""
    divided = shares(job.model, layout)
    return [divided[index] for index in stages_of(layout, pipeline_rank)]


def depths_of(job: Job, layout: Layout, pipeline_rank: int = 0) -> tuple[int, ...]:
    """Two small depths where all layers of the rank are alike, else all layers (0)."""
    held = held_shares(job, layout, pipeline_rank)
    kinds = {kind for share in held for kind in job.model.pattern[share.first : share.last]}
    sizes = {share.last - share.first for share in held}
    stages = [layout.stages[share.index] for share in held] if layout.stages else []
    modes = {mode for stage in stages for mode in stage.modes(layout.recompute)}
    alike = len(kinds) == 1 and len(sizes) == 1 and len(modes) <= 1
    return DEPTHS if alike and min(sizes) > max(DEPTHS) else (0,)


def extrapolate(traces: list[dict[str, Any]], layers: int, num_microbatches: int) -> TracedMemory:
    """Continue the traces of one or two depths on a straight line, each moment and each purpose by itself.

    Args:
        traces: of ``runtime.traced_rank``.
        layers: of each stage.
        num_microbatches: of a step.
    """
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
        collectives=_collectives(traces, line, num_microbatches),
    )


def _collectives(
    traces: list[dict[str, Any]], line: Callable[[list[float]], float], num_microbatches: int
) -> tuple[TracedCollective, ...]:
    few, many = traces[0]["num_microbatches"]
    collectives = []
    for rows in paired([{tuple(row[:4]): tuple(row[4:]) for row in trace["collectives"]} for trace in traces]):
        one, more = (line([float(counts[place]) for _, counts in rows]) for place in (0, 1))
        each = (more - one) / (many - few) if many > few else 0.0
        operation, axis, dtype, _ = rows[0][0]
        size = round(line([float(key[3]) for key, _ in rows]))
        count = round(one + each * (num_microbatches - few))
        if count:
            collectives.append(TracedCollective(operation=operation, axis=axis, dtype=dtype, bytes=size, count=count))
    return tuple(sorted(collectives, key=lambda one: (one.operation, one.axis, one.dtype, one.bytes)))


Row = tuple[tuple[str, str, str, int], tuple[int, int]]
"""Operation, axis, dtype and bytes of a collective, and how often it occurs with few and with many micro-batches."""


def paired(found: list[dict[tuple[Any, ...], tuple[int, int]]]) -> list[list[Row]]:
    """Find the same collective in the traces of all depths: of equal size, or (one buffer of all layers) growing.

    >>> small, large = {("all_reduce", "dp", "float32", 30): (1, 1)}, {("all_reduce", "dp", "float32", 40): (1, 1)}
    >>> [[key[3] for key, _ in rows] for rows in paired([small, large])]
    [[30, 40]]
    """
    if len(found) == 1:
        return [[row] for row in found[0].items()]
    small, large = found
    same: list[list[Row]] = [[(key, small[key]), (key, large[key])] for key in small if key in large]
    left = [
        sorted(row for row in one.items() if row[0] not in other) for one, other in ((small, large), (large, small))
    ]
    for row in left[0]:
        grown = next((one for one in left[1] if one[0][:3] == row[0][:3] and one[1] == row[1]), None)
        if grown is None:
            same.append([row, (row[0], (0, 0))])
        else:
            left[1].remove(grown)
            same.append([row, grown])
    return same + [[(row[0], (0, 0)), row] for row in left[1]]


def named_moments(trace: dict[str, Any]) -> dict[str, dict[str, float]]:
    """Name the backward of layers by their place, so that models of different depth can be compared."""
    depth, peaks = int(trace["depth"]), trace["peaks"]
    names = {"backward of the last layer": depth - 1, "backward of the last but one": depth - 2}
    names |= {"backward of the second layer": 1, "backward of the first layer": 0}
    named = {name: f"layer {place}" for name, place in names.items()}
    named |= {name: name for name in ("forward", "backward", "update", "kept")}
    return {name: peaks[moment] for name, moment in named.items() if moment in peaks}
