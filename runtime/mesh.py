"""The device meshes of a layout: one list of ranks, seen once by the dense layers and once by the experts.

Dense view: pp, replicas (dp x cp, or groups of them), tp. Sparse view: pp, copies of the experts, ep, etp; its groups
are cut from the ranks of dp, cp and tp of a stage, tp varying fastest (Megatron-LM's order).
"""

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
    pp: DeviceMesh
    dp: DeviceMesh
    """The replicas of dense weights: dp x cp, over which gradients are summed and states sharded. Two axes, groups and
    members, where only members share (HSDP)."""
    tp: DeviceMesh
    cp: DeviceMesh | None
    """None: sequences are whole."""
    experts: DeviceMesh | None
    """ep x etp; None: the model has no experts."""
    exchange: dist.ProcessGroup | None
    """All ranks of ``experts``; None: every rank holds all experts."""
    expert_dp: DeviceMesh | None
    """The copies of an expert, as ``dp``."""
    place: dict[str, int]
    tied_embedding_group: dist.ProcessGroup | None
    """First and last pipeline stage, where both hold a copy of a tied embedding; None elsewhere."""

    @property
    def shared(self) -> bool:
        """Some weights are on several ranks, which add up their gradients."""
        return any(mesh is not None and mesh.size() > 1 for mesh in (self.dp, self.expert_dp))

    def named_groups(self) -> dict[str, str]:
        """Axis of each group by the name that torch gave it."""
        found = {"ep": self.experts, "edp": self.expert_dp, "pp": self.pp, "tp": self.tp, "cp": self.cp, "dp": self.dp}
        named: dict[str, str] = {
            mesh.get_group(axis).group_name: name
            for name, mesh in found.items()
            if mesh is not None
            for axis in range(mesh.ndim)
        }
        return named if self.exchange is None else {self.exchange.group_name: "ep"} | named


def build_meshes(
    layout: Layout, device: torch.device, *, tied_embeddings: bool, experts: bool = False
) -> Meshes | None:
    """Make the meshes of a layout over the first ranks of the job; every rank of the job calls it.

    Args:
        layout: of the job.
        device: of this rank.
        tied_embeddings: input and output share a matrix.
        experts: the model has routed experts.

    Returns:
        None on a rank outside the layout.
    """
    order = [
        rank_at(layout, pp=p, dp=d, cp=c, tp=t)
        for p in range(layout.pp)
        for d in range(layout.dp)
        for c in range(layout.cp)
        for t in range(layout.tp)
    ]
    groups = 1 if layout.optimizer_sharding == "none" else layout.dp_replicate
    rank, size = dist.get_rank(), layout.world_size
    world = dist.group.WORLD if size == dist.get_world_size() else dist.new_group(list(range(size)))
    root = DeviceMesh(device.type, torch.tensor(order, dtype=torch.int), mesh_dim_names=("world",))
    dense = _view(root, layout.pp, groups, layout.dp * layout.cp, ("tp",), (layout.tp,), "dp")
    cp = sparse = exchange = None
    if layout.cp > 1:
        sizes = (layout.pp * layout.dp, layout.cp, layout.tp)
        cp = root._unflatten(0, sizes, ("outside_cp", "cp", "inside_cp"))["cp"]
    if experts:
        copies = layout.dp * layout.cp * layout.tp // (layout.ep * layout.etp)
        sparse = _view(root, layout.pp, groups, copies, ("ep", "etp"), (layout.ep, layout.etp), "edp")
        if layout.ep * layout.etp > 1:
            exchange = sparse["ep", "etp"]._flatten("exchange").get_group()
    group = _tied_group(layout, order, rank) if tied_embeddings else None
    if rank >= size:
        return None
    assert world is not None
    return Meshes(
        device=device,
        world=world,
        pp=dense["pp"],
        dp=dense[_shared("dp", groups)],
        tp=dense["tp"],
        cp=cp,
        experts=None if sparse is None else sparse["ep", "etp"],
        exchange=exchange,
        expert_dp=None if sparse is None else sparse[_shared("edp", groups)],
        place=coordinates(layout, rank),
        tied_embedding_group=group,
    )


def _view(
    root: DeviceMesh, pp: int, groups: int, copies: int, inner: tuple[str, ...], sizes: tuple[int, ...], name: str
) -> DeviceMesh:
    """See all ranks as stages of copies of split layers."""
    shared = (copies,) if groups == 1 else (groups, copies // groups)
    axes = ("pp", *_axes(name, groups), *inner)
    return root._unflatten(0, (pp, *shared, *sizes), axes if name == "dp" else (f"{name}_pp", *axes[1:]))


def _axes(name: str, groups: int) -> tuple[str, ...]:
    return (name,) if groups == 1 else (f"{name}_groups", name)


def _shared(name: str, groups: int) -> str | tuple[str, ...]:
    return name if groups == 1 else _axes(name, groups)


def _tied_group(layout: Layout, order: list[int], rank: int) -> dist.ProcessGroup | None:
    """Make the groups of first and last stage, where these are different ranks."""
    if layout.pp == 1 or layout.schedule == "zbv":
        return None
    stage = len(order) // layout.pp
    ends = [list(pair) for pair in zip(order[:stage], order[-stage:], strict=True)]
    mine, _ = dist.new_subgroups_by_enumeration(ends)
    return mine if any(rank in pair for pair in ends) else None
