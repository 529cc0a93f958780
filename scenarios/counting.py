"""Parameters and FLOPs of a layer, part by part.

Parameters are exact. FLOPs are of the forward pass per token: a multiplication and an addition are two; norms,
activations, rotary embeddings and softmax are left out, as is usual for model FLOPs. Causal attention is counted once:
a query sees the tokens before it and half of itself, so that a full layer costs exactly half of the square.
"""

from __future__ import annotations

from scenarios.layers import Attention, Layer, Mamba, Mla, Mlp, Moe

FLOP_PARTS = ("projections", "attention", "mlp", "experts", "router", "mamba", "head")
"""Parts of a forward pass, in the order in which they are told."""


def visible_tokens(seq_length: int, window: int | None = None, chunk: int | None = None) -> float:
    """Return how many tokens a query sees, as the exact average over the positions of a sequence.

    A query at position i (from 0) sees min(i + 1/2, window) tokens of its chunk: a window W below the sequence s gives
    W - W**2 / (2 s), and none gives s / 2.

    >>> visible_tokens(8192), visible_tokens(8192, window=128), visible_tokens(8192, chunk=4096)
    (4096.0, 127.0, 2048.0)
    """
    block = min(chunk or seq_length, seq_length)
    blocks, rest = divmod(seq_length, block)

    def pairs(length: int) -> float:
        reach = min(window or length, length)
        return reach * reach / 2 + (length - reach) * reach

    return (blocks * pairs(block) + pairs(rest)) / seq_length


def mixer_params(mixer: Attention | Mla | Mamba, hidden_size: int) -> int:
    """Count the weights of a token mixer."""
    if isinstance(mixer, Attention):
        return _attention_params(mixer, hidden_size)
    return _mla_params(mixer, hidden_size) if isinstance(mixer, Mla) else _mamba_params(mixer, hidden_size)


def feed_forward_params(block: Mlp | Moe, hidden_size: int) -> int:
    """Count the weights of a feed-forward block, all experts included."""
    if isinstance(block, Mlp):
        return _ffn_params(hidden_size, block.ffn_hidden_size, block.gated, block.bias)
    router = block.num_experts * (hidden_size + block.router_bias) + hidden_size * block.shared_gate
    shared = (
        _ffn_params(hidden_size, block.shared_ffn_hidden_size, block.gated, block.bias)
        if block.shared_ffn_hidden_size
        else 0
    )
    return block.num_experts * expert_params(block, hidden_size) + shared + router


def expert_params(block: Moe, hidden_size: int) -> int:
    """Count the weights of one routed expert."""
    return _ffn_params(hidden_size, block.ffn_hidden_size, block.gated, block.bias)


def layer_flops(layer: Layer, hidden_size: int, seq_length: int) -> dict[str, float]:
    """Return the forward FLOPs per token of one layer by part; the keys are those of FLOP_PARTS but ``head``."""
    flops = dict.fromkeys(FLOP_PARTS[:-1], 0.0)
    match layer.mixer:
        case Attention() as mixer:
            flops["projections"], flops["attention"] = _attention_flops(mixer, hidden_size, seq_length)
        case Mla() as mixer:
            flops["projections"], flops["attention"] = _mla_flops(mixer, hidden_size, seq_length)
        case Mamba() as mixer:
            flops["mamba"] = _mamba_flops(mixer, hidden_size)
    match layer.feed_forward:
        case Mlp() as block:
            flops["mlp"] = 2.0 * _ffn_weights(hidden_size, block.ffn_hidden_size, block.gated)
        case Moe() as block:
            sizes = block.top_k * block.ffn_hidden_size + block.shared_ffn_hidden_size
            flops["experts"] = 2.0 * _ffn_weights(hidden_size, sizes, block.gated)
            flops["router"] = 2.0 * hidden_size * (block.num_experts + block.shared_gate)
    return flops


def _attention_params(mixer: Attention, hidden_size: int) -> int:
    queries, keys = mixer.heads * mixer.head_dim, mixer.kv_heads * mixer.head_dim
    weights = hidden_size * (queries + 2 * keys) + queries * hidden_size
    biases = (queries + 2 * keys) * mixer.qkv_bias + hidden_size * mixer.output_bias
    norms = (queries + keys if mixer.qk_norm_whole else 2 * mixer.head_dim) * mixer.qk_norm
    return weights + biases + norms + mixer.heads * mixer.sinks


def _attention_flops(mixer: Attention, hidden_size: int, seq_length: int) -> tuple[float, float]:
    seen = visible_tokens(seq_length, mixer.window, mixer.chunk)
    projections = 2 * mixer.head_dim * (mixer.heads + mixer.kv_heads) * hidden_size
    return 2.0 * projections, 2 * 2 * mixer.heads * mixer.head_dim * seen


def _mla_matrices(mixer: Mla, hidden_size: int) -> int:
    query_size = mixer.heads * (mixer.qk_nope_head_dim + mixer.qk_rope_head_dim)
    rank = mixer.q_lora_rank
    queries = hidden_size * query_size if rank is None else rank * (hidden_size + query_size)
    latent = hidden_size * (mixer.kv_lora_rank + mixer.qk_rope_head_dim)
    keys_and_values = mixer.kv_lora_rank * mixer.heads * (mixer.qk_nope_head_dim + mixer.v_head_dim)
    return queries + latent + keys_and_values + mixer.heads * mixer.v_head_dim * hidden_size


def _indexer_matrices(mixer: Mla, hidden_size: int) -> int:
    queries = (mixer.q_lora_rank or hidden_size) * mixer.indexer_heads * mixer.indexer_head_dim
    return queries + hidden_size * (mixer.indexer_head_dim + mixer.indexer_heads)


def _mla_params(mixer: Mla, hidden_size: int) -> int:
    norms = (mixer.q_lora_rank or 0) + mixer.kv_lora_rank
    indexer = _indexer_matrices(mixer, hidden_size) + 2 * mixer.indexer_head_dim if mixer.indexer_heads else 0
    return _mla_matrices(mixer, hidden_size) + norms + indexer


def _mla_flops(mixer: Mla, hidden_size: int, seq_length: int) -> tuple[float, float]:
    matrices = _mla_matrices(mixer, hidden_size)
    seen = visible_tokens(seq_length, mixer.indexer_top_k or None)
    per_token = mixer.heads * (mixer.qk_nope_head_dim + mixer.qk_rope_head_dim + mixer.v_head_dim)
    attention = 2 * per_token * seen
    if mixer.indexer_heads:
        matrices += _indexer_matrices(mixer, hidden_size)
        attention += 2 * mixer.indexer_heads * mixer.indexer_head_dim * visible_tokens(seq_length)
    return 2.0 * matrices, attention


def _mamba_params(mixer: Mamba, hidden_size: int) -> int:
    inner, state, rank = mixer.inner_size, mixer.state_size, mixer.dt_rank
    out_projection = inner * hidden_size + hidden_size * mixer.projection_bias
    if mixer.generation == 1:
        in_projection = 2 * inner * (hidden_size + mixer.projection_bias)
        conv = inner * (mixer.conv_kernel + mixer.conv_bias)
        selection = inner * (rank + 2 * state) + inner * (rank + 1)
        state_weights = inner * state + inner
        return (
            in_projection + conv + selection + state_weights + out_projection + (rank + 2 * state) * mixer.inner_norms
        )
    channels = inner + 2 * mixer.groups * state
    in_projection = (inner + channels + mixer.heads) * (hidden_size + mixer.projection_bias)
    conv = channels * (mixer.conv_kernel + mixer.conv_bias)
    return in_projection + conv + 3 * mixer.heads + inner * mixer.inner_norms + out_projection


def _mamba_flops(mixer: Mamba, hidden_size: int) -> float:
    """Scan: 9 per channel and state in version 1 (state-spaces/mamba), 7 in version 2 (Megatron-LM's count)."""
    inner, state = mixer.inner_size, mixer.state_size
    if mixer.generation == 1:
        matrices = 3 * hidden_size * inner + inner * (2 * mixer.dt_rank + 2 * state)
        return 2.0 * (matrices + mixer.conv_kernel * inner) + 9.0 * inner * state
    channels = inner + 2 * mixer.groups * state
    matrices = hidden_size * (2 * inner + channels + mixer.heads)
    return 2.0 * (matrices + mixer.conv_kernel * channels) + 7.0 * inner * state


def _ffn_weights(hidden_size: int, ffn_hidden_size: int, gated: bool) -> int:
    return (2 + gated) * hidden_size * ffn_hidden_size


def _ffn_params(hidden_size: int, ffn_hidden_size: int, gated: bool, bias: bool) -> int:
    biases = (1 + gated) * ffn_hidden_size + hidden_size
    return _ffn_weights(hidden_size, ffn_hidden_size, gated) + biases * bias
