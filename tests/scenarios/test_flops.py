"""FLOPs per token against closed forms, brute force, and what public logs and issues print."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scenarios.counting import visible_tokens
from scenarios.huggingface import spec_from_config
from scenarios.model import Attention, Layer, Mamba, Mla, Mlp, ModelSpec, load_model


def spec_of(**config: Any) -> ModelSpec:
    return ModelSpec.model_validate(spec_from_config(config, "test", "config.json"))


GPT_OSS = {
    "model_type": "gpt_oss", "hidden_size": 2880, "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64,
    "intermediate_size": 2880, "num_experts_per_tok": 4, "sliding_window": 128, "vocab_size": 201088,
    "max_position_embeddings": 131072, "tie_word_embeddings": False, "attention_bias": True,
}  # fmt: skip
"""openai/gpt-oss; layers and experts differ between the two sizes."""


@given(
    seq=st.integers(1, 60), window=st.none() | st.integers(1, 80), chunk=st.none() | st.integers(1, 80)
)  # fmt: skip
def test_visible_tokens_equals_the_sum_over_positions(seq: int, window: int | None, chunk: int | None) -> None:
    def seen(position: int) -> float:
        before = position % chunk if chunk else position
        return min(before + 0.5, window) if window else before + 0.5

    brute = sum(seen(position) for position in range(seq)) / seq
    assert visible_tokens(seq, window, chunk) == pytest.approx(brute)


@pytest.mark.parametrize("name", ["llama-30m", "llama2-7b", "llama3-8b", "llama3-70b", "llama3-405b"])
def test_dense_training_flops_are_six_per_matrix_weight_plus_attention(name: str) -> None:
    spec, seq = load_model(name), 8192
    norms = (2 * spec.num_layers + 1) * spec.hidden_size
    matrices = spec.num_params - spec.embedding_params - norms
    causal = 3 * spec.num_layers * 4 * (seq / 2) * spec.hidden_size
    assert spec.flops_per_token(seq) == pytest.approx(6 * matrices + causal, rel=1e-12)


def test_expert_flops_are_those_of_the_active_parameters() -> None:
    """deepspeedai/Megatron-DeepSpeed#398: Qwen3-30B-A3B computes with 3.35 B of its 30.5 B parameters."""
    spec, seq = load_model("qwen3-30b-a3b"), 4096
    norms = spec.num_layers * (2 * spec.hidden_size + 2 * 128) + spec.hidden_size
    matrices = spec.num_active_params - spec.embedding_params - norms
    flops = spec.forward_flops_per_token(seq)
    assert sum(flops.values()) - flops["attention"] == pytest.approx(2 * matrices, rel=1e-12)
    assert round(spec.num_active_params / 1e9, 2) == 3.35
    assert flops["mlp"] == 0


@pytest.mark.parametrize(
    ("layers", "experts", "all_full", "windowed", "saved"), [(36, 128, 38.04, 34.53, 9.2), (24, 32, None, None, 8.8)]
)
def test_windows_are_counted_at_their_true_size(
    layers: int, experts: int, all_full: float | None, windowed: float | None, saved: float
) -> None:
    """pytorch/torchtitan#4300, gpt-oss at 4,096 tokens: full squares for all layers, then min(W, s) for half of them.

    torchtitan counts 6 per active weight without the input table, and the whole square, not its causal half.
    """
    seq = 4096
    spec = spec_of(**GPT_OSS, num_hidden_layers=layers, num_local_experts=experts)
    blind = spec_of(**GPT_OSS | {"sliding_window": seq}, num_hidden_layers=layers, num_local_experts=experts)
    weights = 6 * (spec.num_active_params - spec.embedding_params)
    square = 3 * 2 * blind.forward_flops_per_token(seq)["attention"]
    halves = square / 2
    windows = 3 * spec.forward_flops_per_token(seq)["attention"] - halves / 2
    before, after = (weights + square) / 1e9, (weights + halves + windows) / 1e9
    assert 100 * (1 - after / before) == pytest.approx(saved, abs=0.05)
    if all_full is not None:
        assert (round(before, 2), round(after, 2)) == (all_full, windowed)


def test_bloom_log_prints_hardware_flops() -> None:
    """bigscience tr11-176B-ml chronicles: 149.02 TFLOP/s at 105.22 s, 2,048 x 2,048 tokens, 384 GPUs.

    The log counts the whole square and runs every layer's forward pass twice; the model FLOPs are 111.8 when the head
    is scaled by 3/4 as well, which it should not be: it is not recomputed.
    """
    spec = spec_of(model_type="bloom", hidden_size=14336, n_layer=70, n_head=112, vocab_size=250880, seq_length=2048)
    forward = spec.forward_flops_per_token(2048)
    layers = forward["projections"] + 2 * forward["attention"] + forward["mlp"]
    tokens_per_gpu_second = 2048 * 2048 / 105.22 / 384
    hardware = (4 * layers + 3 * forward["head"]) * tokens_per_gpu_second / 1e12
    model = 3 * (layers + forward["head"]) * tokens_per_gpu_second / 1e12
    assert round(hardware, 2) == 149.02
    assert model == pytest.approx(111.8, rel=0.01)


def test_internevo_log_flops_per_token() -> None:
    """InternLM/InternEvo 20B log: 127.898 TFLOP/s at 1,031.73 tokens/s per GPU, sequences of 2,048, whole square.

    InternLM 20B: 60 layers of 5,120 with 40 heads, SwiGLU of 8/3 the hidden size, 103,168 tokens in the vocabulary.
    """
    spec = spec_of(
        model_type="llama", hidden_size=5120, num_hidden_layers=60, num_attention_heads=40, vocab_size=103168,
        intermediate_size=13653, num_key_value_heads=40,
    )  # fmt: skip
    forward = spec.forward_flops_per_token(2048)
    whole_square = 3 * (sum(forward.values()) + forward["attention"])
    assert whole_square == pytest.approx(127.89845e12 / 1031.73, rel=5e-4)


def test_primus_log_flops_per_token() -> None:
    """Primus log of Llama 3.1 8B at 8,192 tokens: 579.4 TFLOP/s at 10,005.5 tokens/s per GPU, whole square."""
    forward = load_model("llama3-8b").forward_flops_per_token(8192)
    assert 3 * (sum(forward.values()) + forward["attention"]) == pytest.approx(579.4e12 / 10005.5, rel=5e-4)


def test_swiglu_costs_what_its_three_matrices_cost() -> None:
    """NVIDIA/Megatron-LM#682: Llama 3 70B's MLP is 1.3125 times one of two matrices and four times the hidden size."""
    spec = load_model("llama3-70b")
    assumed = 2 * 2 * 4 * spec.hidden_size**2 * spec.num_layers
    assert spec.forward_flops_per_token(8192)["mlp"] / assumed == 1.3125


def test_projections_use_key_value_heads_and_scores_use_query_heads() -> None:
    """allenai/OLMo-core#475."""
    shape = {"model_type": "llama", "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32,
             "intermediate_size": 11008, "vocab_size": 32000}  # fmt: skip
    grouped, full = spec_of(**shape, num_key_value_heads=8), spec_of(**shape, num_key_value_heads=32)
    few, many = grouped.forward_flops_per_token(4096), full.forward_flops_per_token(4096)
    assert few["attention"] == many["attention"] == 32 * 2 * 4096 * 4096
    assert few["projections"] == 32 * 2 * (2 * 4096**2 + 2 * 4096 * 1024)
    assert many["projections"] == 32 * 2 * 4 * 4096**2


def test_latent_attention_by_hand() -> None:
    """DeepSeek-V3, arXiv 2412.19437, section 4.2: each product of section 2.1.1 written out."""
    flops = load_model("deepseek-v3").layer_flops_per_token("mla+mlp", 4096)
    queries = 7168 * 1536 + 1536 * 128 * (128 + 64)
    keys_values = 7168 * (512 + 64) + 512 * 128 * (128 + 128)
    assert flops["projections"] == 2 * (queries + keys_values + 128 * 128 * 7168)
    assert flops["attention"] == 2 * 128 * (192 + 128) * 4096 / 2
    assert flops["mlp"] == 2 * 3 * 7168 * 18432


def test_sparse_attention_saves_only_beyond_its_top_k() -> None:
    mla = Mla(heads=8, q_lora_rank=64, kv_lora_rank=32, qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=16)
    indexed = mla.model_copy(update={"indexer_heads": 2, "indexer_head_dim": 16, "indexer_top_k": 512})

    def attention(mixer: Mla, seq: int) -> float:
        layer = Layer(mixer=mixer, norms=1)
        spec = ModelSpec(name="m", hidden_size=128, vocab_size=10, layer_kinds={"one": layer}, pattern=("one",))
        return spec.forward_flops_per_token(seq)["attention"]

    indexer = 2 * 2 * 16 * 512 / 2
    assert attention(indexed, 512) == attention(mla, 512) + indexer
    assert attention(indexed, 8192) < attention(mla, 8192)


def test_mamba_2_layer_follows_the_count_of_megatron() -> None:
    """Megatron-LM counts 2 h (2 d + 2 g n + heads) + 7 d n + 2 d h per token; the short convolution is not in it."""
    hidden, inner, state, heads, groups = 8192, 16384, 256, 256, 8
    mixer = Mamba(
        generation=2, inner_size=inner, state_size=state, conv_kernel=4, heads=heads, groups=groups, inner_norms=True
    )
    kinds = {"mamba": Layer(mixer=mixer, norms=1)}
    spec = ModelSpec(name="m", hidden_size=hidden, vocab_size=10, layer_kinds=kinds, pattern=("mamba",))
    megatron = 2 * hidden * (2 * inner + 2 * groups * state + heads) + 7 * inner * state + 2 * inner * hidden
    convolution = 2 * 4 * (inner + 2 * groups * state)
    assert spec.forward_flops_per_token(4096)["mamba"] == megatron + convolution


def test_parts_of_a_hybrid_are_told_apart() -> None:
    kinds = {
        "attention": Layer(mixer=Attention(heads=4, kv_heads=2, head_dim=16), norms=1),
        "mlp": Layer(feed_forward=Mlp(ffn_hidden_size=96, gated=False), norms=1),
    }
    spec = ModelSpec(name="m", hidden_size=64, vocab_size=100, layer_kinds=kinds, pattern=("attention", "mlp"))
    flops = spec.forward_flops_per_token(128)
    assert {part for part, value in flops.items() if value} == {"projections", "attention", "mlp", "head"}
    assert flops["mlp"] == 2 * 2 * 64 * 96
    assert flops["head"] == 2 * 64 * 100
