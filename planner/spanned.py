"""A mix of replicas over several pools as a choice: layouts with stages, the step played, memory, and what is told."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from planner.meeting import exchange_seconds
from planner.paths import pipeline
from planner.pool_choice import Choice, of_all
from planner.replicas import sub_cluster
from planner.spanning import MODES, Shape, Spanning, spanning_mix, stage_mode, stage_pieces
from scenarios.job import Job
from scenarios.layout import Layout, Recompute, Stage
from scenarios.scenario import Scenario
from simulator.memory import memory_use
from simulator.outcome import MemoryUse, StepTime
from simulator.step import predict_step
from topologies.errors import Infeasible

GRADIENTS = "every layer is reduced in a ring over its owners; the rings of a rank share its link"


def spanned_choice(scenario: Scenario, cuts: list[Layout]) -> tuple[Choice | None, dict[str, Any]]:
    """The best mix over some cuts, and the same as plain data; without one the reason."""
    found: list[tuple[Spanning, Layout]] = []
    reasons: list[str] = []
    for cut in cuts:
        try:
            one = spanning_mix(scenario, cut)
        except Infeasible as refusal:
            reasons.append(refusal.constraint)
            continue
        if one is not None:
            found.append((one, cut))
    if not found:
        return None, {"seconds": None, "reason": "; ".join(dict.fromkeys(reasons)) or "no mix holds the batch"}
    best, cut = min(found, key=lambda each: each[0].mix.seconds)
    chosen = _choice(scenario, best, cut)
    told = {
        "seconds": best.mix.seconds,
        "played_seconds": chosen.step.total_seconds,
        "bound_seconds": best.mix.bound_seconds,
        "gap": best.mix.gap,
        "programs": best.mix.programs,
        "tp": cut.tp,
        "cp": cut.cp,
        "shares": [
            {"stages": one.template.name, "replicas": one.replicas, "num_microbatches": one.microbatches}
            for one in best.mix.shares
        ],
        "gradients": GRADIENTS,
    }
    return chosen, told


def _choice(scenario: Scenario, found: Spanning, cut: Layout) -> Choice:
    """Play the replicas with the most micro-batches of each template; the step is the slowest, then the exchange."""
    total = sum(one.replicas for one in found.mix.shares)
    names = dict.fromkeys(one.template.name for one in found.mix.shares)
    shapes = {name: _among(scenario, cut, found.shapes[name], total) for name in names}
    exchange = exchange_seconds([replace(found.members[name], pieces=shapes[name].pieces) for name in names])
    layouts: dict[str, tuple[tuple[int, ...], Layout]] = {}
    steps: list[tuple[float, StepTime]] = []
    memories: list[MemoryUse] = []
    for name in names:
        shape, most = shapes[name], max(s.microbatches for s in found.mix.shares if s.template.name == name)
        layout = _layout(cut, shape, total)
        job = scenario.job.model_copy(update={"global_batch_size": total * layout.micro_batch_size * most})
        steps.append(_step(scenario, job, layout, shape, exchange))
        memories.append(_memory(scenario, job, layout, shape))
        layouts[name] = (shape.pools, layout)
    own, step = max(steps, key=lambda one: one[1].total_seconds)
    fullest = min(memories, key=lambda one: one.headroom_bytes / one.capacity_bytes)
    return Choice(mix=found.mix, layouts=layouts, step=of_all(scenario, step, own, found.mix, layouts), memory=fullest)


def _among(scenario: Scenario, cut: Layout, shape: Shape, replicas: int) -> Shape:
    """The template where the number of replicas is known, which the search had to guess."""
    depth = len(shape.pools)
    known = {pool: stage_pieces(scenario, cut, pool, depth, replicas) for pool in dict.fromkeys(shape.pools)}
    return replace(shape, pieces=tuple(known[pool] for pool in shape.pools))


def _layout(cut: Layout, shape: Shape, total: int) -> Layout:
    depth = len(shape.layers)
    modes = [stage_mode(one, s, depth, n) for s, (one, n) in enumerate(zip(shape.pieces, shape.layers, strict=True))]
    recompute: Recompute = next((mode for mode in MODES if mode in modes), "none")
    stages = tuple(
        Stage(layers=n, recompute_layers=n if mode == "full" else 0).model_copy(
            update={"recompute": mode[0] * n if recompute == "full" and mode == "selective" else ""}
        )
        for n, mode in zip(shape.layers, modes, strict=True)
    )
    sharding = "zero1" if total * cut.cp > 1 else "none"
    changes = {"pp": depth, "dp": total, "vpp": 1, "schedule": "1f1b", "stages": stages, "recompute": recompute}
    return cut.model_copy(update=changes | {"optimizer_sharding": sharding})


def _step(scenario: Scenario, job: Job, layout: Layout, shape: Shape, exchange: float) -> tuple[float, StepTime]:
    """The step of one template: the longest path through its stages, each on its own pool, then the exchange.

    Returned after what the closed form says on the pool of the busiest stage, whose parts and band it stretches.
    """
    depth, count = layout.pp, layout.num_microbatches(job)
    rows = np.array([_forward_backward(shape, stage, layout) for stage in range(depth)])
    send, host = (max(getattr(one, name) for one in shape.pieces) if depth > 1 else 0.0 for name in ("send", "host"))
    work = rows.sum(axis=1)
    alone = shape.pieces[0].per_microbatch
    if depth > 1:
        times = np.concatenate([rows[:, 0], rows[:, 1], np.zeros(depth), [send, host]])[None]
        pipelines = float(pipeline("1f1b", depth, 1, count).longest(times)[0][0])
    else:
        pipelines = count * float(work[0] + alone)
    busiest = int(np.argmax(work))
    closed = predict_step(sub_cluster(scenario.cluster, shape.pools[busiest]), job, layout)
    slow = shape.pieces[busiest].straggler
    inner = ("compute", "tp_comm", "cp_comm", "ep_comm")
    inside = {name: getattr(closed, f"{name}_seconds") for name in inner}
    busy = count * float(work[busiest] + (alone if depth == 1 else 0.0)) / slow
    factor = busy / sum(inside.values())
    sends = count * 2 * (host + send) / slow if depth > 1 else 0.0
    optimizer = min(closed.optimizer_seconds, exchange)
    parts = {name: seconds * factor for name, seconds in inside.items()} | {
        "pp_comm": sends,
        "pp_bubble": pipelines / slow - busy - sends,
        "straggler": pipelines * (1 - 1 / slow),
        "dp_comm": exchange - optimizer,
        "optimizer": optimizer,
    }
    scaled = {name: seconds * factor for name, seconds in closed.compute_parts_seconds.items()}
    fields: dict[str, Any] = {f"{name}_seconds": seconds for name, seconds in parts.items()}
    return closed.total_seconds, replace(closed, **fields, compute_parts_seconds=scaled)


def _forward_backward(shape: Shape, stage: int, layout: Layout) -> tuple[float, float]:
    """Of a stage and micro-batch, embedding and head included."""
    one, count, depth = shape.pieces[stage], shape.layers[stage], layout.pp
    mode = MODES.index(stage_mode(one, stage, depth, count))
    first, last = stage == 0, stage == depth - 1
    forward = count * float(one.forward[mode]) + first * one.first[0] + last * one.last[0]
    return forward, count * float(one.backward[mode]) + first * one.first[1] + last * one.last[1]


def _memory(scenario: Scenario, job: Job, layout: Layout, shape: Shape) -> MemoryUse:
    """Stages as they lie on their pools, against the capacity of the pool whose own stages are fullest."""
    uses = {pool: memory_use(sub_cluster(scenario.cluster, pool), job, layout) for pool in dict.fromkeys(shape.pools)}
    stages = tuple(uses[pool].stages[stage] for stage, pool in enumerate(shape.pools))
    share = {
        pool: max(stages[s].total_bytes for s, own in enumerate(shape.pools) if own == pool) / use.capacity_bytes
        for pool, use in uses.items()
    }
    tightest = max(share, key=lambda pool: share[pool])
    mine = tuple(stage for stage, pool in zip(stages, shape.pools, strict=True) if pool == tightest)
    return replace(uses[tightest], stages=mine)
