"""Families of dense decoders: Llama and its relatives, Gemma, Falcon, BLOOM, GPT-2, -J and -NeoX, OPT, StarCoder2."""

from __future__ import annotations

from typing import Any

from scenarios.hf_config import HfConfig
from scenarios.hf_decoder import (
    Family,
    attention,
    decoder,
    everywhere,
    gated_mlp,
    multi_head,
    plain_mlp,
    stack,
    windows,
)
from scenarios.layers import Attention, Mlp

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
    types = ["sliding_attention" if (index + 1) % period else "full_attention" for index in range(depth)]
    mixer = attention(config, qk_norm=True)
    mixers = windows(config, mixer, types, window=config.size_or_none("sliding_window", 4096))
    return decoder(config, stack(mixers, [gated_mlp(config)] * depth, norms=4), tied=True)


def falcon(config: HfConfig) -> dict[str, Any]:
    """Attention and MLP side by side (one or two norms); one key-value head in the first generation."""
    depth, hidden = config.size("num_hidden_layers"), config.size("hidden_size")
    heads = config.size("num_attention_heads")
    new = config.flag("new_decoder_architecture", False)
    bias = config.flag("bias", False)
    if new:
        mixer = attention(config, kv_heads=heads, qkv_bias=bias, output_bias=bias)
        norms = config.size("num_ln_in_parallel_attn", 2)
    else:
        groups = 1 if config.flag("multi_query", True) else heads
        mixer = attention(config, kv_heads=groups, qkv_bias=bias, output_bias=bias)
        mixer = mixer.model_copy(update={"kv_heads": groups})
        norms = 1 if config.flag("parallel_attn", True) else 2
    block = Mlp(ffn_hidden_size=config.size("ffn_hidden_size", 4 * hidden), gated=False, bias=bias)
    return decoder(config, stack([mixer] * depth, [block] * depth, norms=norms), tied=True, norm_bias=True)


def bloom(config: HfConfig) -> dict[str, Any]:
    """Biases everywhere, MLP of four times the hidden size, a norm after the embedding, ALiBi: no position table."""
    depth = config.size("num_hidden_layers")
    mixer = multi_head(config, qkv_bias=True, output_bias=True)
    block = Mlp(ffn_hidden_size=4 * config.size("hidden_size"), gated=False, bias=True)
    layers = stack([mixer] * depth, [block] * depth)
    return decoder(config, layers, tied=True, norm_bias=True, embedding_norm=True)


def gpt2(config: HfConfig) -> dict[str, Any]:
    """Biases everywhere, a learned position table."""
    depth, hidden = config.size("num_hidden_layers"), config.size("hidden_size")
    config.refuse("add_cross_attention", "cross attention")
    mixer = multi_head(config, qkv_bias=True, output_bias=True)
    block = plain_mlp(config, bias=True, default=4 * hidden)
    positions = config.size("max_position_embeddings")
    layers = stack([mixer] * depth, [block] * depth)
    return decoder(config, layers, tied=True, norm_bias=True, position_embeddings=positions)


def gptj(config: HfConfig) -> dict[str, Any]:
    """Attention without biases beside an MLP with them, one norm, a bias on the head."""
    depth, hidden = config.size("num_hidden_layers"), config.size("hidden_size")
    mixer = multi_head(config)
    block = plain_mlp(config, bias=True, default=4 * hidden)
    layers = stack([mixer] * depth, [block] * depth, norms=1)
    return decoder(config, layers, tied=False, norm_bias=True, head_bias=True)


def gpt_neox(config: HfConfig) -> dict[str, Any]:
    """Attention and MLP side by side with a norm each, biases everywhere."""
    depth = config.size("num_hidden_layers")
    bias = config.flag("attention_bias", True)
    mixer = multi_head(config, qkv_bias=bias, output_bias=bias)
    layers = stack([mixer] * depth, [plain_mlp(config, bias=True)] * depth)
    return decoder(config, layers, tied=False, norm_bias=True)


def opt(config: HfConfig) -> dict[str, Any]:
    """A position table with two extra rows; the 350m model has a narrow embedding and no final norm."""
    depth = config.size("num_hidden_layers")
    bias = config.flag("enable_bias", True)
    if not config.flag("layer_norm_elementwise_affine", True):
        raise config.error("layer_norm_elementwise_affine", "norms without weights are not modelled")
    final = config.flag("do_layer_norm_before", True) and not config.flag("_remove_final_layer_norm", False)
    width = config.size("word_embed_proj_dim", config.size("hidden_size"))
    mixer = multi_head(config, qkv_bias=bias, output_bias=bias)
    return decoder(
        config,
        stack([mixer] * depth, [plain_mlp(config, bias=bias)] * depth),
        tied=True,
        norm_bias=True,
        final_norm=final,
        embedding_size=width,
        position_embeddings=config.size("max_position_embeddings") + 2,
    )


def starcoder2(config: HfConfig) -> dict[str, Any]:
    """LayerNorm and biases around grouped-query attention and a plain MLP."""
    bias = config.flag("use_bias", True)
    mixer = attention(config, qkv_bias=bias, output_bias=bias)
    window = config.size_or_none("sliding_window")
    mixers = windows(config, mixer, everywhere(config, "sliding_attention"), window=window)
    layers = stack(mixers, [plain_mlp(config, bias=bias)] * len(mixers))
    return decoder(config, layers, tied=True, norm_bias=True)


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
    "falcon": falcon,
    "bloom": bloom,
    "gpt2": gpt2,
    "gptj": gptj,
    "gpt_neox": gpt_neox,
    "opt": opt,
    "starcoder2": starcoder2,
}
