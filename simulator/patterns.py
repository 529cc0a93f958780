"""Who sends how much to whom in a collective: rings, double binary trees, direct exchange, hierarchies.

A pattern is a set of flows between GPUs. The flows of one group depend on each other chunk by chunk (a ring, a tree)
and so run in lockstep. Units are the scale-up domains that the GPUs stand in; between units a channel uses one NIC per
unit, so there are as many channels as a unit has members.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from topologies.cluster import CollectiveKind
from topologies.link_map import Floats, Ints, LinkMap

RING_PASSES: dict[CollectiveKind, int] = {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1}
"""Times that the buffer goes around a ring: an all-reduce is a reduce-scatter and an all-gather."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pattern:
    """Flows between GPUs that start together."""

    sources: Ints
    targets: Ints
    size_bytes: Floats
    """Of each flow, over the whole collective."""
    channels: Ints
    """Channel of each flow: a label for the hash of the fabric."""
    groups: Ints
    """Flows of one group run in lockstep; numbered from 0."""
    steps: int
    """Messages that wait for each other, each of one latency."""
    cyclic: bool
    """Rings: behind one slow edge the latency of the others is hidden."""


def units_of(network: LinkMap, gpus: Ints) -> list[Ints]:
    """Split GPUs, in the given order, into runs that stand in one scale-up domain."""
    domain = network.domain[gpus]
    return np.split(gpus, np.flatnonzero(np.diff(domain)) + 1)


def ring(
    kind: CollectiveKind,
    units: Sequence[Ints],
    size_bytes: float,
    *,
    mesh: bool = False,
    most_channels: int | None = None,
) -> Pattern:
    """One ring per channel through all GPUs; a channel enters and leaves each unit over one NIC.

    An edge carries ``passes * (n - 1) / n`` of its channel's part; in a broadcast all of it, and no edge leads back to
    the root (the first GPU).

    Args:
        kind: all_reduce, all_gather, reduce_scatter or broadcast.
        units: GPUs that share a scale-up domain.
        size_bytes: whole buffer.
        mesh: pairs have links of their own, so channels take different ways through a unit.
        most_channels: no more than this; None: as many as the smallest unit has members.
    """
    channels = 1 if len(units) == 1 else min(len(unit) for unit in units)
    channels = min(channels, most_channels or channels)
    orders = [_through(units, channel, channels, mesh) for channel in range(channels)]
    n = len(orders[0])
    sources = np.concatenate(orders)
    targets = np.concatenate([np.roll(order, -1) for order in orders])
    channel = np.repeat(np.arange(channels), n)
    if kind == "broadcast":
        open_edge = targets != units[0][0]
        sources, targets, channel = sources[open_edge], targets[open_edge], channel[open_edge]
        volume, steps = size_bytes, n - 1
    else:
        volume, steps = RING_PASSES[kind] * (n - 1) / n * size_bytes, RING_PASSES[kind] * (n - 1)
    return _pattern(sources, targets, np.full(len(sources), volume / channels), channel, channel, steps, cyclic=True)


def _through(units: Sequence[Ints], channel: int, channels: int, mesh: bool) -> Ints:
    """All GPUs in the order of a channel."""
    if len({len(unit) for unit in units}) > 1:
        return np.concatenate([np.roll(unit, -(channel % len(unit))) for unit in units])
    table = np.stack(units)
    turns = np.arange(len(table)) * (table.shape[1] // 2) if mesh else np.zeros(len(table), np.int64)
    return _ordered(table, channel * (table.shape[1] // channels) + turns, mesh).ravel()


def _ordered(table: Ints, starts: Ints, mesh: bool) -> Ints:
    """Each unit's members in the order of a channel that enters it at member ``starts``.

    Over a mesh the order is a zigzag (+1, -2, +3 ...): over all starts it uses each directed pair once (Walecki), and
    ends half a turn from where it began.
    """
    members = table.shape[1]
    steps = np.arange(members)
    if mesh and members % 2 == 0:
        steps = np.where(steps % 2 == 1, (steps + 1) // 2, -(steps // 2))
    return np.take_along_axis(table, (starts[:, None] + steps) % members, axis=1)


def double_tree(
    units: Sequence[Ints],
    size_bytes: float,
    *,
    chains: bool = True,
    mesh: bool = False,
    most_channels: int | None = None,
) -> Pattern:
    """All-reduce over two complementary binary trees of units per channel, and a chain inside each unit.

    Each tree of each channel reduces and broadcasts ``size / (2 * channels)``; a unit that is inside one tree is a leaf
    of the other (Sanders, Speck and Traff 2009; NCCL src/graph/trees.cc for the shape). Without ``chains`` only the
    flows between units are there: something else reduces inside.

    Raises:
        ValueError: the units are not equally large.
    """
    if len({len(unit) for unit in units}) > 1:
        raise ValueError("a tree needs equally large units")
    table = np.stack(units)
    count, members = table.shape
    channels = min(members, most_channels or members)
    up_from, up_to, channel, group = [], [], [], []
    for tree, parents in enumerate(_two_trees(count)):
        child = np.flatnonzero(parents >= 0)
        for c in range(channels):
            chain = _ordered(table, np.full(count, c * (members // channels)), mesh)
            head = chain[:, 0]
            sources = [head[child], *([chain[:, 1:].ravel()] if chains else [])]
            targets = [head[parents[child]], *([chain[:, :-1].ravel()] if chains else [])]
            up_from.append(np.concatenate(sources))
            up_to.append(np.concatenate(targets))
            channel.append(np.full(len(up_to[-1]), c))
            group.append(np.full(len(up_to[-1]), 2 * c + tree))
    low, high = np.concatenate(up_from), np.concatenate(up_to)
    label = np.concatenate(channel)
    return _pattern(
        np.concatenate([low, high]),
        np.concatenate([high, low]),
        np.full(2 * len(low), size_bytes / (2 * channels)),
        np.concatenate([label, label + channels]),
        np.tile(np.concatenate(group), 2),
        2 * ((members - 1) * chains + max(count.bit_length() - 1, 0)),
    )


def _two_trees(count: int) -> tuple[Ints, Ints]:
    """Parents in the two trees (-1: root): the second mirrors the first, or shifts it where the count is odd."""
    rank = np.arange(count)
    bit = rank & -rank
    first = (rank ^ bit) | (bit << 1)
    first = np.where(first >= count, rank ^ bit, first)
    first[0] = -1
    if count % 2:
        behind = first[(rank - 1) % count]
        second = np.where(behind < 0, -1, (behind + 1) % count)
    else:
        mirrored = first[count - 1 - rank]
        second = np.where(mirrored < 0, -1, count - 1 - mirrored)
    return first, second


def direct(kind: CollectiveKind, gpus: Ints, size_bytes: float) -> Pattern:
    """Every GPU exchanges its part with every other at once, as a mesh of links allows."""
    n = len(gpus)
    source, target = np.repeat(gpus, n), np.tile(gpus, n)
    moves = source != target
    source, target = source[moves], target[moves]
    passes = RING_PASSES.get(kind, 1)
    zero = np.zeros(len(source), np.int64)
    return _pattern(source, target, np.full(len(source), passes * size_bytes / n), zero, zero, passes)


def hierarchical(network: LinkMap, units: Sequence[Ints], size_bytes: float) -> tuple[Pattern, ...]:
    """All-reduce in three phases: reduce-scatter inside units, rings of equal members across, all-gather inside.

    Raises:
        ValueError: the units are not equally large.
    """
    if len({len(unit) for unit in units}) > 1:
        raise ValueError("a hierarchy needs equally large units")
    table = np.stack(units)
    count, members = table.shape
    across = [ring("all_reduce", [table[:, member]], size_bytes / members) for member in range(members)]
    phases = []
    if count > 1:
        phases.append(_joined(across))
    if members == 1:
        return tuple(phases)
    inside = {
        kind: _joined([within(network, kind, unit, size_bytes) for unit in units])
        for kind in ("reduce_scatter", "all_gather")
    }
    return (inside["reduce_scatter"], *phases, inside["all_gather"])


def within(network: LinkMap, kind: CollectiveKind, gpus: Ints, size_bytes: float) -> Pattern:
    """The pattern inside one scale-up domain: direct over a mesh, else a ring."""
    if network.mesh and kind in RING_PASSES:
        return direct(kind, gpus, size_bytes)
    return ring(kind, [gpus], size_bytes)


def shift(gpus: Ints, size_bytes: float) -> Pattern:
    """Every GPU sends the whole buffer to the next one (nccl-tests sendrecv)."""
    number = np.arange(len(gpus))
    return _pattern(gpus, np.roll(gpus, -1), np.full(len(gpus), size_bytes), number * 0, number, 1)


def _joined(parts: Sequence[Pattern]) -> Pattern:
    """Patterns that run side by side, each with groups of its own."""
    before = np.cumsum([0, *(int(part.groups.max()) + 1 for part in parts)])
    return _pattern(
        np.concatenate([part.sources for part in parts]),
        np.concatenate([part.targets for part in parts]),
        np.concatenate([part.size_bytes for part in parts]),
        np.concatenate([part.channels + k for k, part in enumerate(parts)]),
        np.concatenate([part.groups + start for part, start in zip(parts, before, strict=False)]),
        max(part.steps for part in parts),
        cyclic=all(part.cyclic for part in parts),
    )


def _pattern(
    sources: Ints, targets: Ints, size_bytes: Floats, channels: Ints, groups: Ints, steps: int, *, cyclic: bool = False
) -> Pattern:
    return Pattern(
        sources=sources,
        targets=targets,
        size_bytes=size_bytes,
        channels=channels,
        groups=groups,
        steps=steps,
        cyclic=cyclic,
    )
