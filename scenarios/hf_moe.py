"""Families with experts: Mixtral, DBRX, Qwen MoE, DeepSeek, Kimi, GLM, gpt-oss, Llama 4, OLMoE, Granite, MiniMax."""

from __future__ import annotations

from typing import Any

from scenarios.hf_config import HfConfig
from scenarios.hf_decoder import Family, attention, decoder, everywhere, gated_mlp, moe, scores, stack, windows
from scenarios.hf_dense import qwen_windows
from scenarios.layers import Attention, Mla, Mlp, Moe


def mixtral(config: HfConfig) -> dict[str, Any]:
    """Every layer has experts; ``intermediate_size`` is that of one expert."""
    mixer = attention(config)
    window = config.size_or_none("sliding_window")
    mixers = windows(config, mixer, everywhere(config, "sliding_attention"), window=window)
    block = moe(config, ffn=config.size("intermediate_size"))
    return decoder(config, stack(mixers, [block] * len(mixers)), tied=False)


def dbrx(config: HfConfig) -> dict[str, Any]:
    """Sizes of attention and experts are nested; LayerNorm without bias."""
    heads, experts = config.inner("attn_config"), config.inner("ffn_config")
    depth = config.size("num_hidden_layers")
    mixer = attention(config, kv_heads=heads.size("num_key_value_heads"))
    norm = experts.content.get("moe_normalize_expert_weights", 1) is not None
    block = moe(experts, ffn=experts.size("intermediate_size"), route_norm=norm)
    return decoder(config, stack([mixer] * depth, [block] * depth), tied=False)


def qwen2_moe(config: HfConfig) -> dict[str, Any]:
    """One shared expert behind a gate of its own; biases on queries, keys and values."""
    mixers = qwen_windows(config, attention(config, qkv_bias=config.flag("qkv_bias", True)))
    shared = config.size("shared_expert_intermediate_size")
    ffn = config.size("moe_intermediate_size")
    norm = config.flag("norm_topk_prob", False)
    block = moe(config, ffn=ffn, shared_ffn_hidden_size=shared, shared_gate=True, route_norm=norm)
    return decoder(config, stack(mixers, _sparse_blocks(config, block)), tied=False)


def qwen3_moe(config: HfConfig) -> dict[str, Any]:
    """Normalised heads, no shared expert; ``intermediate_size`` belongs to dense layers only."""
    bias = config.flag("attention_bias", False)
    mixers = qwen_windows(config, attention(config, qk_norm=True, qkv_bias=bias, output_bias=bias))
    norm = config.flag("norm_topk_prob", False)
    block = moe(config, ffn=config.size("moe_intermediate_size"), route_norm=norm)
    return decoder(config, stack(mixers, _sparse_blocks(config, block)), tied=False)


def _sparse_blocks(config: HfConfig, block: Moe) -> list[Mlp | Moe]:
    """Qwen's rule: every ``decoder_sparse_step``-th layer has experts, ``mlp_only_layers`` excepted."""
    step, only = config.size("decoder_sparse_step", 1), config.items("mlp_only_layers") or []
    sparse = [index not in only and (index + 1) % step == 0 for index in range(config.size("num_hidden_layers"))]
    return [block if one else gated_mlp(config) for one in sparse]


def deepseek_v2(config: HfConfig) -> dict[str, Any]:
    """Latent attention; the first layers are dense; shared experts; softmax routing without correction."""
    limited = config.text("topk_method", "greedy") == "group_limited_greedy"
    return _deepseek(config, _mla(config), correction=False, grouped=limited, norm=False)


def deepseek_v3(config: HfConfig) -> dict[str, Any]:
    """DeepSeek-V2's layers, routed by sigmoid scores with a correction bias for each expert."""
    return _deepseek(config, _mla(config), correction=True, scale=2.5, groups=8, limited=4)


def deepseek_sparse(config: HfConfig) -> dict[str, Any]:
    """DeepSeek-V3's layers, with an indexer that chooses the tokens that a query sees (DeepSeek-V3.2, GLM-5)."""
    indexer = {
        "indexer_heads": config.size("index_n_heads"),
        "indexer_head_dim": config.size("index_head_dim"),
        "indexer_top_k": config.size("index_topk"),
    }
    mixer = _mla(config).model_copy(update=indexer)
    return _deepseek(config, mixer, correction=True, scale=2.5, groups=8, limited=4)


def glm4_moe(config: HfConfig) -> dict[str, Any]:
    """Grouped-query attention with biases, dense first layers, a shared expert, corrected routing."""
    bias, norm = config.flag("attention_bias", False), config.flag("use_qk_norm", False)
    return _deepseek(config, attention(config, qkv_bias=bias, qk_norm=norm), correction=True)


def _mla(config: HfConfig) -> Mla:
    """``num_key_value_heads`` is not read: every head has its own keys, made from the latent."""
    config.refuse("attention_bias", "a bias in latent attention")
    return Mla(
        heads=config.size("num_attention_heads"),
        q_lora_rank=config.size_or_none("q_lora_rank", required=True),
        kv_lora_rank=config.size("kv_lora_rank"),
        qk_nope_head_dim=config.size("qk_nope_head_dim"),
        qk_rope_head_dim=config.size("qk_rope_head_dim"),
        v_head_dim=config.size("v_head_dim"),
    )


def _deepseek(
    config: HfConfig,
    mixer: Attention | Mla,
    *,
    correction: bool,
    grouped: bool = True,
    norm: bool = True,
    **defaults: Any,
) -> dict[str, Any]:
    """Read the feed-forward parts; the defaults are of the scores."""
    routing = scores(config, norm=norm, **defaults)
    if not grouped:
        routing |= {"expert_groups": 1, "limited_groups": 1}
    routing["score_function"] = "sigmoid" if correction else "softmax"
    depth, ffn = config.size("num_hidden_layers"), config.size("moe_intermediate_size")
    shared = config.size_or_none("n_shared_experts", required=True) or 0
    block = moe(config, ffn=ffn, shared_ffn_hidden_size=shared * ffn, router_bias=correction, **routing)
    first, step = config.count("first_k_dense_replace"), config.size("moe_layer_freq", 1)
    blocks = [block if index >= first and index % step == 0 else gated_mlp(config) for index in range(depth)]
    mtp = config.count("num_nextn_predict_layers", 0)
    return decoder(config, stack([mixer] * depth, blocks), tied=False, mtp_layers=mtp)


def gpt_oss(config: HfConfig) -> dict[str, Any]:
    """Windows in every other layer, attention sinks, biases on everything that multiplies."""
    depth = config.size("num_hidden_layers")
    bias = config.flag("attention_bias", True)
    mixer = attention(config, qkv_bias=bias, output_bias=bias, sinks=True)
    types = ["full_attention" if index % 2 else "sliding_attention" for index in range(depth)]
    mixers = windows(config, mixer, types, window=config.size_or_none("sliding_window", 128))
    block = moe(config, ffn=config.size("intermediate_size"), bias=True, router_bias=True)
    return decoder(config, stack(mixers, [block] * depth), tied=False)


def llama4(config: HfConfig) -> dict[str, Any]:
    """Experts in every ``interleave_moe_layer_step``-th layer with a shared one; every fourth layer sees everything."""
    depth, ffn = config.size("num_hidden_layers"), config.size("intermediate_size")
    bias = config.flag("attention_bias", False)
    mixer = attention(config, qkv_bias=bias, output_bias=bias)
    rope = config.items("no_rope_layers")
    period = config.size("no_rope_layer_interval", 4) if not rope else 1
    local = [bool(one) for one in rope] if rope else [(index + 1) % period != 0 for index in range(depth)]
    types = ["chunked_attention" if one else "full_attention" for one in local]
    mixers = windows(config, mixer, types, chunk=config.size_or_none("attention_chunk_size", 8192))
    step = config.size("interleave_moe_layer_step")
    sparse = config.items("moe_layers") or list(range(step - 1, depth, step))
    experts = moe(
        config,
        ffn=ffn,
        shared_ffn_hidden_size=ffn,
        score_function="sigmoid",
        route_norm=False,
        score_before_experts=True,
    )
    blocks = [experts if index in sparse else gated_mlp(config, "intermediate_size_mlp") for index in range(depth)]
    return decoder(config, stack(mixers, blocks), tied=False)


def olmoe(config: HfConfig) -> dict[str, Any]:
    """Experts in every layer, queries and keys normalised over all heads."""
    bias, heads = config.flag("attention_bias", False), config.size("num_attention_heads")
    mixer = attention(config, kv_heads=heads, qkv_bias=bias, output_bias=bias, qk_norm=True, qk_norm_whole=True)
    block = moe(config, ffn=config.size("intermediate_size"), route_norm=config.flag("norm_topk_prob", False))
    depth = config.size("num_hidden_layers")
    return decoder(config, stack([mixer] * depth, [block] * depth), tied=False)


def granitemoe(config: HfConfig) -> dict[str, Any]:
    """Experts in every layer, beside a shared block where ``shared_intermediate_size`` is set."""
    bias = config.flag("attention_bias", False)
    mixer = attention(config, kv_heads=config.size("num_attention_heads"), qkv_bias=bias, output_bias=bias)
    shared = config.count("shared_intermediate_size", 0)
    block = moe(config, ffn=config.size("intermediate_size"), shared_ffn_hidden_size=shared)
    depth = config.size("num_hidden_layers")
    return decoder(config, stack([mixer] * depth, [block] * depth), tied=False)


def phimoe(config: HfConfig) -> dict[str, Any]:
    """Mixtral with LayerNorm, and a bias on the head where it is switched on."""
    bias = config.flag("attention_bias", False)
    mixer = attention(config, qkv_bias=bias, output_bias=bias)
    window = config.size_or_none("sliding_window")
    mixers = windows(config, mixer, everywhere(config, "sliding_attention"), window=window)
    layers = stack(mixers, [moe(config, ffn=config.size("intermediate_size"))] * len(mixers))
    return decoder(config, layers, tied=False, norm_bias=True, head_bias=config.flag("lm_head_bias", False))


def ernie4_5_moe(config: HfConfig) -> dict[str, Any]:
    """Shared experts and corrected routing in the layers from ``moe_layer_start_index`` to ``moe_layer_end_index``."""
    config.refuse("use_bias", "a bias beside experts that have none")
    depth, ffn = config.size("num_hidden_layers"), config.size("moe_intermediate_size")
    shared = config.count("moe_num_shared_experts", 2) * ffn
    experts = moe(config, ffn=ffn, shared_ffn_hidden_size=shared, router_bias=True)
    first, step = config.count("moe_layer_start_index", 1), config.size("moe_layer_interval", 1)
    last = config.content.get("moe_layer_end_index", -1)
    if not isinstance(last, int):
        raise config.error("moe_layer_end_index", f"{last!r:.60} is not a whole number")
    reach = range(first, (last if last >= 0 else depth - 1) + 1)
    sparse = [index in reach and (index + 1) % step == 0 for index in range(depth)]
    blocks = [experts if one else gated_mlp(config) for one in sparse]
    return decoder(config, stack([attention(config)] * depth, blocks), tied=True)


def minimax_m2(config: HfConfig) -> dict[str, Any]:
    """Corrected sigmoid routing in every layer, queries and keys normalised over all heads."""
    mixer = attention(config, head_dim=128, qk_norm=True, qk_norm_whole=True)
    block = moe(config, ffn=config.size("intermediate_size"), router_bias=True, score_function="sigmoid")
    depth = config.size("num_hidden_layers")
    return decoder(config, stack([mixer] * depth, [block] * depth), tied=False)


def dots1(config: HfConfig) -> dict[str, Any]:
    """DeepSeek-V3's feed-forward parts with grouped-query attention and normalised heads."""
    bias, heads = config.flag("attention_bias", False), config.size("num_attention_heads")
    mixer = attention(config, kv_heads=heads, qkv_bias=bias, output_bias=bias, qk_norm=True)
    return _deepseek(config, mixer, correction=True, norm=False)


def glm4_moe_lite(config: HfConfig) -> dict[str, Any]:
    """DeepSeek-V3's layers in one group of experts; the first layer is dense."""
    config.assume("first_k_dense_replace", 1)
    return _deepseek(config, _mla(config), correction=True, scale=1.8)


MOE: dict[str, Family] = {
    "mixtral": mixtral,
    "dbrx": dbrx,
    "qwen2_moe": qwen2_moe,
    "qwen3_moe": qwen3_moe,
    "qwen3_vl_moe_text": qwen3_moe,
    "deepseek_v2": deepseek_v2,
    "deepseek_v3": deepseek_v3,
    "deepseek_v32": deepseek_sparse,
    "kimi_k2": deepseek_v3,
    "glm4_moe": glm4_moe,
    "glm_moe_dsa": deepseek_sparse,
    "gpt_oss": gpt_oss,
    "llama4_text": llama4,
    "olmoe": olmoe,
    "granitemoe": granitemoe,
    "granitemoeshared": granitemoe,
    "phimoe": phimoe,
    "ernie4_5_moe": ernie4_5_moe,
    "minimax_m2": minimax_m2,
    "dots1": dots1,
    "glm4_moe_lite": glm4_moe_lite,
}
