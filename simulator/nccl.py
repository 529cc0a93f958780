"""NCCL's tuning model: bandwidth and latency of every algorithm and protocol.

Source: NVIDIA/nccl at 5067397c (2026-06-11, 2.30.x), src/graph/tuning.cc, search.cc and topo.h. Constants are in GB/s
and microseconds as there; results are seconds.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from simulator.arrays import Bools, Floats
from topologies.cluster import CollectiveKind

GB, US = 1e9, 1e-6
NEVER = 1e12
"""Latency of an algorithm where it does not run."""

NVLS_EFFICIENCY = {"hopper": 0.85, "blackwell": 0.74}
NVLS_LINK_SHARE = {"hopper": 0.85, "blackwell": 0.77}
"""What in-switch reduction reaches of NCCL's count of a GPU's links: NCCL's own efficiency on Hopper. On Blackwell 0.77
gives 8 B200 the 838 to 846 GB/s that were measured (stas00/ml-engineering), where NCCL tunes with 0.74."""
LL_MAX = (39.0, 39.0, 20.4)
"""LL limit of channels together across nodes, by one, two and more nodes, with Intel CPUs (the row of Volta)."""
LL_MAX_ONE_NODE = {"ampere": 87.7, "hopper": 141.0, "blackwell": 282.0}
RING_LL128_CHANNEL = {"ampere": 20.0, "hopper": 36.7, "blackwell": 40.0}
TREE_LL128_CHANNEL = {"ampere": (20.0, 20.0, 20.0), "hopper": (36.7, 36.7, 29.0), "blackwell": (55.6, 31.67, 20.0)}
TREE_CHANNEL = {"ampere": (24.0, 23.6, 17.8), "hopper": (38.7, 41.4, 36.0), "blackwell": (70.0, 42.8, 24.0)}
NVLS_TREE_CHANNEL = {"hopper": (0.0, 59.9, 45.5), "blackwell": (0.0, 96.0, 80.0)}
"""As NCCL's table, but for two nodes of Hopper, where it tunes with 57.7 and two systems reach 471 and 487 GB/s over
eight channels (oracle-quickstart/oci-hpc, aws-samples/awsome-distributed-training)."""

BASE = {"tree": (6.8, 14.0, 8.4), "ring": (6.6, 14.0, 8.4), "nvls-tree": (0.0, 0.0, 0.0)}
NVLINK = {"tree": (0.6, 1.25, 4.0), "ring": (0.6, 1.9, 3.4)}
NET = {"tree": (5.0, 8.5, 14.0), "ring": (2.7, 4.0, 14.0)}
"""Microseconds by protocol: LL, LL128, Simple."""
NVLS_INTRA, NVLS_TREE_INTER = 25.0, 20.9
NVLINK_SIMPLE, NET_SIMPLE = 3.4e-6, 14e-6
LINK_SHARE = 0.88
"""Of the link rate that NVLink carries at most: 396 of 450 GB/s on H200 (nvbandwidth; stas00/ml-engineering)."""
NET_OVERHEAD = 1.0
"""Of a message across nodes with Intel CPUs; three times that for Simple."""
PROTOCOLS = ("LL", "LL128", "Simple")

LINKS = {"ampere": (25.0, 20.0), "hopper": (25.0, 20.6), "blackwell": (50.0, 40.1)}
"""NVLink: data-sheet rate of a link and direction, and what NCCL counts."""
INTRA_SPEEDS = {
    "ampere": (20.0, 18.0, 15.0, 12.0, 10.0),
    "hopper": (60.0, 50.0, 40.0, 30.0, 24.0, 20.0),
    "blackwell": (90.0, 80.0, 70.0, 60.0, 50.0, 45.0, 40.0),
}
INTER_SPEEDS = {
    "ampere": (48.0, 30.0, 28.0, 24.0, 20.0, 18.0, 15.0, 12.0, 10.0),
    "hopper": (48.0, 45.0, 42.0, 40.0, 30.0, 24.0, 22.0, 20.0, 17.5, 15.0, 12.0),
    "blackwell": (96.0, 86.0, 80.0, 48.0, 45.1, 42.0, 40.0, 30.0, 24.0, 22.0, 20.0, 17.5, 15.0, 12.0),
}
MAX_INTER_CHANNELS = 8.0
"""Rings across domains: one per NIC of a node; racks with more NICs reach no more (GB200, 1,440 GPUs: 405.7 GB/s)."""

TREE_CORRECTION = {
    "LL": (1, 1, 1, 1, 0.9, 0.8, 0.7, 0.7, 0.7, 0.7, 0.6, 0.5, 0.4, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1, 1, 1, 1, 1),
    "LL128": (1, 1, 1, 1, 1, 0.9, 0.8, 0.8, 0.8, 0.7, 0.6, 0.6, 0.6, 0.6, 0.6, 0.6, 0.8, 0.9, 0.9, 0.9, 0.9, 1, 1, 1),
    "Simple": (
        *(0.9, 0.9, 0.9, 0.9, 0.9, 0.9, 0.9, 0.8, 0.7, 0.6, 0.6, 0.5),
        *(0.5, 0.5, 0.5, 0.6, 0.7, 0.8, 0.7, 0.7, 0.8, 0.9, 0.9, 0.9),
    ),
}
"""Share of a tree's bandwidth by the power of two of the size, from 64 bytes on."""
CORRECTIONS = tuple(np.array([*TREE_CORRECTION[protocol], 1.0]) for protocol in PROTOCOLS)
PAT_BASE, PAT_RANK, PAT_HOPS_AT_ONCE, PAT_RATE = 8.0, 2.8, 3.5, 0.75
"""Microseconds of its start and of each rank; hops that overlap; share of the ring's bandwidth."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Ranks of collectives and what joins them, one entry per group; channels, and what each carries."""

    ranks: Floats
    domains: Floats
    """NVLink domains (or nodes) that the ranks lie in."""
    per_domain: Floats
    architecture: str
    switched: bool
    link_bytes_per_second: float
    intra_channels: Floats | float
    intra_bytes_per_second: Floats | float
    inter_channels: Floats
    inter_bytes_per_second: Floats
    nic_seconds: float
    exchange_bytes_per_second: Floats
    """Of the NICs of one GPU, where all members send to all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """Time of one algorithm and protocol over the size of the buffer: latency, and seconds for each byte."""

    latency: Floats
    byte_seconds: Floats
    long_from: Floats | None = None
    """Buffer from which ``long_latency`` counts instead."""
    long_latency: Floats | None = None
    correction: Floats | None = None
    """Share of the rate by the power of two of the size, see TREE_CORRECTION."""
    chunked: Floats | None = None
    """1 where cutting the buffer into chunks costs time of its own (see ``collectives``), 0 elsewhere."""

    def parts(self, size: Floats) -> tuple[Floats, Floats]:
        """Latency and transfer time of buffers of ``size`` bytes."""
        latency, transfer = self.latency, size * self.byte_seconds
        if self.long_from is not None and self.long_latency is not None:
            latency = np.where(size >= self.long_from, self.long_latency, latency)
        if self.correction is not None:
            power = np.log2(np.maximum(size, 64.0) / 64.0).astype(np.int64)
            transfer = transfer / self.correction[np.minimum(power, len(self.correction) - 1)]
        return latency, transfer


Lines = dict[tuple[str, str], Line]
"""By algorithm and protocol."""


def intra_channels(architecture: str, link_gbytes: float) -> tuple[float, float]:
    """Channels and their speed inside a domain: the most that NVLink carries, in the steps that NCCL tries.

    >>> intra_channels("ampere", 300.0), intra_channels("hopper", 450.0), intra_channels("blackwell", 900.0)
    ((12.0, 20.0), (6.0, 60.0), (8.0, 90.0))
    """
    if architecture not in LINKS:
        return 1.0, link_gbytes
    sheet, counted = LINKS[architecture]
    total = link_gbytes / sheet * counted
    best = max(INTRA_SPEEDS[architecture], key=lambda speed: (total // speed) * speed)
    return max(total // best, 1.0), best


def carried_per_channel(architecture: str, link_gbytes: float) -> float:
    """Rate of a channel when all links are full: more than the step that NCCL tried, which is not enforced.

    8 H200 run a ring at 367 GB/s where the steps of the search add up to 360 (stas00/ml-engineering).
    """
    if architecture not in LINKS:
        return link_gbytes
    sheet, counted = LINKS[architecture]
    return link_gbytes / sheet * counted / intra_channels(architecture, link_gbytes)[0]


def inter_speed(architecture: str, nic_gbytes: float) -> float:
    """Speed of a channel over one NIC: the fastest that NCCL tries and the NIC carries.

    >>> inter_speed("ampere", 25.0), inter_speed("hopper", 50.0), inter_speed("blackwell", 100.0)
    (24.0, 48.0, 96.0)
    """
    fitting = [speed for speed in INTER_SPEEDS.get(architecture, INTER_SPEEDS["hopper"]) if speed <= nic_gbytes]
    return max(fitting, default=nic_gbytes)


def lines(kind: CollectiveKind, group: Group) -> Lines:
    """Return every algorithm and protocol that NCCL would consider for a ring-like collective."""
    found: Lines = {}
    alone = group.per_domain <= 1
    for index, protocol in enumerate(PROTOCOLS):
        found["ring", protocol] = _ring(kind, group, index)
        if kind == "all_reduce":
            found["tree", protocol] = _tree(group, index)
    if kind in ("all_gather", "reduce_scatter") and np.any(alone & (group.domains > 1)):
        found["pat", "Simple"] = _pat(group)
    if kind == "all_reduce" and group.switched and group.architecture in NVLS_EFFICIENCY:
        one = group.domains <= 1
        if np.any(one):
            found["nvls", "Simple"] = _only(one & (group.per_domain > 4), _nvls(group))
        if not np.all(one):
            found["nvls-tree", "Simple"] = _only(~one, _nvls_tree(group))
    return found


def _only(here: Bools, line: Line) -> Line:
    return replace(line, latency=np.where(here, line.latency, NEVER))


def steps(kind: CollectiveKind, ranks: Floats) -> Floats:
    """Steps of a ring."""
    if kind == "all_reduce":
        return 2 * (ranks - 1)
    return ranks - 1 if kind in ("all_gather", "reduce_scatter") else ranks


def _bus(group: Group) -> tuple[Floats, Floats]:
    """Bus bandwidth in GB/s and channels of the ring graph."""
    one = group.domains <= 1
    channels = np.where(one, group.intra_channels, group.inter_channels)
    inside = group.intra_channels * group.intra_bytes_per_second / GB
    across = group.inter_channels * group.inter_bytes_per_second / GB
    # up to two domains NCCL counts the inner graph, beyond them the outer one, whose channels the links must carry
    limit = np.where(group.domains > 2, np.maximum(inside, LINK_SHARE * group.link_bytes_per_second / GB), inside)
    limit = limit if group.switched else np.full_like(across, inside)
    return np.where(one, inside, np.minimum(limit, across)), channels


def _ring(kind: CollectiveKind, group: Group, index: int) -> Line:
    bus, channels = _bus(group)
    one = group.domains <= 1
    architecture = group.architecture
    if index == 0:
        limit = np.where(one, LL_MAX_ONE_NODE.get(architecture, LL_MAX[0]), _by_nodes(LL_MAX, group))
        bus = np.minimum(limit, 0.5 * bus)
    elif index == 1:
        bus = np.minimum(0.92 * bus, channels * RING_LL128_CHANNEL.get(architecture, 20.0))
    count = steps(kind, group.ranks)
    bandwidth = bus * group.ranks / count
    crossings = np.where(one, 0.0, (2.0 if kind == "all_reduce" else 1.0) * (group.domains - 1))
    overhead = NET_OVERHEAD * (3.0 if index == 2 else 1.0)
    intra = np.where(one, NVLINK["ring"][index], np.maximum(NVLINK["ring"][index], overhead))
    latency = BASE["ring"][index] + (count - crossings) * intra + crossings * _inter("ring", group, index)
    line = Line(latency=latency * US, byte_seconds=1.0 / (bandwidth * GB))
    if index < 2:
        return line
    line = replace(line, chunked=np.where(one & group.switched, 1.0, 0.0))
    if kind != "all_reduce" or np.all(one):
        return line
    late = line.latency * np.where(one, 1.0, 1.4)
    return replace(line, long_from=64.0 * channels * group.ranks, long_latency=late)


def _tree(group: Group, index: int) -> Line:
    """Two trees; between two domains each sends the buffer once instead of twice, as the inner graph of NCCL says."""
    twice = np.where(group.domains == 2, 2.0, 1.0)
    bus, channels = _bus(replace(group, inter_bytes_per_second=group.inter_bytes_per_second * twice))
    architecture, one = group.architecture, group.domains <= 1
    if index == 0:
        limit = np.where(one, LL_MAX_ONE_NODE.get(architecture, LL_MAX[0]), _by_nodes(LL_MAX, group))
        bus = np.minimum(bus / 3.8, limit)
    elif index == 1:
        most = channels * _by_nodes(TREE_LL128_CHANNEL.get(architecture, TREE_LL128_CHANNEL["ampere"]), group)
        bus = np.minimum(bus * np.where(one, 7.0 / 9.0, 120.0 / 128.0), most)
    else:
        most = channels * _by_nodes(TREE_CHANNEL.get(architecture, TREE_CHANNEL["ampere"]), group)
        bus = np.minimum(0.92 * bus, most)
    depth = np.floor(np.log2(np.maximum(group.domains, 1.0)))
    hops = (group.per_domain - 1) * NVLINK["tree"][index] + depth * _inter("tree", group, index)
    return Line(
        latency=(BASE["tree"][index] + 2.0 * hops) * US,
        byte_seconds=1.0 / (0.5 * bus * GB),
        correction=CORRECTIONS[index],
        chunked=np.where(one & group.switched, 1.0, 0.0) if index == 2 else None,
    )


def _pat(group: Group) -> Line:
    """Parallel aggregated trees, for gathers and reduce-scatters with one GPU in each domain."""
    bus, _ = _bus(group)
    hops = np.floor(np.log2(np.maximum(group.domains, 1.0))) * _inter("ring", group, 2) / PAT_HOPS_AT_ONCE
    latency = np.where((group.per_domain <= 1) & (group.domains > 1), PAT_BASE + hops + PAT_RANK * group.ranks, NEVER)
    return Line(latency=latency * US, byte_seconds=1.0 / (PAT_RATE * bus * GB))


def _nvls(group: Group) -> Line:
    """Reduction inside the switches of one domain: each of n GPUs sends and receives size * (1 + 1 / n).

    The links run at what NCCL counts times its NVLS efficiency. Beyond eight GPUs the bus bandwidth stays: 839 to 847
    GB/s on the 72 of a GB200 rack (coreweave/nccl-tests), 838 to 846 on 8 B200; four GPUs of H200 and of B200 run a
    ring (stas00/ml-engineering).
    """
    members = np.clip(group.per_domain, 2.0, 8.0)
    bus = 2 * (members - 1) / (members + 1) * nvls_link_rate(group.architecture, group.link_bytes_per_second) / GB
    bandwidth = bus * group.ranks / (2 * (group.ranks - 1))
    return Line(
        latency=np.full_like(bandwidth, NVLS_INTRA * US),
        byte_seconds=1.0 / (bandwidth * GB),
        chunked=np.ones_like(bandwidth),
    )


def _nvls_tree(group: Group) -> Line:
    """Switches inside the domains, a tree between them."""
    heads = np.minimum(group.per_domain, 8.0)
    inside = _nvls_speed(group, heads) * (heads - 1) / heads * 2.0
    across = group.inter_bytes_per_second / GB * np.where(group.domains <= 2, 2.0, 1.0)
    most = _by_nodes(NVLS_TREE_CHANNEL[group.architecture], group)
    bus = group.inter_channels * np.minimum(np.minimum(inside, across), most)
    bandwidth = np.maximum(bus * group.ranks / (2 * (group.ranks - 1)), 1e-9)
    inter = NVLS_TREE_INTER + 2 * group.nic_seconds / US
    latency = NVLS_INTRA + 2 * np.floor(np.log2(np.maximum(group.domains, 1.0))) * inter
    return Line(latency=latency * US, byte_seconds=1.0 / (bandwidth * GB))


def _counted(group: Group) -> float:
    """What NCCL counts of the links of one GPU, in GB/s."""
    sheet, counted = LINKS[group.architecture]
    return group.link_bytes_per_second / GB / sheet * counted


def nvls_link_rate(architecture: str, link_bytes_per_second: float) -> float:
    """Rate at which in-switch reduction uses the links of a GPU, in bytes per second; 0: the GPU has none."""
    if architecture not in NVLS_LINK_SHARE:
        return 0.0
    sheet, counted = LINKS[architecture]
    return link_bytes_per_second / sheet * counted * NVLS_LINK_SHARE[architecture]


def _nvls_speed(group: Group, channels: Floats) -> Floats:
    total, speeds = _counted(group), np.array(INTRA_SPEEDS[group.architecture])
    fitting = np.where(speeds[None, :] * channels[:, None] <= total, speeds[None, :], 0.0).max(axis=1)
    return np.asarray(fitting * NVLS_EFFICIENCY[group.architecture])


def _by_nodes(values: tuple[float, float, float], group: Group) -> Floats:
    return np.where(group.domains <= 1, values[0], np.where(group.domains <= 2, values[1], values[2]))


def _inter(algorithm: str, group: Group, index: int) -> Floats:
    """Microseconds of a hop across domains; one GPU per node sees the tree's value, Simple flushes once more."""
    hop = np.where(group.per_domain <= 1, NET["tree"][index], NET[algorithm][index])
    return np.asarray(hop + group.nic_seconds / US * (2.0 if index == 2 else 1.0))
