"""A decoder as plain functions of one sequence, written from the papers and apart from the runtime: loops over heads,
positions and experts, no masks, no fused kernels, no modules. ``weights`` are named as in the whole model."""

from __future__ import annotations

import math

import torch

from scenarios.model import Attention, Layer, Mla, ModelSpec, Moe

Weights = dict[str, torch.Tensor]


def logits(model: ModelSpec, weights: Weights, tokens: torch.Tensor) -> torch.Tensor:
    """Logits (seq, vocab) of one sequence of tokens."""
    hidden = weights["embedding.weight"][tokens]
    if model.position_embeddings:
        hidden = hidden + weights["positions.weight"][: len(tokens)]
    if model.embedding_norm:
        hidden = norm(hidden, under(weights, "embedding_norm."))
    for index, layer in enumerate(model.layers):
        hidden = block(model, layer, under(weights, f"layers.{index}."), hidden)
    head = weights["embedding.weight" if model.tied_embeddings else "head.weight"]
    return norm(hidden, under(weights, "norm.")) @ head.T + (weights["head.bias"] if model.head_bias else 0.0)


def under(weights: Weights, prefix: str) -> Weights:
    return {name.removeprefix(prefix): value for name, value in weights.items() if name.startswith(prefix)}


def block(model: ModelSpec, layer: Layer, weights: Weights, hidden: torch.Tensor) -> torch.Tensor:
    mixer, own = layer.mixer, under(weights, "attention.")
    normed = norm(hidden, under(weights, "attention_norm."))
    if isinstance(mixer, Mla):
        mixed = latent(mixer, own, normed)
    else:
        assert isinstance(mixer, Attention)
        mixed = grouped(mixer, own, normed, rotary=not model.position_embeddings)
    if layer.norms == 4:
        mixed = norm(mixed, under(weights, "attention_post_norm."))
    hidden = hidden + mixed
    own = under(weights, "mlp.")
    if layer.norms > 1:
        normed = norm(hidden, under(weights, "mlp_norm."))
    part = layer.feed_forward
    if isinstance(part, Moe):
        out = torch.stack([mixture(part, own, token) for token in normed])
    else:
        out = torch.stack([feed_forward(own, "", token) for token in normed])
    return hidden + (norm(out, under(weights, "mlp_post_norm.")) if layer.norms == 4 else out)


def norm(values: torch.Tensor, weights: Weights) -> torch.Tensor:
    """RMSNorm, or LayerNorm where there is a bias."""
    if "bias" in weights:
        values = values - values.mean(-1, keepdim=True)
    scaled = values / (values.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weights["weight"]
    return scaled + weights["bias"] if "bias" in weights else scaled


def linear(weights: Weights, name: str, values: torch.Tensor) -> torch.Tensor:
    product = values @ weights[f"{name}.weight"].T
    return product + weights[f"{name}.bias"] if f"{name}.bias" in weights else product


def turned(vector: torch.Tensor, position: int) -> torch.Tensor:
    """Rotate pairs (i, i + half) by position * 10000 ** (-2 i / size)."""
    half = len(vector) // 2
    result = vector.clone()
    for i in range(half):
        angle = position * 10_000.0 ** (-2 * i / len(vector))
        one, other = vector[i], vector[i + half]
        result[i] = one * math.cos(angle) - other * math.sin(angle)
        result[i + half] = one * math.sin(angle) + other * math.cos(angle)
    return result


def grouped(spec: Attention, weights: Weights, hidden: torch.Tensor, *, rotary: bool) -> torch.Tensor:
    seq, size = len(hidden), spec.head_dim
    turn = turned if rotary else lambda vector, _: vector
    query, key, value = (linear(weights, name, hidden).view(seq, -1, size) for name in ("query", "key", "value"))
    if spec.qk_norm:
        query, key = norm(query, under(weights, "query_norm.")), norm(key, under(weights, "key_norm."))
    mixed = torch.zeros(seq, spec.heads, size)
    for head in range(spec.heads):
        of = head // (spec.heads // spec.kv_heads)
        keys = [turn(key[at, of], at) for at in range(seq)]
        for at in range(seq):
            seen = [other for other in range(at + 1) if visible(spec, at, other)]
            scores = [turn(query[at, head], at) @ keys[other] / math.sqrt(size) for other in seen]
            if spec.sinks:
                scores.append(weights["sinks"][head])
            shares = torch.stack(scores).softmax(0)
            mixed[at, head] = sum(share * value[other, of] for share, other in zip(shares, seen, strict=False))
    return linear(weights, "output", mixed.flatten(1))


def visible(spec: Attention, at: int, other: int) -> bool:
    if spec.window is not None and at - other >= spec.window:
        return False
    return spec.chunk is None or at // spec.chunk == other // spec.chunk


def latent(spec: Mla, weights: Weights, hidden: torch.Tensor) -> torch.Tensor:
    seq, plain, rope = len(hidden), spec.qk_nope_head_dim, spec.qk_rope_head_dim
    start = hidden
    if spec.q_lora_rank is not None:
        start = norm(linear(weights, "query_down", hidden), under(weights, "query_norm."))
    query = linear(weights, "query_up", start).view(seq, spec.heads, plain + rope)
    down = linear(weights, "down", hidden)
    compressed, position = down[:, : spec.kv_lora_rank], down[:, spec.kv_lora_rank :]
    both = linear(weights, "up", norm(compressed, under(weights, "norm."))).view(seq, spec.heads, -1)
    mixed = torch.zeros(seq, spec.heads, spec.v_head_dim)
    shared = [turned(position[at], at) for at in range(seq)]
    for head in range(spec.heads):
        for at in range(seq):
            own = turned(query[at, head, plain:], at)
            scores = [
                (query[at, head, :plain] @ both[other, head, :plain] + own @ shared[other]) / math.sqrt(plain + rope)
                for other in range(at + 1)
            ]
            mixed[at, head] = torch.stack(scores).softmax(0) @ both[: at + 1, head, plain:]
    return linear(weights, "output", mixed.flatten(1))


def feed_forward(weights: Weights, prefix: str, token: torch.Tensor) -> torch.Tensor:
    up = linear(weights, f"{prefix}up", token)
    if f"{prefix}gate.weight" in weights:
        gate = linear(weights, f"{prefix}gate", token)
        return linear(weights, f"{prefix}down", gate * torch.sigmoid(gate) * up)
    return linear(weights, f"{prefix}down", up * (1 + torch.erf(up / math.sqrt(2))) / 2)


def mixture(spec: Moe, weights: Weights, token: torch.Tensor) -> torch.Tensor:
    raw = linear(weights, "router.gate", token)
    scores = raw.softmax(0) if spec.score_function == "softmax" else 1 / (1 + (-raw).exp())
    wish = (scores + weights.get("router.correction", torch.zeros(spec.num_experts))).tolist()
    size = spec.num_experts // spec.expert_groups
    groups = [range(first, first + size) for first in range(0, spec.num_experts, size)]
    best = 2 if spec.score_function == "sigmoid" else 1
    groups.sort(key=lambda group: -sum(sorted((wish[one] for one in group), reverse=True)[:best]))
    open_to = [one for group in groups[: spec.limited_groups] for one in group]
    chosen = sorted(open_to, key=lambda one: -wish[one])[: spec.top_k]
    total = sum(scores[one] for one in chosen) if spec.route_norm else 1.0
    result = torch.zeros_like(token)
    for one in chosen:
        names = [name for name in ("up", "gate", "down") if f"experts.{name}" in weights]
        own = {f"{name}.weight": weights[f"experts.{name}"][one] for name in names}
        own |= {f"{name}.bias": weights[f"experts.{name}_bias"][one] for name in names if spec.bias}
        share = scores[one] / total * spec.route_scale
        result = result + (
            feed_forward(own, "", share * token) if spec.score_before_experts else share * feed_forward(own, "", token)
        )
    if spec.shared_ffn_hidden_size:
        beside = feed_forward(weights, "shared.", token)
        gate = 1 / (1 + (-linear(weights, "shared_gate", token)).exp()) if spec.shared_gate else 1.0
        result = result + gate * beside
    return result
