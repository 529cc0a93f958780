"""Time of collectives as NCCL itself would estimate it: the fastest of its algorithms and protocols.

Formulas and constants are those of NCCL's tuning model (NVIDIA/nccl at 5067397c, 2.30.x, src/graph/tuning.cc and
topo.h). Collectives that were measured on the cluster take their place. The step model and ``headway collective`` use
the same functions: one over the groups of many layouts, the other over one group.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np

from simulator import nccl
from simulator.arrays import Bools, Distinct, Floats, Ints, every_row
from simulator.links import Links, group_of, links, measured_seconds
from simulator.log_curves import curve_for, scaled_by
from simulator.nccl import Group, Line, Lines
from topologies.cluster import Cluster, CollectiveKind
from topologies.errors import Infeasible

PACKING = 8.4e-6
"""Start of a point-to-point kernel: NCCL's base latency of the Simple protocol."""
P2P_SHARE = 0.84
"""Of the link rate that one pair reaches over NVLink: 376 of 450 GB/s on H100, 747 of 900 on GB200 (nvbandwidth)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveTime:
    """One collective: ``algbw`` is the buffer over the time, ``busbw`` what each link carries (nccl-tests)."""

    seconds: float
    algbw_bytes_per_second: float
    busbw_bytes_per_second: float
    algorithm: str
    protocol: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Groups:
    """The groups of one parallel axis, one for each layout; those that are alike are priced once."""

    net: Links
    ranks: Floats
    """Of every layout."""
    rows: Distinct
    distinct: Group
    """One for each distinct row."""
    known: dict[CollectiveKind, Lines] = field(default_factory=dict)
    """Lines that were asked for."""

    @property
    def any(self) -> bool:
        """Some layout has a group of two ranks or more."""
        return bool(np.any(self.ranks > 1))

    def seconds(
        self,
        kind: CollectiveKind,
        size_bytes: Floats,
        *,
        algorithm: str | None = None,
        beside: Bools | Literal[False] = False,
    ) -> Floats:
        """Time collectives over buffers of all ranks together (nccl-tests convention); zero for one rank.

        ``beside`` says in which layouts others of their own keep the links busy until they have started.

        Raises:
            ValueError: the collective has no such ``algorithm``.
        """
        if not self.any:
            return np.zeros(len(self.ranks))
        ranks, size = self.ranks[self.rows.first], size_bytes[self.rows.first]
        covered = self.covered(kind) & (algorithm is None)
        if covered.all():
            return measured_seconds(self.net.points, kind, ranks, size)[self.rows.index]
        seconds, latency, _ = fastest(self.lines(kind, algorithm), size)
        if beside is not False:
            seconds = seconds - np.where(beside[self.rows.first], latency, 0.0)
        if covered.any():
            seconds = np.where(covered, measured_seconds(self.net.points, kind, ranks, size), seconds)
        return np.asarray(np.where(ranks > 1, seconds, 0.0)[self.rows.index])

    def exchange_seconds(self, size_bytes: Floats, reached: Floats) -> Floats:
        """Time all-to-alls of which only a part leaves for other domains: ``reached``, one for each distinct row."""
        line = self.lines("all_to_all")["p2p", "Simple"]
        line = replace(line, byte_seconds=_exchange_byte_seconds(self.net, self.distinct, reached))
        seconds, _, _ = fastest({("p2p", "Simple"): line}, size_bytes[self.rows.first])
        return np.asarray(np.where(self.ranks[self.rows.first] > 1, seconds, 0.0)[self.rows.index])

    def lines(self, kind: CollectiveKind, algorithm: str | None = None) -> Lines:
        """Algorithms and protocols of a collective, of every distinct row."""
        if kind not in self.known:
            if self.net.cpu:
                self.known[kind] = {("ring", "gloo"): _gloo(kind, self.net, self.distinct)}
            elif kind in ("all_to_all", "send_recv"):
                self.known[kind] = {("p2p", "Simple"): _pairwise(kind, self.net, self.distinct)}
            else:
                self.known[kind] = nccl.lines(kind, self.distinct)
        every = self.known[kind]
        chosen = {name: line for name, line in every.items() if algorithm in (None, name[0])}
        if not chosen:
            raise ValueError(f"{kind} has no algorithm {algorithm!r}; it has {sorted({name for name, _ in every})}")
        return chosen

    def covered(self, kind: CollectiveKind) -> Bools:
        """Say for which distinct rows a measured curve speaks: of this collective, on the same side of a domain's edge.

        A curve of 8 GPUs of one node knows nothing of the network. Where CPU cores play the part of GPUs everything
        crosses the same memory, and one collective stands in for another.
        """
        points, outside = self.net.points, self.distinct.domains > 1
        if not points or self.net.cpu:
            return np.full(len(outside), bool(points))
        across = {point.ranks > self.net.domain_size for point in points if point.kind == kind}
        return np.where(outside, True in across, False in across)


def groups_of(net: Links, ranks: Floats, stride: Floats, rows: Distinct | None = None) -> Groups:
    """Place the groups of every layout: ``ranks`` whose neighbours lie ``stride`` GPUs apart."""
    rows = rows or every_row(len(ranks))
    stride = np.broadcast_to(stride, ranks.shape)
    return Groups(net=net, ranks=ranks, rows=rows, distinct=group_of(net, ranks[rows.first], stride[rows.first]))


def fastest(lines: Lines, size_bytes: Floats) -> tuple[Floats, Floats, Ints]:
    """Seconds of NCCL's choice among lines, the latency in them, and the number of the choice.

    NCCL's tuning adds latency L and transfer time B; inside one NVLink domain a buffer is cut into k chunks, which
    takes (L + B / k) and its start k times, so about L + B + sqrt(L * B) where k is chosen well. With it 8 H100 are met
    within 8 % from 1 MiB to 16 GiB (awsome-distributed-training, dgxc-benchmarking) and 8 A100 from 32 MiB on
    (ml-engineering). Across nodes the channels overlap the start of the next chunk, and large messages show nothing of
    it. NCCL chooses without that term.
    """
    best, start, chosen, cut = np.zeros(0), np.zeros(0), np.zeros(0, dtype=np.int64), np.zeros(0)
    for number, line in enumerate(lines.values()):
        latency, transfer = line.parts(size_bytes)
        time = latency + transfer
        more = np.zeros(1) if line.chunked is None else line.chunked * latency * transfer
        if number == 0:
            best, chosen, cut = time, np.zeros(time.shape, dtype=np.int64), np.broadcast_to(more, time.shape)
            start = np.broadcast_to(latency, time.shape)
            continue
        better = time < best
        start = np.where(better, latency, start)
        best, chosen, cut = np.where(better, time, best), np.where(better, number, chosen), np.where(better, more, cut)
    return best + np.sqrt(cut), start, chosen


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

    Ranks are packed domain by domain, or ``ranks_per_domain`` of them in each.

    Raises:
        ValueError: the collective has no such ``algorithm``.
    """
    net = links(cluster)
    stride = net.domain_size / ranks_per_domain if ranks_per_domain else 1.0
    groups = groups_of(net, ranks, np.full_like(ranks, stride))
    lines = groups.lines(kind, algorithm)
    _, _, chosen = fastest(lines, size_bytes)
    names = list(lines)
    covered = groups.covered(kind) & (algorithm is None)
    if cluster.node.curves and algorithm is None and not covered.all():
        return _by_logs(kind, cluster, ranks, size_bytes, ranks_per_domain)
    told = [("measured", "measured") if here else names[one] for here, one in zip(covered, chosen, strict=True)]
    return groups.seconds(kind, size_bytes, algorithm=algorithm), told


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


def _pairwise(kind: CollectiveKind, net: Links, group: Group) -> Line:
    """All-to-all and send-receive, which NCCL does not tune: fast links and NICs work side by side."""
    across = group.domains > 1
    latency = PACKING + np.where(across, nccl.NET_SIMPLE + 2 * group.nic_seconds, nccl.NVLINK_SIMPLE)
    chunked = np.where(~across & group.switched, 1.0, 0.0)
    if kind == "send_recv":
        rate = np.where(across, group.inter_bytes_per_second, P2P_SHARE * group.link_bytes_per_second)
        return Line(latency=latency, byte_seconds=1.0 / rate, chunked=chunked)
    return Line(latency=latency, byte_seconds=_exchange_byte_seconds(net, group, 1.0), chunked=chunked)


def _exchange_byte_seconds(net: Links, group: Group, reached: Floats | float) -> Floats:
    """Seconds for each byte of a rank's buffer in an all-to-all.

    ``reached`` is the share of the bytes for other domains that leaves.
    """
    inside = group.intra_channels * group.intra_bytes_per_second * net.all_to_all_share
    near = (group.per_domain - 1.0) / group.ranks / inside
    far = (1.0 - group.per_domain / group.ranks) * reached / group.exchange_bytes_per_second
    return np.maximum(near, far)


def _gloo(kind: CollectiveKind, net: Links, group: Group) -> Line:
    """Ring over shared memory or the NIC; gloo's reduce-scatter moves as much as its all-reduce."""
    passes = 2.0 if kind in ("all_reduce", "reduce_scatter") else 1.0
    volume = 1.0 if kind in ("send_recv", "broadcast") else passes * (group.ranks - 1) / group.ranks
    network = float(np.max(net.nic_bytes_per_second)) * net.nics_per_gpu
    inside = net.bus_bytes_per_second
    rate = np.where(group.domains <= 1, inside, min(inside, network) if network else inside)
    return Line(latency=passes * (group.ranks - 1) * net.hop_seconds, byte_seconds=volume / rate)
