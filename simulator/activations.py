"""Bytes of activations: what one layer keeps for its backward, and how many micro-batches are alive."""

from __future__ import annotations

import numpy as np

from scenarios.job import Job
from scenarios.layout import RecomputeModule
from scenarios.model import Attention, Layer, Mamba, Mla, Mlp, Moe
from simulator.arrays import Floats, Ints
from simulator.attention import head_sizes, heads_per_rank
from simulator.keeping import Keeping, keeping_of
from simulator.layers import FULL, SELECTIVE, Shares
from simulator.moe import ffn_width, matrices_in


def element_bytes(job: Job) -> float:
    """Of an activation outside the GEMMs."""
    return 4.0 if job.precision == "fp32" else 2.0


def is_unfused(job: Job) -> bool:
    """The score matrix is stored."""
    return job.attention == "unfused" or job.stack.attention_kernel == "unfused"


def layer_bytes(job: Job, layer: Layer, share: Shares) -> tuple[Floats, Floats]:
    """What one layer keeps of one micro-batch: everything, and the part that selective recompute drops.

    Unfused GPT layers keep s b h (34 + 5 a s / h) bytes, dropout masks included (Korthikanti et al. 2022, equation 2).
    Flash kernels keep no scores, so that there is nothing for selective recompute to drop; models that run them are
    counted without dropout.
    """
    element, keeping = element_bytes(job), keeping_of(job)
    hidden, tokens, tp = job.model.hidden_size, share.tokens, share.ranks.tp
    masks = 1.0 if is_unfused(job) else 0.0
    norm = element if keeping.norm_bytes is None else keeping.norm_bytes
    kept = norm * layer.norms * share.norm_tokens * hidden
    dropped = np.zeros(len(tokens))
    mixer, ffn = layer.mixer, layer.feed_forward
    gathered = share.norm_tokens if keeping.regathers else tokens
    if mixer is not None:
        kept = kept + (element * gathered + masks * share.norm_tokens) * hidden
    if isinstance(mixer, Mamba):
        width = 5 * mixer.inner_size + 2 * mixer.groups * mixer.state_size
        kept = kept + element * tokens * width / tp
    elif mixer is not None:
        query, value = head_sizes(mixer)
        heads = mixer.heads / tp
        kept = kept + element * tokens * heads * value
        if keeping.output_copy:  # and the cosines and sines that queries and keys are turned by
            kept = kept + element * tokens * (heads * value + 2.0 * query)
        if isinstance(mixer, Mla):
            # where no kernel turns and joins at once, values are a view of keys and values together, which stay
            both = mixer.qk_nope_head_dim if keeping.output_copy else 0
            latent = (norm + element) * ((mixer.q_lora_rank or 0) + mixer.kv_lora_rank)
            kept = kept + element * tokens * (heads * (2 * query + value + both) + mixer.qk_rope_head_dim)
            kept = kept + tokens * latent
        else:
            kept = kept + element * tokens * heads_per_rank(mixer, tp) * mixer.head_dim
            if mixer.qk_norm:
                kept = kept + norm * tokens * (heads + np.maximum(mixer.kv_heads / tp, 1.0)) * mixer.head_dim
        if is_unfused(job):
            dropped = (2.0 * element + 1.0) * tokens * heads * job.seq_length
        else:
            kept = kept + 4.0 * tokens * heads
    if ffn is not None:
        whole = share.norm_tokens if isinstance(ffn, Moe) else gathered
        if isinstance(ffn, Moe) and keeping.wide_router:  # what the shared expert reads is another copy
            whole = whole * (4.0 / element) + (gathered if ffn.shared_ffn_hidden_size and element < 4.0 else 0.0)
        kept = kept + (element * whole + masks * share.norm_tokens) * hidden
    if isinstance(ffn, Mlp):
        kept = kept + element * tokens * inner_tensors(ffn, keeping) * ffn.ffn_hidden_size / tp
    elif isinstance(ffn, Moe):
        kept = kept + _expert_bytes(ffn, element, hidden, share, keeping)
    return kept + dropped, dropped


def inner_tensors(part: Mlp | Moe, keeping: Keeping) -> int:
    """Tensors of the inner width that a feed-forward part keeps."""
    return matrices_in(part) + 1 + (1 if part.gated and keeping.gate_copy else 0)


def _expert_bytes(moe: Moe, element: float, hidden: int, share: Shares, keeping: Keeping) -> Floats:
    """Router scores, routed copies before and after the experts, and the experts' inner activations.

    Where each operation is a kernel of its own, the copies after the experts are kept once more with their weights.
    """
    ranks = share.ranks
    tokens = share.tokens / ranks.tp
    inner = inner_tensors(moe, keeping)
    copies = keeping.routed_copies * hidden * ranks.etp
    routed = tokens * moe.top_k * (copies + inner * moe.ffn_hidden_size)
    shared = tokens * inner * moe.shared_ffn_hidden_size
    return element * (routed + shared) + 4.0 * tokens * moe.num_experts


def module_bytes(job: Job, layer: Layer, share: Shares, modules: tuple[RecomputeModule, ...]) -> Floats:
    """What selective recompute of modules drops besides the scores of unfused attention, which ``core_attn`` drops."""
    element, tokens, tp, keeping = element_bytes(job), share.tokens, share.ranks.tp, keeping_of(job)
    mixer, ffn = layer.mixer, layer.feed_forward
    dropped = np.zeros(len(tokens))
    if "core_attn" in modules and keeping.output_copy and isinstance(mixer, Attention | Mla) and not is_unfused(job):
        query, value = head_sizes(mixer)  # the copy of the output stays
        dropped = dropped + tokens * (mixer.heads / tp * (element * value + 4.0) + 2.0 * element * query)
    if "layernorm" in modules:
        dropped = dropped + element * layer.norms * share.norm_tokens * job.model.hidden_size
    if isinstance(mixer, Mla) and "mla_up_proj" in modules:
        query, value = head_sizes(mixer)
        dropped = dropped + element * tokens * mixer.heads / tp * (2 * query + value)
    if ffn is None:
        return dropped
    inner = element * tokens * ffn_width(ffn) / tp
    if isinstance(ffn, Moe) and "moe" in modules:
        return dropped + _expert_bytes(ffn, element, job.model.hidden_size, share, keeping)
    if isinstance(ffn, Mlp) and "mlp" in modules:
        return dropped + inner_tensors(ffn, keeping) * inner
    if isinstance(ffn, Moe) and "shared_experts" in modules:
        width = inner_tensors(ffn, keeping) * ffn.shared_ffn_hidden_size
        dropped = dropped + element * tokens * width / tp
    return dropped + inner if "act" in modules else dropped


def alternate_bytes(job: Job, layer: Layer, share: Shares) -> Floats:
    """What the per-operator rule of torchtitan keeps of a layer beside its input.

    The output of every second matrix multiplication in the order query, key, value, output, gate, up, down, and that of
    the attention core.
    """
    mixer, ffn, tokens, tp = layer.mixer, layer.feed_forward, share.tokens, share.ranks.tp
    kept = np.zeros(len(tokens))
    if isinstance(mixer, Attention | Mla):
        query, value = head_sizes(mixer)
        values = mixer.heads if isinstance(mixer, Mla) else mixer.kv_heads
        kept = kept + tokens / tp * (mixer.heads * (query + value) + values * value)
    if ffn is not None:
        kept = kept + tokens / tp * ffn_width(ffn)
        if ffn.gated:
            kept = kept + share.norm_tokens * job.model.hidden_size
    return element_bytes(job) * kept


def activation_bytes(
    job: Job, layer: Layer, share: Shares, recompute: Ints, modules: tuple[RecomputeModule, ...] = ("core_attn",)
) -> tuple[Floats, Floats]:
    """What one layer keeps of one micro-batch under a recompute mode, and what its backward needs for a moment.

    Full recompute keeps the layer's input; the backward then holds all of the layer again. Gradients of the widest
    activations come on top.
    """
    element = element_bytes(job)
    everything, scores = layer_bytes(job, layer, share)
    dropped = module_bytes(job, layer, share, modules)
    dropped = dropped + scores if "core_attn" in modules else dropped
    entry = element * share.norm_tokens * job.model.hidden_size
    if "half_of_matmuls" in modules:
        dropped = np.maximum(everything - entry - alternate_bytes(job, layer, share), 0.0)
    full, selective = recompute == FULL, recompute == SELECTIVE
    saved = np.where(full, entry, np.where(selective, everything - dropped, everything))
    again = np.where(full, everything, np.where(selective, dropped, 0.0))
    return saved, again + element * share.tokens * _widest(layer, keeping_of(job)) / share.ranks.tp + entry


def _widest(layer: Layer, keeping: Keeping) -> int:
    """Elements per token of the gradients of the widest activations of a layer: of the inner ones, all at a time."""
    mixer, ffn = layer.mixer, layer.feed_forward
    wide = ffn_width(ffn) * (matrices_in(ffn) + (0 if keeping.regathers else 1)) if ffn is not None else 0
    if isinstance(mixer, Mamba):
        return max(wide, 2 * mixer.inner_size)
    if mixer is None:
        return wide
    query, value = head_sizes(mixer)
    keys = mixer.heads if isinstance(mixer, Mla) else mixer.kv_heads
    return max(wide, mixer.heads * query + keys * (query + value))
