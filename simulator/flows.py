"""One collective as flows on the links of a cluster: who binds it, and how long it takes.

Two fluids bracket what chunks do. In *lockstep* the flows of a ring (or tree) all move at the pace of the slowest, and
leave the rest of their links to others; *edge by edge* each takes its fair share for itself. Alone on a fabric they
agree; where collectives with different bottlenecks share a link, a chunk-by-chunk ring lies in between. The answer is
the lockstep time; the edge-by-edge time is its upper end.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from simulator.flow_traffic import Traffic, collective_traffic, lockstep
from simulator.folding import Folded, fold
from simulator.maxmin import link_rates, max_min_rates
from topologies.cluster import CollectiveKind
from topologies.errors import InputError
from topologies.link_map import Floats, Ints, LinkMap
from topologies.routes import Routes

MOST_PLAYED = 2048
"""Classes of flows that are played edge by edge until the last ends; more are priced at the rates that they start with,
which is slower still: an end only gives the others more."""
FULL = 1e-9
"""Relative distance to its capacity at which a link is called full."""

NOT_MODELLED = (
    "packets and their loss, pause frames (PFC) and their storms, congestion control (ECN, DCQCN), incast",
    "buffers between unequal rings: chunks may wait for the worst phase of a neighbour",
    "protocols and channels inside a link: the rates of links are what large transfers reach",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class FlowTime:
    """A collective played as flows."""

    seconds: float
    high_seconds: float
    """Edge by edge: the upper end where unequal flows share links."""
    latency_seconds: float
    """Part of ``seconds`` that no bandwidth would save."""
    bottleneck: str
    """The link that binds (the first of them)."""
    bottlenecks: int
    """Links that bind just as much."""
    bottleneck_bytes: float
    """What that link carries in the phase that it binds."""
    flows: int
    flow_classes: int
    """Flows that differ by symmetry."""
    link_classes: int


def play_collective(
    network: LinkMap,
    kind: CollectiveKind,
    gpus: Sequence[int] | Ints,
    size_bytes: float,
    *,
    algorithm: str = "ring",
    seed: int = 0,
    relay: bool = True,
) -> FlowTime:
    """Play one collective alone on a cluster.

    Args:
        network: the links; capacities may be degraded.
        kind: which collective.
        gpus: the ranks in order.
        size_bytes: the whole buffer as in nccl-tests.
        algorithm: one of ALGORITHMS; ``nvls`` reduces inside the switches of one domain.
        seed: of the fabric's hash.
        relay: change rails over the scale-up network (PXN).

    Raises:
        InputError: two ranks have no way to each other, or a link on the way is dead.
        ValueError: the algorithm does not exist for this collective or these ranks.
    """
    phases = collective_traffic(
        network, kind, np.asarray(gpus, np.int64), size_bytes, algorithm=algorithm, seed=seed, relay=relay
    )
    times = [_phase(network, phase) for phase in phases]
    longest = max(times, key=lambda time: time.seconds)
    return FlowTime(
        seconds=sum(time.seconds for time in times),
        high_seconds=sum(time.high_seconds for time in times),
        latency_seconds=sum(time.latency_seconds for time in times),
        bottleneck=longest.bottleneck,
        bottlenecks=longest.bottlenecks,
        bottleneck_bytes=longest.bottleneck_bytes,
        flows=sum(time.flows for time in times),
        flow_classes=sum(time.flow_classes for time in times),
        link_classes=sum(time.link_classes for time in times),
    )


def folded(capacities: Floats, traffic: Traffic) -> Folded:
    """Fold the edges of a traffic by symmetry, told apart by their bytes and by how many flows use them."""
    edges = traffic.edges
    whole = Routes(starts=edges.starts, links=edges.links, loads=edges.loads * traffic.counts[edges.rows])
    _, size = np.unique(traffic.edge_bytes, return_inverse=True)
    return fold(capacities, whole, size * (int(traffic.counts.max()) + 1) + traffic.counts)


def _phase(network: LinkMap, traffic: Traffic) -> FlowTime:
    capacities = network.capacities_bytes_per_second
    grouped, group_bytes = lockstep(traffic)
    ends = finish_seconds(capacities, grouped, group_bytes)
    last = int(np.argmax(ends))
    seconds = float(ends[last])
    if not np.isfinite(seconds):
        _refuse_dead(network, grouped, last)
    small = folded(capacities, traffic)
    sizes = np.zeros(len(small.sizes))
    sizes[small.flow_class] = traffic.edge_bytes
    at_start = sizes / max_min_rates(small.capacities, small.flows)
    played = finish_seconds(small.capacities, small.flows, sizes) if len(sizes) <= MOST_PLAYED else at_start
    total = seconds + _latency(at_start, small, traffic, seconds)
    link, count, carried = _bottleneck(capacities, grouped, group_bytes, last)
    return FlowTime(
        seconds=total,
        high_seconds=max(float(played.max()) + total - seconds, total),
        latency_seconds=total - seconds,
        bottleneck=network.name(link) if link >= 0 else "latency",
        bottlenecks=count,
        bottleneck_bytes=carried,
        flows=len(traffic.groups),
        flow_classes=len(small.sizes),
        link_classes=len(small.capacities),
    )


def _latency(own: Floats, small: Folded, traffic: Traffic, seconds: float) -> float:
    """What latency adds: every step of a chain or of an even ring, less where one edge of a ring is slow.

    A ring of K steps ends after max(K * slowest, K * (mean + alpha)), where ``slowest`` and ``mean`` are step times of
    its edges and alpha the latency (exact where edges are equal; from the recursion of its steps).
    """
    all_steps = traffic.steps * traffic.step_seconds
    if not traffic.cyclic or seconds <= 0:
        return all_steps
    mean = float(np.average(own, weights=small.sizes) / own.max())
    return max(traffic.step_seconds, (mean - 1.0) * seconds + all_steps)


def _refuse_dead(network: LinkMap, grouped: Routes, group: int) -> None:
    links = grouped.links[grouped.starts[group] : grouped.starts[group + 1]]
    dead = links[network.capacities_bytes_per_second[links] <= 0]
    raise InputError(
        f"the traffic never ends: {network.name(int(dead[0]))} is dead and its flows have no other way",
        hint="leave the nodes behind it out, or give up the rail",
    )


def _bottleneck(capacities: Floats, grouped: Routes, sizes: Floats, group: int) -> tuple[int, int, float]:
    """The first link that holds a group back, how many hold back flows as slow, and what it carries."""
    mine = grouped.links[grouped.starts[group] : grouped.starts[group + 1]]
    if not len(mine):
        return -1, 0, 0.0
    rates = max_min_rates(capacities, grouped)
    used = link_rates(len(capacities), grouped, rates)
    highest = np.zeros(len(capacities))
    np.maximum.at(highest, grouped.links, rates[grouped.rows])
    binding = (used >= capacities * (1 - FULL)) & (np.abs(highest - rates[group]) <= FULL * rates[group])
    here = mine[binding[mine]]
    link = int(here.min()) if len(here) else int(mine[0])
    carried = grouped.loads * sizes[grouped.rows]
    return link, int(binding.sum()), float(carried[grouped.links == link].sum())


def finish_seconds(capacities: Floats, flows: Routes, size_bytes: Floats, *, window: float = 0.0) -> Floats:
    """Return when each of the flows that all start at 0 ends; infinite over a dead link.

    The same as ``Network`` without processes. ``window`` as there.
    """
    ends = np.zeros(len(size_bytes))
    left = np.asarray(size_bytes, np.float64).copy()
    active = np.flatnonzero((np.diff(flows.starts) > 0) & (left > 0))
    now = 0.0
    while len(active):
        part = _subset(flows, active)
        rates = max_min_rates(capacities, part)
        with np.errstate(divide="ignore"):
            wait = left[active] / rates
        step = float(wait.min())
        if not np.isfinite(step):
            ends[active] = np.inf
            break
        now += step
        done = wait <= step * (1 + 1e-9) + window * now
        ends[active[done]] = now
        left[active] = np.maximum(left[active] - rates * step, 0.0)
        active = active[~done]
    return ends


def _subset(flows: Routes, kept: Ints) -> Routes:
    counts = np.diff(flows.starts)
    keep = np.zeros(len(counts), np.bool_)
    keep[kept] = True
    entries = np.repeat(keep, counts)
    starts = np.concatenate([[0], np.cumsum(counts[kept])]).astype(np.int64)
    return Routes(starts=starts, links=flows.links[entries], loads=flows.loads[entries])
