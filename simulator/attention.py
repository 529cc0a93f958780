"""Token mixers on one GPU: softmax attention with grouped or latent heads, and state-space layers."""

from __future__ import annotations

import numpy as np

from scenarios.model import Attention, Mamba, Mla
from simulator.arrays import Floats
from simulator.compute import Rates, gemm_seconds, inverse_distance, memory_seconds
from topologies.cluster import AttentionPoint

Mixer = Attention | Mla | Mamba


def heads_per_rank(mixer: Attention, tp: Floats) -> Floats:
    """Query heads and twice the key-value heads of one rank; a rank keeps at least one key-value head."""
    return mixer.heads / tp + 2.0 * np.maximum(mixer.kv_heads / tp, 1.0)


def head_sizes(mixer: Attention | Mla) -> tuple[int, int]:
    """Size of a query (and key) head and of a value head."""
    if isinstance(mixer, Mla):
        return mixer.qk_nope_head_dim + mixer.qk_rope_head_dim, mixer.v_head_dim
    return mixer.head_dim, mixer.head_dim


def projection_seconds(rates: Rates, mixer: Mixer, hidden: int, tokens: Floats, tp: Floats) -> Floats:
    """GEMMs of the projections into and out of a mixer, forward.

    Latent attention has five: two low-rank steps to queries, two to keys and values, one out (DeepSeek-V2, 2.1).
    """

    def gemm(n: Floats | float, k: Floats | float) -> Floats:
        return gemm_seconds(rates.gemm, tokens, n, k)

    if isinstance(mixer, Mamba):
        into = 2 * mixer.inner_size + (
            2 * mixer.groups * mixer.state_size + mixer.heads if mixer.generation == 2 else 0
        )
        time = gemm(into / tp, hidden) + gemm(hidden, mixer.inner_size / tp)
        if mixer.generation == 1:
            time = time + gemm(mixer.dt_rank + 2 * mixer.state_size, mixer.inner_size / tp)
            time = time + gemm(mixer.inner_size / tp, max(mixer.dt_rank, 1))
        return time
    if isinstance(mixer, Mla):
        query, value = head_sizes(mixer)
        rank = mixer.q_lora_rank
        time = gemm(mixer.heads * query / tp, rank or hidden)
        if rank:
            time = time + gemm(rank, hidden)
        time = time + gemm(mixer.kv_lora_rank + mixer.qk_rope_head_dim, hidden)
        time = time + gemm(mixer.heads * (mixer.qk_nope_head_dim + value) / tp, mixer.kv_lora_rank)
        time = time + gemm(hidden, mixer.heads * value / tp)
        if mixer.indexer_heads:
            time = time + gemm(mixer.indexer_heads * mixer.indexer_head_dim, rank or hidden)
        return time
    into_width = heads_per_rank(mixer, tp) * mixer.head_dim
    return gemm(into_width, hidden) + gemm(hidden, mixer.heads * mixer.head_dim / tp)


def visible_tokens(mixer: Attention | Mla, seq_length: int) -> float:
    """Twice the mean number of tokens that a query sees: the sequence under a causal mask, less with a window."""
    if isinstance(mixer, Mla):
        return min(seq_length, 2.0 * mixer.indexer_top_k) if mixer.indexer_top_k else float(seq_length)
    if mixer.window is not None:
        return min(float(seq_length), 2.0 * mixer.window)
    return float(min(seq_length, mixer.chunk)) if mixer.chunk is not None else float(seq_length)


def core_seconds(
    rates: Rates, mixer: Mixer, seq_length: int, batch: Floats, tokens: Floats, tp: Floats
) -> tuple[Floats, Floats]:
    """Attention core (or state-space scan), forward and backward of one micro-batch.

    Flash kernels do half of the square and 2.5 times the forward in the backward (Dao 2023); their rate rises with the
    sequence and with the head size. Unfused kernels do the whole square and move the scores.
    """
    if isinstance(mixer, Mamba):
        scan = rates.parameters.mamba_scan_passes.value * rates.element_bytes * tokens * mixer.inner_size / tp
        forward = memory_seconds(rates, rates.software.memory_ops * scan)
        return forward, 2.0 * forward
    query, value = head_sizes(mixer)
    heads = mixer.heads / tp
    if rates.software.unfused:
        return _unfused_seconds(rates, heads * (query + value), heads * batch * seq_length, tokens, seq_length, batch)
    flops = tokens * heads * (visible_tokens(mixer, seq_length) * (query + value))
    if isinstance(mixer, Mla) and mixer.indexer_heads:
        flops = flops + tokens * (float(seq_length) * mixer.indexer_heads * mixer.indexer_head_dim)
    if rates.attention_points:
        return _measured_seconds(rates, flops, seq_length, heads * batch, float(query))
    parameters = rates.parameters
    size = min(1.0, 1.5 * value / (value + 64.0)) if rates.ampere else min(1.0, value / 128.0)
    saturation = seq_length / (seq_length + parameters.attention_half_sequence.value)
    forward = flops * (rates.slowdown / (rates.attention_flop_per_second * saturation * size))
    return forward, 2.5 * forward


def _unfused_seconds(
    rates: Rates, width: Floats, rows: Floats, tokens: Floats, seq_length: int, batch: Floats
) -> tuple[Floats, Floats]:
    """Two batched GEMMs over the whole square, and 12 (backward 16) bytes per score: mask, softmax, dropout, casts.

    Published runs of 2021 and 2022 (Megatron-LM, BigScience) confirm the traffic within a factor of 0.7 to 1.
    """
    rate = rates.wide_gemm.flop_per_second * rates.parameters.unfused_gemm.value / rates.wide_gemm.slowdown
    gemm = 2.0 * tokens * seq_length * width / rate
    scores = rows * tokens / batch * rates.parameters.unfused_scores.value * rates.element_bytes / 2.0
    return gemm + memory_seconds(rates, 12.0 * scores), 2.0 * gemm + memory_seconds(rates, 16.0 * scores)


def _measured_seconds(
    rates: Rates, flops: Floats, seq_length: int, rows: Floats, head_dim: float
) -> tuple[Floats, Floats]:
    points = rates.attention_points
    places = np.array([(p.seq_length, p.heads * p.batch, p.head_dim) for p in points], dtype=np.float64)
    at = (np.float64(seq_length), rows, np.float64(head_dim))

    def work(point: AttentionPoint) -> float:
        return 2.0 * point.batch * point.heads * point.head_dim * point.seq_length**2

    forward = inverse_distance(places, np.array([work(p) / p.forward_seconds for p in points]), at)
    backward = inverse_distance(places, np.array([work(p) / p.backward_seconds for p in points]), at)
    slower = rates.slowdown * rates.product_factor
    return flops / forward * slower, flops / backward * slower


def mixer_elements(mixer: Mixer, tokens: Floats, tp: Floats) -> Floats:
    """Activations between the projections and the core of one rank: queries, keys, values (or inner state)."""
    if isinstance(mixer, Mamba):
        return 2.0 * tokens * mixer.inner_size / tp
    if isinstance(mixer, Mla):
        query, value = head_sizes(mixer)
        return tokens * mixer.heads * (2 * query + value) / tp
    return tokens * heads_per_rank(mixer, tp) * mixer.head_dim


def core_elements(mixer: Attention | Mla, tokens: Floats, tp: Floats) -> Floats:
    """Outputs of the attention core on one rank."""
    return tokens * mixer.heads * head_sizes(mixer)[1] / tp


def key_value_elements(mixer: Mixer, tokens: Floats, tp: Floats) -> Floats:
    """Keys and values of one rank's heads for ``tokens`` tokens: what context parallelism exchanges."""
    if isinstance(mixer, Mamba):
        return tokens * mixer.state_size / tp
    if isinstance(mixer, Mla):
        query, value = head_sizes(mixer)
        return tokens * mixer.heads * (query + value) / tp
    return tokens * np.maximum(mixer.kv_heads / tp, 1.0) * 2.0 * mixer.head_dim
