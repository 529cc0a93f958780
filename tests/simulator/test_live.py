"""Peaks of interleaved pipelines with unequal chunks, against the op orders."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from scenarios.job import Job
from scenarios.layout import Layout, Stage
from scenarios.model import load_model
from simulator.arrays import LayoutArrays
from simulator.live import interleaved_moments, live_microbatches
from simulator.memory import memory_use, peak_bytes
from simulator.schedule import live_vectors, op_orders
from simulator.stages import stage_layers
from topologies.catalog import load_cluster


@given(
    st.integers(2, 6),
    st.integers(2, 5),
    st.integers(1, 5),
    st.lists(st.integers(0, 4), min_size=3, max_size=3),
)
def test_the_moments_hold_every_maximum(pp, vpp, rounds, layers):
    """First chunk, chunks between and last chunk of any size: no combination that is reached holds more."""
    m = pp * rounds
    rows = LayoutArrays.of([Layout(pp=pp, vpp=vpp, schedule="interleaved")])
    ranks, count = np.arange(pp, dtype=float)[None], np.array([float(m)])
    live = live_microbatches(rows, ranks, count)
    moments = [live, *interleaved_moments(rows, ranks, count, live)]
    first, between, last = layers
    for rank, order in enumerate(op_orders("interleaved", pp, vpp, m)):
        most = max(one[0] * first + sum(one[1:-1]) * between + one[-1] * last for one in live_vectors(order))
        told = max(a[0, rank] * first + (vpp - 2) * b[0, rank] * between + c[0, rank] * last for a, b, c in moments)
        assert told == pytest.approx(most)


@pytest.mark.parametrize(
    ("name", "pp", "vpp"),
    [("llama3-70b", 8, 4), ("mixtral-8x7b", 16, 4), ("qwen3-30b-a3b", 8, 4), ("llama3-70b", 4, 10)],
)
def test_uniform_stages_are_as_full_as_the_same_stages_spelt_out(name, pp, vpp):
    job = Job(model=load_model(name), seq_length=4096, global_batch_size=512)
    layout = Layout(tp=8, pp=pp, vpp=vpp, dp=8, schedule="interleaved", sequence_parallel=True)
    sizes = stage_layers(job.model.num_layers, pp, vpp)
    spelt = layout.model_copy(update={"stages": tuple(Stage(layers=size) for size in sizes)})
    cluster = load_cluster("dgx-h100-superpod")
    (peak,) = peak_bytes(cluster, job, LayoutArrays.of([layout]))
    assert peak == memory_use(cluster, job, layout).peak_bytes
    assert peak == pytest.approx(memory_use(cluster, job, spelt).peak_bytes, rel=1e-9)
