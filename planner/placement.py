"""Ranks to nodes: consecutive ranks fill a node, and nodes are taken so that few bytes leave a scalable unit."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np

from planner.arrangement import Blocks, Ints, best_arrangement, in_rank_order, least_bytes, uplink_bytes
from planner.domain_nodes import assumed, crossing, group_nodes, whole_groups
from scenarios.layout import Axis, Layout
from scenarios.scenario import Scenario
from topologies.cluster import Cluster
from topologies.numbering import node_numbers, ranges_text, without_nodes


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Where ranks lie. Ranks count through ``rank_order``, fastest axis first; node ``i`` holds a run of them."""

    rank_order: tuple[Axis, ...]
    nodes: int
    """Nodes that the job needs."""
    ranks_per_node: int
    idle_gpus: int
    """GPUs of the cluster without a rank."""
    inside_domain: dict[str, bool]
    """Whether the groups of an axis stay inside one scale-up domain."""
    node_numbers: tuple[int, ...] = ()
    """Numbers of the cluster's nodes in the order of ranks; empty: not chosen."""
    excluded: tuple[int, ...] = ()
    one_rail: bool = True
    """Whether data-parallel neighbours on other nodes sit at the same place of their node, hence on the same rail."""
    uplinks: dict[str, Any] | None = None
    """What leaves the scalable units, against rank order and against the bound; None: there is one unit."""
    step_assumes: str = ""
    """What the step time takes for granted about where ranks lie."""

    def as_json(self) -> dict[str, Any]:
        """Plain data for the plan file."""
        numbers = sorted(self.node_numbers)
        spare = [number for number in range(numbers[-1] + 1) if number not in set(numbers)] if numbers else []
        return {
            "rank_order": list(self.rank_order),
            "nodes": self.nodes,
            "ranks_per_node": self.ranks_per_node,
            "idle_gpus": self.idle_gpus,
            "inside_domain": self.inside_domain,
            "node_numbers": list(self.node_numbers),
            "excluded_nodes": list(self.excluded),
            "skipped_nodes": sorted(set(spare) - set(self.excluded)),
            "one_rail": self.one_rail,
            "uplinks": self.uplinks,
            "step_assumes": self.step_assumes,
        }


def place(cluster: Cluster, layout: Layout) -> Placement:
    """Lay consecutive ranks on nodes; a node holds whole tensor-parallel groups where these are smaller than it."""
    node_gpus = min(pool.node.gpus_per_node for pool in cluster.pools)
    whole_groups = node_gpus // layout.tp * layout.tp if layout.tp <= node_gpus else node_gpus
    ranks_per_node = min(layout.world_size, whole_groups)
    inner = layout.tp * layout.cp
    return Placement(
        rank_order=layout.rank_order,
        nodes=math.ceil(layout.world_size / ranks_per_node),
        ranks_per_node=ranks_per_node,
        idle_gpus=cluster.num_gpus - layout.world_size,
        inside_domain={
            axis: span <= cluster.domain_size and cluster.domain_size % span == 0
            for axis, span in group_spans(layout).items()
        },
        one_rail=inner % ranks_per_node == 0 or ranks_per_node % inner == 0,
    )


def healthy(scenario: Scenario) -> Scenario:
    """The scenario on the nodes that are neither broken nor reserved; on what is left GPUs may stay idle.

    Few layouts use exactly the GPUs that a broken node leaves, and those are seldom good ones.

    Raises:
        InputError: ``exclude_nodes`` names nodes that do not exist, or all of them.
    """
    if not scenario.exclude_nodes:
        return scenario
    gone = node_numbers(scenario.exclude_nodes, scenario.cluster)
    changes = {"cluster": without_nodes(scenario.cluster, gone), "exclude_nodes": ""}
    allow = tuple(dict.fromkeys((*scenario.allow, "fewer-gpus")))
    return scenario.model_copy(update=changes | {"allow": allow})


def arranged(scenario: Scenario, layout: Layout) -> Placement:
    """Choose the nodes: whole blocks of a stage (and of expert groups) under one switch, neighbours together.

    Args:
        scenario: with all nodes of the cluster, and those to leave out.
        layout: complete.
    """
    cluster = scenario.cluster
    gone = node_numbers(scenario.exclude_nodes, cluster) if scenario.exclude_nodes else frozenset[int]()
    placed = replace(place(cluster, layout), excluded=tuple(sorted(gone)))
    idle = sum(pool.num_nodes * pool.node.gpus_per_node for pool in cluster.pools) - layout.world_size
    placed = replace(placed, idle_gpus=idle - len(gone) * cluster.node.gpus_per_node)
    free = np.array([number for number in range(cluster.num_nodes) if number not in gone], dtype=np.int64)
    spans = group_spans(layout)
    groups = group_nodes(spans, placed.inside_domain, placed.ranks_per_node)
    whole = whole_groups(cluster, groups, free)
    found = _on_units(scenario, layout, placed, free if len(whole) < placed.nodes else whole)
    crossed = crossing(cluster, groups, found.node_numbers)
    return replace(found, step_assumes=assumed(placed.inside_domain, spans, crossed))


def _on_units(scenario: Scenario, layout: Layout, placed: Placement, free: Ints) -> Placement:
    """Choose among the free nodes, whole blocks in whole units where there are several of these."""
    cluster, job = scenario.cluster, scenario.job
    level = _unit_level(cluster, placed.nodes)
    per_block = _block_nodes(layout, placed.ranks_per_node)
    if level is None or per_block is None or len(free) < placed.nodes:
        return replace(placed, node_numbers=tuple(int(one) for one in free[: placed.nodes]))
    name, size = level
    unit_of = free // size
    units, first = np.unique(unit_of, return_inverse=True)
    held = np.bincount(first) // per_block
    blocks = _blocks(scenario, layout, placed, per_block)
    if int(held.sum()) < blocks.count:  # broken nodes leave too few whole blocks
        return replace(placed, node_numbers=tuple(int(one) for one in free[: placed.nodes]))
    chosen = best_arrangement(blocks, held)
    naive = uplink_bytes(blocks, in_rank_order(blocks, held))
    best = uplink_bytes(blocks, chosen)
    bound = min(least_bytes(blocks, held), best)
    return replace(
        placed,
        node_numbers=_numbers(chosen, free, unit_of, units, per_block),
        uplinks={
            "level": name,
            "unit_nodes": size,
            "rank_order_bytes": naive,
            "bytes": best,
            "saved_bytes": naive - best,
            "bound_bytes": bound,
            "gap": best / bound - 1 if bound > 0 else (0.0 if best == 0 else None),
            "counted": "rings of gradients and weights, and pipeline messages, of one step, one direction; expert and "
            "context groups stay inside a block",
            "job": f"{job.model.name}, {blocks.stages} stages of {blocks.per_stage} blocks of {per_block} nodes",
        },
    )


def _unit_level(cluster: Cluster, nodes: int) -> tuple[str, int] | None:
    """The level whose uplinks are scarcest: most oversubscribed, else the lowest; None where one unit holds the job."""
    tiers = cluster.fabric.tiers
    levels = [
        (above.oversubscription, -position, below.name, below.nodes)
        for position, (below, above) in enumerate(pairwise(tiers))
        if below.nodes < nodes
    ]
    if not levels:
        return None
    _, _, name, size = max(levels)
    return name, size


def _block_nodes(layout: Layout, ranks_per_node: int) -> int | None:
    """Nodes of a block: those of one stage of one replica, or of an expert group; None where stages share nodes."""
    if layout.rank_order.index("pp") != len(layout.rank_order) - 1:
        return None
    stage = layout.tp * layout.cp * layout.dp
    block = math.lcm(max(layout.tp * layout.cp, layout.ep * layout.etp), ranks_per_node)
    return block // ranks_per_node if stage % block == 0 else None


def _blocks(scenario: Scenario, layout: Layout, placed: Placement, per_block: int) -> Blocks:
    """Bytes of a step around a ring and between neighbours.

    Gradients in their precision and updated bf16 weights; activations and their gradients in bf16, once per
    tensor-parallel rank without sequence parallelism.
    """
    job = scenario.job
    reduced = 4.0 if job.precision == "fp32" or job.gradient_precision == "fp32" else 2.0
    gathers = 2.0 * layout.num_microbatches(job) if layout.optimizer_sharding == "zero3" else 1.0
    per_stage = layout.tp * layout.cp * layout.dp // (placed.ranks_per_node * per_block)
    copies = 1 if layout.sequence_parallel else layout.tp
    boundary = 2.0 * 2.0 * job.tokens_per_step * job.model.hidden_size * copies / per_stage
    return Blocks(
        stages=layout.pp,
        per_stage=per_stage,
        ring_bytes=job.model.num_params / layout.pp * (reduced + 2.0 * gathers) if per_stage > 1 else 0.0,
        neighbour_bytes=boundary * layout.vpp if layout.pp > 1 else 0.0,
        around_bytes=boundary * (layout.vpp - 1) if layout.schedule == "interleaved" else 0.0,
    )


def _numbers(chosen: Ints, free: Ints, unit_of: Ints, units: Ints, per_block: int) -> tuple[int, ...]:
    """Node numbers in the order of ranks: each block takes the next nodes of its unit."""
    waiting = {place: list(free[unit_of == unit]) for place, unit in enumerate(units)}
    taken = dict.fromkeys(waiting, 0)
    numbers: list[int] = []
    for unit in chosen.ravel():
        start = taken[int(unit)]
        numbers += [int(one) for one in waiting[int(unit)][start : start + per_block]]
        taken[int(unit)] = start + per_block
    return tuple(numbers)


def nodes_text(placed: dict[str, Any]) -> str:
    """The nodes of a plan's ``placement`` in words."""
    numbers = placed.get("node_numbers") or []
    excluded, skipped = placed.get("excluded_nodes") or [], placed.get("skipped_nodes") or []
    words = f"nodes {ranges_text(numbers)}" if numbers else f"{placed['nodes']} nodes"
    words += f"; left out: {ranges_text(excluded)}" if excluded else ""
    return words + (f"; skipped for whole units: {ranges_text(skipped)}" if skipped else "")


def group_spans(layout: Layout) -> dict[str, int]:
    """Consecutive ranks that one group of each axis reaches over; axes of degree 1 have no groups.

    ``ep`` groups are cut from the ranks of tp, cp and dp and span ``ep x etp`` of them (Megatron-LM's order).

    >>> group_spans(Layout(tp=8, cp=2, dp=4))
    {'tp': 8, 'cp': 16, 'dp': 64}
    """
    spans, reach = {}, 1
    for axis in layout.rank_order:
        if axis == "ep":
            if layout.ep > 1:
                spans["ep"] = layout.ep * layout.etp
            continue
        reach *= getattr(layout, axis)
        if getattr(layout, axis) > 1:
            spans[axis] = reach
    return spans
