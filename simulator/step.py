"""The closed form of one optimizer step: of many layouts at once, of one layout with its basis, and stage by stage.

One layout is the array form with one row; the event-driven step takes the same numbers before they are added up.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np

from scenarios.job import Job
from scenarios.layout import Layout
from simulator.arrays import CHUNK_ROWS, LayoutArrays
from simulator.confidence import band
from simulator.evaluation import StepArrays, evaluate
from simulator.outcome import BREAKDOWN, StepTime
from simulator.parameters import Parameters, shipped_parameters
from simulator.stages import layout_tables, placement, uniform_tables
from topologies.cluster import Cluster

__all__ = ["StageCosts", "StepArrays", "predict_step", "stage_costs", "step_seconds"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StageCosts:
    """One entry per virtual stage in model order, seconds of one micro-batch.

    ``backward_seconds`` holds recompute and the weight gradient; ``weight_gradient_seconds`` is the part of it that a
    zero-bubble schedule splits off. Exposed TP, CP and EP traffic is included, FSDP traffic is not.
    """

    forward_seconds: tuple[float, ...]
    backward_seconds: tuple[float, ...]
    weight_gradient_seconds: tuple[float, ...]
    stage_ranks: tuple[int, ...]
    p2p_seconds: float
    """One transfer between neighbours."""
    p2p_exposed_share: float
    """Share of it that the closed form counts."""
    p2p_bytes: float
    fsdp_seconds: float
    """Gathers and reductions per micro-batch that compute does not hide."""
    dp_seconds: float
    """Gradient reduction and weight gathers per step, before overlap."""
    dp_exposed_seconds: float
    dp_bytes: float
    """Gradients of one rank that are reduced."""
    optimizer_seconds: float
    """With the constant per step."""
    straggler_factor: float
    """What jitter multiplies the pipeline with."""


def step_seconds(
    cluster: Cluster, job: Job, layouts: LayoutArrays, *, parameters: Parameters | None = None
) -> StepArrays:
    """Predict one step of every layout; stages by the uniform rule.

    Raises:
        InputError: the GPU lacks the job's precision.
        ValueError: the global batch does not divide in one of the rows.
    """
    parameters = parameters or shipped_parameters()
    passes = []
    for start in range(0, len(layouts), CHUNK_ROWS):
        rows = layouts.take(slice(start, start + CHUNK_ROWS)) if len(layouts) > CHUNK_ROWS else layouts
        passes.append(evaluate(cluster, job, rows, uniform_tables(job.model, rows), parameters).step)
    if len(passes) == 1:
        return passes[0]
    return StepArrays(
        **{one.name: np.concatenate([getattr(part, one.name) for part in passes]) for one in fields(StepArrays)}
    )


def predict_step(cluster: Cluster, job: Job, layout: Layout, *, parameters: Parameters | None = None) -> StepTime:
    """Predict one step of one layout, with its explicit stages if it has any.

    Raises:
        InputError: the GPU lacks the job's precision.
        ValueError: the global batch does not divide, or the stages do not hold the model.
    """
    parameters = parameters or shipped_parameters()
    result = evaluate(cluster, job, LayoutArrays.of([layout]), layout_tables(job.model, layout), parameters)
    parts = {f"{name}_seconds": float(getattr(result.step, f"{name}_seconds")[0]) for name in BREAKDOWN}
    total = sum(parts.values())
    gpus, tokens = layout.world_size, job.tokens_per_step
    model_flops = job.model.flops_per_token(job.seq_length) * tokens
    peak = cluster.gpu.peak(job.precision)
    low, high, basis = band(cluster, job, layout, result.rates, total)
    return StepTime(
        **parts,
        mfu=None if peak is None else model_flops / (total * gpus * peak),
        hfu=None if peak is None else (model_flops + _recomputed_flops(job, layout) * tokens) / (total * gpus * peak),
        tokens_per_second_per_gpu=tokens / total / gpus,
        tflops_per_gpu=model_flops / total / gpus / 1e12,
        low_seconds=low,
        high_seconds=high,
        compute_parts_seconds=result.compute_parts(),
        basis=basis,
    )


def _recomputed_flops(job: Job, layout: Layout) -> float:
    """FLOPs per token that a step repeats: the forward of the layers, or of the attention core only."""
    forward = job.model.forward_flops_per_token(job.seq_length)
    whole = sum(flops for name, flops in forward.items() if name != "head")
    letters = "".join(stage.modes(layout.recompute) for stage in layout.stages)
    if "f" in letters or any(stage.recompute for stage in layout.stages):
        repeated = whole * letters.count("f") + forward.get("attention", 0.0) * letters.count("s")
        return repeated / job.model.num_layers
    return {"none": 0.0, "selective": forward.get("attention", 0.0), "full": whole}[layout.recompute]


def stage_costs(cluster: Cluster, job: Job, layout: Layout, *, parameters: Parameters | None = None) -> StageCosts:
    """Time every virtual stage of one layout.

    Raises:
        InputError: the GPU lacks the job's precision.
        ValueError: the global batch does not divide, or the stages do not hold the model.
    """
    parameters = parameters or shipped_parameters()
    one = evaluate(cluster, job, LayoutArrays.of([layout]), layout_tables(job.model, layout), parameters)
    _, placed = placement(job.model, layout)
    forward = placed.counts @ np.array([float(times.forward_seconds[0]) for times in one.times])
    backward = placed.counts @ np.array([float(times.backward_seconds[0]) for times in one.times])
    weight = placed.counts @ np.array([float(times.weight_gradient[0]) for times in one.times])
    embedding, head = float(one.embedding[0]), float(one.head_gemm[0] + one.head_memory[0])
    forward[0] += 0.4 * embedding
    backward[0] += 0.6 * embedding
    forward[-1] += head / 3.0
    backward[-1] += head * (2.0 / 3.0)
    weight[-1] += float(one.head_gemm[0]) / 3.0
    return StageCosts(
        forward_seconds=tuple(map(float, forward)),
        backward_seconds=tuple(map(float, backward)),
        weight_gradient_seconds=tuple(map(float, weight)),
        stage_ranks=tuple(map(int, placed.ranks)),
        p2p_seconds=float(one.p2p[0]),
        p2p_exposed_share=float(one.p2p_exposed[0]),
        p2p_bytes=float(one.boundary_bytes[0]),
        fsdp_seconds=float(one.data.fsdp[0]),
        dp_seconds=float(one.data.total[0]),
        dp_exposed_seconds=float(one.data.exposed[0]),
        dp_bytes=float(one.data.reduced_bytes[0]),
        optimizer_seconds=float(one.data.update[0]),
        straggler_factor=float(one.straggler[0]),
    )
