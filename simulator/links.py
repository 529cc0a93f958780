"""The links of a cluster as groups of ranks see them: rates by placement, or what was measured between ranks."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from simulator import nccl
from simulator.arrays import Floats
from simulator.parameters import Parameters
from topologies.cluster import Cluster, CollectiveKind, CollectivePoint, Tier

GB = 1e9

STAND_INS: dict[CollectiveKind, tuple[tuple[CollectiveKind, float], ...]] = {
    "all_reduce": (),
    "all_gather": (("all_reduce", 0.5),),
    "reduce_scatter": (("all_reduce", 1.0),),
    "all_to_all": (("all_gather", 1.0), ("all_reduce", 0.5)),
    "broadcast": (("send_recv", 1.0), ("all_reduce", 0.5)),
    "send_recv": (("broadcast", 1.0), ("all_reduce", 1.0)),
}
"""What stands in for a collective that was not measured; gloo's reduce-scatter moves the volume of an all-reduce."""

PCIE_BYTES_PER_SECOND = {"ampere": 20e9, "hopper": 40e9, "blackwell": 40e9, "cdna3": 40e9, "cdna4": 40e9}
"""One GPU to another through the host: 16 lanes of PCIe 4.0 or 5.0 (32, 64 GB/s) at the share that copies reach."""

MESHES = ("infinity-fabric", "nvlink-mesh")
"""Domains without a switch: two of 8 MI300X reach 47.7 GB/s, all eight 312.9 (stas00/ml-engineering)."""

ALL_TO_ALL_SHARE, MESH_ALL_TO_ALL_SHARE = 0.95, 0.89
"""Of the ring bus bandwidth inside a domain: 224.3 of 235 GB/s on 8 A100 (superbench log), 361.4 of 406.8 over the mesh
of 8 MI355X (OCI)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Links:
    """The links of one cluster, as scalars."""

    architecture: str
    domain_size: float
    """GPUs that reach each other without a NIC."""
    gpus_per_node: float
    kind: str
    """Of the network inside a domain."""
    switched: bool
    link_bytes_per_second: float
    """Of one GPU inside a domain, as the data sheet says."""
    bus_bytes_per_second: float
    """All-reduce bus bandwidth inside a domain, as measured."""
    channels: float
    channel_bytes_per_second: float
    """NCCL's channels inside a domain."""
    nics_per_gpu: float
    nic_bytes_per_second: Floats | float
    """Of one NIC and direction, as this traffic sees it."""
    shared: bool
    """All GPUs of a node send at once, in groups side by side: none finds a NIC for itself that others use."""
    nic_seconds: float
    hop_seconds: float
    """One hop inside a domain, for libraries other than NCCL."""
    host_bytes_per_second: float
    """Per GPU, between the domains of one node: through the host's PCIe."""
    tiers: tuple[Tier, ...]
    all_to_all_share: Floats | float
    points: tuple[CollectivePoint, ...] = ()
    """Measured collectives; they take the place of the formulas."""

    @property
    def cpu(self) -> bool:
        """CPU cores play the part of GPUs, and gloo that of NCCL."""
        return self.architecture == "cpu"


def links(cluster: Cluster, parameters: Parameters | None = None) -> Links:
    """Gather the links of a cluster.

    ``parameters`` say what training traffic keeps of the NICs and of the rate of an all-to-all; without them links are
    as a benchmark of one collective at a time finds them.
    """
    node, scale_up, architecture = cluster.node, cluster.scale_up, cluster.gpu.architecture
    switched = scale_up.kind == "nvswitch"
    link = scale_up.bandwidth_bytes_per_second / GB
    channels, _ = nccl.intra_channels(architecture, link)
    speed = nccl.carried_per_channel(architecture, link)
    if not switched or cluster.gpu.vendor != "NVIDIA":
        channels, speed = 8.0, scale_up.bus_bandwidth_bytes_per_second / GB / 8.0
    exchange = ALL_TO_ALL_SHARE if switched else MESH_ALL_TO_ALL_SHARE
    line: Floats | float = 0.0
    if node.nic is not None:
        line = node.nic.bandwidth_bytes_per_second / GB
        share = np.minimum(1.0 if parameters is None else parameters.nic.value, cluster.fabric.efficiency)
        line = np.minimum(nccl.inter_speed(architecture, line), line * share)
    return Links(
        architecture=architecture,
        domain_size=cluster.domain_size,
        gpus_per_node=node.gpus_per_node,
        kind=scale_up.kind,
        switched=switched,
        link_bytes_per_second=scale_up.bandwidth_bytes_per_second,
        bus_bytes_per_second=scale_up.bus_bandwidth_bytes_per_second,
        channels=channels,
        channel_bytes_per_second=speed * GB,
        nics_per_gpu=node.nics_per_node / node.gpus_per_node,
        nic_bytes_per_second=line * GB,
        shared=parameters is not None,
        nic_seconds=node.nic.latency_seconds if node.nic else 0.0,
        hop_seconds=scale_up.latency_seconds,
        host_bytes_per_second=PCIE_BYTES_PER_SECOND.get(architecture, 0.0),
        tiers=cluster.fabric.tiers,
        all_to_all_share=exchange if parameters is None or architecture == "cpu" else parameters.all_to_all.value,
        points=_measured_points(cluster),
    )


def _measured_points(cluster: Cluster) -> tuple[CollectivePoint, ...]:
    """What was measured, as much slower as runs have taught."""
    if cluster.measured is None:
        return ()
    points, slower = cluster.measured.collectives, cluster.measured.host_seconds.get("collectives", 1.0)
    if slower == 1.0:
        return points
    return tuple(point.model_copy(update={"time_seconds": slower * point.time_seconds}) for point in points)


def local_ranks(net: Links, ranks: Floats, stride: Floats) -> Floats:
    """Members of a group that share a domain, where neighbours lie ``stride`` GPUs apart."""
    return np.clip(net.domain_size / stride, 1.0, ranks)


def mesh_share(kind: str, ranks: Floats, domain_size: float) -> Floats:
    """Share of the links that a part of a fully connected domain can use: each pair has one (1 with a switch)."""
    if kind not in MESHES or domain_size <= 2:
        return np.ones_like(ranks)
    return np.clip((ranks - 1.0) / (domain_size - 1.0), 1.0 / (domain_size - 1.0), 1.0)


def ring_taper(tiers: tuple[Tier, ...], nodes: Floats, step: Floats) -> Floats:
    """How much slower oversubscribed levels make the NICs of rings over ``nodes``, in order, ``step`` nodes apart.

    Groups lie side by side: of the nodes below one part of a level, the last ``step`` send across its edge (all of
    them where members lie further apart than the part is wide), and they may use the whole of its way up.
    """
    worst, factor, below = np.ones_like(nodes), 1.0, 1.0
    for tier in tiers:
        factor *= tier.oversubscription
        crossing = np.minimum(np.maximum(step, 1.0), below) / below
        worst = np.where(nodes > below, np.maximum(worst, factor * crossing), worst)
        below = float(tier.nodes)
    return np.asarray(worst)


def exchange_taper(tiers: tuple[Tier, ...], nodes: Floats, step: Floats) -> Floats:
    """The same where all members send to all: a part of ``below`` nodes sends away what is for nodes beyond it.

    Relative to what leaves a node, which is all of it but the share of the node itself.
    """
    worst, factor, below = np.ones_like(nodes), 1.0, 1.0
    for tier in tiers:
        factor *= tier.oversubscription
        own = np.maximum(step, 1.0) / nodes
        away = (1.0 - np.maximum(below / nodes, own)) / np.maximum(1.0 - own, 1e-9)
        worst = np.where(nodes > below, np.maximum(worst, factor * away), worst)
        below = float(tier.nodes)
    return np.asarray(worst)


def group_of(net: Links, ranks: Floats, stride: Floats) -> nccl.Group:
    """Place groups of ``ranks``, neighbours ``stride`` GPUs apart, and search channels as NCCL does."""
    ranks = np.maximum(ranks, 2.0)
    per_domain = local_ranks(net, ranks, stride)
    domains = np.ceil(ranks / per_domain - 1e-9)
    speed: Floats | float = net.channel_bytes_per_second
    if not net.switched:
        speed = speed * mesh_share(net.kind, per_domain, net.domain_size)
    nics = np.maximum(1.0, per_domain * min(1.0, net.nics_per_gpu))
    rate = np.maximum(net.nic_bytes_per_second, 1.0) * max(1.0, net.nics_per_gpu)  # NICs of a GPU carry one channel
    if net.shared:
        rate = rate * np.minimum(1.0, per_domain * net.nics_per_gpu)
    nodes, step = ranks * stride / net.gpus_per_node, stride / net.gpus_per_node
    ring, exchange = rate / ring_taper(net.tiers, nodes, step), rate / exchange_taper(net.tiers, nodes, step)
    if net.domain_size < net.gpus_per_node:
        host = net.host_bytes_per_second * per_domain / nics
        ring, exchange = (np.where(nodes <= 1.0, np.maximum(one, host), one) for one in (ring, exchange))
    return nccl.Group(
        ranks=ranks,
        domains=domains,
        per_domain=per_domain,
        architecture=net.architecture,
        switched=net.switched,
        link_bytes_per_second=net.link_bytes_per_second,
        intra_channels=net.channels,
        intra_bytes_per_second=speed,
        inter_channels=np.minimum(nics, nccl.MAX_INTER_CHANNELS),
        inter_bytes_per_second=ring,
        nic_seconds=net.nic_seconds,
        exchange_bytes_per_second=exchange * nics / per_domain,
    )


def measured_seconds(
    points: tuple[CollectivePoint, ...], kind: CollectiveKind, ranks: Floats | float, size_bytes: Floats | float
) -> Floats:
    """Interpolate measured times by size at the nearest measured number of ranks, scaled by ring volume.

    Below the smallest size the time stays, above the largest it grows with the last bandwidth.
    """
    kind, factor = _stand_in(points, kind)
    known = sorted({point.ranks for point in points if point.kind == kind})
    ranks, size_bytes = np.broadcast_arrays(np.asarray(ranks, np.float64), np.asarray(size_bytes, np.float64))
    seconds = np.zeros(ranks.shape)
    for count in np.unique(ranks):
        if count <= 1:
            continue
        near = min(known, key=lambda one: abs(np.log(one / count)))
        curve = sorted((p.size_bytes, p.time_seconds) for p in points if p.kind == kind and p.ranks == near)
        sizes, times = (np.array(column) for column in zip(*curve, strict=True))
        here = ranks == count
        size = np.maximum(size_bytes[here], 1.0)
        inside = np.interp(size, sizes, times)
        volume = ((count - 1) / count) / ((near - 1) / near)
        seconds[here] = factor * volume * np.where(size > sizes[-1], times[-1] * size / sizes[-1], inside)
    return seconds


def _stand_in(points: tuple[CollectivePoint, ...], kind: CollectiveKind) -> tuple[CollectiveKind, float]:
    kinds = {point.kind for point in points if point.ranks > 1}
    for one, factor in ((kind, 1.0), *STAND_INS[kind]):
        if one in kinds:
            return one, factor
    return next(iter(sorted(kinds))), 1.0
