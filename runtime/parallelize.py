"""One stage of the model under a layout: tensor, expert and context parallel, then sharded data parallel.

Order matters: what splits weights first, then FSDP2 on experts, on each layer, and on the root (as torchtitan does).
All reductions are sums: the loss is a part of the mean over the global batch (``runtime.pipeline``).
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Placement, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    PrepareModuleInputOutput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from runtime.attention import LatentAttention
from runtime.context import SequencePart
from runtime.experts import Experts, MixtureOfExperts, split_experts
from runtime.layers import Embedding, local
from runtime.mesh import Meshes
from runtime.request import Recipe
from runtime.transformer import Block, Decoder
from scenarios.layout import Layout

Styles = dict[str, ParallelStyle]
USUAL = Recipe()


class Duplicated(ParallelStyle):
    """Every rank holds the weights and uses them on its own tokens or heads; their gradients are parts of a sum."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        return distribute_module(module, device_mesh)


class RowsSplit(ParallelStyle):
    """Every rank holds an equal part of the rows of a table."""

    def __init__(self, split: Placement) -> None:
        super().__init__()
        self.split = split

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        assert isinstance(module, Embedding)
        module.split = self.split
        module.weight = nn.Parameter(distribute_tensor(module.weight.detach(), device_mesh, [Shard(0)]))
        return module


def parallelize(decoder: Decoder, layout: Layout, meshes: Meshes, recipe: Recipe = USUAL) -> Decoder:
    """Apply a layout's tensor, expert, context and data parallelism to a stage, in place."""
    if meshes.cp is not None:
        by_torch = recipe.split_attention == "torch"
        part = SequencePart(kind=layout.cp_comm, group=meshes.cp.get_group(), by_torch=by_torch)
        decoder.part = part
        for layer in decoder.blocks():
            layer.attention.part = part
    split = tuple(mesh.get_group() for mesh in (meshes.cp, meshes.tp) if mesh is not None and mesh.size() > 1)
    for router in decoder.routers():
        router.balance = replace(router.balance, sequence_groups=split)
    if meshes.experts is not None and meshes.exchange is not None:
        for layer in decoder.blocks():
            if isinstance(layer.mlp, MixtureOfExperts):
                split_experts(layer.mlp, meshes.experts, meshes.exchange)
    if layout.tp > 1:
        apply_tensor_parallel(decoder, layout, meshes.tp)
    if recipe.compile is not None:
        for layer in decoder.blocks():
            layer.compile(mode=recipe.compile)
    if uses_fsdp(layout, meshes):
        apply_fsdp(decoder, layout, meshes)
    return decoder


def uses_fsdp(layout: Layout, meshes: Meshes) -> bool:
    """Gradients (zero2) or weights too (zero3) are sharded: FSDP2 does it."""
    return meshes.shared and layout.optimizer_sharding in ("zero2", "zero3")


def apply_tensor_parallel(decoder: Decoder, layout: Layout, tp: DeviceMesh) -> None:
    """Split heads, feed-forward width and vocabulary; with sequence parallelism also norms and residuals."""
    split: Shard | Replicate = Shard(1) if layout.sequence_parallel else Replicate()
    ends: Styles = {}
    if decoder.embedding is not None:
        for table in ("embedding", "positions"):
            if getattr(decoder, table) is not None:
                ends[table] = RowsSplit(split)
        if layout.sequence_parallel and decoder.embedding_norm is not None:
            ends["embedding_norm"] = SequenceParallel(use_local_output=True)
    if decoder.head is not None:
        if layout.sequence_parallel:
            ends["norm"] = SequenceParallel()
        ends["head"] = ColwiseParallel(input_layouts=split, output_layouts=Shard(-1), use_local_output=False)
    if ends:
        parallelize_module(decoder, tp, ends)
        decoder.tie()
    for layer in decoder.blocks():
        styles = _attention_styles(layer, split, tp) | _feed_forward_styles(layer, split)
        if layout.sequence_parallel:
            styles |= _norm_styles(layer)
        parallelize_module(layer, tp, styles)


def _norm_styles(layer: Block) -> Styles:
    styles: Styles = {}
    for name in ("attention_norm", "mlp_norm", "attention_post_norm", "mlp_post_norm"):
        if getattr(layer, name) is not None:
            styles[name] = SequenceParallel(use_local_output="post" in name)
    return styles


def _attention_styles(layer: Block, split: Placement, tp: DeviceMesh) -> Styles:
    styles: Styles = {"attention.output": RowwiseParallel(output_layouts=split)}
    latent = isinstance(layer.attention, LatentAttention)
    if isinstance(layer.attention, LatentAttention):
        layer.attention.tp = tp
        styles |= {"attention.query_up": ColwiseParallel(), "attention.up": ColwiseParallel()}
    else:
        styles |= {f"attention.{name}": ColwiseParallel() for name in ("query", "key", "value")}
        if layer.attention.query_norm is not None:
            styles |= {f"attention.{name}": Duplicated() for name in ("query_norm", "key_norm")}
        if layer.attention.sinks is not None:
            sinks = layer.attention.sinks.detach()
            layer.attention.sinks = nn.Parameter(distribute_tensor(sinks, tp, [Shard(0)]))
    if isinstance(split, Shard):
        styles["attention"] = _gathered(use_local_output=latent)
    return styles


def _feed_forward_styles(layer: Block, split: Placement) -> Styles:
    if not isinstance(layer.mlp, MixtureOfExperts):
        gathered: Styles = {"mlp": _gathered()} if isinstance(split, Shard) else {}
        return gathered | _wide("mlp", layer.mlp.gate is not None, split)
    styles: Styles = {
        # each rank routes its own part of the tokens, whether norms and residuals are split or not
        "mlp": PrepareModuleInputOutput(
            input_layouts=(split,),
            desired_input_layouts=(Shard(1),),
            use_local_input=True,
            output_layouts=(Shard(1),),
            desired_output_layouts=(split,),
        ),
        "mlp.router.gate": Duplicated(),
    }
    if layer.mlp.shared is not None:
        styles |= {"mlp.shared": _gathered()} | _wide("mlp.shared", layer.mlp.shared.gate is not None, Shard(1))
    if layer.mlp.shared_gate is not None:
        styles["mlp.shared_gate"] = Duplicated()
    return styles


def _gathered(*, use_local_output: bool = False) -> PrepareModuleInput:
    return PrepareModuleInput(
        input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),), use_local_output=use_local_output
    )


def _wide(name: str, gated: bool, split: Placement) -> Styles:
    """Split the width of a feed-forward part."""
    columns = ("up", "gate") if gated else ("up",)
    return {f"{name}.{one}": ColwiseParallel() for one in columns} | {
        f"{name}.down": RowwiseParallel(output_layouts=split)
    }


def apply_fsdp(decoder: Decoder, layout: Layout, meshes: Meshes) -> None:
    """Shard weights, gradients and optimizer state over the replicas, those of experts over the copies of experts.

    zero2 keeps the gathered weights until the step ends.
    """
    reshard = layout.optimizer_sharding == "zero3"
    policy = MixedPrecisionPolicy()
    if decoder.dtype != torch.float32:
        policy = MixedPrecisionPolicy(param_dtype=decoder.dtype, reduce_dtype=torch.float32)
    for module in decoder.modules():
        if isinstance(module, Experts):
            assert meshes.expert_dp is not None
            copies = meshes.expert_dp.size(meshes.expert_dp.ndim - 1)
            fully_shard(
                module,
                mesh=meshes.expert_dp,
                reshard_after_forward=reshard,
                mp_policy=policy,
                shard_placement_fn=partial(_sharded_dimension, copies=copies),
            )
    for layer in decoder.layers.values():
        fully_shard(layer, mesh=meshes.dp, reshard_after_forward=reshard, mp_policy=policy)
    fully_shard(decoder, mesh=meshes.dp, reshard_after_forward=reshard, mp_policy=policy)
    for module in decoder.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # gloo knows no sum of products (PREMUL_SUM)


def _sharded_dimension(parameter: nn.Parameter, copies: int) -> Shard:
    """Shard the experts, or their first matrix dimension where there are too few of them to be shared evenly."""
    count, rows = (local(parameter).shape[dim] for dim in (0, 1))
    return Shard(1) if count % copies and rows % copies == 0 else Shard(0)


def mark_microbatch(module: nn.Module, layout: Layout, *, last: bool) -> None:
    """Tell FSDP2 whether a backward pass is the last of the step: zero2 gathers its weights once a step."""
    if isinstance(module, FSDPModule):
        module.set_is_last_backward(last)
        if layout.optimizer_sharding == "zero2":
            module.set_reshard_after_backward(last)
