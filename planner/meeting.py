"""Gradients of replicas that are cut differently: a ring for each layer over its owners, one in every replica.

All replicas split a layer over the same tp and cp, so a rank's part of it has one shape everywhere, and nothing is
reshaped. Where cuts differ, a rank's layers have different owners and make several rings: one for every piece between
two cuts of any template. Assumed: the rings of a rank run at the same time, each with the share of the link that its
bytes are. Then no link is asked for more than it has, and all rings end when the most loaded rank ends: the exchange
takes as long as in equal replicas with that rank's stage, at the pace of the slowest network on the way, and each
further ring adds what a ring without bytes takes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

import numpy as np

from planner.mixing import Mix, Share, Template, fastest_mix, holds
from simulator.pieces import Pieces

LEVELS = 8
"""Intervals of the exchange's time that are looked at one by one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """One way to cut a replica, as its gradients see it."""

    layers: tuple[int, ...]
    """Of each stage."""
    slowest: float
    """Seconds of its slowest stage for a micro-batch."""
    pieces: tuple[Pieces, ...]
    """Of the pools that it lies on."""


def exchange_seconds(members: Sequence[Member]) -> float:
    """Exposed reduction of gradients and update of a step with replicas of these kinds."""
    networks = [one for member in members for one in member.pieces]
    longest = max(_alone(member, one) for member in members for one in networks)
    further = max(most_rings(member, members) for member in members) - 1
    return longest + further * max(one.tail.reduce.constant * one.tail.exposed_share for one in networks)


def most_rings(member: Member, members: Sequence[Member]) -> int:
    """Rings that some rank of a member takes part in: pieces of its stage between the cuts of all members."""
    ends = {end for one in members for end in accumulate(one.layers)}
    own = accumulate(member.layers, initial=0)
    return max(1, *(sum(low < end <= high for end in ends) for low, high in pairwise(own)))


def _alone(member: Member, network: Pieces) -> float:
    """The fullest stage's exchange among equal replicas."""
    most = max(member.layers)
    dense = most * float(network.dense[0]) + network.last_dense
    return network.tail.after(dense, most * float(network.expert[0]) + network.last_expert, member.slowest)


def fastest_meeting(
    templates: Sequence[Template], members: Mapping[str, Member], pools: tuple[int, ...], batch: int
) -> Mix | None:
    """Find replicas whose pipelines and common exchange together are fastest; ``fixed_seconds`` hold no exchange.

    The exchange depends on which templates meet, so its time is cut into intervals: within one, templates of longer
    exchanges are left out, and the interval's lower end is added to every pipeline, which bounds all mixes in it. An
    interval in which nothing runs the batch in the time of the best one so far needs no search.
    """
    own = {one.name: exchange_seconds([members[one.name]]) for one in templates}
    pipelines = fastest_mix(templates, pools, batch)
    if pipelines is None:
        return None
    best: Mix | None = None
    bound, programs = np.inf, pipelines.programs
    likely = max(own[share.template.name] for share in pipelines.shares)
    for low, high in sorted(_intervals(list(own.values())), key=lambda one: not one[0] <= likely <= one[1]):
        if best is not None and pipelines.bound_seconds + low >= best.seconds:
            continue
        allowed = [replace(one, fixed_seconds=one.fixed_seconds + low) for one in templates if own[one.name] <= high]
        programs += 1
        if best is not None and not holds(allowed, pools, batch, best.seconds):
            continue
        found = fastest_mix(allowed, pools, batch)
        if found is None:
            continue
        programs, bound = programs + found.programs, min(bound, found.bound_seconds)
        met = exchange_seconds([members[share.template.name] for share in found.shares])
        if best is None or found.seconds - low + met < best.seconds:
            shares = tuple(_longer(share, met - low) for share in found.shares)
            best = replace(found, shares=shares, seconds=found.seconds - low + met)
    return None if best is None else replace(best, bound_seconds=min(bound, best.seconds), programs=programs)


def _longer(share: Share, seconds: float) -> Share:
    template = replace(share.template, fixed_seconds=share.template.fixed_seconds + seconds)
    return replace(share, template=template)


def _intervals(times: list[float]) -> list[tuple[float, float]]:
    """Least and greatest of neighbouring times, a few at once."""
    distinct = np.unique(times)
    return [(float(part[0]), float(part[-1])) for part in np.array_split(distinct, min(LEVELS, len(distinct)))]
