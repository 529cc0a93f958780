"""Which GPU every rank of a layout stands on, as tables of groups: ranks count through ``rank_order`` from GPU 0."""

from __future__ import annotations

import numpy as np

from scenarios.layout import Layout
from topologies.link_map import Ints


def rank_grid(layout: Layout) -> Ints:
    """Return the GPU of every rank, with shape (pp, dp, cp, tp).

    >>> rank_grid(Layout(tp=2, pp=2, dp=2))[0].ravel().tolist()
    [0, 1, 2, 3]
    """
    axes = [axis for axis in layout.rank_order if axis != "ep"]
    numbers = np.arange(layout.world_size).reshape([getattr(layout, axis) for axis in reversed(axes)])
    place = {axis: position for position, axis in enumerate(reversed(axes))}
    return np.transpose(numbers, [place[axis] for axis in ("pp", "dp", "cp", "tp")])


def expert_grid(layout: Layout, grid: Ints) -> Ints:
    """Return the GPUs of every expert group: shape (pp, groups, ep, etp). Groups are runs of the ranks of a stage."""
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
