"""Time of one collective as NCCL itself would estimate it: the fastest of its algorithms and protocols.

Formulas and constants are those of NCCL's tuning model (NVIDIA/nccl at 5067397c, 2.30.x, src/graph/tuning.cc and
topo.h). Clusters with measured collectives use those instead. The step model prices long and overlapped traffic with
``simulator.links``, which needs no more than a bus bandwidth.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from simulator import nccl
from simulator.arrays import Bools, Floats
from simulator.links import measured_seconds, mesh_share
from simulator.log_curves import curve_for, scaled_by
from simulator.nccl import Group
from topologies.cluster import Cluster, CollectiveKind, Fabric
from topologies.errors import Infeasible

GB = 1e9
PACKING = 8.4e-6
"""Start of a point-to-point kernel: NCCL's base latency of the Simple protocol."""
P2P_SHARE = 0.84
"""Of the link rate that one pair reaches over NVLink: 376 of 450 GB/s on H100, 747 of 900 on GB200 (nvbandwidth)."""
ALL_TO_ALL_SHARE, MESH_ALL_TO_ALL_SHARE = 0.95, 0.89
"""Of the ring bus bandwidth inside a domain: 224.3 of 235 GB/s on 8 A100 (superbench log), 361.4 of 406.8 over the mesh
of 8 MI355X (OCI)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveTime:
    """One collective: ``algbw`` is the buffer over the time, ``busbw`` what each link carries (nccl-tests)."""

    seconds: float
    algbw_bytes_per_second: float
    busbw_bytes_per_second: float
    algorithm: str
    protocol: str


def collective_seconds(
    kind: CollectiveKind,
    cluster: Cluster,
    ranks: int,
    size_bytes: float,
    *,
    ranks_per_domain: int | None = None,
    algorithm: str | None = None,
) -> CollectiveTime:
    """Time one collective.

    Args:
        kind: which one.
        cluster: the machine.
        ranks: how many GPUs take part.
        size_bytes: the whole buffer as in nccl-tests (of all ranks together for all_gather and reduce_scatter).
        ranks_per_domain: how many of them share an NVLink domain; default: as many as fit.
        algorithm: forced, such as ring; default: NCCL's choice.

    Raises:
        Infeasible: the cluster has fewer GPUs.
        ValueError: less than one rank, or a negative size.
    """
    if ranks < 1 or size_bytes < 0:
        raise ValueError(f"{ranks} ranks and {size_bytes} bytes make no collective")
    if ranks > cluster.num_gpus:
        raise Infeasible(f"a collective on {cluster.name}", needed=f"{ranks} GPUs", available=str(cluster.num_gpus))
    if ranks == 1:
        return CollectiveTime(
            seconds=0.0, algbw_bytes_per_second=0.0, busbw_bytes_per_second=0.0, algorithm="none", protocol="none"
        )
    seconds, names = collective_times(
        kind,
        cluster,
        np.array([float(ranks)]),
        np.array([float(size_bytes)]),
        ranks_per_domain=ranks_per_domain,
        algorithm=algorithm,
    )
    chosen, protocol = names[0]
    algbw = size_bytes / float(seconds[0])
    return CollectiveTime(
        seconds=float(seconds[0]),
        algbw_bytes_per_second=algbw,
        busbw_bytes_per_second=algbw * bus_factor(kind, ranks),
        algorithm=chosen,
        protocol=protocol,
    )


def bus_factor(kind: CollectiveKind, ranks: int) -> float:
    """Bus over algorithm bandwidth (nccl-tests, doc/PERFORMANCE.md)."""
    if kind == "all_reduce":
        return 2.0 * (ranks - 1) / ranks
    return 1.0 if kind in ("broadcast", "send_recv") else (ranks - 1) / ranks


def collective_times(
    kind: CollectiveKind,
    cluster: Cluster,
    ranks: Floats,
    size_bytes: Floats,
    *,
    ranks_per_domain: int | None = None,
    algorithm: str | None = None,
) -> tuple[Floats, list[tuple[str, str]]]:
    """Time collectives as arrays, with the algorithm and the protocol of each; two ranks or more.

    Raises:
        ValueError: the collective has no such ``algorithm``.
    """
    covered = _measured(kind, cluster, ranks)
    if cluster.measured is not None and algorithm is None and covered.any():
        seconds = measured_seconds(cluster.measured.collectives, kind, ranks, size_bytes)
        if covered.all():
            return seconds, [("measured", "measured")] * len(seconds)
        bare = cluster.model_copy(update={"measured": None})
        model, chosen = collective_times(kind, bare, ranks, size_bytes, ranks_per_domain=ranks_per_domain)
        names = [("measured", "measured") if here else name for here, name in zip(covered, chosen, strict=True)]
        return np.where(covered, seconds, model), names
    if cluster.node.curves and algorithm is None:
        return _by_logs(kind, cluster, ranks, size_bytes, ranks_per_domain)
    group = _group(cluster, ranks, ranks_per_domain, crowded=kind == "all_to_all")
    if group.architecture == "cpu":
        return _gloo_seconds(kind, cluster, ranks, size_bytes), [("ring", "gloo")] * len(ranks)
    candidates = _candidates(kind, group, size_bytes)
    names = [name for name in candidates if algorithm in (None, name[0])]
    if not names:
        raise ValueError(f"{kind} has no algorithm {algorithm!r}; it has {sorted({name for name, _ in candidates})}")
    times = np.stack([candidates[name] for name in names])
    best, columns = np.argmin(times, axis=0), np.arange(len(ranks))
    chosen = [names[i] for i in best]
    start = _candidates(kind, group, np.zeros_like(size_bytes))
    latency = np.stack([start[name] for name in names])[best, columns]
    return _pipelined(group, chosen, latency, times[best, columns]), chosen


def _by_logs(
    kind: CollectiveKind, cluster: Cluster, ranks: Floats, size_bytes: Floats, ranks_per_domain: int | None
) -> tuple[Floats, list[tuple[str, str]]]:
    """Correct NCCL's model by what published logs of such nodes took."""
    bare = without_logs(cluster)

    def model(one: CollectiveKind, count: float, sizes: Floats) -> Floats:
        return collective_times(one, bare, np.full(len(sizes), count), sizes)[0]

    seconds, chosen = collective_times(kind, bare, ranks, size_bytes, ranks_per_domain=ranks_per_domain)
    for count in np.unique(ranks):
        curve, here = curve_for(kind, cluster, float(count)), ranks == count
        if curve is not None:
            seconds[here] = scaled_by(curve, cluster, float(count), size_bytes[here], seconds[here], model)
    return seconds, chosen


def without_logs(cluster: Cluster) -> Cluster:
    """Return the cluster with nodes that no published log speaks for, so that NCCL's model answers alone."""
    first, *others = cluster.pools
    node = first.node.model_copy(update={"curves": ()})
    return cluster.model_copy(update={"pools": (first.model_copy(update={"node": node}), *others)})


def _measured(kind: CollectiveKind, cluster: Cluster, ranks: Floats) -> Bools:
    """Say for which groups a measured curve speaks: of this collective, and on the same side of the domain's edge.

    A curve of 8 GPUs of one node knows nothing of the network. Where CPU cores play the part of GPUs everything crosses
    the same memory, and one collective stands in for another.
    """
    points = cluster.measured.collectives if cluster.measured is not None else ()
    if cluster.gpu.architecture == "cpu":
        return np.full(len(ranks), bool(points))
    known = [point.ranks > cluster.domain_size for point in points if point.kind == kind]
    return np.array([(count > cluster.domain_size) in known for count in ranks])


def _candidates(kind: CollectiveKind, group: Group, size_bytes: Floats) -> dict[tuple[str, str], Floats]:
    return _pairwise(kind, group, size_bytes) or nccl.candidates(kind, group, size_bytes)


def _pipelined(group: Group, names: list[tuple[str, str]], latency: Floats, seconds: Floats) -> Floats:
    """Add what cutting a buffer into chunks costs inside one NVLink domain.

    NCCL's tuning adds latency L and transfer time B; a pipeline of k chunks takes (L + B / k) and its start k times, so
    about L + B + sqrt(L * B) where k is chosen well. With it 8 H100 are met within 8 % from 1 MiB to 16 GiB (awsome-
    distributed-training, dgxc-benchmarking) and 8 A100 from 32 MiB on (ml-engineering). Across nodes the channels
    overlap the start of the next chunk, and large messages show nothing of it.
    """
    simple = np.array([protocol == "Simple" for _, protocol in names]) & (group.domains <= 1) & group.switched
    return np.asarray(seconds + np.where(simple, np.sqrt(latency * np.maximum(seconds - latency, 0.0)), 0.0))


def crossing(fabric: Fabric, nodes: int, crowded: bool) -> float:
    """How much slower the levels that ``nodes`` packed nodes span make each NIC.

    Where all send to all, a group of b of the n nodes sends (n - b) / n of its traffic up. Rings and trees over nodes
    in order leave each group with the traffic of one node: they are held back only where its way up is thinner.
    """
    worst, factor, below = 1.0, 1.0, 1
    for tier in fabric.tiers:
        factor *= tier.oversubscription
        if nodes > below:
            worst = max(worst, factor * (1 - below / nodes) if crowded and below > 1 else factor / below)
        below = tier.nodes
    return worst


def _group(cluster: Cluster, ranks: Floats, ranks_per_domain: int | None, crowded: bool) -> Group:
    """Place ranks on domains and search channels as NCCL does; ``crowded``: all send to all."""
    node, gpu, scale_up = cluster.node, cluster.gpu, cluster.scale_up
    per_domain = np.minimum(ranks, float(ranks_per_domain or cluster.domain_size))
    domains = np.ceil(ranks / per_domain)
    switched = scale_up.kind == "nvswitch"
    channels, _ = nccl.intra_channels(gpu.architecture, scale_up.bandwidth_bytes_per_second / GB)
    speed = nccl.carried_per_channel(gpu.architecture, scale_up.bandwidth_bytes_per_second / GB)
    if not switched or gpu.vendor != "NVIDIA":
        # a mesh: the pairs that take part are all that carries, in proportion
        channels, speed = 8.0, scale_up.bus_bandwidth_bytes_per_second / GB / 8.0
        speed *= float(mesh_share(scale_up.kind, per_domain, cluster.domain_size)[0])
    if node.nic is None:
        nics, rate = np.ones_like(ranks), np.full_like(ranks, 1e-9)
    else:
        share = node.nics_per_node / node.gpus_per_node
        nics = np.maximum(1.0, per_domain * min(1.0, share))
        if not crowded:
            nics = np.minimum(nics, nccl.MAX_INTER_CHANNELS)
        line = node.nic.bandwidth_bytes_per_second / GB
        speed_of_nic = min(nccl.inter_speed(gpu.architecture, line), line * cluster.fabric.efficiency)
        rate = np.full_like(ranks, speed_of_nic * max(1.0, share))  # several NICs of a GPU carry one channel
        nodes = domains * np.maximum(1.0, per_domain / node.gpus_per_node)
        rate = rate / np.array([crossing(cluster.fabric, int(count), crowded) for count in nodes])
    return Group(
        ranks=ranks,
        domains=domains,
        per_domain=per_domain,
        architecture=gpu.architecture,
        switched=switched,
        link_bytes_per_second=scale_up.bandwidth_bytes_per_second,
        intra_channels=channels,
        intra_bytes_per_second=speed * GB,
        inter_channels=nics,
        inter_bytes_per_second=rate * GB,
        nic_seconds=node.nic.latency_seconds if node.nic else 0.0,
    )


def _pairwise(kind: CollectiveKind, group: Group, size: Floats) -> dict[tuple[str, str], Floats]:
    """All-to-all and send-receive, which NCCL does not tune: fast links and NICs work side by side."""
    inside = group.intra_channels * group.intra_bytes_per_second
    nic = group.inter_bytes_per_second * group.inter_channels / group.per_domain
    hop = np.where(group.domains > 1, nccl.NET_SIMPLE + 2 * group.nic_seconds, nccl.NVLINK_SIMPLE)
    if kind == "send_recv":
        rate = np.where(group.domains > 1, group.inter_bytes_per_second, P2P_SHARE * group.link_bytes_per_second)
        return {("p2p", "Simple"): PACKING + hop + size / rate}
    if kind == "all_to_all":
        near = (
            size
            / group.ranks
            * (group.per_domain - 1)
            / ((ALL_TO_ALL_SHARE if group.switched else MESH_ALL_TO_ALL_SHARE) * inside)
        )
        far = size / group.ranks * (group.ranks - group.per_domain) / nic
        return {("p2p", "Simple"): PACKING + hop + np.maximum(near, far)}
    return {}


def _gloo_seconds(kind: CollectiveKind, cluster: Cluster, ranks: Floats, size: Floats) -> Floats:
    """Ring over shared memory or the NIC; gloo's reduce-scatter moves as much as its all-reduce."""
    passes = 2.0 if kind in ("all_reduce", "reduce_scatter") else 1.0
    volume = size if kind in ("send_recv", "broadcast") else passes * (ranks - 1) / ranks * size
    inside = cluster.scale_up.bus_bandwidth_bytes_per_second
    network = cluster.node.network_bytes_per_second_per_gpu
    rate = np.where(ranks <= cluster.domain_size, inside, min(inside, network) if network else inside)
    return np.asarray(passes * (ranks - 1) * cluster.scale_up.latency_seconds + volume / rate)
