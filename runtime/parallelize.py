"""One stage of the model under a layout: tensor parallel, then sharded data parallel, with torch's own parts.

Order matters: tensor parallel first, then FSDP2 on each layer, then on the root (as torchtitan does).
"""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from runtime.mesh import Meshes
from runtime.transformer import Decoder
from scenarios.layout import Layout


def parallelize(decoder: Decoder, layout: Layout, meshes: Meshes) -> Decoder:
    """Apply a layout's tensor and data parallelism to a stage, in place."""
    if layout.tp > 1:
        apply_tensor_parallel(decoder, layout, meshes)
    if uses_fsdp(layout):
        apply_fsdp(decoder, layout, meshes)
    return decoder


def uses_fsdp(layout: Layout) -> bool:
    """Gradients (zero2) or weights too (zero3) are sharded: FSDP2 does it."""
    return layout.dp > 1 and layout.optimizer_sharding in ("zero2", "zero3")


def apply_tensor_parallel(decoder: Decoder, layout: Layout, meshes: Meshes) -> None:
    """Split heads, feed-forward width and vocabulary; with sequence parallelism also norms and residuals."""
    split: Shard | Replicate = Shard(1) if layout.sequence_parallel else Replicate()
    ends: dict[str, ParallelStyle] = {}
    if decoder.embedding is not None:
        ends["embedding"] = RowwiseParallel(input_layouts=Replicate(), output_layouts=split)
    if decoder.head is not None:
        if layout.sequence_parallel:
            ends["norm"] = SequenceParallel()
        ends["head"] = ColwiseParallel(input_layouts=split, output_layouts=Shard(-1), use_local_output=False)
    if ends:
        parallelize_module(decoder, meshes.tp, ends)
        decoder.tie()
    for layer in decoder.blocks():
        styles: dict[str, ParallelStyle] = {
            "attention.query": ColwiseParallel(),
            "attention.key": ColwiseParallel(),
            "attention.value": ColwiseParallel(),
            "attention.output": RowwiseParallel(output_layouts=split),
            "mlp.up": ColwiseParallel(),
            "mlp.gate": ColwiseParallel(),
            "mlp.down": RowwiseParallel(output_layouts=split),
        }
        if layer.mlp.gate is None:
            del styles["mlp.gate"]
        if layout.sequence_parallel:
            gather = PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),))
            styles |= {
                "attention_norm": SequenceParallel(),
                "mlp_norm": SequenceParallel(),
                "attention": gather,
                "mlp": gather,
            }
        parallelize_module(layer, meshes.tp, styles)


def apply_fsdp(decoder: Decoder, layout: Layout, meshes: Meshes) -> None:
    """Shard weights, gradients and optimizer state over dp; zero2 keeps the gathered weights until the step ends."""
    reshard = layout.optimizer_sharding == "zero3"
    policy = MixedPrecisionPolicy()
    if decoder.dtype != torch.float32:
        policy = MixedPrecisionPolicy(param_dtype=decoder.dtype, reduce_dtype=torch.float32)
    for layer in decoder.layers.values():
        fully_shard(layer, mesh=meshes.dp, reshard_after_forward=reshard, mp_policy=policy)
    fully_shard(decoder, mesh=meshes.dp, reshard_after_forward=reshard, mp_policy=policy)


def mark_microbatch(module: nn.Module, layout: Layout, *, last: bool) -> None:
    """Tell FSDP2 whether a backward pass is the last of the step: zero2 gathers its weights once a step."""
    if isinstance(module, FSDPModule):
        module.set_is_last_backward(last)
        if layout.optimizer_sharding == "zero2":
            module.set_reshard_after_backward(last)
