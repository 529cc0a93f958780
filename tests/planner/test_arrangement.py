"""Arrangements against every assignment of blocks to units at small size."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest

from planner.arrangement import Blocks, best_arrangement, in_rank_order, least_bytes, uplink_bytes


def cheapest(blocks: Blocks, capacities: list[int]) -> float:
    """Try every way to put the blocks on units."""
    best = np.inf
    for choice in itertools.product(range(len(capacities)), repeat=blocks.count):
        if all(choice.count(unit) <= size for unit, size in enumerate(capacities)):
            units = np.array(choice).reshape(blocks.stages, blocks.per_stage)
            best = min(best, uplink_bytes(blocks, units))
    return float(best)


def some_cases() -> list[tuple[Blocks, list[int]]]:
    dice = random.Random(7)
    cases = []
    while len(cases) < 40:
        stages, per_stage = dice.choice([(2, 2), (2, 3), (3, 2), (2, 4), (4, 2), (3, 3), (1, 5)])
        capacities = [dice.randint(1, 5) for _ in range(dice.randint(2, 3))]
        if sum(capacities) >= stages * per_stage and len(capacities) ** (stages * per_stage) < 20_000:
            blocks = Blocks(
                stages=stages,
                per_stage=per_stage,
                ring_bytes=dice.choice([1.0, 5.0, 20.0]),
                neighbour_bytes=1.0,
                around_bytes=dice.choice([0.0, 0.0, 0.75]),
            )
            cases.append((blocks, capacities))
    return cases


@pytest.mark.parametrize(("blocks", "capacities"), some_cases())
def test_the_bound_holds_and_the_greedy_is_close(blocks: Blocks, capacities: list[int]) -> None:
    room = np.array(capacities)
    found = best_arrangement(blocks, room)
    optimum = cheapest(blocks, capacities)
    cost = uplink_bytes(blocks, found)
    assert all(np.bincount(found.ravel(), minlength=len(room)) <= room)
    assert least_bytes(blocks, room) <= optimum * (1 + 1e-9) + 1e-9
    assert optimum <= cost * (1 + 1e-9)
    assert cost <= uplink_bytes(blocks, in_rank_order(blocks, room))
    assert cost <= optimum + max(2 * blocks.ring_bytes, 0.35 * optimum)


def test_uplink_bytes_by_hand() -> None:
    """Stage 0 on units 0, 0, 1 and stage 1 on 1, 1, 1: one ring of two crossings, two neighbours apart."""
    blocks = Blocks(stages=2, per_stage=3, ring_bytes=10.0, neighbour_bytes=1.0)
    assert uplink_bytes(blocks, np.array([[0, 0, 1], [1, 1, 1]])) == 2 * 10 + 2


def test_what_goes_around_counts_where_first_and_last_stage_are_apart() -> None:
    blocks = Blocks(stages=2, per_stage=2, ring_bytes=0.0, neighbour_bytes=1.0, around_bytes=3.0)
    assert uplink_bytes(blocks, np.array([[0, 0], [1, 0]])) == 1 + 3
    assert uplink_bytes(blocks, np.array([[0, 1], [0, 1]])) == 0


def test_stages_fill_whole_units_where_there_are_spares() -> None:
    """Three stages of four blocks on units of five: rank order cuts stages, whole units cut none."""
    blocks = Blocks(stages=3, per_stage=4, ring_bytes=10.0, neighbour_bytes=1.0)
    room = np.array([5, 5, 5])
    naive, found = in_rank_order(blocks, room), best_arrangement(blocks, room)
    assert uplink_bytes(blocks, naive) > 40
    assert [sorted(set(row)) for row in found.tolist()] == [[0], [1], [2]]
    assert uplink_bytes(blocks, found) == 8.0
    assert least_bytes(blocks, room) <= 8.0


def test_neighbours_share_units_where_the_pipeline_sends_more() -> None:
    blocks = Blocks(stages=2, per_stage=4, ring_bytes=1.0, neighbour_bytes=10.0)
    found = best_arrangement(blocks, np.array([4, 4]))
    assert (found[0] == found[1]).all()
    assert uplink_bytes(blocks, found) == 4.0
    assert 0 < least_bytes(blocks, np.array([4, 4])) <= 4.0


def test_llama_3_on_pods_of_384_nodes() -> None:
    """Sixteen stages of 128 nodes: three stages fill a pod, so no ring leaves one (arXiv 2407.21783, section 3.3)."""
    blocks = Blocks(stages=16, per_stage=128, ring_bytes=19e9, neighbour_bytes=1.1e9)
    room = np.array([384] * 5 + [128])
    found = best_arrangement(blocks, room)
    assert uplink_bytes(blocks, found) == pytest.approx(5 * 128 * 1.1e9)
    broken = room - np.array([3, 0, 0, 0, 0, -3])
    shifted = best_arrangement(blocks, broken)
    assert uplink_bytes(blocks, shifted) < uplink_bytes(blocks, in_rank_order(blocks, broken))
