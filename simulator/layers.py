"""One layer of each kind on one rank: seconds of one micro-batch by cause, before overlap."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from scenarios.job import Job
from scenarios.layout import RECOMPUTES, SHARDINGS, ContextExchange, RecomputeModule
from scenarios.model import Attention, Layer, Mamba, Mla, Mlp, Moe
from simulator.arrays import Bools, Floats, Ints, LayoutArrays
from simulator.attention import (
    core_elements,
    core_seconds,
    head_sizes,
    key_value_elements,
    mixer_elements,
    projection_seconds,
)
from simulator.compute import (
    Rates,
    accumulate_seconds,
    cast_seconds,
    gemm_seconds,
    memory_seconds,
    saturating_max,
)
from simulator.measured_costs import software_seconds
from simulator.moe import (
    dense_ffn_seconds,
    expert_seconds,
    ffn_width,
    matrices_in,
    moe_host_seconds,
    permute_seconds,
)
from simulator.traffic import (
    Axes,
    Ranks,
    cp_seconds,
    ep_seconds,
    head_exchange_seconds,
    tp_regather_seconds,
    tp_seconds,
)

SELECTIVE, FULL = RECOMPUTES.index("selective"), RECOMPUTES.index("full")
ZERO1, ZERO2, ZERO3 = (SHARDINGS.index(name) for name in ("zero1", "zero2", "zero3"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Shares:
    """What one rank sees of one micro-batch, as arrays over layouts."""

    ranks: Ranks
    batch: Floats
    """Sequences."""
    tokens: Floats
    """Of the rank's slice of the sequence."""
    norm_tokens: Floats
    """The same where norms and residuals work: split over tp with sequence parallelism."""
    sequence_parallel: Bools
    num_microbatches: Floats
    fsdp: Bools
    """Weights are sharded."""
    wrapped: Bools
    """Gradients are reduced layer by layer in every micro-batch."""


def shares(job: Job, layouts: LayoutArrays, ranks: Ranks) -> Shares:
    """Cut one micro-batch into the parts of the ranks."""
    batch = layouts.micro_batch_size.astype(np.float64)
    tokens = batch * job.seq_length / ranks.cp
    return Shares(
        ranks=ranks,
        batch=batch,
        tokens=tokens,
        norm_tokens=np.where(layouts.sequence_parallel, tokens / ranks.tp, tokens),
        sequence_parallel=layouts.sequence_parallel,
        num_microbatches=layouts.num_microbatches(job).astype(np.float64),
        fsdp=layouts.sharding == ZERO3,
        wrapped=layouts.sharding >= ZERO2,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerTimes:
    """Seconds of one layer and micro-batch on one rank. ``*_comm`` are exposed."""

    gemm: Floats
    """Forward."""
    gemm_backward: Floats
    """Input and weight gradients: twice the forward, half of that where the weights are frozen."""
    attention_forward: Floats
    attention_backward: Floats
    memory: Floats
    """Forward; the backward takes twice as long."""
    cast: Floats
    """Forward and backward."""
    accumulate: Floats
    recompute: Floats
    host: Floats
    """What the host adds to the GPU's time."""
    tp_comm: Floats
    cp_comm: Floats
    ep_comm: Floats
    forward_comm: Floats
    """Forward part of the three communications."""
    tp_traffic: Floats
    cp_traffic: Floats
    ep_traffic: Floats
    """Seconds of the three before overlap, forward and backward."""
    tp_bytes: Floats
    """Buffers of its all-reduces together; a gather or a reduce-scatter counts half."""
    cp_bytes: Floats
    """Keys and values of the whole sequence, once for each time they go around."""
    ep_bytes: Floats
    """Routed tokens of one rank, once for each exchange."""

    @property
    def communication(self) -> Floats:
        """Exposed TP, CP and EP traffic."""
        return self.tp_comm + self.cp_comm + self.ep_comm

    @property
    def compute(self) -> Floats:
        """Forward, backward, recompute and host time."""
        gpu = self.gemm + self.gemm_backward + 3.0 * self.memory
        gpu = gpu + self.attention_forward + self.attention_backward + self.cast
        return gpu + self.accumulate + self.recompute + self.host

    @property
    def total(self) -> Floats:
        """Compute and exposed traffic, forward and backward."""
        return self.compute + self.communication

    @property
    def forward_seconds(self) -> Floats:
        """The forward, with its third of casts and host time and its own traffic."""
        gpu = self.gemm + self.attention_forward + self.memory
        return gpu + (self.cast + self.host) / 3.0 + self.forward_comm

    @property
    def backward_seconds(self) -> Floats:
        """The backward, with recompute and weight gradients."""
        return self.total - self.forward_seconds

    @property
    def weight_gradient(self) -> Floats:
        """The part of the backward that no other stage waits for."""
        return np.maximum(self.gemm_backward - self.gemm, 0.0) + self.accumulate


def layer_times(
    rates: Rates,
    axes: Axes,
    job: Job,
    layer: Layer,
    weights: float,
    expert_weights: float,
    share: Shares,
    recompute: Ints,
    modules: tuple[RecomputeModule, ...] = ("core_attn",),
    cp_comm_kind: ContextExchange = "ring",
) -> LayerTimes:
    """Time one layer: GEMMs, attention core, memory-bound operations, casts, recompute, host, then its traffic.

    ``weights`` and ``expert_weights`` are the layer's parameters outside and inside its routed experts.
    """
    ranks, tokens, hidden = share.ranks, share.tokens, job.model.hidden_size
    mixer, ffn, software = layer.mixer, layer.feed_forward, rates.software
    zero = np.zeros(len(tokens))
    element, tp = rates.element_bytes, ranks.tp

    mixer_gemm, ffn_gemm, core_forward, core_backward, quantised, moved = zero, zero, zero, zero, zero, zero
    if mixer is not None:
        mixer_gemm = projection_seconds(rates, mixer, hidden, tokens, tp)
        core_forward, core_backward = core_seconds(rates, mixer, job.seq_length, share.batch, tokens, tp)
        inner = mixer_elements(mixer, tokens, tp)
        moved = moved + element * (5.0 * share.norm_tokens * hidden + 2.0 * inner)
        quantised = quantised + 2.0 * tokens * hidden + inner
    if ffn is not None:
        matrices = 1 + matrices_in(ffn)
        moved = moved + element * (5.0 * share.norm_tokens * hidden + tokens * (ffn_width(ffn) * matrices) / tp)
        if isinstance(ffn, Moe):
            ffn_gemm = expert_seconds(rates, ffn, hidden, tokens, ranks)
            copies = tokens / tp * ffn.top_k
            quantised = quantised + copies * (2.0 * hidden + matrices * ffn.ffn_hidden_size)
            if ffn.shared_ffn_hidden_size:
                quantised = quantised + tokens * (2.0 * hidden + matrices * ffn.shared_ffn_hidden_size / tp)
        else:
            ffn_gemm = dense_ffn_seconds(rates, ffn.gated, ffn.ffn_hidden_size, hidden, tokens, tp)
            quantised = quantised + tokens * (2.0 * hidden + matrices * ffn.ffn_hidden_size / tp)
    gemm = mixer_gemm + ffn_gemm
    special = 1.0
    if isinstance(mixer, Attention) and mixer.sinks:
        special = 1.0 + (rates.parameters.special_layers.value - 1.0) * software.moe_release
    memory = memory_seconds(rates, software.memory_ops * special * moved)
    if isinstance(ffn, Moe):
        memory = memory + permute_seconds(rates, ffn, hidden, tokens, ranks)
    cast = cast_seconds(rates, quantised) if rates.cast_weight else zero
    local_weights = weights / tp + expert_weights / (ranks.ep * ranks.etp)
    accumulate = accumulate_seconds(rates, local_weights, share.num_microbatches, share.fsdp)
    gemm_backward = 2.0 * gemm
    if software.lora:
        accumulate = zero
        gemm_backward = rates.parameters.lora_backward.value * gemm

    full = recompute == FULL
    forward = gemm + core_forward + memory
    again = np.where(full, forward, 0.0)
    if np.any(recompute == SELECTIVE):
        repeated = selective_seconds(rates, job, layer, share, modules, mixer_gemm, ffn_gemm, core_forward, memory)
        again = np.where(recompute == SELECTIVE, repeated, again)
    gpu = gemm + gemm_backward + 3.0 * memory + core_forward + core_backward + cast + accumulate + again
    host = _host_seconds(rates, layer, share, full, gpu, element * tokens * hidden, local_weights)

    tp_one = tp_seconds(axes, element * tokens * hidden, share.sequence_parallel)
    if mixer is None or ffn is None:
        tp_one = tp_one / 2.0
    part = np.where(ranks.etp < tp, 0.5, 1.0) if isinstance(ffn, Moe) else 1.0
    tp_exposed, tp_backward = part * software.exposed_tp, part * software.exposed_tp_backward
    regather = (
        zero
        if rates.cpu or not np.any(share.sequence_parallel)
        else np.where(share.sequence_parallel, tp_regather_seconds(axes, element * tokens * hidden), 0.0)
    )
    if software.lora:
        regather = zero
    gathers = np.where(share.sequence_parallel, 0.5, 0.0) * tp_one
    tp_comm = tp_exposed * (tp_one * (1.0 + full) + gathers) + tp_backward * (tp_one - gathers + regather)
    tp_traffic = part * (tp_one * (2.0 + full) + regather)
    halves = (1.0 if mixer is None or ffn is None else 2.0) * (2.0 + full)
    tp_bytes = part * element * tokens * hidden * np.where(tp > 1, halves + (np.asarray(regather) > 0), 0.0)
    cp_comm = cp_traffic = cp_bytes = ep_traffic = ep_bytes = zero
    if mixer is not None and not isinstance(mixer, Mamba):
        cp_comm, cp_traffic, cp_bytes = _context_seconds(rates, axes, job, mixer, share, cp_comm_kind, full)
    ep_comm = zero
    if isinstance(ffn, Moe):
        routed = element * hidden * ffn.top_k * tokens / tp
        one = ep_seconds(axes, ranks, routed, ffn.top_k, software.deduplicates)
        twice = np.where((recompute == SELECTIVE) & ("moe" in modules), 1.0, full)
        ep_traffic = (4.0 + 2.0 * twice) * one
        ep_bytes = np.where(ranks.ep > 1, (4.0 + 2.0 * twice) * routed, 0.0)
        ep_comm = software.exposed_ep * software.moe_release * ep_traffic
    forward_comm = (
        tp_exposed * tp_one + cp_comm / ((3.0 if cp_comm_kind == "ring" else 2.0) + full) + ep_comm / (2.0 + full)
    )
    return LayerTimes(
        gemm=gemm,
        gemm_backward=gemm_backward,
        attention_forward=core_forward,
        attention_backward=core_backward,
        memory=memory,
        cast=cast,
        accumulate=accumulate,
        recompute=again,
        host=host,
        tp_comm=tp_comm,
        cp_comm=cp_comm,
        ep_comm=ep_comm,
        forward_comm=forward_comm,
        tp_traffic=tp_traffic,
        cp_traffic=cp_traffic,
        ep_traffic=ep_traffic,
        tp_bytes=tp_bytes,
        cp_bytes=cp_bytes,
        ep_bytes=ep_bytes,
    )


def _context_seconds(
    rates: Rates, axes: Axes, job: Job, mixer: Attention | Mla, share: Shares, kind: ContextExchange, full: Bools
) -> tuple[Floats, Floats, Floats]:
    """Traffic of context parallelism, forward and backward: exposed seconds, seconds before overlap, bytes.

    A ring hides most of its hops behind blocks of attention and sends gradients beside keys and values in the backward.
    Gathers of keys and values are waited for, and so are the reductions of their gradients (Llama 3, section 3.3.2);
    likewise the exchanges of heads, which the backward makes for gradients. Full recompute repeats the forward's part.
    """
    ranks, element = share.ranks, rates.element_bytes
    if kind == "all-to-all":
        kept = element * (mixer_elements(mixer, share.tokens, ranks.tp) + core_elements(mixer, share.tokens, ranks.tp))
        seconds = (2.0 + full) * head_exchange_seconds(axes, kept)
        return seconds, seconds, np.where(ranks.cp > 1, (2.0 + full) * kept, 0.0)
    exchanged = element * key_value_elements(mixer, share.batch * job.seq_length, ranks.tp)
    times = (3.0 if kind == "ring" else 2.0) + full
    seconds = times * cp_seconds(axes, exchanged, ring=kind == "ring")
    exposed = rates.software.exposed_cp if kind == "ring" else 1.0
    return exposed * seconds, seconds, np.where(ranks.cp > 1, times * exchanged, 0.0)


def selective_seconds(
    rates: Rates,
    job: Job,
    layer: Layer,
    share: Shares,
    modules: tuple[RecomputeModule, ...],
    mixer_gemm: Floats,
    ffn_gemm: Floats,
    core_forward: Floats,
    memory: Floats,
) -> Floats:
    """Forward time that selective recompute repeats, module by module (names of Megatron-Core)."""
    mixer, ffn, hidden, tp = layer.mixer, layer.feed_forward, job.model.hidden_size, share.ranks.tp
    memory_ops, element = rates.software.memory_ops, rates.element_bytes
    time = np.zeros(len(share.tokens))
    if "core_attn" in modules:
        time = time + core_forward
    if "half_of_matmuls" in modules:
        time = time + 0.5 * (mixer_gemm + ffn_gemm) + memory
    if "layernorm" in modules:
        time = time + memory_seconds(rates, memory_ops * element * 4.0 * share.norm_tokens * hidden)
    if isinstance(mixer, Mla) and "mla_up_proj" in modules:
        query, value = head_sizes(mixer)
        rank = mixer.q_lora_rank or hidden
        time = time + gemm_seconds(rates.gemm, share.tokens, mixer.heads * query / tp, rank)
        up = mixer.heads * (mixer.qk_nope_head_dim + value) / tp
        time = time + gemm_seconds(rates.gemm, share.tokens, up, mixer.kv_lora_rank)
    inner = zero = np.zeros(len(share.tokens))
    if ffn is not None:
        width = ffn_width(ffn) * (1 + matrices_in(ffn))
        inner = memory_seconds(rates, memory_ops * element * share.tokens * width / tp)
    if "act" in modules:
        time = time + inner
    if (isinstance(ffn, Mlp) and "mlp" in modules) or (isinstance(ffn, Moe) and "moe" in modules):
        time = time + ffn_gemm + inner
    if isinstance(ffn, Moe) and "moe" in modules:
        time = time + permute_seconds(rates, ffn, hidden, share.tokens, share.ranks)
    elif isinstance(ffn, Moe) and ffn.shared_ffn_hidden_size and "shared_experts" in modules:
        time = time + dense_ffn_seconds(rates, ffn.gated, ffn.shared_ffn_hidden_size, hidden, share.tokens, tp)
    return time + zero


def _host_seconds(
    rates: Rates, layer: Layer, share: Shares, full: Bools, gpu: Floats, activation_bytes: Floats, weights: Floats
) -> Floats:
    """What the host adds: the larger of launching and computing, rounded; recompute launches a third more.

    On CPU the measured costs of a layer are added, since host and device are one.
    """
    parameters, software = rates.parameters, rates.software
    if rates.cpu:
        return software_seconds(
            rates,
            layer,
            share.ranks,
            sequence_parallel=share.sequence_parallel,
            wrapped=share.wrapped,
            full=full,
            activation_bytes=activation_bytes,
            weights=weights,
        )
    host = parameters.host_layer.value * software.host_share
    host_time = np.full(len(gpu), host)
    if isinstance(layer.feed_forward, Moe):
        host_time = host_time + moe_host_seconds(rates, layer.feed_forward, share.ranks)
    return saturating_max(gpu, host_time * (1.0 + full / 3.0)) - gpu + software.sync_seconds * (1.0 + full / 3.0)
