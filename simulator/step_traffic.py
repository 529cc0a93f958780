"""Where the traffic of a training step goes: each stream of it with the bytes that it puts on every link.

A stream is what moves in lockstep: the transfers between two stages of a unit of replicas, the exchanges inside the ops
of one of its ranks, or the gradients of one data-parallel group. Its pace is the rate of one of its flows (the
fattest) where it has every link to itself; its loads count its flows on each link, as in ``flow_traffic.lockstep``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from scipy import sparse

from scenarios.layout import Layout
from simulator.flow_traffic import busiest_port
from simulator.patterns import RING_PASSES, ring, units_of, within
from simulator.rank_places import expert_grid, rank_grid, replicas_in_step
from simulator.step_volumes import StepVolumes
from topologies.cluster import CollectiveKind
from topologies.link_map import Floats, Ints, LinkMap
from topologies.routes import routes

ONCE = ("reduce", "gather")
"""Streams of a step's end: gradients, and updated weights."""


class Stream(NamedTuple):
    """What a stream is."""

    kind: str
    """p2p, tp_comm, cp_comm, ep_comm, fsdp, reduce or gather."""
    unit: int
    """Of replicas; -1: all of them take part."""
    rank: int
    """Pipeline rank (the sender of a p2p stream)."""
    other: int = -1
    """The receiver of a p2p stream; the number of a group of ``reduce`` and ``gather``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTraffic:
    """All streams of a step. ``loads[s, l]``: bytes on link l for each byte of a flow of stream s."""

    streams: tuple[Stream, ...]
    pace_bytes_per_second: Floats
    loads: Any
    """Sparse, (streams, links)."""
    unit_of_replica: Ints
    flows: int

    @property
    def num_units(self) -> int:
        """Units of replicas that are in step inside."""
        return int(self.unit_of_replica.max()) + 1


class _Edges(NamedTuple):
    """Flows with the stream that they belong to and the rate of each."""

    stream: Ints
    source: Ints
    target: Ints
    rate: Floats


def step_traffic(
    network: LinkMap,
    layout: Layout,
    volumes: StepVolumes,
    *,
    hops: tuple[tuple[int, int], ...],
    p2p_seconds: float,
    p2p_bytes: float,
    slow: float = 1.0,
    gpus: Ints | None = None,
    seed: int = 0,
) -> StepTraffic:
    """Lay the traffic of a step on the links.

    Args:
        network: links of the cluster.
        layout: what its ranks are to each other.
        volumes: how long and how much.
        hops: pairs of pipeline ranks between which activations or gradients go.
        p2p_seconds: one transfer, alone.
        p2p_bytes: of one rank.
        slow: by how much longer ops take, and with them the traffic inside them.
        gpus: the GPU of each rank; None: ranks stand on GPUs in their order.
        seed: of the fabric's hash.
    """
    grid = rank_grid(layout)
    places = np.arange(layout.world_size) if gpus is None else gpus
    unit = replicas_in_step(layout, grid)
    if volumes.fsdp_seconds > 0:  # each op waits for the shards of all replicas
        unit = np.zeros_like(unit)
    streams: list[Stream] = []
    parts: list[_Edges] = []

    def add(new: list[Stream], edges: _Edges) -> None:
        if len(edges.source) and new:
            parts.append(edges._replace(stream=edges.stream + len(streams)))
            streams.extend(new)

    if p2p_seconds > 0:
        add(*_hops(grid, unit, hops, p2p_bytes / p2p_seconds, places))
    for new, edges in _inner(network, layout, grid, unit, volumes, slow, places):
        add(new, edges)
    for new, edges in _weights(network, layout, grid, volumes, slow, places):
        add(new, edges)
    if not streams:
        return StepTraffic(
            streams=(),
            pace_bytes_per_second=np.zeros(0),
            loads=sparse.csr_array((0, network.num_links)),
            unit_of_replica=unit,
            flows=0,
        )
    stream, source, target, rate = (np.concatenate(column) for column in zip(*parts, strict=True))
    near = network.domain[source] == network.domain[target]
    moved, rows, links = [], [], []
    for some in (np.flatnonzero(near), np.flatnonzero(~near)):
        ways = routes(network, source[some], target[some], labels=stream[some], seed=seed)
        flow = some[ways.rows]
        moved.append(ways.loads * rate[flow])
        rows.append(stream[flow])
        links.append(ways.links)
    entries = np.concatenate(moved), (np.concatenate(rows), np.concatenate(links))
    loads: Any = sparse.csr_array(entries, shape=(len(streams), network.num_links))
    pace = np.zeros(len(streams))
    np.maximum.at(pace, stream, rate)
    exchanges = ("ep_comm", "cp_comm") if layout.cp_comm == "all-to-all" else ("ep_comm",)
    for k, one in enumerate(streams):
        if one.kind in exchanges:
            pace[k] = busiest_port(network, loads[[k]].toarray()[0])
    return StepTraffic(
        streams=tuple(streams),
        pace_bytes_per_second=pace,
        loads=sparse.csr_array(sparse.diags_array(1.0 / pace) @ loads),
        unit_of_replica=unit,
        flows=len(source),
    )


def _hops(
    grid: Ints, unit: Ints, hops: tuple[tuple[int, int], ...], rate: float, places: Ints
) -> tuple[list[Stream], _Edges]:
    units = int(unit.max()) + 1
    streams = [Stream("p2p", one, a, b) for a, b in hops for one in range(units)]
    shape = grid.shape[1:]
    owner = np.broadcast_to(unit[:, None, None], shape).ravel()
    numbers = [owner + units * place for place in range(len(hops))]
    sources = [places[grid[a]].ravel() for a, _ in hops]
    targets = [places[grid[b]].ravel() for _, b in hops]
    if not hops:
        return [], _Edges(unit, unit, unit, np.zeros(0))
    source = np.concatenate(sources)
    return streams, _Edges(np.concatenate(numbers), source, np.concatenate(targets), np.full(len(source), rate))


def _inner(
    network: LinkMap, layout: Layout, grid: Ints, unit: Ints, volumes: StepVolumes, slow: float, places: Ints
) -> Iterator[tuple[list[Stream], _Edges]]:
    """Streams inside ops: one of each kind for each unit and rank."""
    units, pp = int(unit.max()) + 1, layout.pp
    rank_unit = np.arange(pp)[:, None] * units + unit[None, :]
    for kind, traffic in volumes.inner.items():
        streams = [Stream(kind, one, rank) for rank in range(pp) for one in range(units)]
        rate = traffic.bytes_per_second / traffic.seconds_share / slow
        if kind == "ep_comm":
            groups = expert_grid(layout, grid)
            replica = np.zeros(layout.world_size, np.int64)
            replica[grid] = np.arange(layout.dp)[None, :, None, None]
            table = np.swapaxes(groups, 2, 3).reshape(-1, layout.ep)
            rank = np.repeat(np.arange(pp), len(table) // pp)
            owner = rank * units + unit[replica[table[:, 0]]]
            yield streams, _exchange(network, places[table], owner, rate, volumes.ep_reached)
        elif kind == "tp_comm":
            owner = np.broadcast_to(rank_unit[:, :, None], (*grid.shape[:3],)).ravel()
            yield streams, _grouped(network, "all_reduce", places[grid].reshape(-1, layout.tp), owner, rate)
        else:
            table = places[np.swapaxes(grid, 2, 3)]
            owner = np.broadcast_to(rank_unit[:, :, None], (pp, layout.dp, layout.tp)).ravel()
            if layout.cp_comm == "all-to-all":
                yield streams, _exchange(network, table.reshape(-1, layout.cp), owner, rate, 1.0)
                continue
            yield streams, _grouped(network, "all_gather", table.reshape(-1, layout.cp), owner, rate)


def _weights(
    network: LinkMap, layout: Layout, grid: Ints, volumes: StepVolumes, slow: float, places: Ints
) -> Iterator[tuple[list[Stream], _Edges]]:
    """Streams of gradients and weights: once a step, or (FSDP) inside every op of a rank."""
    width, copies = layout.ep * layout.etp, layout.dp_replicate if layout.optimizer_sharding != "none" else 1
    dense = np.swapaxes(np.sort(grid.reshape(layout.pp, -1, layout.tp), axis=1), 1, 2)
    experts = np.swapaxes(expert_grid(layout, grid).reshape(layout.pp, -1, width), 1, 2)
    tables = [
        (_cut(table, min(copies, table.shape[2])), weights)
        for table, weights in ((dense, volumes.dense_weights), (experts, volumes.expert_weights))
        if table.shape[2] > 1 and weights > 0
    ]
    for kind, moved, summed in _moved(layout, volumes, slow) if tables else ():
        found: list[_Edges] = []
        streams = [Stream(kind, 0, rank) for rank in range(layout.pp)] if kind == "fsdp" else []
        for (shards, across), weights in tables:
            whole: list[tuple[CollectiveKind, Ints, float]] = [("all_gather", shards, moved * weights)]
            if across.shape[2] > 1 and summed > 0:  # each shard's gradients are summed over the copies of it
                whole.append(("all_reduce", across, summed * weights / shards.shape[2]))
            for collective, table, rate in whole:
                pp, groups, members = table.shape
                if members == 1:
                    continue
                owner = np.repeat(np.arange(pp), groups)
                if kind != "fsdp":
                    owner = len(streams) + np.arange(pp * groups)
                    before = len(streams) // pp
                    streams += [Stream(kind, -1, rank, before + group) for rank in range(pp) for group in range(groups)]
                found.append(_grouped(network, collective, places[table].reshape(-1, members), owner, rate))
        if found:
            yield streams, _Edges(*(np.concatenate(column) for column in zip(*found, strict=True)))


def _moved(layout: Layout, volumes: StepVolumes, slow: float) -> list[tuple[str, float, float]]:
    """Kinds of streams with the bytes a second that each weight moves over the ring, and of its gradient alone."""
    kinds = []
    if volumes.reduce_seconds > 0:
        reduced = volumes.reduced_width / volumes.reduce_seconds
        kinds.append(("reduce", volumes.reduce_passes * reduced, reduced))
    if volumes.gather_seconds > 0:
        kinds.append(("gather", volumes.gathered_width / volumes.gather_seconds, 0.0))
    if volumes.fsdp_seconds > 0:
        gathered = 2.0 * volumes.gathered_width * (layout.optimizer_sharding == "zero3")
        each = volumes.fsdp_seconds * slow
        kinds.append(("fsdp", (volumes.reduced_width + gathered) / each, volumes.reduced_width / each))
    return kinds


def _cut(table: Ints, copies: int) -> tuple[Ints, Ints]:
    """Cut groups (pp, groups, members) into those that share the shards, and those that hold copies of one shard."""
    pp, groups, members = table.shape
    apart = table.reshape(pp, groups, copies, members // copies)
    return apart.reshape(pp, groups * copies, -1), np.swapaxes(apart, 2, 3).reshape(pp, -1, copies)


def _grouped(network: LinkMap, kind: CollectiveKind, table: Ints, owner: Ints, rate: float) -> _Edges:
    """Rings (or direct exchange over a mesh) of all groups; ``rate`` is that of the buffer."""
    count, members = table.shape
    domain = network.domain[table]
    size = _run_length(domain)
    if size == 0 or network.mesh:
        found = [_pattern(network, kind, gpus) for gpus in table]
        lengths = [len(one.sources) for one in found]
        return _Edges(
            np.repeat(owner, lengths),
            np.concatenate([one.sources for one in found]),
            np.concatenate([one.targets for one in found]),
            np.concatenate([one.size_bytes for one in found]) * rate,
        )
    channels = 1 if size == members else size
    runs = table.reshape(count, members // size, size)
    orders = [np.roll(runs, -channel, axis=2).reshape(count, members) for channel in range(channels)]
    source = np.concatenate(orders).ravel()
    target = np.concatenate([np.roll(order, -1, axis=1) for order in orders]).ravel()
    share = RING_PASSES[kind] * (members - 1) / members / channels
    return _Edges(np.tile(np.repeat(owner, members), channels), source, target, np.full(len(source), share * rate))


def _pattern(network: LinkMap, kind: CollectiveKind, gpus: Ints) -> Any:
    units = units_of(network, gpus)
    return within(network, kind, gpus, 1.0) if len(units) == 1 else ring(kind, units, 1.0, mesh=network.mesh)


def _run_length(domain: Ints) -> int:
    """Members of a group that stand in one domain, where all groups have equal runs of them; else 0."""
    breaks = np.diff(domain, axis=1) != 0
    if (breaks != breaks[0]).any():
        return 0
    ends = np.concatenate([[-1], np.flatnonzero(breaks[0]), [domain.shape[1] - 1]])
    lengths = np.diff(ends)
    return int(lengths[0]) if (lengths == lengths[0]).all() else 0


def _exchange(network: LinkMap, table: Ints, owner: Ints, rate: float, reached: float) -> _Edges:
    """All pairs of every group; ``reached`` is the share of the bytes for other domains that leaves."""
    members = table.shape[1]
    source = np.repeat(table, members, axis=1).ravel()
    target = np.tile(table, (1, members)).ravel()
    stream = np.repeat(owner, members * members)
    moves = source != target
    source, target, stream = source[moves], target[moves], stream[moves]
    same = network.domain[source] == network.domain[target]
    return _Edges(stream, source, target, np.where(same, 1.0, reached) * rate / members)
