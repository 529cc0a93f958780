"""Feed-forward parts on one GPU: dense, and routed experts with router, permutation and grouped GEMMs."""

from __future__ import annotations

import numpy as np

from scenarios.model import Mlp, Moe
from simulator.arrays import Floats
from simulator.compute import Rates, gemm_seconds, memory_seconds
from simulator.traffic import Ranks


def matrices_in(part: Mlp | Moe) -> int:
    """Matrices that widen: two where the activation is gated."""
    return 2 if part.gated else 1


def dense_ffn_seconds(rates: Rates, gated: bool, width: int, hidden: int, tokens: Floats, tp: Floats) -> Floats:
    """GEMMs of a dense feed-forward part, forward: up (and gate) in one, then down."""
    into = (2 if gated else 1) * width / tp
    return gemm_seconds(rates.gemm, tokens, into, hidden) + gemm_seconds(rates.gemm, tokens, hidden, width / tp)


def expert_rows(moe: Moe, tokens: Floats, ranks: Ranks) -> Floats:
    """Token copies that the experts of one rank see, on average: its share of the tokens times top_k."""
    return tokens * moe.top_k * ranks.etp / ranks.tp


def local_experts(moe: Moe, ranks: Ranks) -> Floats:
    """Experts of one rank."""
    return np.maximum(moe.num_experts / ranks.ep, 1.0)


def expert_seconds(rates: Rates, moe: Moe, hidden: int, tokens: Floats, ranks: Ranks) -> Floats:
    """GEMMs of router, routed experts and shared expert, forward.

    Each local expert multiplies its own rows, so that few rows per expert cost through the shape; the whole is divided
    by the efficiency of grouped GEMMs and multiplied by the load of the fullest rank.
    """
    count = local_experts(moe, ranks)
    rows = expert_rows(moe, tokens, ranks) / count
    width = moe.ffn_hidden_size / ranks.etp
    up = gemm_seconds(rates.gemm, rows, matrices_in(moe) * width, hidden)
    down = gemm_seconds(rates.gemm, rows, hidden, width)
    imbalance = rates.parameters.moe_imbalance.value
    grouped = 1.0 if rates.gemm.points else rates.parameters.moe_gemm.value
    time = count * (up + down) * (imbalance / grouped)
    time = time + gemm_seconds(rates.wide_gemm, tokens / ranks.tp, moe.num_experts, hidden)
    if moe.shared_ffn_hidden_size:
        time = time + dense_ffn_seconds(rates, moe.gated, moe.shared_ffn_hidden_size, hidden, tokens, ranks.tp)
    return time


def permute_seconds(rates: Rates, moe: Moe, hidden: int, tokens: Floats, ranks: Ranks) -> Floats:
    """Sorting tokens by expert and back, forward: four passes over the routed copies."""
    moved = 4.0 * rates.element_bytes * hidden * tokens * moe.top_k / ranks.tp
    return memory_seconds(rates, rates.parameters.moe_permute.value * rates.software.moe_release * moved)


def moe_host_seconds(rates: Rates, moe: Moe, ranks: Ranks) -> Floats:
    """Host time that an MoE layer adds, forward and backward: synchronisation and per-expert launches and casts."""
    parameters, stack = rates.parameters, rates.software
    per_expert = parameters.host_expert.value * (2.0 if rates.cast_weight else 1.0)
    time = parameters.host_moe_layer.value + per_expert * local_experts(moe, ranks)
    return time * (stack.moe_release * stack.moe_host_share)


def ffn_width(part: Mlp | Moe) -> int:
    """Hidden size of the feed-forward part that one token passes through."""
    return (
        part.ffn_hidden_size
        if isinstance(part, Mlp)
        else part.top_k * part.ffn_hidden_size + part.shared_ffn_hidden_size
    )
