"""Families that mix state-space layers with attention: Jamba, Bamba, Nemotron-H."""

from __future__ import annotations

from typing import Any

from scenarios.hf_config import HfConfig
from scenarios.hf_decoder import Family, attention, decoder, gated_mlp, moe, plain_mlp, scores, stack
from scenarios.layers import Layer, Mamba, Mlp, Moe


def jamba(config: HfConfig) -> dict[str, Any]:
    """Attention in every ``attn_layer_period``-th layer, else Mamba; experts in every ``expert_layer_period``-th."""
    depth, hidden = config.size("num_hidden_layers"), config.size("hidden_size")
    rank = config.content.get("mamba_dt_rank")
    mamba = Mamba(
        generation=1,
        inner_size=config.size("mamba_expand") * hidden,
        state_size=config.size("mamba_d_state"),
        conv_kernel=config.size("mamba_d_conv"),
        dt_rank=-(-hidden // 16) if rank == "auto" else config.size("mamba_dt_rank"),
        conv_bias=config.flag("mamba_conv_bias", True),
        projection_bias=config.flag("mamba_proj_bias", False),
        inner_norms=True,
    )
    mixer = attention(config)
    period, offset = config.size("attn_layer_period"), config.count("attn_layer_offset")
    mixers = [mixer if index % period == offset else mamba for index in range(depth)]
    dense: Mlp | Moe = gated_mlp(config)
    experts = (
        moe(config, ffn=config.size("intermediate_size"), route_norm=False) if config.size("num_experts") > 1 else dense
    )
    period, offset = config.size("expert_layer_period"), config.count("expert_layer_offset")
    blocks = [experts if index % period == offset else dense for index in range(depth)]
    return decoder(config, stack(mixers, blocks), tied=False)


def bamba(config: HfConfig) -> dict[str, Any]:
    """Mamba-2 with a gated MLP in every layer, attention in its place where ``attn_layer_indices`` says."""
    depth, hidden = config.size("num_hidden_layers"), config.size("hidden_size")
    inner, heads = config.size("mamba_expand", 2) * hidden, config.size("mamba_n_heads", 128)
    mamba = Mamba(
        generation=2,
        inner_size=inner,
        state_size=config.size("mamba_d_state", 256),
        conv_kernel=config.size("mamba_d_conv", 4),
        heads=heads,
        groups=config.size("mamba_n_groups", 1),
        conv_bias=config.flag("mamba_conv_bias", True),
        projection_bias=config.flag("mamba_proj_bias", False),
        inner_norms=True,
    )
    bias = config.flag("attention_bias", False)
    mixer = attention(config, qkv_bias=bias, output_bias=bias)
    where = config.items("attn_layer_indices") or []
    mixers = [mixer if index in where else mamba for index in range(depth)]
    block = gated_mlp(config, bias=config.flag("mlp_bias", False))
    return decoder(config, stack(mixers, [block] * depth), tied=False)


def nemotron_h(config: HfConfig) -> dict[str, Any]:
    """One part a layer, as ``hybrid_override_pattern`` spells: M is Mamba-2, * attention, - an MLP, E experts."""
    depth, pattern = config.size("num_hidden_layers"), config.text("hybrid_override_pattern")
    config.refuse("moe_latent_size", "an expert that works in a latent space")
    read = {"M": _mamba2, "*": _attention, "-": _relu2_mlp, "E": _relu2_moe}
    if unknown := [letter for letter in pattern if letter not in read]:
        raise config.error(
            "hybrid_override_pattern", f"the letter {unknown[0]!r} is not known", f"known: {' '.join(read)}"
        )
    if len(pattern) != depth:
        raise config.error("hybrid_override_pattern", f"spells {len(pattern)} layers, and num_hidden_layers is {depth}")
    kinds = {letter: read[letter](config) for letter in sorted(set(pattern))}
    return decoder(config, [kinds[letter] for letter in pattern], tied=False)


def _mamba2(config: HfConfig) -> Layer:
    heads = config.size("mamba_num_heads")
    mixer = Mamba(
        generation=2,
        inner_size=heads * config.size("mamba_head_dim"),
        state_size=config.size("ssm_state_size"),
        conv_kernel=config.size("conv_kernel"),
        heads=heads,
        groups=config.size("n_groups"),
        conv_bias=config.flag("use_conv_bias", True),
        projection_bias=config.flag("use_bias", False),
        inner_norms=True,
    )
    return Layer(mixer=mixer, norms=1)


def _attention(config: HfConfig) -> Layer:
    bias = config.flag("attention_bias", False)
    return Layer(mixer=attention(config, qkv_bias=bias, output_bias=bias), norms=1)


def _relu2_mlp(config: HfConfig) -> Layer:
    return Layer(feed_forward=plain_mlp(config, bias=config.flag("mlp_bias", False)), norms=1)


def _relu2_moe(config: HfConfig) -> Layer:
    shared = config.count("n_shared_experts") and config.size("moe_shared_expert_intermediate_size")
    block = moe(
        config,
        ffn=config.size("moe_intermediate_size"),
        shared_ffn_hidden_size=shared,
        gated=False,
        bias=config.flag("mlp_bias", False),
        router_bias=True,
        score_function="sigmoid",
        **scores(config, norm=True),
    )
    return Layer(feed_forward=block, norms=1)


HYBRID: dict[str, Family] = {"jamba": jamba, "bamba": bamba, "nemotron_h": nemotron_h}
