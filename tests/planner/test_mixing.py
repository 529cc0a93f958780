"""Knapsack and bisection against every choice of replicas and micro-batches at small size."""

from __future__ import annotations

import itertools
import math
import random

import pytest

from planner.mixing import Template, fastest_mix


def by_brute_force(templates: list[Template], pools: tuple[int, ...], batch: int) -> float:
    """The fastest step over all numbers of replicas: each finishes at one of its own times."""
    best = math.inf
    most = [min(held // need for need, held in zip(one.nodes, pools, strict=True) if need) for one in templates]
    for counts in itertools.product(*(range(one + 1) for one in most)):
        used = [sum(c * one.nodes[p] for c, one in zip(counts, templates, strict=True)) for p in range(len(pools))]
        if not any(counts) or any(use > held for use, held in zip(used, pools, strict=True)):
            continue
        times = sorted(
            one.seconds(m) for c, one in zip(counts, templates, strict=True) if c for m in range(one.least, batch + 1)
        )
        for seconds in times:
            if seconds >= best:
                break
            held = sum(
                c * one.replicas * one.micro_batch_size * one.microbatches(seconds)
                for c, one in zip(counts, templates, strict=True)
            )
            if held >= batch:
                best = seconds
                break
    return best


def some_pools() -> list[tuple[list[Template], tuple[int, ...], int]]:
    dice, cases = random.Random(3), []
    for _ in range(30):
        pools = (dice.randint(2, 7), dice.randint(2, 9))
        templates = []
        for number in range(dice.randint(2, 4)):
            nodes = dice.choice([(1, 0), (2, 0), (0, 1), (0, 2), (1, 1), (0, 3)])
            speed = dice.uniform(0.5, 1.0) if nodes[0] else dice.uniform(1.0, 3.0)
            templates.append(
                Template(
                    name=str(number),
                    nodes=nodes,
                    replicas=dice.choice([1, 1, 2]),
                    fixed_seconds=dice.uniform(0.5, 4.0),
                    microbatch_seconds=speed,
                    micro_batch_size=1,
                    least=dice.choice([1, 2]),
                )
            )
        cases.append((templates, pools, dice.randint(12, 60)))
    return cases


@pytest.mark.parametrize(("templates", "pools", "batch"), some_pools())
def test_no_choice_of_replicas_is_faster(templates: list[Template], pools: tuple[int, ...], batch: int) -> None:
    found = fastest_mix(templates, pools, batch)
    best = by_brute_force(templates, pools, batch)
    if math.isinf(best):
        assert found is None
        return
    assert found is not None
    assert found.seconds == pytest.approx(best, rel=3e-4)
    assert found.bound_seconds <= best * (1 + 1e-9)
    assert found.gap < 5e-4
    assert sum(one.sequences for one in found.shares) == batch
    for pool, held in enumerate(pools):
        assert (
            sum(one.replicas / one.template.replicas * one.template.nodes[pool] for one in found.shares) <= held + 1e-9
        )
    assert all(one.microbatches >= one.template.least for one in found.shares)


def test_fast_and_slow_replicas_share_the_batch_by_speed() -> None:
    """Two replicas of speed 1 and two of speed 1/3: of 80 sequences the fast ones take three quarters."""
    fast, slow = (
        Template(name=n, nodes=nodes, replicas=1, fixed_seconds=0.0, microbatch_seconds=s, micro_batch_size=1)
        for n, nodes, s in (("fast", (1, 0), 1.0), ("slow", (0, 1), 3.0))
    )
    found = fastest_mix([fast, slow], (2, 2), 80)
    assert found is not None
    assert found.seconds == 30.0
    assert {(one.template.name, one.replicas, one.microbatches) for one in found.shares} == {
        ("fast", 2, 30),
        ("slow", 2, 10),
    }


def test_a_pool_without_room_holds_nothing() -> None:
    large = Template(name="x", nodes=(3, 0), replicas=1, fixed_seconds=1.0, microbatch_seconds=1.0, micro_batch_size=1)
    assert fastest_mix([large], (2, 9), 10) is None
