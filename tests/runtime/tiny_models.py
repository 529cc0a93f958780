"""Tiny models of every kind that the runtime builds."""

from __future__ import annotations

from typing import Any

from scenarios.model import Attention, Layer, Mla, Mlp, ModelSpec, Moe

LAYERS = 4
PLAIN = Attention(heads=4, kv_heads=2, head_dim=16)
DENSE = Mlp(ffn_hidden_size=96, gated=True)
LATENT = Mla(heads=4, q_lora_rank=24, kv_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=8, v_head_dim=16)
SOFTMAX = Moe(num_experts=8, top_k=2, ffn_hidden_size=32)
SIGMOID = Moe(
    num_experts=8,
    top_k=3,
    ffn_hidden_size=32,
    shared_ffn_hidden_size=32,
    router_bias=True,
    score_function="sigmoid",
    route_scale=2.5,
    expert_groups=4,
    limited_groups=2,
)


def model(name: str, kinds: dict[str, Layer], pattern: tuple[str, ...] = (), **more: Any) -> ModelSpec:
    return ModelSpec(
        name=name,
        hidden_size=64,
        vocab_size=256,
        layer_kinds=kinds,
        pattern=pattern or tuple(kinds) * (LAYERS // len(kinds)),
        **more,
    )


def of(mixer: Attention | Mla = PLAIN, block: Mlp | Moe = DENSE) -> Layer:
    return Layer(mixer=mixer, feed_forward=block)


MODELS = {
    "dense": model("tiny", {"dense": of()}),
    "tied": model("tiny", {"dense": of()}, tied_embeddings=True),
    # as GPT-3: LayerNorm, learned positions, biases, two matrices with GELU
    "gpt": model(
        "gpt",
        {
            "dense": of(
                Attention(heads=4, kv_heads=4, head_dim=16, qkv_bias=True, output_bias=True),
                Mlp(ffn_hidden_size=96, gated=False, bias=True),
            )
        },
        norm_bias=True,
        position_embeddings=48,
        tied_embeddings=True,
    ),
    # as GPT-J and BLOOM together: one norm for attention and feed-forward side by side, a norm after the embedding
    "gptj": model(
        "gptj",
        {"dense": Layer(mixer=PLAIN, feed_forward=Mlp(ffn_hidden_size=96, gated=False, bias=True), norms=1)},
        norm_bias=True,
        embedding_norm=True,
        head_bias=True,
    ),
    # as Gemma 3: norms before and behind each part
    "gemma": model(
        "gemma",
        {"dense": Layer(mixer=PLAIN.model_copy(update={"window": 8, "qk_norm": True}), feed_forward=DENSE, norms=4)},
        tied_embeddings=True,
    ),
    # as Mixtral and Qwen3: softmax routing in every layer, normalised heads
    "moe": model("moe", {"moe": of(PLAIN.model_copy(update={"qk_norm": True}), SOFTMAX)}),
    # as DeepSeek-V3: latent attention, dense first layer, shared expert, corrected sigmoid scores in limited groups
    "deepseek": model("deepseek", {"dense": of(LATENT), "moe": of(LATENT, SIGMOID)}, ("dense", "moe", "moe", "moe")),
    # as gpt-oss: windows in every other layer, sinks, biases on everything that multiplies
    "gpt-oss": model(
        "gpt-oss",
        {
            f"reach-{window}": of(
                PLAIN.model_copy(update={"window": window, "sinks": True, "qkv_bias": True, "output_bias": True}),
                SOFTMAX.model_copy(update={"bias": True, "router_bias": True}),
            )
            for window in (8, None)
        },
    ),
    # as Llama 4 and Qwen2-MoE together: chunks, scores before the experts, a gate on the shared expert
    "llama4": model(
        "llama4",
        {
            "dense": of(PLAIN.model_copy(update={"chunk": 12, "qkv_bias": True})),
            "moe": of(
                PLAIN,
                Moe(
                    num_experts=4,
                    top_k=1,
                    ffn_hidden_size=48,
                    shared_ffn_hidden_size=48,
                    shared_gate=True,
                    score_function="sigmoid",
                    route_norm=False,
                    score_before_experts=True,
                ),
            ),
        },
    ),
}
