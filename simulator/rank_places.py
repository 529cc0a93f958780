"""Which ranks of a layout talk to each other, as tables of groups, and on which GPU every rank stands.

Ranks count through ``rank_order``. Where nothing else is said, rank 0 stands on GPU 0, rank 1 on GPU 1 and so on.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from scenarios.layout import Layout
from topologies.link_map import Ints


def rank_grid(layout: Layout) -> Ints:
    """Return the numbers of the ranks, with shape (pp, dp, cp, tp).

    >>> rank_grid(Layout(tp=2, pp=2, dp=2))[0].ravel().tolist()
    [0, 1, 2, 3]
    """
    axes = [axis for axis in layout.rank_order if axis != "ep"]
    numbers = np.arange(layout.world_size).reshape([getattr(layout, axis) for axis in reversed(axes)])
    place = {axis: position for position, axis in enumerate(reversed(axes))}
    return np.transpose(numbers, [place[axis] for axis in ("pp", "dp", "cp", "tp")])


def rank_gpus(layout: Layout, gpus_per_node: int, nodes: Sequence[int] = (), ranks_per_node: int | None = None) -> Ints:
    """Return the GPU of every rank: nodes in the order given, each with a run of ranks.

    >>> rank_gpus(Layout(tp=2, dp=2), 4, nodes=[3, 1], ranks_per_node=2).tolist()
    [12, 13, 4, 5]

    Raises:
        ValueError: too few nodes.
    """
    ranks = np.arange(layout.world_size)
    if not nodes:
        return ranks
    each = ranks_per_node or gpus_per_node
    if len(nodes) * each < layout.world_size:
        raise ValueError(f"{len(nodes)} nodes of {each} ranks hold fewer than {layout.world_size} ranks")
    return np.asarray(nodes, np.int64)[ranks // each] * gpus_per_node + ranks % each


def placed_gpus(layout: Layout, gpus_per_node: int, placement: Mapping[str, Any] | None) -> Ints | None:
    """Return the GPU of every rank as the ``placement`` of a plan says; None: it says nothing.

    Raises:
        ValueError: too few nodes.
    """
    told = placement or {}
    nodes, each = told.get("node_numbers"), told.get("ranks_per_node")
    if not nodes or not isinstance(each, int) or not all(isinstance(one, int) and one >= 0 for one in nodes):
        return None
    return rank_gpus(layout, gpus_per_node, nodes, each)


def expert_grid(layout: Layout, grid: Ints) -> Ints:
    """Return the ranks of every expert group: shape (pp, groups, ep, etp). Groups are runs of the ranks of a stage."""
    ordered = np.sort(grid.reshape(layout.pp, -1), axis=1)
    return ordered.reshape(layout.pp, -1, layout.ep, layout.etp)


def replicas_in_step(layout: Layout, grid: Ints) -> Ints:
    """Return for every replica (dp index) its unit: replicas that exchange tokens inside an op are in step, one unit.

    >>> replicas_in_step(Layout(tp=2, dp=8, ep=8), rank_grid(Layout(tp=2, dp=8))).tolist()
    [0, 0, 0, 0, 1, 1, 1, 1]
    """
    unit = np.arange(layout.dp)
    if layout.ep * layout.etp == 1:
        return unit
    replica = np.zeros(layout.world_size, np.int64)
    replica[grid] = np.arange(layout.dp)[None, :, None, None]
    for group in replica[expert_grid(layout, grid).reshape(-1, layout.ep * layout.etp)]:
        joined = np.unique(unit[group])
        if len(joined) > 1:
            unit[np.isin(unit, joined)] = joined[0]
    return np.unique(unit, return_inverse=True)[1].astype(np.int64)
