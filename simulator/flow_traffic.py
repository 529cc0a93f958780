"""A collective as traffic on links: its flows with their ways, told apart by ring or tree."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy import sparse

from simulator import nccl
from simulator.exchange import exchange_loads
from simulator.patterns import Pattern, double_tree, hierarchical, ring, shift, units_of, within
from topologies.cluster import CollectiveKind
from topologies.link_map import Floats, Ints, LinkMap
from topologies.routes import Routes, routes

MOST_CHANNELS = int(nccl.MAX_INTER_CHANNELS)
"""Rings and trees across domains; a rack of 72 NICs uses no more, as far as is published."""
ALGORITHMS = ("ring", "tree", "hierarchical", "nvls", "nvls-tree", "p2p")


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """Flows that start together; the collective goes on when all have ended.

    Flows of equal ends, size and way are one edge that ``counts`` flows use.
    """

    edges: Routes
    """The links of one flow of each edge."""
    edge_bytes: Floats
    """Of one flow."""
    counts: Ints
    """Flows of each edge."""
    flow_edge: Ints
    """Edge of each flow."""
    groups: Ints
    """Group of each flow; flows of one group run in lockstep."""
    steps: int
    step_seconds: float
    """Mean latency of a step."""
    cyclic: bool = False


def collective_traffic(
    network: LinkMap,
    kind: CollectiveKind,
    gpus: Ints,
    size_bytes: float,
    *,
    algorithm: str = "ring",
    seed: int = 0,
    relay: bool = True,
) -> tuple[Traffic, ...]:
    """Return the phases of a collective as traffic on links; see ``play_collective``."""
    if kind == "all_to_all":
        loads = exchange_loads(network, gpus, size_bytes, relay=relay)
        return (_counted(network, loads, gpus),)
    if algorithm.startswith("nvls"):
        return (_in_switch(network, kind, gpus, size_bytes, seed, relay),)
    patterns = _patterns(network, kind, gpus, size_bytes, algorithm)
    return tuple(_routed(network, pattern, seed, relay) for pattern in patterns)


def _patterns(
    network: LinkMap, kind: CollectiveKind, gpus: Ints, size_bytes: float, algorithm: str
) -> tuple[Pattern, ...]:
    units = units_of(network, gpus)
    if kind == "reduce_scatter" and network.cluster.gpu.architecture == "cpu":
        kind = "all_reduce"  # gloo moves the volume of an all-reduce
    if kind == "send_recv":
        return (shift(gpus, size_bytes),)
    if algorithm == "ring":
        if len(units) == 1:
            return (within(network, kind, gpus, size_bytes),)
        return (ring(kind, units, size_bytes, mesh=network.mesh, most_channels=MOST_CHANNELS),)
    if kind != "all_reduce" or algorithm not in ALGORITHMS or algorithm == "p2p":
        raise ValueError(f"{kind} has no algorithm {algorithm!r} here")
    if algorithm == "hierarchical":
        return hierarchical(network, units, size_bytes)
    return (double_tree(units, size_bytes, mesh=network.mesh, most_channels=MOST_CHANNELS),)


def _routed(network: LinkMap, pattern: Pattern, seed: int, relay: bool) -> Traffic:
    sources, targets = pattern.sources, pattern.targets
    same = network.domain[sources] == network.domain[targets]
    labels = np.where(same | network.bundled, 0, pattern.channels)
    _, sizes = np.unique(pattern.size_bytes, return_inverse=True)
    gpus = len(network.domain)
    key = ((labels * (int(sizes.max()) + 1) + sizes) * gpus + sources) * gpus + targets
    _, first, flow_edge, counts = np.unique(key, return_index=True, return_inverse=True, return_counts=True)
    edges = routes(network, sources[first], targets[first], labels=labels[first], seed=seed, relay=relay)
    return Traffic(
        edges=edges,
        edge_bytes=pattern.size_bytes[first],
        counts=counts,
        flow_edge=flow_edge,
        groups=pattern.groups,
        steps=pattern.steps,
        step_seconds=float(np.average(hop_seconds(network, sources[first], targets[first]), weights=counts)),
        cyclic=pattern.cyclic,
    )


def _counted(network: LinkMap, loads: Floats, gpus: Ints) -> Traffic:
    """Traffic of known bytes per link, all of which moves as one, and shares links like one flow for each NIC."""
    used, flow_bytes = np.flatnonzero(loads), busiest_port(network, loads)
    zero = np.zeros(1, np.int64)
    return Traffic(
        edges=Routes(starts=np.array([0, len(used)]), links=used, loads=loads[used] / flow_bytes),
        edge_bytes=np.full(1, flow_bytes),
        counts=zero + 1,
        flow_edge=zero,
        groups=zero,
        steps=1,
        step_seconds=float(hop_seconds(network, gpus[:1], gpus[-1:])[0]),
    )


def busiest_port(network: LinkMap, loads: Floats) -> float:
    """Return the most that an exchange puts on a NIC (on any link, where it needs none).

    A library serves a few peers of an all-to-all at a time: beside other traffic it counts as one flow for each NIC,
    and not as one for each pair.
    """
    first, end = network.first["nic_up"], network.first["nic_down"]
    ports = float(loads[first:end].max(initial=0.0))
    return ports or float(loads.max(initial=0.0))


def _in_switch(
    network: LinkMap, kind: CollectiveKind, gpus: Ints, size_bytes: float, seed: int, relay: bool
) -> Traffic:
    """All-reduce with reduction in the switches of each domain (NVLS), and two trees between domains.

    Each of the n GPUs of a domain sends and receives ``size * (1 + 1 / n)``. Such traffic fills links less than a ring
    does, so that its bytes count for more.
    """
    units = units_of(network, gpus)
    if kind != "all_reduce" or network.mesh or min(len(unit) for unit in units) < 2:
        raise ValueError(f"in-switch reduction is for an all_reduce inside switched domains, not for {kind} here")
    share = np.concatenate([np.full(len(unit), size_bytes * (1 + 1 / len(unit))) for unit in units])
    inside = Traffic(
        edges=Routes(
            starts=2 * np.arange(len(gpus) + 1),
            links=np.stack([network.first[block] + gpus for block in ("scale_up_out", "scale_up_in")], axis=1).ravel(),
            loads=np.full(2 * len(gpus), nvls_weight(network)),
        ),
        edge_bytes=share,
        counts=np.ones(len(gpus), np.int64),
        flow_edge=np.arange(len(gpus)),
        groups=np.zeros(len(gpus), np.int64),
        steps=1,
        step_seconds=network.cluster.scale_up.latency_seconds,
    )
    if len(units) == 1:
        return inside
    across = _routed(network, double_tree(units, size_bytes, chains=False, most_channels=MOST_CHANNELS), seed, relay)
    return _side_by_side(inside, across)


def nvls_weight(network: LinkMap) -> float:
    """Return the rate of a ring over that of in-switch reduction on the same links."""
    cluster = network.cluster
    rate = nccl.nvls_link_rate(cluster.gpu.architecture, cluster.scale_up.bandwidth_bytes_per_second)
    return max(1.0, cluster.scale_up.bus_bandwidth_bytes_per_second / rate) if rate else 1.0


def _side_by_side(first: Traffic, second: Traffic) -> Traffic:
    """Join traffic that runs at the same time, each with groups of its own."""
    return Traffic(
        edges=Routes(
            starts=np.concatenate([first.edges.starts, first.edges.starts[-1] + second.edges.starts[1:]]),
            links=np.concatenate([first.edges.links, second.edges.links]),
            loads=np.concatenate([first.edges.loads, second.edges.loads]),
        ),
        edge_bytes=np.concatenate([first.edge_bytes, second.edge_bytes]),
        counts=np.concatenate([first.counts, second.counts]),
        flow_edge=np.concatenate([first.flow_edge, len(first.counts) + second.flow_edge]),
        groups=np.concatenate([first.groups, int(first.groups.max()) + 1 + second.groups]),
        steps=first.steps + second.steps,
        step_seconds=(first.steps * first.step_seconds + second.steps * second.step_seconds)
        / (first.steps + second.steps),
    )


def hop_seconds(network: LinkMap, sources: Ints, targets: Ints) -> Floats:
    """Latency of one message: of the scale-up network, or of the NIC and the lowest level that joins both nodes."""
    cluster = network.cluster
    near = np.full(len(sources), cluster.scale_up.latency_seconds)
    if cluster.node.nic is None or not cluster.fabric.tiers:
        return near
    a, b = (ends // network.gpus_per_node for ends in (sources, targets))
    level = np.full(len(sources), cluster.fabric.tiers[-1].latency_seconds)
    for tier in reversed(cluster.fabric.tiers):
        level = np.where(a // tier.nodes == b // tier.nodes, tier.latency_seconds, level)
    return np.where(network.domain[sources] == network.domain[targets], near, level + cluster.node.nic.latency_seconds)


def lockstep(traffic: Traffic) -> tuple[Routes, Floats]:
    """Return one flow per group, at the rate of a single flow of it, and its bytes.

    Its loads count the flows of the group on each link, so that it shares links as its flows would.
    """
    edges = traffic.edges
    width = int(edges.links.max(initial=0)) + 1
    links = sparse.csr_array((edges.loads, edges.links, edges.starts), shape=(len(traffic.counts), width))
    flow_bytes = traffic.edge_bytes[traffic.flow_edge]
    sizes = np.zeros(int(traffic.groups.max()) + 1)
    np.maximum.at(sizes, traffic.groups, flow_bytes)
    moved = flow_bytes / np.where(sizes > 0, sizes, 1.0)[traffic.groups], (traffic.groups, traffic.flow_edge)
    total: Any = sparse.csr_array(moved, shape=(len(sizes), len(traffic.counts))) @ links
    flows = Routes(starts=total.indptr.astype(np.int64), links=total.indices.astype(np.int64), loads=total.data)
    return flows, sizes
