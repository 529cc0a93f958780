"""One GPU against kernel benchmarks, FLOP counts and limits."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scenarios.job import Job
from scenarios.layout import Layout
from scenarios.model import Attention, Layer, Mamba, Mla, Mlp, ModelSpec, Moe
from scenarios.stack import Stack
from simulator.arrays import LayoutArrays
from simulator.attention import core_seconds, projection_seconds, visible_tokens
from simulator.compute import (
    cast_seconds,
    gemm_seconds,
    head_seconds,
    inverse_distance,
    memory_seconds,
    optimizer_seconds,
    rates,
    saturating_max,
)
from simulator.moe import dense_ffn_seconds, expert_seconds
from simulator.parameters import Parameters, shipped_parameters
from simulator.traffic import ranks_of
from topologies.cluster import AttentionPoint, Cluster, GemmPoint, Measured
from topologies.document import LoadContext, check
from topologies.errors import InputError

ONE = np.ones(1)
TUNED = Stack(trainer="megatron")


def cluster_of(node="dgx-h100"):
    return check({"name": "test", "node": node, "num_nodes": 1}, Cluster, LoadContext(Path("test.yaml")))


def job_of(mixer=None, ffn=None, hidden=8192, seq_length=8192, stack=TUNED, **changes):
    layer = Layer(
        mixer=mixer or Attention(heads=64, kv_heads=8, head_dim=128),
        feed_forward=ffn or Mlp(ffn_hidden_size=28672, gated=True),
    )
    model = ModelSpec(name="m", hidden_size=hidden, vocab_size=128256, layer_kinds={"a": layer}, pattern=("a",))
    return Job(model=model, seq_length=seq_length, global_batch_size=8, stack=stack, **changes)


def rate_of(node="dgx-h100", **changes):
    return rates(cluster_of(node), job_of(**changes), shipped_parameters())


def gemm_share(rate, peak, m, n, k):
    return float(2 * m * n * k / gemm_seconds(rate.gemm, m * ONE, n * ONE, k * ONE)[0] / peak)


def test_large_gemm_reaches_what_benchmarks_show():
    # 8192 cube on H100: 0.75 / 1.108 of the dense bf16 peak; measured cuBLAS rates are 600 to 750 TFLOP/s
    share = gemm_share(rate_of(), 989.5e12, 8192, 8192, 8192)
    assert 0.66 < share < 0.71
    assert gemm_share(rate_of("dgx-a100"), 312e12, 8192, 8192, 8192) == pytest.approx(0.73, abs=0.02)


def test_thin_gemms_are_bound_by_memory():
    rate = rate_of()
    seconds = float(gemm_seconds(rate.gemm, 1.0 * ONE, 8192 * ONE, 8192 * ONE)[0])
    assert seconds > 2 * 8192 * 8192 / 3.35e12  # the weights have to be read
    shares = [gemm_share(rate, 989.5e12, m, 8192, 8192) for m in (16, 128, 1024, 8192, 65536)]
    assert shares == sorted(shares)
    assert shares[0] < 0.05


@settings(deadline=None)
@given(st.integers(1, 5), st.integers(1, 5), st.integers(1, 5))
def test_the_three_products_of_a_layer_cost_the_same(m, n, k):
    rate = rate_of().gemm
    sides = [256.0 * 2**one for one in (m, n, k)]
    first = float(gemm_seconds(rate, *(one * ONE for one in sides))[0])
    for turn in ((1, 2, 0), (2, 0, 1)):
        assert float(gemm_seconds(rate, *(sides[one] * ONE for one in turn))[0]) == pytest.approx(first)


def test_causal_attention_counts_half_of_the_square():
    rate = rate_of()
    mixer = Attention(heads=64, kv_heads=8, head_dim=128)
    forward, backward = core_seconds(rate, mixer, 8192, ONE, 8192 * ONE, ONE)
    flops = 4 * 8192 * 8192 / 2 * 64 * 128
    reached = flops / float(forward[0]) / 989.5e12
    efficiency = shipped_parameters().attention_efficiency["hopper"].value
    assert reached == pytest.approx(efficiency * 8192 / (8192 + 512), rel=1e-9)
    assert float(backward[0] / forward[0]) == pytest.approx(2.5)


def test_windows_chunks_and_sparse_selection_limit_what_a_query_sees():
    full = Attention(heads=8, kv_heads=8, head_dim=128)
    assert visible_tokens(full, 32768) == 32768
    assert visible_tokens(full.model_copy(update={"window": 128}), 32768) == 256
    assert visible_tokens(full.model_copy(update={"window": 128}), 64) == 64
    assert visible_tokens(full.model_copy(update={"chunk": 8192}), 32768) == 8192
    mla = Mla(
        heads=8, q_lora_rank=None, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128,
        indexer_heads=64, indexer_head_dim=128, indexer_top_k=2048,
    )  # fmt: skip
    assert visible_tokens(mla, 131072) == 4096


def test_older_kernels_are_slower_in_the_published_order():
    mixer = Attention(heads=64, kv_heads=8, head_dim=128)

    def forward(kernel):
        stack = Stack(trainer="megatron", attention_kernel=kernel)
        return float(core_seconds(rate_of(stack=stack), mixer, 2048, ONE, 2048 * ONE, ONE)[0][0])

    best, second, first, unfused = (forward(name) for name in ("flash3-cudnn", "flash2", "early-flash", "unfused"))
    assert best < second < first < unfused
    assert 1.5 < second / best < 2.0  # FlashAttention-3 paper, figure 5: 1.5 to 2.0


def test_unfused_attention_moves_its_scores():
    rate = rate_of("dgx-a100", stack=Stack(trainer="megatron", attention_kernel="unfused"))
    mixer = Attention(heads=96, kv_heads=96, head_dim=128)
    forward, backward = core_seconds(rate, mixer, 2048, ONE, 2048 * ONE, 8 * ONE)
    scores = 96 / 8 * 2048 * 2048
    assert float(forward[0]) > float(memory_seconds(rate, 12 * scores))
    assert float(backward[0]) > float(memory_seconds(rate, 16 * scores))
    assert float(forward[0]) < 4 * float(memory_seconds(rate, 12 * scores))


def test_a_rank_keeps_one_key_value_head():
    rate = rate_of()
    mixer = Attention(heads=64, kv_heads=8, head_dim=128)
    eight = projection_seconds(rate, mixer, 8192, 8192 * ONE, 8 * ONE)
    sixteen = projection_seconds(rate, mixer, 8192, 8192 * ONE, 16 * ONE)
    assert float(eight[0] / sixteen[0]) < 2.0
    one = float(projection_seconds(rate, mixer, 8192, 8192 * ONE, ONE)[0])
    assert one / float(eight[0]) == pytest.approx(8.0, rel=0.2)


@pytest.mark.parametrize(
    "mixer",
    [
        Mla(heads=16, q_lora_rank=512, kv_lora_rank=256, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128),
        Mla(heads=16, q_lora_rank=None, kv_lora_rank=256, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128),
        Mamba(generation=1, inner_size=4096, state_size=16, conv_kernel=4, dt_rank=256),
        Mamba(generation=2, inner_size=4096, state_size=128, conv_kernel=4, heads=64, groups=8),
    ],
)
def test_projections_take_as_long_as_their_flops(mixer):
    job = job_of(mixer=mixer, hidden=4096)
    rate = rates(cluster_of(), job, shipped_parameters())
    tokens = 65536.0
    seconds = float(projection_seconds(rate, mixer, 4096, tokens * ONE, ONE)[0])
    parts = job.model.layer_flops_per_token("a", 8192)
    flops = parts["projections"] + parts["mamba"]
    assert flops * tokens / seconds == pytest.approx(0.75 * 989.5e12, rel=0.45)
    assert flops * tokens / seconds < 0.75 * 989.5e12


def test_experts_with_few_rows_are_slow_and_count_their_copies():
    rate = rate_of()
    moe = Moe(num_experts=64, top_k=4, ffn_hidden_size=2048)
    layouts = LayoutArrays.of([Layout(ep=8, dp=8)] * 2)
    tokens = np.array([256.0, 65536.0])
    seconds = expert_seconds(rate, moe, 4096, tokens, ranks_of(layouts))
    per_token = seconds / tokens
    assert per_token[0] > 2.0 * per_token[1]
    dense = dense_ffn_seconds(rate, True, 4 * 2048, 4096, tokens[1:], ONE)
    assert float(seconds[1] / dense[0]) == pytest.approx(1 / shipped_parameters().moe_gemm.value, rel=0.1)


def test_shared_experts_and_their_router_are_added():
    rate, ranks = rate_of(), ranks_of(LayoutArrays.of([Layout(ep=8, dp=8)]))
    plain = Moe(num_experts=64, top_k=4, ffn_hidden_size=2048)
    shared = plain.model_copy(update={"shared_ffn_hidden_size": 4096})
    more = expert_seconds(rate, shared, 4096, 8192 * ONE, ranks) - expert_seconds(rate, plain, 4096, 8192 * ONE, ranks)
    assert float(more[0]) == pytest.approx(float(dense_ffn_seconds(rate, True, 4096, 4096, 8192 * ONE, ONE)[0]))


def test_casts_cost_only_below_16_bits():
    elements = 1e9 * ONE
    times = {
        precision: float(cast_seconds(rate_of("dgx-b200", precision=precision), elements)[0])
        for precision in ("bf16", "fp8", "mxfp8", "nvfp4")
    }
    assert times["bf16"] == 0.0
    assert times["fp8"] < times["mxfp8"] < times["nvfp4"]


def test_the_head_multiplies_in_16_bits():
    half, quarter = rate_of("dgx-b200"), rate_of("dgx-b200", precision="fp8")
    tokens, vocab = 8192 * ONE, 128256 * ONE
    gemm = [head_seconds(rate, tokens, vocab, 4096, tokens, np.array([False]))[0] for rate in (half, quarter)]
    assert gemm[0] == gemm[1]
    flops = 3 * 2 * 8192 * 128256 * 4096
    assert flops / float(gemm[0][0]) < 0.60 * 2250e12


def test_the_optimizer_streams_its_states():
    rate = rate_of()
    seconds = float(optimizer_seconds(rate, job_of(), 1e9 * ONE)[0])
    assert seconds == pytest.approx(34e9 / (3.35e12 * 0.85))
    assert float(optimizer_seconds(rate, job_of(optimizer="sgd"), 1e9 * ONE)[0]) < seconds


def test_a_rounded_maximum():
    assert float(saturating_max(ONE, 0 * ONE)[0]) == 1.0
    assert float(saturating_max(ONE, ONE)[0]) == pytest.approx(2**0.25)
    assert float(saturating_max(10 * ONE, ONE)[0]) == pytest.approx(10, rel=1e-3)


def test_a_precision_that_the_gpu_lacks_is_refused():
    with pytest.raises(InputError, match=r"A100 SXM 80GB has no fp8 peak.*choose a precision of"):
        rate_of("dgx-a100", precision="fp8")


def test_undeclared_software_is_assumed_and_named():
    declared, open_ = rate_of(), rate_of(stack=Stack())
    assert any("stack.trainer is not declared" in text for text in open_.software.assumptions)
    assert "trainer not declared" in open_.software.undeclared
    assert "trainer not declared" not in declared.software.undeclared
    generic = rate_of(stack=Stack(trainer="torchtitan"))
    assert 0.8 < generic.gemm.flop_per_second / declared.gemm.flop_per_second < 0.95
    old = [rate_of("dgx-a100", stack=Stack(trainer=one)).gemm.flop_per_second for one in ("megatron", "torchtitan")]
    assert old[0] == old[1]


def test_parameters_stay_in_their_ranges():
    shipped = shipped_parameters()
    for name, one in shipped.items():
        assert one.low <= one.value <= one.high, name
        assert one.source, name
        if name.startswith(("gemm_efficiency", "attention_efficiency")):
            assert one.high <= 0.85, name
    changed = shipped.with_values({"gemm_efficiency.hopper.bf16": 0.70, "host_layer": 5e-4})
    assert changed.gemm_efficiency["hopper"]["bf16"].value == 0.70
    assert changed.host_layer.value == 5e-4
    assert changed.source == shipped.source
    with pytest.raises(ValueError, match="outside"):
        shipped.with_values({"gemm_efficiency.hopper.bf16": 0.95})
    with pytest.raises(ValueError, match="not a parameter"):
        shipped.with_values({"luck": 1.0})
    assert isinstance(changed, Parameters)


GEMMS = tuple(
    GemmPoint(m=m, n=n, k=k, precision="fp32", rate_flop_per_second=rate)
    for m, n, k, rate in ((64, 512, 512, 40e9), (512, 512, 512, 60e9), (2048, 512, 512, 70e9), (512, 4096, 512, 80e9))
)
CORES = tuple(
    AttentionPoint(
        batch=1, seq_length=s, heads=8, head_dim=64, precision="fp32", forward_seconds=f, backward_seconds=3 * f
    )
    for s, f in ((128, 1e-3), (512, 1.2e-2))
)


def measured_cluster(**changes):
    measured = Measured(date="2026-01-01", gemms=GEMMS, attention=CORES, memory_bandwidth_bytes_per_second=5e9)
    return cluster_of("laptop-core").model_copy(update={"measured": measured, **changes})


def test_measured_points_take_the_place_of_efficiencies():
    job = job_of(precision="fp32")
    rate = rates(measured_cluster(), job, shipped_parameters())
    for point in GEMMS:
        seconds = gemm_seconds(rate.gemm, point.m * ONE, point.n * ONE, point.k * ONE)
        assert 2 * point.m * point.n * point.k / float(seconds[0]) == pytest.approx(
            point.rate_flop_per_second, rel=1e-6
        )
    between = 2 * 1024 * 512 * 512 / float(gemm_seconds(rate.gemm, 1024 * ONE, 512 * ONE, 512 * ONE)[0])
    assert 55e9 < between < 75e9
    mixer = Attention(heads=8, kv_heads=8, head_dim=64)
    for point in CORES:
        forward, backward = core_seconds(rate, mixer, point.seq_length, ONE, point.seq_length * ONE, ONE)
        assert float(forward[0]) == pytest.approx(point.forward_seconds, rel=1e-6)
        assert float(backward[0]) == pytest.approx(point.backward_seconds, rel=1e-6)
    assert rate.memory_bytes_per_second == 5e9
    assert any("measured points" in fact for fact in rate.facts)


def test_shared_cores_slow_everything():
    job = job_of(precision="fp32")
    alone = rates(measured_cluster(), job, shipped_parameters())
    shared = rates(measured_cluster(oversubscribed_cores=2.0), job, shipped_parameters())
    shape = (512 * ONE, 512 * ONE, 512 * ONE)
    assert float(gemm_seconds(shared.gemm, *shape)[0]) == pytest.approx(2 * float(gemm_seconds(alone.gemm, *shape)[0]))
    assert shared.memory_bytes_per_second == alone.memory_bytes_per_second / 2


@given(st.floats(1, 1e4), st.floats(1, 1e4))
def test_interpolation_stays_between_its_points(x, y):
    places = np.array([[1.0, 1.0], [100.0, 10.0], [10.0, 1000.0]])
    values = np.array([2.0, 3.0, 5.0])
    found = float(inverse_distance(places, values, (np.float64(x), np.float64(y))))
    assert 2.0 - 1e-9 <= found <= 5.0 + 1e-9
