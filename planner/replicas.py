"""Replicas of one kind of GPU as templates: how long a step of one is, for every cut of the model and every pool.

All replicas of a cut hold the same layers on the same number of ranks, so their gradients meet one to one; micro-batch
size and recompute are each pool's own. The gradient ring goes at the pace of the slowest network on the way.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from planner.candidates import Candidates, legal_layouts
from planner.mixing import Template
from planner.pricing import Floats, peaks, times
from planner.question import Question
from scenarios.layout import RECOMPUTES, SHARDINGS, Layout
from scenarios.scenario import Scenario
from simulator.arrays import LayoutArrays
from simulator.step import step_seconds
from topologies.cluster import Cluster

CUT = ("tp", "cp", "pp", "ep", "etp", "sequence_parallel")
"""What all replicas have in common."""
ALIKE = {"dp": 1, "vpp": 1, "schedule": "1f1b", "optimizer_sharding": "none"}
"""Of one replica; the ring over all of them shards the optimizer states."""
FREE = ("dp", "rank_order", "stages", "optimizer_sharding")
"""Pins that say nothing about one replica."""
ZERO1 = SHARDINGS.index("zero1")


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolTemplates:
    """All ways to build a replica on one pool that fit; arrays have one entry a way."""

    layouts: LayoutArrays
    """With dp 1."""
    rings: Floats
    """Replicas over all pools that the numbers below assume: a power of two, at most as many as there can be."""
    fixed_seconds: Floats
    """Of a step, without the gradient ring."""
    microbatch_seconds: Floats
    ring_seconds: Floats
    """Of the gradient ring at this pool's network."""


def sub_cluster(cluster: Cluster, pool: int) -> Cluster:
    """A cluster of the whole size whose nodes are all of one pool: what its replicas see."""
    kind = cluster.pools[pool].model_copy(update={"num_nodes": cluster.num_nodes})
    return cluster.model_copy(update={"pools": (kind,), "node_names": ""})


def legal_replicas(scenario: Scenario, pool: int, pins: Mapping[str, Any]) -> tuple[Cluster, Candidates]:
    """The pool as a cluster of its own, and every replica that keeps the rules on it."""
    alone = scenario.cluster.model_copy(update={"pools": scenario.cluster.pools[pool : pool + 1], "node_names": ""})
    question = Question(cluster=alone, job=scenario.job, allow=scenario.allow, least_gpus=1)
    fixed = {name: value for name, value in pins.items() if name not in FREE} | ALIKE
    return alone, legal_layouts(question, fixed)


def pool_templates(scenario: Scenario, pool: int, pins: Mapping[str, Any]) -> PoolTemplates:
    """Price every legal replica of one pool: 1F1B, sharded optimizer states, uniform stages and recompute."""
    cluster, job = sub_cluster(scenario.cluster, pool), scenario.job
    alone, candidates = legal_replicas(scenario, pool, pins)
    found = candidates.layouts
    if "recompute" not in pins:
        modes = np.repeat(np.arange(len(RECOMPUTES)), len(found))
        found = replace(found.take(np.tile(np.arange(len(found)), len(RECOMPUTES))), recompute=modes)
    found = found.take(_fills_nodes(found, alone))
    rows: list[Any] = []
    rings, constants, each, ring = list[Floats](), list[Floats](), list[Floats](), list[Floats]()
    most = scenario.cluster.num_gpus // found.world_size if len(found) else np.empty(0)
    assumed = 2 ** np.floor(np.log2(np.maximum(most, 1))).astype(np.int64)
    for replicas in np.unique(assumed):
        group = np.flatnonzero(assumed == replicas)
        layouts = _with_ring(found.take(group), int(replicas))
        lcm = math.lcm(*(int(size) for size in np.unique(layouts.micro_batch_size)))
        counts = [lcm * 2 * int(layouts.pp.max()) * factor for factor in (1, 2)]
        jobs = [job.model_copy(update={"global_batch_size": int(replicas) * count}) for count in counts]
        asked = Question(cluster=cluster, job=jobs[0], allow=scenario.allow)
        fits = np.flatnonzero(peaks(asked, layouts) <= cluster.gpu.usable_memory_bytes)
        if not len(fits):
            continue
        layouts, group = layouts.take(fits), group[fits]
        short = step_seconds(cluster, jobs[0], layouts)
        long = times(Question(cluster=cluster, job=jobs[1], allow=scenario.allow), layouts)
        micro = counts[0] / layouts.micro_batch_size
        per = (long - short.total_seconds) / micro
        rows.append(group)
        rings.append(np.full(len(group), float(replicas)))
        constants.append(short.total_seconds - per * micro - short.dp_comm_seconds)
        each.append(per)
        ring.append(short.dp_comm_seconds)

    def joined(parts: list[Any]) -> Floats:
        return np.concatenate(parts) if parts else np.empty(0)

    return PoolTemplates(
        layouts=found.take(joined(rows).astype(np.int64)),
        rings=joined(rings),
        fixed_seconds=joined(constants),
        microbatch_seconds=joined(each),
        ring_seconds=joined(ring),
    )


def cuts_of(found: PoolTemplates) -> list[tuple[int, ...]]:
    """The cut of each way, as a key."""
    return list(zip(*(getattr(found.layouts, axis).tolist() for axis in CUT), strict=True))


def template(scenario: Scenario, found: PoolTemplates, row: int, pool: int, ring_seconds: float) -> Template:
    """One way as a template of the mix; ``ring_seconds`` of the slowest network."""
    size, per_node = int(found.layouts.world_size[row]), scenario.cluster.pools[pool].node.gpus_per_node
    nodes = [0] * len(scenario.cluster.pools)
    nodes[pool] = max(1, size // per_node)
    return Template(
        name=f"{pool}:{row}",
        nodes=tuple(nodes),
        replicas=max(1, per_node // size),
        fixed_seconds=float(found.fixed_seconds[row]) + ring_seconds,
        microbatch_seconds=float(found.microbatch_seconds[row]),
        micro_batch_size=int(found.layouts.micro_batch_size[row]),
        least=int(found.layouts.pp[row]),
    )


def layout_of(found: PoolTemplates, row: int, replicas: int) -> Layout:
    """The layout of one way with so many replicas over all pools."""
    layout = found.layouts.row(row)
    sharding = "zero1" if replicas * layout.cp > 1 else "none"
    return layout.model_copy(update={"dp": replicas, "optimizer_sharding": sharding})


def _fills_nodes(layouts: LayoutArrays, alone: Cluster) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """Rows whose replicas fill whole nodes, or of which several fill one."""
    per_node, size = alone.node.gpus_per_node, layouts.world_size
    plain = (layouts.recompute <= RECOMPUTES.index("full")) & (layouts.ep * layouts.etp <= layouts.tp * layouts.cp)
    return np.flatnonzero(((size % per_node == 0) | (per_node % np.maximum(size, 1) == 0)) & plain)


def _with_ring(layouts: LayoutArrays, replicas: int) -> LayoutArrays:
    dp = np.full(len(layouts), replicas)
    sharded = np.where(dp * layouts.cp > 1, ZERO1, 0)
    return replace(layouts, dp=dp, sharding=sharded)
