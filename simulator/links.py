"""How fast a group of ranks moves data: bus bandwidth by placement, or what was measured between these ranks."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from simulator.arrays import Floats
from simulator.parameters import Parameters
from topologies.cluster import Cluster, CollectiveKind, CollectivePoint, Fabric

HALVES: dict[CollectiveKind, float] = {
    "all_reduce": 2.0,
    "all_gather": 1.0,
    "reduce_scatter": 1.0,
    "all_to_all": 1.0,
    "broadcast": 1.0,
    "send_recv": 1.0,
}
"""Passes of a ring over the buffer: an all-reduce is a reduce-scatter and an all-gather."""

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

LAUNCH_SECONDS, HOP_SECONDS = 5e-6, 2e-6
"""Start of a collective, and each further rank of it (NCCL ring, LL128 protocol: 14 us at 8 ranks)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Links:
    """The links of one cluster, as scalars."""

    domain_size: float
    """GPUs that reach each other without a NIC."""
    gpus_per_node: float
    scale_up_bytes_per_second: float
    """All-reduce bus bandwidth inside a domain."""
    kind: str
    """Of the network inside a domain."""
    network_bytes_per_second: float
    """Per GPU and direction, as training traffic sees it."""
    host_bytes_per_second: float
    """Per GPU, between the domains of one node: through the host's PCIe."""
    fabric: Fabric
    half_speed_bytes: float
    """Buffer at which a collective inside a domain runs at half of its bandwidth."""
    all_to_all_share: float
    points: tuple[CollectivePoint, ...] = ()
    """Measured collectives; they take the place of the formulas."""


def links(cluster: Cluster, parameters: Parameters) -> Links:
    """Gather the links of a cluster."""
    measured = cluster.measured.collectives if cluster.measured else ()
    cpu = cluster.gpu.architecture == "cpu"
    share = np.minimum(parameters.nic.value, cluster.fabric.efficiency)
    return Links(
        domain_size=cluster.domain_size,
        gpus_per_node=cluster.node.gpus_per_node,
        scale_up_bytes_per_second=cluster.scale_up.bus_bandwidth_bytes_per_second,
        kind=cluster.scale_up.kind,
        network_bytes_per_second=cluster.node.network_bytes_per_second_per_gpu * share,
        host_bytes_per_second=PCIE_BYTES_PER_SECOND.get(cluster.gpu.architecture, 0.0),
        fabric=cluster.fabric,
        half_speed_bytes=0.0 if cpu else parameters.half_speed.value,
        all_to_all_share=1.0 if cpu else parameters.all_to_all.value,
        points=measured,
    )


def local_ranks(net: Links, ranks: Floats, stride: Floats) -> Floats:
    """Members of a group that share a domain, where neighbours lie ``stride`` GPUs apart."""
    return np.clip(net.domain_size / stride, 1.0, ranks)


def mesh_share(kind: str, ranks: Floats, domain_size: float) -> Floats:
    """Share of the links that a part of a fully connected domain can use: each pair has one (1 with a switch)."""
    if kind not in MESHES or domain_size <= 2:
        return np.ones_like(ranks)
    return np.clip((ranks - 1.0) / (domain_size - 1.0), 1.0 / (domain_size - 1.0), 1.0)


def network_rate(net: Links, ranks: Floats, stride: Floats) -> Floats:
    """NIC rate that a group sees per GPU, after the oversubscription of the levels that it spans.

    Where a node holds more than one domain, groups inside the node may use the host's links instead.
    """
    rate = np.full(np.shape(ranks), net.network_bytes_per_second)
    if net.domain_size < net.gpus_per_node:
        inside = ranks * stride <= net.gpus_per_node
        rate = np.where(inside, np.maximum(rate, net.host_bytes_per_second), rate)
    if all(tier.oversubscription == 1.0 for tier in net.fabric.tiers):
        return rate
    nodes = ranks * stride / net.gpus_per_node
    factor, lower = 1.0, 1.0
    for tier in net.fabric.tiers:
        factor *= tier.oversubscription
        rate = np.where(nodes > lower, net.network_bytes_per_second / factor, rate)
        lower = tier.nodes
    return rate


def bus_rate(net: Links, ranks: Floats, stride: Floats) -> Floats:
    """Bus bandwidth of a ring: the domain's, or across it that of the NICs of the members in one domain."""
    local = local_ranks(net, ranks, stride)
    inside = net.scale_up_bytes_per_second
    across = np.minimum(inside, local * network_rate(net, ranks, stride))
    if net.kind not in MESHES:
        return np.where(ranks <= local * 1.001, inside, across)
    return np.where(ranks <= local * 1.001, inside * mesh_share(net.kind, ranks, net.domain_size), across)


def volume_seconds(net: Links, kind: CollectiveKind, ranks: Floats, stride: Floats, size_bytes: Floats) -> Floats:
    """Time of a long collective over the whole buffer ``size_bytes``; no latency. Zero for one rank.

    Ring volume (ranks - 1) / ranks per half over the bus rate, or what was measured.
    """
    if net.points:
        return measured_seconds(net.points, kind, ranks, size_bytes)
    time = HALVES[kind] * (ranks - 1) / ranks * size_bytes / bus_rate(net, ranks, stride)
    return np.asarray(time)


def collective_latency_seconds(ranks: Floats) -> Floats:
    """Start of a collective and one hop per rank."""
    return np.where(ranks > 1, LAUNCH_SECONDS + HOP_SECONDS * ranks, 0.0)


def short_seconds(net: Links, kind: CollectiveKind, ranks: Floats, stride: Floats, size_bytes: Floats) -> Floats:
    """Time of a collective of some megabytes on the way of every layer: volume, ramp and latency. Zero for one rank."""
    if net.points:
        return measured_seconds(net.points, kind, ranks, size_bytes)
    ramped = volume_seconds(net, kind, ranks, stride, size_bytes + net.half_speed_bytes)
    return ramped + HALVES[kind] * collective_latency_seconds(ranks)


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
