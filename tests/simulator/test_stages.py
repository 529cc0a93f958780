"""Stage splits against published splits, sums and brute force over all ranks."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scenarios.layout import RECOMPUTES, Layout, Stage
from scenarios.model import Attention, Layer, Mlp, ModelSpec, Moe
from simulator.arrays import LayoutArrays
from simulator.stages import (
    explicit_columns,
    layout_tables,
    placement,
    rank_chunks,
    rank_profiles,
    stage_layers,
    uniform_tables,
)

MIXER = Attention(heads=8, kv_heads=8, head_dim=64)


def model_of(pattern):
    kinds = {
        "dense": Layer(mixer=MIXER, feed_forward=Mlp(ffn_hidden_size=2048, gated=True)),
        "moe": Layer(mixer=MIXER, feed_forward=Moe(num_experts=8, top_k=2, ffn_hidden_size=512)),
    }
    return ModelSpec(
        name="mixed",
        hidden_size=512,
        vocab_size=1000,
        layer_kinds={name: kinds[name] for name in dict.fromkeys(pattern)},
        pattern=tuple(pattern),
    )


@given(st.integers(1, 200), st.integers(1, 16), st.integers(1, 6), st.integers(0, 3))
def test_no_layer_is_lost_and_stages_are_even(layers, pp, vpp, tail):
    sizes = stage_layers(layers, pp, vpp, tail)
    assert len(sizes) == pp * vpp
    assert sum(sizes) == layers
    assert min(sizes) >= 0
    inner = sizes[:-1] or sizes
    assert max(inner) - min(inner) <= 1
    if tail == 0:
        assert max(sizes) == -(-layers // (pp * vpp))


def test_spare_slots_come_from_the_ends():
    # GLM-4.5-Air, 46 layers over four stages (modelscope/ms-swift issue 5737)
    assert stage_layers(46, 4, 1) == (11, 12, 12, 11)
    # Llama 3 405B: 126 layers, one less on the first and on the last stage (arXiv 2407.21783, section 3.3.2)
    assert stage_layers(126, 16, 1) == (7, *[8] * 14, 7)
    assert stage_layers(126, 16, 8)[0] == stage_layers(126, 16, 8)[-1] == 0


def test_prediction_layers_make_room_on_the_last_stage():
    # DeepSeek-V3: 61 layers, one prediction depth
    assert stage_layers(61, 16, 1, 2) == (3, *[4] * 14, 2)


pattern_of = st.lists(st.sampled_from(["dense", "moe"]), min_size=8, max_size=40)


@settings(max_examples=60, deadline=None)
@given(
    pattern_of,
    st.sampled_from(
        [("1f1b", 1), ("interleaved", 2), ("interleaved", 3), ("zbv", 2), ("dualpipe", 1), ("dualpipe", 2)]
    ),
    st.sampled_from([1, 2, 4, 6, 8]),
    st.lists(st.floats(0, 10), min_size=4, max_size=4),
)
def test_pruned_profiles_hold_the_slowest_rank(pattern, schedule, pp, times):
    layout = Layout(pp=pp, vpp=schedule[1], schedule=schedule[0])
    model = model_of(pattern)
    columns, placed = placement(model, layout)
    width = len(columns)
    cost = np.array([*times[:width], *times[2:]])
    every = rank_profiles(placed) @ cost
    tables = uniform_tables(model, LayoutArrays.of([layout]))
    assert (tables.busy[0] @ cost).max() == pytest.approx(every.max())
    assert rank_profiles(placed).sum(axis=0)[:width] == pytest.approx(tables.totals)
    assert tables.totals.sum() == len(pattern)


def test_v_shaped_and_bidirectional_ranks_hold_two_stages():
    model = model_of(["dense"] * 8)
    _, vee = placement(model, Layout(pp=2, vpp=2, schedule="zbv"))
    assert list(vee.ranks) == [0, 1, 1, 0]
    _, ends = rank_chunks(vee)
    assert ends.tolist() == [[1, 1], [0, 0]]
    _, both = placement(model, Layout(pp=4, schedule="dualpipe"))
    chunks, ends = rank_chunks(both)
    assert chunks.sum(axis=1)[:, 0].tolist() == [4, 4, 4, 4]
    assert ends.tolist() == [[1, 1], [0, 0], [0, 0], [1, 1]]
    assert rank_profiles(both)[:, 0].tolist() == [2, 2, 2, 2]


def test_explicit_stages_are_counted_as_written():
    model = model_of(["dense"] * 3 + ["moe"] * 5)
    layout = Layout(pp=2, stages=(Stage(layers=3), Stage(layers=5)))
    columns, placed = placement(model, layout)
    assert [column.kind for column in columns] == ["dense", "moe"]
    assert placed.counts.tolist() == [[3, 0], [0, 5]]


def test_recomputed_layers_are_columns_of_their_own():
    model = model_of(["dense"] * 8)
    layout = Layout(pp=2, recompute="full", stages=(Stage(layers=4, recompute_layers=3), Stage(layers=4)))
    columns = explicit_columns(model, layout)
    assert [column.recompute for column in columns] == [RECOMPUTES.index("full"), RECOMPUTES.index("none")]
    assert layout_tables(model, layout).totals.tolist() == [3, 5]


@pytest.mark.parametrize(
    ("layout", "words"),
    [
        (Layout(pp=2, stages=(Stage(layers=8),)), "1 stages are given for pp 2 x vpp 1"),
        (Layout(pp=2, stages=(Stage(layers=4), Stage(layers=3))), "hold 7 layers, the model has 8"),
    ],
)
def test_stages_that_lose_layers_are_refused(layout, words):
    with pytest.raises(ValueError, match=words):
        placement(model_of(["dense"] * 8), layout)
