"""From the shape that a published row gives to a ModelSpec."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from scenarios.layers import Attention, Layer, Mla, Mlp, Moe
from scenarios.model import ModelSpec
from topologies.errors import InputError

NEEDED = ("layers", "hidden", "ffn_hidden", "heads", "vocab", "seq_len")


def model_of(shape: Mapping[str, Any]) -> tuple[ModelSpec, list[str]]:
    """Build the model of a row, and say what was assumed.

    Raises:
        InputError: a size is missing, or the sizes contradict each other.
    """
    for key in NEEDED:
        value = shape.get(key)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise InputError("is missing" if value is None else f"is {value!r}, not a size", key=f"model.{key}")
    assumed: list[str] = []
    gated = shape.get("gated_mlp")
    if gated is None:
        gated = False
        assumed.append("a feed-forward part of two matrices (not stated)")
    tied = shape.get("tied_embeddings")
    if tied is None:
        tied = False
        assumed.append("an output matrix of its own (not stated)")
    special = "gpt-oss" in str(shape.get("name") or "")
    if special:
        assumed.append("attention sinks and biased, clamped SwiGLU experts (gpt-oss model card)")
    window = shape.get("sliding_window") or {}
    moe: Mapping[str, Any] = shape.get("moe") or {}
    kinds: dict[str, Layer] = {}
    pattern: list[str] = []
    for index in range(shape["layers"]):
        local = bool(window) and index % window.get("every", 1) == 0
        sparse = bool(moe) and _is_sparse(moe, index)
        kind = ("local-" if local else "") + ("moe" if sparse else "dense")
        if kind not in kinds:
            mixer = _mixer(shape, window.get("window") if local else None, special)
            ffn = _experts(moe, gated, special) if sparse else Mlp(ffn_hidden_size=shape["ffn_hidden"], gated=gated)
            kinds[kind] = Layer(mixer=mixer, feed_forward=ffn)
        pattern.append(kind)
    model = ModelSpec(
        name=str(shape.get("name") or "unnamed"),
        hidden_size=shape["hidden"],
        vocab_size=shape["vocab"],
        layer_kinds=kinds,
        pattern=tuple(pattern),
        tied_embeddings=tied,
        mtp_layers=shape.get("mtp_layers") or 0,
    )
    return model, assumed


def _mixer(shape: Mapping[str, Any], window: int | None, special: bool) -> Attention | Mla:
    heads = shape["heads"]
    latent = shape.get("mla")
    if latent:
        return Mla(
            heads=heads,
            q_lora_rank=latent.get("q_lora") or None,
            kv_lora_rank=latent["kv_lora"],
            qk_nope_head_dim=latent["qk_nope"],
            qk_rope_head_dim=latent["qk_rope"],
            v_head_dim=latent["v_head"],
        )
    groups = shape.get("kv_heads") or heads
    if heads % groups:
        raise InputError(f"{heads} heads cannot share {groups} key-value heads evenly", key="model.kv_heads")
    size = shape.get("head_dim") or shape["hidden"] // heads
    return Attention(
        heads=heads, kv_heads=groups, head_dim=size, window=window, sinks=special, qkv_bias=special, output_bias=special
    )


def _experts(moe: Mapping[str, Any], gated: bool, special: bool) -> Moe:
    width = moe.get("moe_ffn")
    if not width or not moe.get("experts") or not moe.get("topk"):
        raise InputError("lacks the number or the size of the experts", key="model.moe")
    return Moe(
        num_experts=moe["experts"],
        top_k=moe["topk"],
        ffn_hidden_size=width,
        shared_ffn_hidden_size=moe.get("shared_ffn") or (moe.get("shared_experts") or 0) * width,
        gated=gated,
        bias=special,
    )


def _is_sparse(moe: Mapping[str, Any], index: int) -> bool:
    first = moe.get("dense_layers") or 0
    every = moe.get("moe_layer_freq") or 1
    return bool(index >= first and (index - first) % every == every - 1)
