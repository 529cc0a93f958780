"""Ranks to nodes: consecutive ranks fill a node, so that the fastest axes stay inside the scale-up domain."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from scenarios.layout import Axis, Layout
from topologies.cluster import Cluster


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

    def as_json(self) -> dict[str, Any]:
        """Plain data for the plan file."""
        return {
            "rank_order": list(self.rank_order),
            "nodes": self.nodes,
            "ranks_per_node": self.ranks_per_node,
            "idle_gpus": self.idle_gpus,
            "inside_domain": self.inside_domain,
        }


def place(cluster: Cluster, layout: Layout) -> Placement:
    """Lay consecutive ranks on nodes; a node holds whole tensor-parallel groups where these are smaller than it."""
    node_gpus = min(pool.node.gpus_per_node for pool in cluster.pools)
    whole_groups = node_gpus // layout.tp * layout.tp if layout.tp <= node_gpus else node_gpus
    ranks_per_node = min(layout.world_size, whole_groups)
    return Placement(
        rank_order=layout.rank_order,
        nodes=math.ceil(layout.world_size / ranks_per_node),
        ranks_per_node=ranks_per_node,
        idle_gpus=cluster.num_gpus - layout.world_size,
        inside_domain={
            axis: span <= cluster.domain_size and cluster.domain_size % span == 0
            for axis, span in group_spans(layout).items()
        },
    )


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
