"""Nodes of scale-up domains that are larger than a node: groups that the step time takes as inside one stay inside one.

The closed form knows how many nodes there are, not which: it lets consecutive ranks fill whole domains. Where broken
nodes leave domains with fewer, the nodes are chosen so that this is true, and where that cannot be it is told.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from topologies.cluster import Cluster

Ints = npt.NDArray[np.int64]


def group_nodes(spans: Mapping[str, int], inside: Mapping[str, bool], ranks_per_node: int) -> dict[str, int]:
    """Nodes of the groups that lie inside a domain and are larger than a node, by axis."""
    return {
        axis: math.ceil(span / ranks_per_node) for axis, span in spans.items() if inside[axis] and span > ranks_per_node
    }


def whole_groups(cluster: Cluster, groups: Mapping[str, int], free: Ints) -> Ints:
    """Of the free nodes those that make up whole groups of their domain, in order; all where no group needs that."""
    widest = max(groups.values(), default=1)
    if widest == 1:
        return free
    domain = free // _domain_nodes(cluster)
    _, first, held = np.unique(domain, return_index=True, return_counts=True)
    place = np.arange(len(free)) - np.repeat(first, held)
    return free[place < np.repeat(held // widest * widest, held)]


def crossing(cluster: Cluster, groups: Mapping[str, int], numbers: Sequence[int]) -> list[str]:
    """Axes of which some group crosses domains on these nodes, in the order of ranks."""
    domain = np.array(numbers, dtype=np.int64) // _domain_nodes(cluster)
    return [
        axis
        for axis, nodes in groups.items()
        if any(len(set(domain[start : start + nodes])) > 1 for start in range(0, len(domain), nodes))
    ]


def assumed(inside: Mapping[str, bool], spans: Mapping[str, int], crossed: Sequence[str]) -> str:
    """What the step time takes for granted about where ranks lie, in words."""
    within = [axis for axis in spans if inside[axis]]
    over = [axis for axis in spans if not inside[axis]]
    told = "consecutive ranks on neighbouring nodes"
    told += f", {' and '.join(within)} groups inside a scale-up domain" if within else ""
    told += f", {' and '.join(over)} over the network at the level that they reach in rank order" if over else ""
    if crossed:
        told += f"; on these nodes {' and '.join(crossed)} groups cross domains, which is not in the step time"
    return told


def _domain_nodes(cluster: Cluster) -> int:
    return max(1, cluster.scale_up.domain_size // cluster.node.gpus_per_node)
