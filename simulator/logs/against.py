"""A log held against a plan: its step in the plan's terms, what contradicts the plan, and what the log leaves open."""

from __future__ import annotations

import re
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from scenarios.job import Job
from scenarios.layout import Layout
from simulator.logs.flop_counts import HEADWAYS, recognise_count
from simulator.logs.trainer_log import StepRecord, TrainerLog, quantiles
from topologies.cluster import Cluster
from topologies.errors import InputError

HIGHEST_MFU = 0.75
"""No published training run reaches more of the dense peak with dense matrix products."""
PARAMETER_TOLERANCE = 0.03
PADDING_TOLERANCE = 0.01
CLOCK_TOLERANCE = 0.1

_PRODUCT = re.compile(r"[A-Z]{1,2}\d{1,4}[A-Z]?")


@dataclass(frozen=True, slots=True, kw_only=True)
class LoggedRun:
    """A log in the terms of a job and a layout."""

    step_seconds: float
    """Median of the steady iterations, or of all where there is none and that was accepted."""
    step_seconds_p10: float
    step_seconds_p90: float
    tokens_per_second_per_gpu: float
    tflops_per_gpu: float
    """Model TFLOP/s in headway's count, not the log's."""
    mfu: float | None
    """Of headway's count over the cluster's dense peak; None: the peak is unknown, or it cannot be that of the run."""
    memory_bytes: float | None
    reported_tflops_per_gpu: float | None
    flop_count: str | None
    """What the log's own TFLOP/s count, where the figure shows it."""
    contradictions: tuple[str, ...]
    """What the log states otherwise than the plan: the two are not the same run."""
    notes: tuple[str, ...]


def choose_run(logs: Sequence[TrainerLog], cluster: Cluster, job: Job, layout: Layout, file: str | Path) -> TrainerLog:
    """Return the run of a file that the plan describes: the only one, or the only one that does not contradict it.

    Raises:
        InputError: the file holds several runs, and none or several of them fit.
    """
    if len(logs) == 1:
        return logs[0]
    fitting = [log for log in logs if not contradictions(log, cluster, job, layout)]
    if len(fitting) == 1:
        return fitting[0]
    names = ", ".join(log.run or f"run {index}" for index, log in enumerate(logs, 1))
    count = "none of them fits" if not fitting else f"{len(fitting)} of them fit"
    raise InputError(
        f"holds {len(logs)} runs ({names}), and {count} the plan's {layout.world_size} GPUs, batch of "
        f"{job.global_batch_size} and {job.seq_length} tokens",
        hint="give a file with the one run of this plan",
        file=file,
    )


def hold_against(
    log: TrainerLog,
    cluster: Cluster,
    job: Job,
    layout: Layout,
    *,
    accept_unsteady: bool = False,
    file: str | Path | None = None,
) -> LoggedRun:
    """Express a log in the terms of a job and a layout; what the log does not state is taken from them and said.

    Args:
        log: of one run.
        cluster: whose GPU gives the peak.
        job: that was planned.
        layout: that was planned.
        accept_unsteady: use all iterations where none is steady.
        file: for messages.

    Raises:
        InputError: the log has no steady iteration.
    """
    records = log.steady or (log.steps if accept_unsteady else ())
    gpus = log.gpus or layout.world_size
    timed = [seconds for one in records if (seconds := _step_seconds(one, log, job, gpus))]
    if not timed:
        raise InputError(
            f"the {log.format} log has no steady iteration: a first one compiles, autotunes or captures graphs",
            hint="give a log with more iterations (headway compare --force takes it as it is)",
            file=file,
        )
    seconds = statistics.median(timed)
    low, high = quantiles(timed) or (seconds, seconds)
    tokens_per_sample = log.seq_length or log.tokens_per_sample or job.seq_length
    rate = log.tokens_per_second_per_gpu or (log.global_batch_size or job.global_batch_size) * tokens_per_sample / (
        seconds * gpus
    )
    achieved = rate * job.model.flops_per_token(log.seq_length or job.seq_length)
    peak = cluster.gpu.peak(job.precision)
    other = contradictions(log, cluster, job, layout)
    mfu = achieved / peak if peak else None
    count = None if other else _count(log, job, rate)
    return LoggedRun(
        step_seconds=seconds,
        step_seconds_p10=low,
        step_seconds_p90=high,
        tokens_per_second_per_gpu=rate,
        tflops_per_gpu=achieved / 1e12,
        mfu=None if mfu is not None and (mfu > 1 or _other_machine(other)) else mfu,
        memory_bytes=log.peak_memory_bytes,
        reported_tflops_per_gpu=log.tflops_per_gpu,
        flop_count=count,
        contradictions=tuple(other),
        notes=tuple(_notes(log, job, layout, mfu, count, seconds, same_run=not other)),
    )


def _step_seconds(record: StepRecord, log: TrainerLog, job: Job, gpus: int) -> float | None:
    """Printed seconds, else the plan's tokens or samples at the printed rate, else the clock's difference."""
    if record.seconds and not log.timed_by_clock:
        return record.seconds
    if record.tokens_per_second_per_gpu:
        tokens = log.tokens_per_step or record.tokens or job.tokens_per_step
        return tokens / (record.tokens_per_second_per_gpu * gpus)
    if record.samples_per_second:
        return (log.global_batch_size or job.global_batch_size) / record.samples_per_second
    return record.seconds


def contradictions(log: TrainerLog, cluster: Cluster, job: Job, layout: Layout) -> list[str]:
    """Say what the log states otherwise than the plan."""
    told = []

    def check(what: str, logged: float | None, planned: float) -> None:
        if logged is not None and logged != planned:
            told.append(f"{what}: {logged:,g} in the log, {planned:,g} in the plan")

    check("GPUs", log.gpus, layout.world_size)
    check("global batch", log.global_batch_size, job.global_batch_size)
    check("sequence length", log.seq_length, job.seq_length)
    check("micro-batch", log.micro_batch_size, layout.micro_batch_size)
    for name, value in log.layout.items():
        if name != "dp" or log.gpus is None:
            check(name, value, getattr(layout, name))
    planned = job.model.num_params
    if log.num_params and abs(log.num_params / planned - 1) > PARAMETER_TOLERANCE:
        told.append(f"parameters: {log.num_params / 1e9:,.3g} B in the log, {planned / 1e9:,.3g} B in the plan")
    product = _PRODUCT.search((log.device or "").upper())
    if product and product[0] not in cluster.gpu.name.upper():
        told.append(f"GPU: {log.device} in the log, {cluster.gpu.name} in the plan")
    return told


def _other_machine(contradictions: Sequence[str]) -> bool:
    """Tell whether GPU or model contradict: then neither peak nor FLOPs are those of the log."""
    return any(one.startswith(("GPU:", "parameters:")) for one in contradictions)


def _count(log: TrainerLog, job: Job, rate: float) -> str | None:
    if not log.tflops_per_gpu:
        return None
    return recognise_count(log.tflops_per_gpu * 1e12 / rate, job.model, log.seq_length or job.seq_length)


def _notes(
    log: TrainerLog, job: Job, layout: Layout, mfu: float | None, count: str | None, seconds: float, *, same_run: bool
) -> list[str]:
    notes = list(log.warnings)
    open_ = [
        f"{name} ({planned:,})"
        for name, logged, planned in (
            ("GPUs", log.gpus, layout.world_size),
            ("global batch", log.global_batch_size, job.global_batch_size),
            ("sequence length", log.seq_length, job.seq_length),
        )
        if logged is None
    ]
    if open_:
        notes.append(f"the log does not state {', '.join(open_)}: taken from the plan")
    padded = log.tokens_per_sample
    if padded and abs(padded / job.seq_length - 1) > PADDING_TOLERANCE:
        notes.append(f"a sample holds {padded:,.0f} tokens on average, the plan counts {job.seq_length:,}")
    if log.timed_by_clock and log.step_seconds and abs(log.step_seconds / seconds - 1) > CLOCK_TOLERANCE:
        notes.append(
            f"lines are {log.step_seconds:.3g} s per step apart, the printed rate gives {seconds:.3g} s: batch, "
            "sequence or GPUs are not those of the plan, or the job waits between steps"
        )
    if same_run and mfu is not None and mfu > HIGHEST_MFU:
        notes.append(f"this would be {100 * mfu:.0f} % of the dense peak: another precision, GPU or batch than planned")
    if same_run and log.tflops_per_gpu:
        told = f"the log prints {log.tflops_per_gpu:,.5g} TFLOP/s per GPU"
        if count is None:
            notes.append(f"{told}, which fits no count of FLOPs of this model at these sizes")
        elif count != HEADWAYS:
            notes.append(f"{told}: {count}")
    if log.memory_kind == "allocated":
        notes.append("the log's memory is what was allocated, without what the allocator reserves beyond")
    return notes
