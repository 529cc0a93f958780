"""The exchange of gradients between replicas that are cut differently, by hand, and the choice by brute force."""

from __future__ import annotations

import itertools
import math
import random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from planner.meeting import Member, exchange_seconds, fastest_meeting, most_rings
from planner.mixing import Template


def network(seconds_per_layer: float, ring: float = 0.0, head: float = 0.0) -> Any:
    """A stand-in for the pieces of a pool: seconds of a reduced layer, of a ring without bytes, of the head."""

    def after(dense: float, expert: float, microbatch: float) -> float:
        return ring + dense

    tail = SimpleNamespace(after=after, reduce=SimpleNamespace(constant=ring), exposed_share=1.0)
    return SimpleNamespace(
        dense=np.array([seconds_per_layer]), expert=np.zeros(1), last_dense=head, last_expert=0.0, tail=tail
    )


def member(layers: tuple[int, ...], *networks: Any) -> Member:
    return Member(layers=layers, slowest=1.0, pieces=networks)


def test_equal_cuts_are_the_ring_of_equal_replicas() -> None:
    one = member((4, 4), network(0.5, ring=0.1, head=0.2))
    assert most_rings(one, [one, one]) == 1
    assert exchange_seconds([one, one]) == exchange_seconds([one]) == pytest.approx(0.1 + 4 * 0.5 + 0.2)


def test_each_piece_between_two_cuts_is_a_ring() -> None:
    """Cuts after 4 of 8, and after 3 and 6: a half holds two pieces (3 + 1, or 2 + 2), a third of them two at most."""
    halves, thirds = member((4, 4), network(0.5, ring=0.1)), member((3, 3, 2), network(0.5, ring=0.1))
    assert most_rings(halves, [halves, thirds]) == 2
    assert most_rings(thirds, [halves, thirds]) == 2
    assert exchange_seconds([halves, thirds]) == pytest.approx((0.1 + 4 * 0.5) + 0.1)


def test_the_slowest_network_and_the_fullest_stage_set_the_pace() -> None:
    """Four layers on the fast network alone: 1 s; beside replicas on the slow one: 2 s, as the ring goes over both."""
    fast, slow = network(0.25), network(0.5)
    assert exchange_seconds([member((4, 4), fast)]) == pytest.approx(1.0)
    assert exchange_seconds([member((4, 4), fast), member((2, 2, 2, 2), slow)]) == pytest.approx(2.0)
    assert exchange_seconds([member((4, 4), fast, slow)]) == pytest.approx(2.0)


def by_brute_force(templates: list[Template], members: dict[str, Member], pools: tuple[int, ...], batch: int) -> float:
    """The fastest pipelines of every number of replicas, plus what their gradients then take."""
    best = math.inf
    most = [min(held // need for need, held in zip(one.nodes, pools, strict=True) if need) for one in templates]
    for counts in itertools.product(*(range(one + 1) for one in most)):
        used = [(count, one) for count, one in zip(counts, templates, strict=True) if count]
        taken = [sum(count * one.nodes[pool] for count, one in used) for pool in range(len(pools))]
        if not used or any(some > held for some, held in zip(taken, pools, strict=True)):
            continue
        met = exchange_seconds([members[one.name] for _, one in used])
        for seconds in sorted({one.seconds(m) for _, one in used for m in range(one.least, batch + 1)}):
            if seconds + met >= best:
                break
            if sum(count * one.microbatches(seconds) for count, one in used) >= batch:
                best = seconds + met
                break
    return best


def some_pools() -> list[tuple[list[Template], dict[str, Member], tuple[int, ...], int]]:
    dice, cases = random.Random(7), []
    for _ in range(16):
        networks = [network(dice.uniform(0.05, 0.6), ring=dice.uniform(0.0, 0.05)) for _ in range(2)]
        templates, members = [], {}
        for number, layers in enumerate(dice.sample([(6,), (3, 3), (2, 4), (4, 2), (2, 2, 2), (1, 2, 3)], 4)):
            nodes = dice.choice([(len(layers), 0), (0, len(layers)), (1, len(layers))])
            slowest = max(layers) * dice.uniform(0.2, 0.6)
            templates.append(
                Template(
                    name=str(number),
                    nodes=nodes,
                    replicas=1,
                    fixed_seconds=dice.uniform(0.2, 2.0),
                    microbatch_seconds=slowest,
                    micro_batch_size=1,
                )
            )
            over = tuple(one for one, need in zip(networks, nodes, strict=True) if need)
            members[str(number)] = Member(layers=layers, slowest=slowest, pieces=over)
        cases.append((templates, members, (dice.randint(2, 6), dice.randint(2, 7)), dice.randint(8, 30)))
    return cases


@pytest.mark.parametrize(("templates", "members", "pools", "batch"), some_pools())
def test_no_other_replicas_are_faster_by_more_than_the_gap(
    templates: list[Template], members: dict[str, Member], pools: tuple[int, ...], batch: int
) -> None:
    best, found = by_brute_force(templates, members, pools, batch), fastest_meeting(templates, members, pools, batch)
    if math.isinf(best):
        assert found is None
        return
    assert found is not None
    assert sum(one.sequences for one in found.shares) == batch
    met = exchange_seconds([members[one.template.name] for one in found.shares])
    pipelines = max(one.template.seconds(one.microbatches) for one in found.shares)
    plain = {one.name: one for one in templates}
    assert pipelines == pytest.approx(
        max(plain[one.template.name].seconds(one.microbatches) for one in found.shares) + met
    )
    assert best * (1 - 1e-9) <= found.seconds == pytest.approx(pipelines)
    assert found.bound_seconds <= best * (1 + 1e-9)
    assert found.seconds <= best * 1.02
