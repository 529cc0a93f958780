"""Layouts as arrays: what goes in comes out."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from scenarios.job import Job
from scenarios.layout import RECOMPUTES, SCHEDULES, SHARDINGS, Layout
from scenarios.model import Attention, Layer, Mlp, ModelSpec
from simulator.arrays import LayoutArrays

DEGREE = st.integers(1, 64)
LAYOUT = st.builds(
    Layout,
    tp=DEGREE,
    cp=DEGREE,
    pp=DEGREE,
    dp=DEGREE,
    ep=DEGREE,
    etp=DEGREE,
    vpp=DEGREE,
    micro_batch_size=DEGREE,
    sequence_parallel=st.booleans(),
    optimizer_sharding=st.sampled_from(SHARDINGS),
    schedule=st.sampled_from(SCHEDULES),
    recompute=st.sampled_from(RECOMPUTES),
)


@given(st.lists(LAYOUT, min_size=1, max_size=5))
def test_rows_are_the_layouts(layouts):
    arrays = LayoutArrays.of(layouts)
    assert [arrays.row(i) for i in range(len(arrays))] == layouts
    assert arrays.world_size.tolist() == [layout.world_size for layout in layouts]
    last = arrays.take(np.array([len(layouts) - 1]))
    assert last.row(0) == layouts[-1]


def test_rank_orders_do_not_mix():
    other = Layout(rank_order=("tp", "pp", "cp", "ep", "dp"))
    assert LayoutArrays.of([other]).row(0) == other
    with pytest.raises(ValueError, match="share their rank_order"):
        LayoutArrays.of([Layout(), other])


def test_a_batch_that_does_not_divide_is_refused():
    layer = Layer(mixer=Attention(heads=1, kv_heads=1, head_dim=8), feed_forward=Mlp(ffn_hidden_size=8, gated=False))
    model = ModelSpec(name="x", hidden_size=8, vocab_size=8, layer_kinds={"a": layer}, pattern=("a",))
    job = Job(model=model, seq_length=8, global_batch_size=12)
    arrays = LayoutArrays.of([Layout(dp=2, micro_batch_size=3), Layout(dp=5)])
    assert arrays.take(slice(0, 1)).num_microbatches(job).tolist() == [2]
    with pytest.raises(ValueError, match="not a multiple of dp 5 x micro-batch 1 in row 1"):
        arrays.num_microbatches(job)
