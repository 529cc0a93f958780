"""What a software stack keeps of a forward pass, and in which format it holds weights: Megatron-Core against PyTorch.

The formulas of ``simulator.activations`` and ``simulator.memory`` take their differences between stacks from here.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

from scenarios.job import Job
from scenarios.stack import Stack, Trainer

TORCH: frozenset[Trainer] = frozenset(
    {"torchtitan", "fsdp", "llm-foundry", "huggingface", "automodel", "deepspeed", "headway"}
)
"""Trainers whose layers are PyTorch modules under autograd (DTensor, FSDP2, DDP), unless they are tuned for the GPU."""
COMPILED: frozenset[Trainer] = frozenset({"torchtitan", "fsdp", "llm-foundry", "automodel"})
"""Those of them that run compiled or fused norms, activations and losses unless the stack says otherwise."""
MEGATRON_CORE: frozenset[Trainer] = frozenset({"megatron", "nemo", "megatron-bridge"})
"""Megatron-Core and what is built on it."""
EMPTY_GRADIENTS_SINCE = "2023-07"
"""Since when Megatron-Core hands autograd an empty gradient for each weight whose gradient a GEMM has already added to
the fp32 buffer (``overlap_grad_reduce`` with ``gradient_accumulation_fusion``)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Keeping:
    """Bytes are per element beside what every stack keeps."""

    regathers: bool
    """Inputs gathered over the tp group are gathered again for the backward (Korthikanti et al. 2022, section 4.2.2);
    autograd keeps the whole of them on every rank."""
    norm_bytes: float | None
    """Kept for the backward of a norm; None: its input in the format of activations."""
    gate_copy: bool
    """Gate, its activation and their product are three tensors."""
    routed_copies: float
    """Of a token for each expert that it visits: before the experts, after them, and after that with its weight."""
    wide_router: bool
    """A router reads an fp32 copy of its input."""
    output_copy: bool
    """The attention output is copied to the layout that the projection wants."""
    logit_bytes: float
    """Alive in the loss: the logits, their fp32 copies and their gradients."""
    split_logit_bytes: float
    """More where the vocabulary is split over a tp group."""
    fp32_weights: bool
    """Parameters are fp32 and cast for each use; no second master copy."""
    cast_copies: bool
    """The 16-bit copies of fp32 weights live from the forward to the backward, even where gathered weights do not."""
    whole_tables: bool
    """The gradient of a table that is split over a tp group is whole on each of its ranks, as DTensor makes it."""
    frees_gradients: bool
    """Gradients do not exist before the first backward of a step, and activations go while gradients come."""
    root_stays: bool
    """Embedding and head stay gathered from their forward to the end of the backward where weights are sharded."""
    empty_gradients: bool
    """16-bit tensors of the shape of each weight of a layer, that nothing is written to."""


MEGATRON = Keeping(
    regathers=True,
    norm_bytes=None,
    gate_copy=False,
    routed_copies=2.0,
    wide_router=False,
    output_copy=False,
    logit_bytes=6.0,
    split_logit_bytes=0.0,
    fp32_weights=False,
    cast_copies=False,
    whole_tables=False,
    frees_gradients=False,
    root_stays=True,
    empty_gradients=True,
)
"""Peaks of 15 real runs on B200 (SimuMax v1.2 release table): logits in 16 bits and in fp32, and empty gradients."""
OTHER_TUNED = replace(MEGATRON, empty_gradients=False)

EAGER = Keeping(
    regathers=False,
    norm_bytes=8.0,
    gate_copy=True,
    routed_copies=3.0,
    wide_router=False,
    output_copy=True,
    logit_bytes=12.0,
    split_logit_bytes=4.0,
    fp32_weights=True,
    cast_copies=True,
    whole_tables=True,
    frees_gradients=True,
    root_stays=True,
    empty_gradients=False,
)
"""One kernel per operation: an fp32 norm keeps input and normalised input, the loss fp32 logits, their logarithms and
the gradient (and once more under ``loss_parallel``); as torch 2.13 books them when a rank is traced on shapes alone."""
OWN = replace(EAGER, routed_copies=2.0, wide_router=True, root_stays=False, cast_copies=False, whole_tables=False)
"""headway's own runtime: it casts weights once more for the backward, and looks up its own rows of a table."""

COMPILED_TORCH = Keeping(
    regathers=False,
    norm_bytes=None,
    gate_copy=False,
    routed_copies=2.0,
    wide_router=False,
    output_copy=False,
    logit_bytes=14.0,
    split_logit_bytes=4.0,
    fp32_weights=True,
    cast_copies=True,
    whole_tables=True,
    frees_gradients=True,
    root_stays=True,
    empty_gradients=False,
)
"""Fused norms and activations; the loss as the memory in torchtitan's benchmarks of December 2024 has it: 16-bit logits
beside fp32 logits, their logarithms and the gradient."""


def keeping_of(job: Job) -> Keeping:
    """Resolve the stack of a job; an undeclared trainer is taken for Megatron-Core without its empty gradients."""
    return _keeping(job.stack)


@lru_cache(maxsize=256)
def _keeping(stack: Stack) -> Keeping:
    tuned = bool(stack.tuned) if stack.tuned is not None else False
    if stack.trainer in TORCH and not tuned:
        fused = stack.trainer in COMPILED if stack.fused is None else stack.fused
        return COMPILED_TORCH if fused else OWN if stack.trainer == "headway" else EAGER
    current = stack.date is None or stack.date >= EMPTY_GRADIENTS_SINCE
    return MEGATRON if stack.trainer in MEGATRON_CORE and current else OTHER_TUNED
