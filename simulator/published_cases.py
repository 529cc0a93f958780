"""From a published row to what is predicted: a cluster, a job and a layout, with every assumption on the way."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from pydantic import ValidationError

from scenarios.job import Job, TrainingPrecision
from scenarios.layout import Layout
from simulator.memory import memory_use
from simulator.published import PublishedRun
from simulator.published_hardware import cluster_of
from simulator.published_layout import layout_of
from simulator.published_model import model_of
from simulator.published_stack import gradient_precision_of, stack_of
from topologies.cluster import Cluster
from topologies.errors import InputError

PRECISIONS: dict[str, TrainingPrecision] = {
    "fp32": "fp32", "bf16": "bf16", "fp16": "fp16", "fp16/bf16": "bf16",
    "fp8": "fp8", "mxfp8": "mxfp8", "nvfp4": "nvfp4",
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A row that can be predicted."""

    run: PublishedRun
    cluster: Cluster
    job: Job
    layout: Layout
    assumptions: tuple[str, ...]
    measured_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Skipped:
    """A row that cannot, and why."""

    run: PublishedRun
    reason: str


def case_of(run: PublishedRun) -> Case:
    """Translate one row.

    Raises:
        InputError: the row is incomplete, contradicts itself, or names what is not known.
    """
    if run.measured_step_seconds is None:
        raise InputError("no step time is given", key="normalised.step_time_s")
    if run.task not in ("pretrain", "sft", "lora"):
        raise InputError(f"the task {run.task!r} is not modelled", key="task")
    try:
        return _case(run, run.measured_step_seconds)
    except (ValidationError, ValueError, TypeError, KeyError, AttributeError) as error:
        what = error.errors()[0]["msg"] if isinstance(error, ValidationError) else str(error)
        raise InputError(f"cannot be read: {what}") from None


def _case(run: PublishedRun, measured_seconds: float) -> Case:
    cluster, assumed = cluster_of(run.hardware)
    model, more = model_of(run.model)
    assumed += more
    precision = _precision(run, cluster)
    stack = stack_of(run, cluster.gpu.architecture)
    layout, batch, more = layout_of(run, model, cluster_gpus(run), bool(stack.tuned))
    assumed += more
    job = Job(
        model=model,
        seq_length=run.model["seq_len"],
        global_batch_size=batch,
        precision=precision,
        gradient_precision=gradient_precision_of(run),
        tuning="lora" if run.task == "lora" else "full",
        attention="unfused" if stack.attention_kernel == "unfused" else "flash",
        stack=stack,
    )
    if run.layout.get("recompute") is None and not stack.tuned:
        layout, why = _recompute_to_fit(cluster, job, layout)
        assumed.append(why)
    return Case(
        run=run, cluster=cluster, job=job, layout=layout, assumptions=tuple(assumed), measured_seconds=measured_seconds
    )


def cluster_gpus(run: PublishedRun) -> int:
    """GPUs that a row states."""
    return int(run.hardware["gpus"])


def _precision(run: PublishedRun, cluster: Cluster) -> TrainingPrecision:
    stated = run.precision.get("dtype")
    if stated not in PRECISIONS:
        raise InputError("is missing" if stated is None else f"{stated!r} is not known", key="precision.dtype")
    precision = PRECISIONS[stated]
    if cluster.gpu.peak(precision) is None:
        known = ", ".join(cluster.gpu.peak_flop_per_second)
        raise InputError(f"{cluster.gpu.name} has no {precision} (it has {known})", key="precision.dtype")
    return precision


def _recompute_to_fit(cluster: Cluster, job: Job, layout: Layout) -> tuple[Layout, str]:
    """Recompute is not stated: none where that fits the GPU, else full."""
    use = memory_use(cluster, job, layout)
    if use.headroom_bytes >= 0:
        return layout, "no recompute (not stated, and it fits without)"
    needed = f"{use.peak_bytes / 2**30:.0f} of {use.capacity_bytes / 2**30:.0f} GiB"
    return layout.model_copy(
        update={"recompute": "full"}
    ), f"full recompute (not stated; without it a GPU would need {needed})"


def cases(runs: Iterable[PublishedRun]) -> tuple[list[Case], list[Skipped]]:
    """Translate rows; those that cannot be predicted come back with the reason."""
    known: list[Case] = []
    skipped: list[Skipped] = []
    for run in runs:
        try:
            known.append(case_of(run))
        except InputError as error:
            skipped.append(Skipped(run=run, reason=str(error)))
    return known, skipped
