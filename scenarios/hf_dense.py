"""Families of dense decoders with gated MLPs: Llama and its many relatives, Qwen, Gemma, OLMo, Cohere, GLM."""

from __future__ import annotations

from typing import Any

from scenarios.hf_config import HfConfig
from scenarios.hf_decoder import (
    Family,
    attention,
    decoder,
    everywhere,
    gated_mlp,
    stack,
    windows,
)
from scenarios.layers import Attention

GEMMA3_DEFAULTS = {
    "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26, "num_attention_heads": 8,
    "num_key_value_heads": 4, "head_dim": 256, "vocab_size": 262208,
}  # fmt: skip
"""The published Gemma 3 configs leave several of these out, so the format's defaults are part of the models."""


def llama(config: HfConfig) -> dict[str, Any]:
    """RMSNorm, rotary positions, grouped-query attention, SwiGLU."""
    bias = config.flag("attention_bias", False)
    mixer = attention(config, kv_heads=config.size("num_attention_heads"), qkv_bias=bias, output_bias=bias)
    block = gated_mlp(config, bias=config.flag("mlp_bias", False))
    depth = config.size("num_hidden_layers")
    return decoder(config, stack([mixer] * depth, [block] * depth), tied=False)


def mistral(config: HfConfig) -> dict[str, Any]:
    """Llama with a window in every layer; null: none."""
    window = config.size_or_none("sliding_window", 4096)
    mixers = windows(config, attention(config), everywhere(config, "sliding_attention"), window=window)
    return decoder(config, stack(mixers, [gated_mlp(config)] * len(mixers)), tied=False)


def qwen2(config: HfConfig) -> dict[str, Any]:
    """Llama with biases on queries, keys and values; windows only where they are switched on."""
    mixers = qwen_windows(config, attention(config, qkv_bias=True))
    return decoder(config, stack(mixers, [gated_mlp(config)] * len(mixers)), tied=False)


def qwen3(config: HfConfig) -> dict[str, Any]:
    """Heads of their own size, normalised."""
    bias = config.flag("attention_bias", False)
    mixers = qwen_windows(config, attention(config, head_dim=128, qk_norm=True, qkv_bias=bias, output_bias=bias))
    return decoder(config, stack(mixers, [gated_mlp(config)] * len(mixers)), tied=False)


def qwen_windows(config: HfConfig, mixer: Attention) -> list[Attention]:
    """Layers from ``max_window_layers`` on have a window where ``use_sliding_window`` is true."""
    depth = config.size("num_hidden_layers")
    if not config.flag("use_sliding_window", False):
        return [mixer] * depth
    first = config.count("max_window_layers")
    types = ["sliding_attention" if index >= first else "full_attention" for index in range(depth)]
    return windows(config, mixer, types, window=config.size("sliding_window"))


def phi3(config: HfConfig) -> dict[str, Any]:
    """Llama with fused projections: the same weights."""
    window = config.size_or_none("sliding_window")
    mixer = attention(config, kv_heads=config.size("num_attention_heads"))
    mixers = windows(config, mixer, everywhere(config, "sliding_attention"), window=window)
    return decoder(config, stack(mixers, [gated_mlp(config)] * len(mixers)), tied=False)


def gemma(config: HfConfig) -> dict[str, Any]:
    """Tied table, heads of 256."""
    depth = config.size("num_hidden_layers")
    mixer = attention(config, head_dim=256)
    return decoder(config, stack([mixer] * depth, [gated_mlp(config)] * depth), tied=True)


def gemma2(config: HfConfig) -> dict[str, Any]:
    """Four norms a layer; every other layer has a window, the first included."""
    depth = config.size("num_hidden_layers")
    types = ["full_attention" if index % 2 else "sliding_attention" for index in range(depth)]
    mixer = attention(config, head_dim=256)
    mixers = windows(config, mixer, types, window=config.size_or_none("sliding_window", 4096))
    return decoder(config, stack(mixers, [gated_mlp(config)] * depth, norms=4), tied=True)


def gemma3(config: HfConfig) -> dict[str, Any]:
    """Four norms a layer, normalised heads; five windows for each layer that sees everything."""
    for key, default in GEMMA3_DEFAULTS.items():
        config.assume(key, default)
    depth = config.size("num_hidden_layers")
    period = config.size("sliding_window_pattern", 6)
    mixer = attention(config, qk_norm=True)
    mixers = windows(config, mixer, every(config, period), window=config.size_or_none("sliding_window", 4096))
    return decoder(config, stack(mixers, [gated_mlp(config)] * depth, norms=4), tied=True)


def granite(config: HfConfig) -> dict[str, Any]:
    """Llama with constant factors on embeddings, residuals and logits: the same weights."""
    return llama(config)


def olmo(config: HfConfig) -> dict[str, Any]:
    """Llama whose norms have no weights."""
    bias = config.flag("attention_bias", False)
    mixer = attention(config, kv_heads=config.size("num_attention_heads"), qkv_bias=bias, output_bias=bias)
    depth = config.size("num_hidden_layers")
    return decoder(config, stack([mixer] * depth, [gated_mlp(config)] * depth, norms=0), tied=False, final_norm=False)


def olmo2(config: HfConfig) -> dict[str, Any]:
    """Norms behind attention and MLP, queries and keys normalised over all heads; OLMo 3: windows in three of four."""
    bias = config.flag("attention_bias", False)
    heads = config.size("num_attention_heads")
    mixer = attention(config, kv_heads=heads, qkv_bias=bias, output_bias=bias, qk_norm=True, qk_norm_whole=True)
    mixers = [mixer] * config.size("num_hidden_layers")
    if config.family == "olmo3":
        mixers = windows(config, mixer, every(config, 4), window=config.size_or_none("sliding_window", 4096))
    return decoder(config, stack(mixers, [gated_mlp(config)] * len(mixers)), tied=False)


def cohere(config: HfConfig) -> dict[str, Any]:
    """Attention and MLP side by side behind one norm; Command R+ normalises each head by weights of its own."""
    bias, norm = config.flag("attention_bias", False), config.flag("use_qk_norm", False)
    heads = config.size("num_attention_heads")
    mixer = attention(config, kv_heads=heads, qkv_bias=bias, output_bias=bias, qk_norm=norm, qk_norm_whole=norm)
    mixers = [mixer] * config.size("num_hidden_layers")
    if config.family == "cohere2":
        types = every(config, config.size("sliding_window_pattern", 4))
        mixers = windows(config, mixer, types, window=config.size_or_none("sliding_window", 4096))
    return decoder(config, stack(mixers, [gated_mlp(config)] * len(mixers), norms=1), tied=True)


def exaone4(config: HfConfig) -> dict[str, Any]:
    """Norms behind attention and MLP, normalised heads; ``sliding_window_pattern``: LLLG, or the period."""
    mixer = attention(config, qk_norm=True)
    pattern = config.content.get("sliding_window_pattern") or 4
    period = len(pattern) if isinstance(pattern, str) else config.size("sliding_window_pattern", 4)
    mixers = windows(config, mixer, every(config, period), window=config.size_or_none("sliding_window", 4096))
    return decoder(config, stack(mixers, [gated_mlp(config)] * len(mixers)), tied=False)


def glm(config: HfConfig) -> dict[str, Any]:
    """Llama with biases on queries, keys and values; GLM-4: four norms a layer."""
    mixer = attention(config, head_dim=128, qkv_bias=config.flag("attention_bias", True))
    depth = config.size("num_hidden_layers")
    norms = 4 if config.family == "glm4" else 2
    return decoder(config, stack([mixer] * depth, [gated_mlp(config)] * depth, norms=norms), tied=False)


def seed_oss(config: HfConfig) -> dict[str, Any]:
    """Llama with biases on queries, keys and values, and heads of their own size."""
    biases = {
        "qkv_bias": config.flag("attention_bias", True),
        "output_bias": config.flag("attention_out_bias", False),
    }
    mixer = attention(config, head_dim=128, **biases)
    depth = config.size("num_hidden_layers")
    block = gated_mlp(config, bias=config.flag("mlp_bias", False))
    return decoder(config, stack([mixer] * depth, [block] * depth), tied=False)


def ernie4_5(config: HfConfig) -> dict[str, Any]:
    """Llama with a tied table; one switch for all biases."""
    bias = config.flag("use_bias", False)
    mixer = attention(config, head_dim=128, qkv_bias=bias, output_bias=bias)
    depth = config.size("num_hidden_layers")
    return decoder(config, stack([mixer] * depth, [gated_mlp(config, bias=bias)] * depth), tied=True)


def smollm3(config: HfConfig) -> dict[str, Any]:
    """Llama with a tied table; every fourth layer has no rotary positions; windows only where they are switched on."""
    bias = config.flag("attention_bias", False)
    mixers = qwen_windows(config, attention(config, qkv_bias=bias, output_bias=bias))
    block = gated_mlp(config, bias=config.flag("mlp_bias", False))
    return decoder(config, stack(mixers, [block] * len(mixers)), tied=True)


def hunyuan(config: HfConfig) -> dict[str, Any]:
    """Llama with normalised heads."""
    bias = config.flag("attention_bias", False)
    heads = config.size("num_attention_heads")
    mixer = attention(config, kv_heads=heads, qkv_bias=bias, output_bias=bias, qk_norm=True)
    depth = config.size("num_hidden_layers")
    return decoder(config, stack([mixer] * depth, [gated_mlp(config)] * depth), tied=False)


def internlm(config: HfConfig) -> dict[str, Any]:
    """Llama; InternLM 3 has biases of their own for queries, keys and values."""
    bias = config.flag("bias", False)
    mixer = attention(config, qkv_bias=config.flag("qkv_bias", bias), output_bias=bias)
    depth = config.size("num_hidden_layers")
    block = gated_mlp(config, bias=bias if config.family == "internlm3" else False)
    return decoder(config, stack([mixer] * depth, [block] * depth), tied=False)


def stablelm(config: HfConfig) -> dict[str, Any]:
    """Llama with LayerNorm; one norm a layer where attention and MLP stand side by side."""
    config.refuse("qk_layernorm", "a LayerNorm for each head")
    mixer = attention(config, qkv_bias=config.flag("use_qkv_bias", False))
    depth = config.size("num_hidden_layers")
    norms = 1 if config.flag("use_parallel_residual", False) else 2
    layers = stack([mixer] * depth, [gated_mlp(config)] * depth, norms=norms)
    return decoder(config, layers, tied=False, norm_bias=True)


def every(config: HfConfig, period: int) -> list[str]:
    """Return a window for every layer but each ``period``-th, which sees everything."""
    depth = config.size("num_hidden_layers")
    return ["sliding_attention" if (index + 1) % period else "full_attention" for index in range(depth)]


DENSE: dict[str, Family] = {
    "llama": llama,
    "mistral": mistral,
    "qwen2": qwen2,
    "qwen3": qwen3,
    "qwen3_vl_text": qwen3,
    "phi3": phi3,
    "gemma": gemma,
    "gemma2": gemma2,
    "gemma3_text": gemma3,
    "granite": granite,
    "ministral": mistral,
    "ministral3": mistral,
    "olmo": olmo,
    "olmo2": olmo2,
    "olmo3": olmo2,
    "cohere": cohere,
    "cohere2": cohere,
    "exaone4": exaone4,
    "glm": glm,
    "glm4": glm,
    "seed_oss": seed_oss,
    "ernie4_5": ernie4_5,
    "smollm3": smollm3,
    "hunyuan_v1_dense": hunyuan,
    "internlm3": internlm,
    "stablelm": stablelm,
}
