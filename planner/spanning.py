"""Replicas whose pipeline reaches over two pools: stages on fast and slow GPUs, each with as many layers as it can run.

A template has some stages on one kind of GPU, the rest on another, fast or slow ones first; its layers are split so
that the slowest stage is as fast as memory allows, each stage with the recompute it needs. Seconds and bytes of a layer
come from the simulator; a step of m micro-batches is (m - 1) times the slowest stage plus one pass through all of them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from planner.meeting import Member, fastest_meeting
from planner.mixing import Mix, Template
from planner.replicas import sub_cluster
from scenarios.layout import Layout, Recompute
from scenarios.scenario import Scenario
from simulator.pieces import Pieces, pieces
from topologies.errors import Infeasible

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

MODES: tuple[Recompute, ...] = ("full", "selective", "none")
DEEPEST = 32
"""Stages of a template at most."""


@dataclass(frozen=True, slots=True)
class Split:
    """Layers of each stage, and the time of the slowest one and of a pass through all."""

    layers: tuple[int, ...]
    slowest: float
    through: float


@dataclass(frozen=True, slots=True)
class Shape:
    """How a template is cut: layers, pool and pieces of each stage."""

    layers: tuple[int, ...]
    pools: tuple[int, ...]
    pieces: tuple[Pieces, ...]


@dataclass(frozen=True, slots=True)
class Spanning:
    """The fastest mix, and what its replicas look like."""

    mix: Mix
    shapes: dict[str, Shape]
    members: dict[str, Member]


def spanning_mix(scenario: Scenario, cut: Layout) -> Spanning | None:
    """The fastest mix of replicas of any depth over one or two pools, with the degrees of a layout inside a stage.

    Their gradients meet layer by layer (``planner.meeting``).

    Raises:
        Infeasible: the model has layers of several kinds, or there are not two pools.
    """
    cluster = scenario.cluster
    if len(cluster.pools) != 2 or len(scenario.model.kind_counts) != 1:
        raise Infeasible("replicas over several pools are mixed for models of equal layers on two pools")
    pools = tuple(pool.num_nodes for pool in cluster.pools)
    per_stage = [cut.tp * cut.cp / pool.node.gpus_per_node for pool in cluster.pools]
    if any(share != int(share) for share in per_stage):
        raise Infeasible(
            "a stage of a replica over several pools fills whole nodes", relax=("tp x cp of a node's GPUs",)
        )
    known: dict[tuple[int, int], Pieces] = {}

    def of(pool: int, depth: int) -> Pieces:
        if (pool, depth) not in known:
            known[pool, depth] = stage_pieces(scenario, cut, pool, depth)
        return known[pool, depth]

    shapes: dict[str, Shape] = {}
    templates, members, layers = [], dict[str, Member](), np.arange(scenario.model.num_layers + 1)
    for depth in range(1, min(DEEPEST, scenario.model.num_layers) + 1):
        seconds = [
            np.array([stage_seconds(of(pool, depth), stage, depth, layers) for stage in range(depth)])
            for pool in range(2)
        ]
        for fast in range(depth + 1):
            slow_first = np.arange(depth) >= depth - fast
            fast_first = np.arange(depth) < fast
            orders = (fast_first,) if fast in (0, depth) else (fast_first, slow_first)
            splits = [(best_split(np.where(on_fast[:, None], *seconds)), on_fast) for on_fast in orders]
            found = [(one, on_fast) for one, on_fast in splits if one is not None]
            if not found:
                continue
            best, on_fast = min(found, key=lambda one: (one[0].slowest, one[0].through))
            name, pieces_of = f"{fast}+{depth - fast}", [(0, fast), (1, depth - fast)]
            members[name] = Member(
                layers=best.layers,
                slowest=best.slowest,
                pieces=tuple(of(pool, depth) for pool, count in pieces_of if count),
            )
            stage_pools = tuple(0 if fast_one else 1 for fast_one in on_fast)
            shapes[name] = Shape(best.layers, stage_pools, tuple(of(pool, depth) for pool in stage_pools))
            templates.append(
                Template(
                    name=name,
                    nodes=(int(fast * per_stage[0]), int((depth - fast) * per_stage[1])),
                    replicas=1,
                    fixed_seconds=best.through - best.slowest,
                    microbatch_seconds=best.slowest,
                    micro_batch_size=cut.micro_batch_size,
                    least=depth,
                )
            )
    mix = fastest_meeting(templates, members, pools, scenario.job.global_batch_size)
    return None if mix is None else Spanning(mix, shapes, members)


def stage_pieces(scenario: Scenario, cut: Layout, pool: int, depth: int, replicas: int | None = None) -> Pieces:
    """One layer on one kind of GPU, as a stage of a pipeline of so many stages.

    Before the number of replicas is known, it is taken as a power of two that the cluster may hold.
    """
    ring = replicas or 2 ** int(math.log2(max(1, scenario.cluster.num_gpus // (cut.tp * cut.cp * depth))))
    sharding = "zero1" if ring * cut.cp > 1 else "none"
    changes = {"pp": depth, "dp": ring, "stages": (), "recompute": "none", "optimizer_sharding": sharding, "vpp": 1}
    job = scenario.job.model_copy(update={"global_batch_size": ring * cut.micro_batch_size * 2 * depth})
    return pieces(sub_cluster(scenario.cluster, pool), job, cut.model_copy(update=changes), MODES)


def best_split(seconds: Floats) -> Split | None:
    """Layers of every stage so that the slowest is as fast as can be; None where the model does not fit.

    The slowest stage takes one of the times that some stage takes for some number of layers; the smallest of them at
    which all stages together hold the model is found by bisection.

    Args:
        seconds: of each stage (rows) for 0, 1, 2 ... layers, up to all of them; infinite where they do not fit.
    """
    depth, total = seconds.shape[0], seconds.shape[1] - 1
    times = np.unique(seconds[np.isfinite(seconds)])
    if not len(times):
        return None

    def most(limit: float) -> Ints:
        fits = seconds <= limit * (1 + 1e-12)
        return np.where(fits.any(axis=1), total - np.argmax(fits[:, ::-1], axis=1), -1)

    low, high = 0, len(times) - 1
    held = most(times[high])
    if held.min() < 0 or held.sum() < total:
        return None
    while low < high:
        middle = (low + high) // 2
        held = most(times[middle])
        low, high = (low, middle) if held.min() >= 0 and held.sum() >= total else (middle + 1, high)
    layers = most(times[low])
    while layers.sum() > total:  # what is too much goes where it saves most
        saved = np.array([seconds[s, n] - seconds[s, n - 1] if n > 0 else -1.0 for s, n in enumerate(layers)])
        layers[int(np.argmax(saved))] -= 1
    own = seconds[np.arange(depth), layers]
    return Split(tuple(int(n) for n in layers), float(own.max()), float(own.sum()))


def stage_seconds(one: Pieces, stage: int, depth: int, layers: Ints) -> Floats:
    """Forward and backward of a micro-batch with the cheapest recompute that fits, for some numbers of layers."""
    return np.asarray(_by_mode(one, stage, depth, layers).min(axis=1))


def stage_mode(one: Pieces, stage: int, depth: int, layers: int) -> Recompute:
    """That recompute."""
    return MODES[int(np.argmin(_by_mode(one, stage, depth, np.array([layers]))[0]))]


def _by_mode(one: Pieces, stage: int, depth: int, layers: Ints) -> Floats:
    first, last = stage == 0, stage == depth - 1
    fixed = (sum(one.first) if first else 0.0) + (sum(one.last[:2]) if last else 0.0)
    fixed += 2 * (one.host + one.send) if depth > 1 else one.per_microbatch
    ends = one.both_bytes if first and last else one.first_bytes if first else one.last_bytes if last else 0.0
    each = one.held + (depth - stage) * one.saved
    needed = one.base_bytes + ends + np.outer(layers, each) + np.where(layers[:, None] > 0, one.again, 0.0)
    times = fixed + np.outer(layers, one.forward + one.backward)
    return np.asarray(np.where(needed <= one.capacity_bytes, times, np.inf))
