"""What data parallelism adds: gathers and reductions of weights and gradients, and the update of the optimizer."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from scenarios.job import Job
from simulator.arrays import Floats, LayoutArrays
from simulator.compute import Rates, optimizer_seconds
from simulator.layers import ZERO1, ZERO2, ZERO3, Shares
from simulator.stages import StageTables
from simulator.traffic import Axes, Weighed, data_parallel_seconds
from simulator.weights import rank_weights, weights_of

HIDDEN_BEHIND = 0.8
"""Share of the last micro-batch behind which overlapped gradient reduction can hide (fit of published runs)."""

BUCKET, BUCKET_OF_RANK = 40e6, 1e6
"""Parameters that one reduction moves at least, and for each rank of its group (Megatron-Core's bucket size)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DataParallel:
    """Seconds of the heaviest rank."""

    fsdp: Floats
    """Exposed per micro-batch."""
    total: Floats
    """Once per step, before overlap."""
    exposed: Floats
    """Once per step."""
    reduced_bytes: Floats
    """Gradients of one rank that are reduced once per step."""
    update: Floats
    """Optimizer, with the constant per step."""
    fsdp_traffic: Floats
    """Per micro-batch, before overlap."""
    dense_weights: Floats
    """Of the heaviest rank, outside routed experts."""
    expert_weights: Floats
    reduced_width: float
    """Bytes of a gradient on its way."""
    gathered_width: float
    """Bytes of a weight on its way."""


def _update_seconds(rate: Rates, job: Job, owned: Floats, ranks_per_host: Floats) -> Floats:
    """Update on the GPU, or on the host for all of its ranks (Ren et al. 2021, ZeRO-Offload)."""
    if not rate.software.cpu_optimizer:
        return optimizer_seconds(rate, job, owned)
    return np.asarray(rate.parameters.cpu_adam.value * 1e-9 * owned * ranks_per_host)


def data_parallel(
    rate: Rates,
    axes: Axes,
    job: Job,
    layouts: LayoutArrays,
    share: Shares,
    tables: StageTables,
    microbatch: Floats,
) -> DataParallel:
    """Time the traffic of weights and gradients, and the update (Rajbhandari et al. 2020; Zhao et al. 2023, FSDP).

    none and zero1 reduce gradients once per step, zero1 and zero2 gather updated weights once; zero2 reduces every
    micro-batch (its ranks keep no more than their shard of the sum), zero3 also gathers weights for its forward and for
    its backward. Both run beside compute and slow it by a share of the shorter; ``microbatch`` is the time of one.
    """
    ranks, software, parameters = share.ranks, rate.software, rate.parameters
    dense, experts, _ = rank_weights(weights_of(job.model), tables)
    local = dense.max(axis=1)[tables.index] / ranks.tp
    local_expert = experts.max(axis=1)[tables.index] / (ranks.ep * ranks.etp)
    fp32 = job.precision == "fp32"
    gathered, reduced = software.gather_bytes, 4.0 if fp32 or job.gradient_precision == "fp32" else 2.0
    if software.lora:
        reduced = 0.0
    zero1, zero2, zero3 = layouts.sharding == ZERO1, layouts.sharding == ZERO2, layouts.sharding == ZERO3
    eager = zero2

    whole = _units(job, layouts, axes, local, local_expert, wrapped=False)
    layerwise = _units(job, layouts, axes, local, local_expert, wrapped=True)

    fsdp = each = np.zeros(len(layouts))
    if np.any(zero3 | eager):
        each = data_parallel_seconds(
            layerwise,
            gathers=np.where(zero3, 2.0, 0.0),
            gathered_bytes=gathered,
            reduced_bytes=np.full(len(layouts), reduced),
            sharded=layouts.sharding >= ZERO1,
        )
        if rate.cpu:  # FSDP copies weights around each of its collectives: two gathers and a reduction, or one of these
            copied = np.where(ranks.shards > 1, np.where(zero3, 1.0, 1.0 / 3.0), 0.0) * 4e-9 * local
            each = each + rate.fixed_seconds("dp_gigabyte") * copied
        each = np.where(zero3 | eager, each, 0.0)
        beside = software.exposed_fsdp * np.minimum(microbatch, each) + np.maximum(each - microbatch, 0.0)
        fsdp = each if rate.cpu else beside

    updated = (zero1 | zero2) & (not software.lora)
    total = data_parallel_seconds(
        whole,
        gathers=np.where(updated, 1.0, 0.0),
        gathered_bytes=gathered,
        reduced_bytes=np.where(eager, 0.0, reduced),
        sharded=layouts.sharding >= ZERO1,
    )
    total = np.where(zero3, 0.0, total)
    if rate.cpu:  # gradients are joined in a buffer, experts' in their own; zero1 also copies its slice of the weights
        joined = np.where(zero1, rate.fixed_seconds("shard_gigabyte"), rate.fixed_seconds("flat_gigabyte"))
        shared = (ranks.shards > 1) | (ranks.expert_shards > 1)
        total = total + np.where(shared & (layouts.sharding <= ZERO1), joined * 4e-9 * (local + local_expert), 0.0)
    exposed = software.exposed_dp * total
    if software.dp_overlap:
        exposed = np.maximum(exposed, total - HIDDEN_BEHIND * microbatch)

    split = layouts.sharding >= ZERO1
    owned = local / np.where(split, ranks.shards, 1.0) + local_expert / np.where(split, ranks.expert_shards, 1.0)
    if software.lora:
        owned = np.zeros(len(layouts))
    per_host = np.minimum(axes.net.gpus_per_node, layouts.world_size)
    constant = rate.fixed_seconds("step") if rate.cpu else parameters.step_constant.value
    return DataParallel(
        fsdp=fsdp,
        total=total,
        exposed=exposed,
        reduced_bytes=np.where(zero3, 0.0, (local + local_expert) * reduced),
        update=_update_seconds(rate, job, owned, per_host) + constant,
        fsdp_traffic=each,
        dense_weights=local,
        expert_weights=local_expert,
        reduced_width=reduced,
        gathered_width=gathered,
    )


def _units(
    job: Job, layouts: LayoutArrays, axes: Axes, local: Floats, local_expert: Floats, *, wrapped: bool
) -> tuple[Weighed, Weighed]:
    """Weights of one rank with what one collective moves of them: a mean layer where layers are wrapped, else a bucket.

    The same size for every rank of a pipeline, so that time is linear in the weights of a rank. Experts of a wrapped
    layer are gathered and reduced in groups of their own, beside its other weights. Where CPU cores play
    the part of GPUs, all of a rank's weights, cut into its layers: what was measured there holds costs of each.
    """
    weights, model = weights_of(job.model), job.model
    layers, pp, split = model.num_layers, layouts.pp.astype(np.float64), layouts.ep * layouts.etp
    if axes.net.cpu:
        pieces = layers / pp + 1.0 if wrapped else np.ones(len(layouts))
        units = local / pieces, local_expert / pieces
    else:
        dense = sum(weights.dense[kind] * count for kind, count in model.kind_counts.items()) / layouts.tp
        expert = sum(weights.expert[kind] * count for kind, count in model.kind_counts.items()) / split
        units = dense / layers, expert / layers
        if not wrapped:
            buckets = [np.maximum(BUCKET, BUCKET_OF_RANK * one.ranks) for one in (axes.shards, axes.expert_shards)]
            units = np.minimum(buckets[0], dense / pp), np.minimum(buckets[1], expert / pp)
    return (
        Weighed(
            local=local,
            unit=np.maximum(units[0], 1.0),
            shards=axes.shards,
            copies=axes.copies,
            beside=wrapped & (units[1] > 1.0) & (axes.expert_shards.ranks > 1),
        ),
        Weighed(
            local=local_expert,
            unit=np.maximum(units[1], 1.0),
            shards=axes.expert_shards,
            copies=axes.expert_copies,
            beside=np.zeros(len(layouts), dtype=np.bool_),
        ),
    )
