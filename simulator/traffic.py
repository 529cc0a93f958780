"""What each parallel axis sends, and how long that takes before any overlap. Exposure is applied in ``step``.

Groups lie in rank order: a group's neighbours are as far apart as the product of the axes before it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from scenarios.layout import Axis
from simulator.arrays import Bools, Floats, LayoutArrays, every_row
from simulator.collectives import Groups, groups_of
from simulator.links import Links


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranks:
    """Degrees as floats, and how far apart neighbours of each group are."""

    tp: Floats
    cp: Floats
    ep: Floats
    etp: Floats
    pp: Floats
    vpp: Floats
    shards: Floats
    """Ranks that share the dense weights: dp x cp / replicas."""
    expert_shards: Floats
    """Ranks that share the weights of the same experts: dp x cp x tp / (ep x etp) / replicas."""
    replicas: Floats
    """Copies of what is sharded."""
    expert_replicas: Floats
    """The same of experts: no more than ranks hold the same ones."""
    tp_stride: Floats
    cp_stride: Floats
    ep_stride: Floats
    dp_stride: Floats
    pp_stride: Floats
    expert_stride: Floats


def ranks_of(layouts: LayoutArrays) -> Ranks:
    """Spread the axes over GPU numbers."""
    size = {axis: getattr(layouts, axis).astype(np.float64) for axis in ("tp", "cp", "dp", "pp", "ep", "etp")}

    def stride(axis: Axis) -> Floats:
        before = layouts.rank_order[: layouts.rank_order.index(axis)]
        result = np.ones(len(layouts))
        for one in before:
            result = result * (size[one] if one != "ep" else 1.0)
        return result

    outside = size["pp"] if layouts.rank_order.index("pp") < layouts.rank_order.index("ep") else 1.0
    replicas = np.where(layouts.sharding > 0, float(layouts.dp_replicate), 1.0)
    shards = size["dp"] * size["cp"] / replicas
    alike = np.maximum(1.0, size["dp"] * size["cp"] * size["tp"] / (size["ep"] * size["etp"]))
    return Ranks(
        tp=size["tp"],
        cp=size["cp"],
        ep=size["ep"],
        etp=size["etp"],
        pp=size["pp"],
        vpp=layouts.vpp.astype(np.float64),
        shards=shards,
        replicas=replicas,
        expert_replicas=np.minimum(replicas, alike),
        expert_shards=np.maximum(1.0, shards * size["tp"] / (size["ep"] * size["etp"])),
        tp_stride=stride("tp"),
        cp_stride=stride("cp"),
        ep_stride=size["etp"] * outside,
        dp_stride=np.minimum(stride("dp"), stride("cp")),
        pp_stride=stride("pp"),
        expert_stride=size["ep"] * size["etp"] * outside,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Axes:
    """The groups of every parallel axis."""

    net: Links
    tp: Groups
    cp: Groups
    ep: Groups
    pp: Groups
    shards: Groups
    copies: Groups
    """Of one shard of the dense weights."""
    expert_shards: Groups
    expert_copies: Groups


def axes_of(net: Links, layouts: LayoutArrays, ranks: Ranks) -> Axes:
    """Place the groups of every axis.

    Rows that send the same are priced once, but for parameters under trial, where every row has its own links, and for
    CPU cores, which reduce all weights of the heaviest stage in one go, and those differ.
    """
    own = net.cpu or np.ndim(net.nic_bytes_per_second) or np.ndim(net.all_to_all_share)
    rows = every_row(len(layouts)) if own else layouts.alike()
    exchanged = ranks.ep * ranks.etp if net.cpu else ranks.ep
    return Axes(
        net=net,
        tp=groups_of(net, ranks.tp, ranks.tp_stride, rows),
        cp=groups_of(net, ranks.cp, ranks.cp_stride, rows),
        ep=groups_of(net, exchanged, ranks.ep_stride, rows),
        pp=groups_of(net, np.minimum(ranks.pp, 2.0) if net.cpu else ranks.pp, ranks.pp_stride, rows),
        shards=groups_of(net, ranks.shards, ranks.dp_stride, rows),
        copies=groups_of(net, ranks.replicas, ranks.shards * ranks.dp_stride, rows),
        expert_shards=groups_of(net, ranks.expert_shards, ranks.expert_stride, rows),
        expert_copies=groups_of(net, ranks.expert_replicas, ranks.expert_shards * ranks.expert_stride, rows),
    )


def tp_seconds(axes: Axes, activation_bytes: Floats, sequence_parallel: Bools) -> Floats:
    """Collectives of one layer's forward over the tp group (Shoeybi et al. 2019; Korthikanti et al. 2022).

    Two all-reduces of the activations, or with sequence parallelism two all-gathers and two reduce-scatters. The
    backward costs the same again.
    """
    time = np.zeros(len(axes.tp.ranks))
    if np.any(sequence_parallel):
        time = axes.tp.seconds("all_gather", activation_bytes) + axes.tp.seconds("reduce_scatter", activation_bytes)
    if not np.all(sequence_parallel):
        time = np.where(sequence_parallel, time, axes.tp.seconds("all_reduce", activation_bytes))
    return 2.0 * time


def tp_regather_seconds(axes: Axes, activation_bytes: Floats) -> Floats:
    """Two all-gathers more in the backward with sequence parallelism: the gathered inputs are not kept."""
    return 2.0 * axes.tp.seconds("all_gather", activation_bytes)


def cp_seconds(axes: Axes, key_value_bytes: Floats, *, ring: bool) -> Floats:
    """Exchange of keys and values of the whole sequence in one forward, around a ring (Liu et al. 2023) or gathered.

    A ring passes on one rank's part at a time, from neighbour to neighbour.
    """
    if axes.net.cpu or not ring:
        return axes.cp.seconds("all_gather", key_value_bytes)
    return (axes.cp.ranks - 1.0) * axes.cp.seconds("send_recv", key_value_bytes / axes.cp.ranks)


def head_exchange_seconds(axes: Axes, kept_bytes: Floats) -> Floats:
    """All-to-all of queries, keys and values before the attention of one forward, and of its output after it.

    ``kept_bytes`` is what one rank holds of the four; it sends all but its own part (Jacobs et al. 2023, Ulysses).
    """
    return 2.0 * axes.cp.seconds("all_to_all", kept_bytes / 2.0)


def ep_seconds(axes: Axes, ranks: Ranks, routed_bytes: Floats, top_k: int, deduplicates: bool) -> Floats:
    """One dispatch (or combine) of routed tokens over the ep group.

    Ranks of one domain get their part over the fast links while the rest goes through the NICs. A deduplicating
    dispatcher sends a token once to each of the nodes that hold one of its experts.
    """
    groups, net = axes.ep, axes.net
    time = groups.seconds("all_to_all", routed_bytes)
    if net.cpu:
        return time
    if deduplicates and groups.any:
        domains = groups.distinct.ranks / groups.distinct.per_domain
        time = groups.exchange_seconds(routed_bytes, reached_share(domains, top_k, deduplicates))
    return time + (ranks.etp - 1.0) * routed_bytes / net.bus_bytes_per_second


def reached_share(domains: Floats, top_k: int, deduplicates: bool) -> Floats:
    """Share of the routed bytes for other domains that leaves: a token goes once to each that holds its experts."""
    if not deduplicates:
        return np.ones_like(domains)
    return np.minimum(domains * (1.0 - (1.0 - 1.0 / domains) ** top_k) / top_k, 1.0)


def p2p_seconds(axes: Axes, boundary_bytes: Floats) -> Floats:
    """One transfer of activations (or their gradients) to the next pipeline stage."""
    return axes.pp.seconds("send_recv", boundary_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Weighed:
    """Weights of one rank that its groups share, and how many of them one collective moves."""

    local: Floats
    unit: Floats
    shards: Groups
    copies: Groups
    beside: Bools
    """Other groups move theirs at the same time, so that the start of a collective leaves no link idle."""


def data_parallel_seconds(
    parts: tuple[Weighed, ...],
    *,
    gathers: Floats,
    gathered_bytes: float,
    reduced_bytes: Floats,
    sharded: Bools,
) -> Floats:
    """Time to gather weights and to reduce gradients of one rank; experts in their own groups.

    ``gathers`` counts the gathers, the bytes are per parameter. Collectives move ``unit`` parameters each; where
    nothing is sharded the gradients are all-reduced, and where shards have copies, each shard's gradients are summed
    over these.
    """
    total = np.zeros(np.shape(gathers))
    for part in parts:
        if not np.any(part.local):
            continue
        one = np.zeros(np.shape(gathers))
        if np.any(gathers):
            one = gathers * part.shards.seconds("all_gather", part.unit * gathered_bytes, beside=part.beside)
        if np.any(reduced_bytes):
            size = part.unit * reduced_bytes
            reduced = part.shards.seconds("reduce_scatter", size, beside=part.beside)
            if not np.all(sharded):
                reduced = np.where(sharded, reduced, part.shards.seconds("all_reduce", size))
            if part.copies.any:
                reduced = reduced + part.copies.seconds("all_reduce", size / part.shards.ranks)
            one = one + np.where(reduced_bytes > 0, reduced, 0.0)
        total = total + part.local / part.unit * one
    return total
