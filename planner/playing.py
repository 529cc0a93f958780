"""The step of one layout as its pipeline runs it: the longest path through all ops, as if played event by event."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from planner.paths import MAX_OPS, num_ops
from scenarios.job import Job
from scenarios.layout import Layout
from simulator.outcome import BREAKDOWN, StepTime
from simulator.step import predict_step
from simulator.step_path import longest_step
from topologies.cluster import Cluster

ROUNDS = 3
"""Rounds of pp micro-batches that are walked of a step with too many ops; what follows repeats the last of them."""


def played_step(cluster: Cluster, job: Job, layout: Layout) -> StepTime:
    """Predict a step by the longest path through its pipeline; without a pipeline the closed form is exact.

    Raises:
        ValueError: the global batch does not divide, or the stages do not hold the model.
    """
    closed = predict_step(cluster, job, layout)
    if layout.pp == 1:
        return closed
    count = layout.num_microbatches(job)
    if num_ops(layout.pp, layout.vpp, count, layout.schedule) <= MAX_OPS or count <= (ROUNDS + 1) * layout.pp:
        return _retold(closed, longest_step(cluster, job, layout)[0])
    most = ROUNDS * layout.pp + count % layout.pp
    long, short = (_part(cluster, job, layout, walked) for walked in (most, most - layout.pp))
    rounds = (count - most) / layout.pp
    return _retold(closed, {part: long[part] + rounds * (long[part] - short[part]) for part in BREAKDOWN})


def _part(cluster: Cluster, job: Job, layout: Layout, num_microbatches: int) -> dict[str, float]:
    sequences = num_microbatches * layout.dp * layout.micro_batch_size
    return longest_step(cluster, job.model_copy(update={"global_batch_size": sequences}), layout)[0]


def _retold(closed: StepTime, parts: dict[str, float]) -> StepTime:
    """The closed form's step with the played parts; rates, band and compute parts follow."""
    total = sum(parts.values())
    factor = total / closed.total_seconds
    compute = parts["compute"] / closed.compute_seconds if closed.compute_seconds > 0 else 1.0
    fields: dict[str, Any] = {f"{part}_seconds": parts[part] for part in BREAKDOWN}
    return replace(
        closed,
        **fields,
        mfu=None if closed.mfu is None else closed.mfu / factor,
        hfu=None if closed.hfu is None else closed.hfu / factor,
        tokens_per_second_per_gpu=closed.tokens_per_second_per_gpu / factor,
        tflops_per_gpu=closed.tflops_per_gpu / factor,
        low_seconds=closed.low_seconds * factor,
        high_seconds=closed.high_seconds * factor,
        compute_parts_seconds={name: part * compute for name, part in closed.compute_parts_seconds.items()},
    )
