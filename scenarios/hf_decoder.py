"""What the families of Hugging Face configs share: attention, windows, feed-forward, and the assembly of layers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from scenarios.hf_config import HfConfig
from scenarios.layers import Attention, Layer, Mamba, Mla, Mlp, Moe

Family = Callable[[HfConfig], dict[str, Any]]
_LAYER_TYPES = ("full_attention", "sliding_attention", "chunked_attention")


def attention(
    config: HfConfig, *, kv_heads: int | None = None, head_dim: int | None = None, **flags: bool
) -> Attention:
    """Read heads, key-value heads and head size; ``flags`` are those of Attention.

    Args:
        config: the config.
        kv_heads: the format's default; None: the key is required.
        head_dim: the format's default; None: hidden size divided by heads.
        flags: biases, norms and sinks.
    """
    heads = config.size("num_attention_heads")
    by_division = head_dim is None and not config.has("head_dim")
    size = multi_head(config).head_dim if by_division else config.size("head_dim", head_dim)
    groups = config.size("num_key_value_heads", kv_heads)
    if heads % groups:
        raise config.error("num_key_value_heads", f"{heads} heads cannot share {groups} key-value heads evenly")
    return Attention(heads=heads, kv_heads=groups, head_dim=size, **flags)


def multi_head(config: HfConfig, **flags: bool) -> Attention:
    """Read plain multi-head attention, for formats that know no other: each head has its own keys and values."""
    heads, hidden = config.size("num_attention_heads"), config.size("hidden_size")
    if hidden % heads:
        raise config.error("num_attention_heads", f"{heads} heads do not divide the hidden size {hidden}")
    return Attention(heads=heads, kv_heads=heads, head_dim=hidden // heads, **flags)


def windows(
    config: HfConfig, mixer: Attention, default: Sequence[str], *, window: int | None = None, chunk: int | None = None
) -> list[Attention]:
    """Give each layer its own reach: ``layer_types`` of the config, or ``default``, a type for each layer."""
    types = config.items("layer_types") or list(default)
    depth = config.size("num_hidden_layers")
    if len(types) != depth:
        raise config.error("layer_types", f"has {len(types)} entries for {depth} layers")
    if unknown := [one for one in types if one not in _LAYER_TYPES]:
        raise config.error("layer_types", f"{unknown[0]!r} is not known", f"known: {', '.join(_LAYER_TYPES)}")
    reach = {
        "full_attention": mixer,
        "sliding_attention": mixer.model_copy(update={"window": window}),
        "chunked_attention": mixer.model_copy(update={"chunk": chunk}),
    }
    return [reach[one] for one in types]


def everywhere(config: HfConfig, type_: str = "full_attention") -> list[str]:
    """Return one layer type for every layer."""
    return [type_] * config.size("num_hidden_layers")


def gated_mlp(config: HfConfig, key: str = "intermediate_size", *, bias: bool = False) -> Mlp:
    """Read a SwiGLU-like block."""
    return Mlp(ffn_hidden_size=config.size(key), gated=True, bias=bias)


def plain_mlp(config: HfConfig, *, bias: bool, default: int | None = None) -> Mlp:
    """Read a block of two matrices."""
    return Mlp(ffn_hidden_size=config.size("intermediate_size", default), gated=False, bias=bias)


def moe(config: HfConfig, *, ffn: int, **fields: Any) -> Moe:
    """Read the number of experts and how many a token visits."""
    experts, top_k = config.size("num_experts"), config.size("num_experts_per_tok")
    if top_k > experts:
        raise config.error("num_experts_per_tok", f"a token cannot visit {top_k} of {experts} experts")
    groups, limited = fields.get("expert_groups", 1), fields.get("limited_groups", 1)
    if experts % groups or limited > groups or top_k > experts // groups * limited:
        raise config.error("n_group", f"{limited} of {groups} groups of {experts} experts cannot give {top_k} of them")
    return Moe(num_experts=experts, top_k=top_k, ffn_hidden_size=ffn, **fields)


def scores(config: HfConfig, *, norm: bool, scale: float = 1.0, groups: int = 1, limited: int = 1) -> dict[str, Any]:
    """Read what becomes of the router's scores; the arguments are the format's defaults."""
    return {
        "route_norm": config.flag("norm_topk_prob", norm),
        "route_scale": config.number("routed_scaling_factor", scale),
        "expert_groups": config.size("n_group", groups),
        "limited_groups": config.size("topk_group", limited),
    }


def stack(
    mixers: Iterable[Attention | Mla | Mamba | None], blocks: Iterable[Mlp | Moe | None], *, norms: int = 2
) -> list[Layer]:
    """Pair mixers and feed-forward blocks into layers."""
    return [Layer(mixer=mixer, feed_forward=block, norms=norms) for mixer, block in zip(mixers, blocks, strict=True)]


def decoder(config: HfConfig, layers: Sequence[Layer], *, tied: bool, **fields: Any) -> dict[str, Any]:
    """Assemble the raw mapping of a ModelSpec: equal layers become one kind.

    Args:
        config: gives hidden size, vocabulary and longest sequence.
        layers: every layer in order.
        tied: the format's default of tie_word_embeddings.
        fields: further fields of ModelSpec.
    """
    names: dict[Layer, str] = {}
    for layer in layers:
        if layer not in names:
            names[layer] = _free_name(layer, set(names.values()))
    longest = config.size("max_position_embeddings") if config.has("max_position_embeddings") else None
    return {
        "hidden_size": config.size("hidden_size"),
        "vocab_size": fields.pop("vocab_size", None) or config.size("vocab_size"),
        "tied_embeddings": config.flag("tie_word_embeddings", tied),
        "max_seq_length": longest,
        "layer_kinds": {name: layer.model_dump() for layer, name in names.items()},
        "pattern": [names[layer] for layer in layers],
        **fields,
    }


def _free_name(layer: Layer, taken: set[str]) -> str:
    name = layer.kind
    if isinstance(layer.mixer, Attention) and (layer.mixer.window or layer.mixer.chunk):
        name = f"{'window' if layer.mixer.window else 'chunk'}-{name}"
    numbered = (f"{name}-{number}" for number in range(2, len(taken) + 2))
    return name if name not in taken else next(one for one in numbered if one not in taken)
