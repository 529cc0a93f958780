"""Which traffic of a layout crosses what is thin or lossy in a cluster's fabric: worth knowing before a launch."""

from __future__ import annotations

import numpy as np

from scenarios.layout import Layout
from simulator.rank_places import expert_grid, rank_grid
from topologies.cluster import Cluster
from topologies.link_map import Ints

NAMES = {
    "tp": "tensor parallel all-reduces",
    "cp": "context parallel exchanges",
    "ep": "all-to-alls of experts",
    "pp": "transfers between pipeline stages",
    "dp": "gradients",
}
"""From the traffic that suffers most to that which suffers least."""


def fabric_notes(cluster: Cluster, layout: Layout) -> list[str]:
    """Return one sentence for each level that is oversubscribed under planned traffic, and one for a lossy fabric."""
    fabric, per_node = cluster.fabric, cluster.node.gpus_per_node
    if fabric.kind == "none" or layout.world_size > cluster.num_gpus:
        return []
    groups = {axis: table for axis, table in _groups(layout).items() if table.shape[1] > 1}
    outside = [axis for axis, table in groups.items() if _spans(table, cluster.domain_size)]
    if not outside:
        return []
    told = []
    if not fabric.lossless:
        told.append(
            f"the fabric drops packets under congestion, and {_listed(outside)} cross it: stalls on retransmission are "
            "not modelled; turn flow control on, or put what you measure into fabric.efficiency"
        )
    factor, below = 1.0, 1
    for tier in fabric.tiers:
        factor *= tier.oversubscription
        crossing = [axis for axis in outside if _spans(groups[axis], below * per_node)]
        if tier.oversubscription > 1 and crossing:
            told.append(
                f"{_listed(crossing)} cross {tier.name!r}, where a NIC keeps 1/{factor:g} of its rate if all send at "
                "once: 'headway simulate --step' plays what that costs"
            )
        below = tier.nodes
    return told


def step_warnings(cluster: Cluster, layout: Layout, *, draining: bool) -> list[str]:
    """Return ``fabric_notes``, and what of the fabric's use is left to chance or out of a step."""
    told, fabric = fabric_notes(cluster, layout), cluster.fabric
    nodes = -(-layout.world_size // cluster.node.gpus_per_node)
    if fabric.routing == "ecmp" and len(fabric.tiers) > 1 and nodes > fabric.tiers[0].nodes:
        told.append(
            f"connections are hashed onto equal paths with {fabric.queue_pairs} queue pairs each: collisions depend on "
            "the seed (--seed)"
        )
    shared = cluster.storage_network is None and any(not store.per_node for store in cluster.storage)
    if shared and not draining and fabric.kind != "none":
        told.append("storage traffic shares this fabric; --drain sends a checkpoint over it during the step")
    return told


def _groups(layout: Layout) -> dict[str, Ints]:
    """Groups of GPUs that talk to each other, by axis: (groups, members)."""
    grid = rank_grid(layout)
    experts = np.swapaxes(expert_grid(layout, grid), 2, 3).reshape(-1, layout.ep)
    found = {
        "tp": grid.reshape(-1, layout.tp),
        "cp": np.swapaxes(grid, 2, 3).reshape(-1, layout.cp),
        "ep": experts,
        "pp": np.moveaxis(grid, 0, -1).reshape(-1, layout.pp),
        "dp": np.moveaxis(grid, 1, -1).reshape(-1, layout.dp),
    }
    return {axis: found[axis] for axis in NAMES}


def _spans(table: Ints, size: int) -> bool:
    """Whether a group leaves its run of ``size`` GPUs."""
    return bool((table // size != table[:, :1] // size).any())


def _listed(axes: list[str]) -> str:
    names = [NAMES[axis] for axis in axes]
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
