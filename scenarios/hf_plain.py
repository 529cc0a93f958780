"""Families of dense decoders with plain MLPs: Falcon, BLOOM, GPT-2, -J, -NeoX, OPT, StarCoder, MPT, Phi, Nemotron."""

from __future__ import annotations

from typing import Any

from scenarios.hf_config import HfConfig
from scenarios.hf_decoder import Family, attention, decoder, everywhere, multi_head, plain_mlp, stack, windows
from scenarios.layers import Mlp


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


def gpt_bigcode(config: HfConfig) -> dict[str, Any]:
    """GPT-2 with one key-value head (StarCoder, SantaCoder, Granite Code)."""
    depth, hidden = config.size("num_hidden_layers"), config.size("hidden_size")
    config.refuse("add_cross_attention", "cross attention")
    mixer = multi_head(config, qkv_bias=True, output_bias=True)
    if config.flag("multi_query", True):
        mixer = mixer.model_copy(update={"kv_heads": 1})
    layers = stack([mixer] * depth, [plain_mlp(config, bias=True, default=4 * hidden)] * depth)
    positions = config.size("max_position_embeddings")
    return decoder(config, layers, tied=True, norm_bias=True, position_embeddings=positions)


def mpt(config: HfConfig) -> dict[str, Any]:
    """No biases; ALiBi, or a learned position table where it is switched off."""
    depth, hidden = config.size("num_hidden_layers"), config.size("hidden_size")
    if not config.flag("no_bias", True):
        raise config.error("no_bias", "biases in MPT are not modelled")
    heads = config.inner("attn_config") if config.has("attn_config") else config
    heads.refuse("qk_ln", "a LayerNorm over all queries and keys")
    mixer = multi_head(config)
    if heads.has("kv_n_heads"):
        mixer = mixer.model_copy(update={"kv_heads": heads.size("num_key_value_heads")})
    block = Mlp(ffn_hidden_size=config.size("expansion_ratio", 4) * hidden, gated=False)
    positions = 0 if heads.flag("alibi", True) or heads.flag("rope", False) else config.size("max_position_embeddings")
    return decoder(config, stack([mixer] * depth, [block] * depth), tied=True, position_embeddings=positions)


def phi(config: HfConfig) -> dict[str, Any]:
    """Attention and MLP side by side behind one norm, biases everywhere, on the head too."""
    config.refuse("qk_layernorm", "a LayerNorm for each head")
    depth = config.size("num_hidden_layers")
    mixer = attention(config, kv_heads=config.size("num_attention_heads"), qkv_bias=True, output_bias=True)
    layers = stack([mixer] * depth, [plain_mlp(config, bias=True)] * depth, norms=1)
    return decoder(config, layers, tied=False, norm_bias=True, head_bias=True)


def nemotron(config: HfConfig) -> dict[str, Any]:
    """LayerNorm and a squared ReLU (Nemotron-4); Arcee: RMSNorm; Jais 2: biases."""
    bias = config.flag("attention_bias", config.family == "jais2")
    mixer = attention(config, kv_heads=config.size("num_attention_heads"), qkv_bias=bias, output_bias=bias)
    depth = config.size("num_hidden_layers")
    block = plain_mlp(config, bias=config.flag("mlp_bias", config.family == "jais2"))
    layers = stack([mixer] * depth, [block] * depth)
    return decoder(config, layers, tied=False, norm_bias=config.family != "arcee")


PLAIN: dict[str, Family] = {
    "falcon": falcon,
    "bloom": bloom,
    "gpt2": gpt2,
    "gptj": gptj,
    "gpt_neox": gpt_neox,
    "gpt_bigcode": gpt_bigcode,
    "opt": opt,
    "starcoder2": starcoder2,
    "mpt": mpt,
    "phi": phi,
    "nemotron": nemotron,
    "arcee": nemotron,
    "jais2": nemotron,
}
