"""What each parallel axis sends, and how long that takes before any overlap. Exposure is applied in ``step``.

Groups lie in rank order: a group's neighbours are as far apart as the product of the axes before it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from scenarios.layout import Axis
from simulator.arrays import Bools, Floats, LayoutArrays
from simulator.links import (
    Links,
    bus_rate,
    collective_latency_seconds,
    local_ranks,
    measured_seconds,
    network_rate,
    short_seconds,
    volume_seconds,
)


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
    return Ranks(
        tp=size["tp"],
        cp=size["cp"],
        ep=size["ep"],
        etp=size["etp"],
        pp=size["pp"],
        vpp=layouts.vpp.astype(np.float64),
        shards=shards,
        replicas=replicas,
        expert_shards=np.maximum(1.0, shards * size["tp"] / (size["ep"] * size["etp"])),
        tp_stride=stride("tp"),
        cp_stride=stride("cp"),
        ep_stride=size["etp"] * outside,
        dp_stride=np.minimum(stride("dp"), stride("cp")),
        pp_stride=stride("pp"),
        expert_stride=size["ep"] * size["etp"] * outside,
    )


def tp_seconds(net: Links, ranks: Ranks, activation_bytes: Floats, sequence_parallel: Bools) -> Floats:
    """Collectives of one layer's forward over the tp group (Shoeybi et al. 2019; Korthikanti et al. 2022).

    Two all-reduces of the activations, or with sequence parallelism two all-gathers and two reduce-scatters, which move
    the same. The backward costs the same again.
    """
    if not net.points:
        return 2.0 * short_seconds(net, "all_reduce", ranks.tp, ranks.tp_stride, activation_bytes)
    return 2.0 * np.where(
        sequence_parallel,
        short_seconds(net, "all_gather", ranks.tp, ranks.tp_stride, activation_bytes)
        + short_seconds(net, "reduce_scatter", ranks.tp, ranks.tp_stride, activation_bytes),
        short_seconds(net, "all_reduce", ranks.tp, ranks.tp_stride, activation_bytes),
    )


def tp_regather_seconds(net: Links, ranks: Ranks, activation_bytes: Floats) -> Floats:
    """Two all-gathers more in the backward with sequence parallelism: the gathered inputs are not kept."""
    return 2.0 * short_seconds(net, "all_gather", ranks.tp, ranks.tp_stride, activation_bytes)


def cp_seconds(net: Links, ranks: Ranks, key_value_bytes: Floats) -> Floats:
    """Exchange of keys and values of the whole sequence in one forward, around a ring (Liu et al. 2023) or gathered."""
    volume = volume_seconds(net, "all_gather", ranks.cp, ranks.cp_stride, key_value_bytes)
    return volume if net.points else volume + 2e-5 * (ranks.cp - 1)


def head_exchange_seconds(net: Links, ranks: Ranks, kept_bytes: Floats) -> Floats:
    """All-to-all of queries, keys and values before the attention of one forward, and of its output after it.

    ``kept_bytes`` is what one rank holds of the four; it sends all but its own part (Jacobs et al. 2023, Ulysses).
    """
    if net.points:
        return np.where(ranks.cp > 1, measured_seconds(net.points, "all_to_all", ranks.cp, kept_bytes), 0.0)
    local = local_ranks(net, ranks.cp, ranks.cp_stride)
    inside = kept_bytes * (local - 1.0) / ranks.cp / (net.scale_up_bytes_per_second * net.all_to_all_share)
    rate = np.maximum(network_rate(net, ranks.cp, ranks.cp_stride), 1.0)
    outside = kept_bytes * (1.0 - local / ranks.cp) / rate
    return np.where(ranks.cp > 1, np.maximum(inside, outside) + 2.0 * collective_latency_seconds(ranks.cp), 0.0)


def ep_seconds(net: Links, ranks: Ranks, routed_bytes: Floats, top_k: int, deduplicates: bool) -> Floats:
    """One dispatch (or combine) of routed tokens over the ep group.

    Ranks of one domain get their part over the fast links while the rest goes through the NICs. A deduplicating
    dispatcher sends a token once to each of the nodes that hold one of its experts.
    """
    group = ranks.ep * ranks.etp
    if net.points:
        return np.where(group > 1, measured_seconds(net.points, "all_to_all", group, routed_bytes), 0.0)
    local = local_ranks(net, ranks.ep, ranks.ep_stride)
    domains = ranks.ep / local
    reached = reached_share(domains, top_k, deduplicates)
    inside = routed_bytes * (local - 1.0) / ranks.ep / (net.scale_up_bytes_per_second * net.all_to_all_share)
    rate = network_rate(net, ranks.ep, ranks.ep_stride)
    outside = routed_bytes * (1.0 - local / ranks.ep) * reached / np.maximum(rate, 1.0)
    split = (ranks.etp - 1.0) * routed_bytes / net.scale_up_bytes_per_second
    time = split + np.maximum(inside, outside) + np.where(domains > 1.0, 6e-5, 3e-5)
    return np.where(group > 1.0, time, 0.0)


def reached_share(domains: Floats, top_k: int, deduplicates: bool) -> Floats:
    """Share of the routed bytes for other domains that leaves: a token goes once to each that holds its experts."""
    if not deduplicates:
        return np.ones_like(domains)
    return np.minimum(domains * (1.0 - (1.0 - 1.0 / domains) ** top_k) / top_k, 1.0)


def p2p_seconds(net: Links, ranks: Ranks, boundary_bytes: Floats) -> Floats:
    """One transfer of activations (or their gradients) to the next pipeline stage."""
    if net.points:
        return np.where(
            ranks.pp > 1, measured_seconds(net.points, "send_recv", np.full_like(ranks.pp, 2.0), boundary_bytes), 0.0
        )
    inside = ranks.pp_stride < net.domain_size
    rate = np.where(
        inside, 0.7 * net.scale_up_bytes_per_second, np.maximum(network_rate(net, ranks.pp, ranks.pp_stride), 1.0)
    )
    return np.where(ranks.pp > 1, boundary_bytes / rate + 2e-5, 0.0)


def data_parallel_seconds(
    net: Links,
    ranks: Ranks,
    weights: Floats,
    expert_weights: Floats,
    *,
    gathers: Floats,
    gathered_bytes: float,
    reduced_bytes: Floats,
    sharded: Bools,
    pieces: Floats,
) -> Floats:
    """Time to gather weights and to reduce gradients of one rank; experts in their own groups.

    ``gathers`` counts the gathers, the bytes are per parameter, ``pieces`` is the number of collectives that share a
    pass (one per wrapped layer); where nothing is sharded the gradients are all-reduced.
    """
    total = np.zeros(np.shape(weights))
    for size, count, stride in (
        (weights, ranks.shards, ranks.dp_stride),
        (expert_weights, ranks.expert_shards, ranks.expert_stride),
    ):
        if not np.any(size):
            continue
        if net.points:
            part = size / pieces
            gather = volume_seconds(net, "all_gather", count, stride, part * gathered_bytes)
            scatter = volume_seconds(net, "reduce_scatter", count, stride, part * reduced_bytes)
            reduce = volume_seconds(net, "all_reduce", count, stride, part * reduced_bytes)
            reduced = np.where(reduced_bytes > 0, np.where(sharded, scatter, reduce), 0.0)
            copies = volume_seconds(net, "all_reduce", ranks.replicas, count * stride, part * reduced_bytes / count)
            total = total + pieces * (gathers * gather + reduced + np.where(ranks.replicas > 1, copies, 0.0))
        else:
            moved = gathers * gathered_bytes + np.where(sharded, 1.0, 2.0) * reduced_bytes
            total = total + (count - 1.0) / count * size * moved / np.maximum(bus_rate(net, count, stride), 1.0)
            if np.any(ranks.replicas > 1):  # each shard's gradients are summed over the copies of it
                copies = volume_seconds(net, "all_reduce", ranks.replicas, count * stride, size * reduced_bytes / count)
                total = total + copies
    return total
