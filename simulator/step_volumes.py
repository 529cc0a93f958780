"""What the traffic of a step would take with every link to itself: seconds before overlap, exposed seconds, bytes.

The same formulas as the closed form, on a fabric whose levels are not oversubscribed: what the links of the real fabric
make of it is for the network to say.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from scenarios.job import Job
from scenarios.layout import Layout
from scenarios.model import Moe
from simulator.arrays import LayoutArrays
from simulator.evaluation import Evaluation, evaluate
from simulator.links import links, local_ranks
from simulator.parameters import shipped_parameters
from simulator.stages import layout_tables
from simulator.traffic import reached_share
from topologies.cluster import Cluster

INNER = ("tp_comm", "cp_comm", "ep_comm")
"""Traffic inside an op, in the order in which it is drawn."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InnerTraffic:
    """Traffic of one kind inside the ops of a rank, as shares of an op's work."""

    seconds_share: float
    """Seconds of traffic for each second of work; no more than 1."""
    bytes_per_second: float
    """Buffer bytes for each second of work."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepVolumes:
    """Traffic of the heaviest rank."""

    inner: dict[str, InnerTraffic]
    """By kind; kinds without traffic are left out."""
    ep_reached: float
    """Share of the bytes for other domains that leaves a GPU."""
    fsdp_seconds: float
    """Of weight shards and gradients per micro-batch."""
    fsdp_forward_share: float
    """Part of it that is in a forward: one of the two gathers; gradients are reduced in the backward."""
    reduce_seconds: float
    """Gradients, once per step."""
    gather_seconds: float
    """Updated weights, once per step."""
    dense_weights: float
    expert_weights: float
    reduced_width: float
    gathered_width: float
    reduce_passes: float
    """Times around the ring: 1 for a reduce-scatter, 2 for an all-reduce."""


def without_taper(cluster: Cluster) -> Cluster:
    """Return the cluster with no level of its fabric oversubscribed."""
    tiers = tuple(tier.model_copy(update={"oversubscription": 1.0}) for tier in cluster.fabric.tiers)
    return cluster.model_copy(update={"fabric": cluster.fabric.model_copy(update={"tiers": tiers})})


def step_volumes(cluster: Cluster, job: Job, layout: Layout) -> StepVolumes:
    """Measure the traffic of one step.

    Raises:
        InputError: the GPU lacks the job's precision.
        ValueError: the global batch does not divide, or the stages do not hold the model.
    """
    found = evaluate(cluster, job, LayoutArrays.of([layout]), layout_tables(job.model, layout), shipped_parameters())
    data = found.data
    sharded = layout.optimizer_sharding != "none"
    passes = 1.0 if sharded else 2.0
    once = layout.optimizer_sharding in ("none", "zero1")
    reduced = float(data.reduced_bytes[0]) > 0 and once
    gathered = layout.optimizer_sharding in ("zero1", "zero2") and float(data.total[0]) > 0
    fetched = data.gathered_width * (layout.optimizer_sharding == "zero3")
    part = (passes * data.reduced_width * reduced, data.gathered_width * gathered)
    total = float(data.total[0]) / max(sum(part), 1e-300)
    return StepVolumes(
        inner=_inner(found),
        ep_reached=_reached(cluster, job, found),
        fsdp_seconds=float(data.fsdp_traffic[0]),
        fsdp_forward_share=fetched / (2 * fetched + data.reduced_width),
        reduce_seconds=total * part[0],
        gather_seconds=total * part[1],
        dense_weights=float(data.dense_weights[0]),
        expert_weights=float(data.expert_weights[0]),
        reduced_width=data.reduced_width,
        gathered_width=data.gathered_width,
        reduce_passes=passes,
    )


def _reached(cluster: Cluster, job: Job, found: Evaluation) -> float:
    net, ranks = links(cluster, shipped_parameters()), found.share.ranks
    domains = ranks.ep / local_ranks(net, ranks.ep, ranks.ep_stride)
    top_k = max(
        (layer.feed_forward.top_k for layer in job.model.layer_kinds.values() if isinstance(layer.feed_forward, Moe)),
        default=1,
    )
    return float(reached_share(domains, top_k, found.rates.software.deduplicates)[0])


def _inner(found: Evaluation) -> dict[str, InnerTraffic]:
    step, counts = found.step, found.slowest[0]
    micro = float(found.share.num_microbatches[0])
    inside = float(step.compute_seconds[0] + sum(getattr(step, f"{kind}_seconds")[0] for kind in INNER)) / micro
    result = {}
    for kind in INNER:
        axis = kind.removesuffix("_comm")

        def summed(what: str, axis: str = axis) -> float:
            parts = [float(getattr(one, f"{axis}_{what}")[0]) for one in found.times]
            return float(np.dot(counts[: len(parts)], parts))

        seconds, moved = summed("traffic"), summed("bytes")
        if seconds > 0 and moved > 0:
            result[kind] = InnerTraffic(seconds_share=min(seconds / inside, 1.0), bytes_per_second=moved / inside)
    return result
