"""The place of ranks, and which layers they hold."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny_training import LAYERS, tiny

from runtime.ranks import coordinates, rank_at, shares, stages_of
from scenarios.layout import Layout, Stage
from simulator.schedule import stage_rank

orders = st.permutations(("tp", "cp", "ep", "dp", "pp"))


@given(orders, st.integers(1, 3), st.integers(1, 3), st.integers(1, 3))
def test_coordinates_and_rank_are_inverse(order: tuple[str, ...], tp: int, dp: int, pp: int) -> None:
    layout = Layout(tp=tp, dp=dp, pp=pp, rank_order=tuple(order))  # type: ignore[arg-type]
    places = [coordinates(layout, rank) for rank in range(layout.world_size)]
    assert [rank_at(layout, **place) for place in places] == list(range(layout.world_size))
    assert len({tuple(sorted(place.items())) for place in places}) == layout.world_size


def test_the_first_axis_of_the_order_varies_fastest() -> None:
    layout = Layout(tp=2, dp=2, rank_order=("dp", "tp", "cp", "ep", "pp"))
    assert [coordinates(layout, rank)["dp"] for rank in range(4)] == [0, 1, 0, 1]


@pytest.mark.parametrize(("schedule", "vpp"), [("1f1b", 1), ("gpipe", 1), ("zb-h1", 1), ("interleaved", 3), ("zbv", 2)])
def test_stages_lie_where_the_simulator_says(schedule: str, vpp: int) -> None:
    layout = Layout(pp=4, vpp=vpp, schedule=schedule)  # type: ignore[arg-type]
    placed = {stage: rank for rank in range(4) for stage in stages_of(layout, rank)}
    assert placed == {stage: stage_rank(layout.schedule, 4, vpp, stage) for stage in range(4 * vpp)}


@given(st.lists(st.integers(0, 3), min_size=4, max_size=4).filter(lambda counts: sum(counts) == LAYERS))
def test_every_layer_is_held_once(counts: list[int]) -> None:
    layout = Layout(pp=2, vpp=2, schedule="interleaved", stages=tuple(Stage(layers=count) for count in counts))
    held = shares(tiny(), layout)
    assert list(itertools.chain.from_iterable(range(one.first, one.last) for one in held)) == list(range(LAYERS))
    assert [one.embedding for one in held] == [True, False, False, False]
    assert [one.head for one in held] == [False, False, False, True]


def test_recompute_is_a_matter_of_the_layout_and_its_stages() -> None:
    assert [one.modes for one in shares(tiny(), Layout(pp=2, recompute="full"))] == ["ff", "ff"]
    stages = (Stage(layers=2, recompute_layers=1), Stage(layers=2))
    assert [one.modes for one in shares(tiny(), Layout(pp=2, recompute="full", stages=stages))] == ["fn", "nn"]
    assert [one.modes for one in shares(tiny(), Layout(pp=2, recompute="selective"))] == ["ss", "ss"]
    letters = (Stage(layers=2, recompute_layers=1, recompute="nf"), Stage(layers=2, recompute="sn"))
    assert [one.modes for one in shares(tiny(), Layout(pp=2, stages=letters))] == ["nf", "sn"]
