"""The device mesh of a layout: axes pp, dp and tp over the ranks, in the order that the layout states."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from runtime.ranks import coordinates, rank_at
from scenarios.layout import Layout


@dataclass(frozen=True, slots=True, kw_only=True)
class Meshes:
    """The meshes and groups that a rank belongs to; ``place`` is its coordinate on each axis."""

    device: torch.device
    world: dist.ProcessGroup
    """All ranks of the layout."""
    root: DeviceMesh
    pp: DeviceMesh
    dp: DeviceMesh
    tp: DeviceMesh
    place: dict[str, int]
    tied_embedding_group: dist.ProcessGroup | None
    """First and last pipeline stage, where both hold a copy of a tied embedding; None elsewhere."""


def build_meshes(layout: Layout, device: torch.device, *, tied_embeddings: bool) -> Meshes | None:
    """Make the meshes of a layout over the first ranks of the job; every rank of the job calls it.

    Returns:
        None on a rank outside the layout.
    """
    axes = ("pp", "dp", "tp")
    sizes = {axis: getattr(layout, axis) for axis in axes}
    ranks = [
        [[rank_at(layout, pp=p, dp=d, tp=t) for t in range(sizes["tp"])] for d in range(sizes["dp"])]
        for p in range(sizes["pp"])
    ]
    root = DeviceMesh(device.type, torch.tensor(ranks, dtype=torch.int), mesh_dim_names=axes)
    rank, size = dist.get_rank(), layout.world_size
    world = dist.group.WORLD if size == dist.get_world_size() else dist.new_group(list(range(size)))
    group = None
    if tied_embeddings and layout.pp > 1 and layout.schedule != "zbv":
        ends = [
            [place[d][t] for place in (ranks[0], ranks[-1])] for d in range(sizes["dp"]) for t in range(sizes["tp"])
        ]
        mine, _ = dist.new_subgroups_by_enumeration(ends)
        group = mine if any(rank in pair for pair in ends) else None
    if rank >= size:
        return None
    assert world is not None
    return Meshes(
        device=device,
        world=world,
        root=root,
        pp=root["pp"],
        dp=root["dp"],
        tp=root["tp"],
        place=coordinates(layout, rank),
        tied_embedding_group=group,
    )
