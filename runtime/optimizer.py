"""AdamW and the sum of gradients over replicas, by how much of the state is sharded.

none    gradients are all-reduced, every replica updates everything
zero1   gradients are reduce-scattered, each replica updates its slices of flat buffers, weights are all-gathered
        (Rajbhandari et al. 2020, arXiv 1910.02054, section 5.1)
zero2, zero3   FSDP2 has reduced the gradients; each replica updates its shards

Experts have replicas of their own, and so flat buffers of their own. A buffer is small beside a model: gradients go as
they are joined, so that little more than all of them is held at any time.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from runtime.collectives import all_gather, reduce_scatter
from runtime.experts import expert_parameters
from runtime.layers import local
from runtime.mesh import Meshes
from scenarios.layout import Layout

WEIGHT_DECAY = 0.1
BETAS = (0.9, 0.95)
"""As Llama was trained (arXiv 2302.13971, section 2.3)."""

BUCKET_ELEMENTS, BUCKET_ELEMENTS_PER_RANK = 40_000_000, 1_000_000
"""Of a flat buffer, at most, whichever is more, unless one parameter has more yet (Megatron-LM's rule)."""

Part = tuple[list[nn.Parameter], DeviceMesh]
"""Parameters, and the ranks that hold them too: those that share the state, or copies of groups of these."""


class ReplicaOptimizer(ABC):
    """What the training loop asks of an optimizer: reduce, update, clear."""

    inner: torch.optim.AdamW

    @abstractmethod
    def reduce_gradients(self) -> None:
        """Sum the gradients over the replicas."""

    @abstractmethod
    def update(self) -> None:
        """Change the weights."""

    @abstractmethod
    def clear(self) -> None:
        """Forget the gradients."""

    @abstractmethod
    def reduced(self) -> Iterable[tuple[nn.Parameter, torch.Tensor, int]]:
        """Return what this rank has of the summed gradients: parameter, values, and how many ranks share them."""

    def set_rate(self, rate: float) -> None:
        """Take another learning rate."""
        for group in self.inner.param_groups:
            group["lr"] = rate


def build_optimizer(modules: Iterable[nn.Module], layout: Layout, meshes: Meshes, rate: float) -> ReplicaOptimizer:
    """Choose by the layout's sharding."""
    modules = list(modules)
    parameters = [parameter for module in modules for parameter in module.parameters() if parameter.requires_grad]
    if not meshes.shared or layout.optimizer_sharding in ("zero2", "zero3"):
        return LocalAdamW(parameters, rate)
    experts = expert_parameters(modules)
    parts = buckets([one for one in parameters if one not in experts], meshes.dp)
    if meshes.expert_dp is not None and experts:
        parts += buckets([one for one in parameters if one in experts], meshes.expert_dp)
    return FlatShardAdamW(parts, rate) if layout.optimizer_sharding == "zero1" else ReplicatedAdamW(parts, rate)


def buckets(parameters: list[nn.Parameter], mesh: DeviceMesh) -> list[Part]:
    """Divide parameters, in order, into parts of a bounded size."""
    parts: list[Part] = []
    most, room = max(BUCKET_ELEMENTS, BUCKET_ELEMENTS_PER_RANK * mesh.size()), 0
    for parameter in parameters:
        size = local(parameter).numel()
        if size > room:
            parts.append(([], mesh))
            room = most
        parts[-1][0].append(parameter)
        room -= size
    return parts


def adamw(parameters: list[nn.Parameter], rate: float) -> torch.optim.AdamW:
    """AdamW with Llama's settings, DTensors and plain tensors in groups of their own (the fused kernel wants it)."""
    kinds: dict[object, list[nn.Parameter]] = {}
    for parameter in parameters:
        kind = parameter.device_mesh if isinstance(parameter, DTensor) else None
        kinds.setdefault(kind, []).append(parameter)
    groups = [{"params": group} for group in kinds.values()]
    return torch.optim.AdamW(groups, lr=rate, betas=BETAS, weight_decay=WEIGHT_DECAY, fused=True)


class LocalAdamW(ReplicaOptimizer):
    """One replica, or gradients that FSDP2 has already reduced."""

    def __init__(self, parameters: list[nn.Parameter], rate: float) -> None:
        self.parameters, self.inner = parameters, adamw(parameters, rate)

    def reduce_gradients(self) -> None:
        """Nothing is left to do, except partial sums of tensor parallelism."""
        for parameter in self.parameters:
            settle(parameter)

    def update(self) -> None:
        """One AdamW step."""
        self.inner.step()

    def clear(self) -> None:
        """Drop the gradients."""
        self.inner.zero_grad(set_to_none=True)

    def reduced(self) -> Iterable[tuple[nn.Parameter, torch.Tensor, int]]:
        """Return the gradients as they are."""
        for parameter in self.parameters:
            assert parameter.grad is not None
            yield parameter, local(parameter.grad), 1


class ReplicatedAdamW(LocalAdamW):
    """Every replica holds everything; one all-reduce of a flat buffer sums the gradients of a part."""

    def __init__(self, parts: list[Part], rate: float) -> None:
        super().__init__([parameter for parameters, _ in parts for parameter in parameters], rate)
        self.parts = parts

    def reduce_gradients(self) -> None:
        """All-reduce; the gradients become views of the reduced buffer."""
        for parameters, mesh in self.parts:
            flat = flat_gradients(parameters)
            if mesh.size() > 1:
                dist.all_reduce(flat, group=mesh.get_group())
            for parameter, view in zip(parameters, flat.split([local(p).numel() for p in parameters]), strict=True):
                set_local_gradient(parameter, view)


class FlatShard:
    """One flat buffer that weights are views of; each of its replicas owns an equal slice."""

    def __init__(self, parameters: list[nn.Parameter], mesh: DeviceMesh) -> None:
        *copies, group = mesh.get_all_groups()
        self.parameters, self.group, self.copies = parameters, group, copies
        sizes = [local(parameter).numel() for parameter in parameters]
        self.padding = -sum(sizes) % group.size()
        pieces = [local(parameter).detach().flatten() for parameter in parameters]
        self.flat = torch.cat([*pieces, pieces[0].new_zeros(self.padding)])
        for parameter, view in zip(parameters, self.flat.split([*sizes, self.padding])[:-1], strict=True):
            set_local(parameter, view.view_as(local(parameter)))
        self.shard = nn.Parameter(self.flat.chunk(group.size())[group.rank()])

    def spans(self) -> Iterable[tuple[nn.Parameter, int, int, int]]:
        """Return which elements of each parameter are in the slice: first, last (exclusive), and their place."""
        first = self.group.rank() * self.shard.numel()
        begin = 0
        for parameter in self.parameters:
            size = local(parameter).numel()
            low, high = max(first - begin, 0), min(first + self.shard.numel() - begin, size)
            yield parameter, low, max(low, high), begin + low - first
            begin += size


class FlatShardAdamW(ReplicaOptimizer):
    """The replicas of each part own and update equal slices of it."""

    def __init__(self, parts: list[Part], rate: float) -> None:
        self.shards = [FlatShard(parameters, mesh) for parameters, mesh in parts]
        self.inner = adamw([one.shard for one in self.shards], rate)

    def reduce_gradients(self) -> None:
        """Reduce-scatter into the gradient of the slice."""
        for one in self.shards:
            gradient = flat = flat_gradients(one.parameters, one.padding)
            if one.group.size() > 1:
                gradient = torch.empty_like(one.shard)
                reduce_scatter(gradient, flat, one.group)
            for copies in one.copies:
                dist.all_reduce(gradient, group=copies)
            one.shard.grad = gradient

    def update(self) -> None:
        """Step on the slices, then gather all slices into the buffer that the weights are views of."""
        self.inner.step()
        with torch.no_grad():
            for one in self.shards:
                if one.group.size() > 1:
                    all_gather(one.flat, one.shard.detach().clone(), one.group)

    def reduced(self) -> Iterable[tuple[nn.Parameter, torch.Tensor, int]]:
        """Return of each gradient what lies in this rank's slice."""
        for one in self.shards:
            assert one.shard.grad is not None
            for parameter, low, high, place in one.spans():
                yield parameter, one.shard.grad[place : place + high - low], one.group.size()

    def clear(self) -> None:
        """Drop the gradients."""
        self.inner.zero_grad(set_to_none=True)


def set_local(parameter: nn.Parameter, view: torch.Tensor) -> None:
    """Let a parameter's local values live in ``view``."""
    if isinstance(parameter, DTensor):
        parameter._local_tensor = view
    else:
        parameter.data = view


def settle(parameter: torch.Tensor) -> None:
    """Sum a gradient that tensor parallelism left as partial sums, so that it is placed as its parameter is."""
    gradient = parameter.grad
    if not isinstance(gradient, DTensor) or not isinstance(parameter, DTensor):
        return
    if tuple(gradient.placements) != tuple(parameter.placements):
        parameter.grad = gradient.redistribute(placements=parameter.placements)


def flat_gradients(parameters: list[nn.Parameter], padding: int = 0) -> torch.Tensor:
    """Move the local gradients into one flat buffer."""
    pieces = []
    for parameter in parameters:
        settle(parameter)
        assert parameter.grad is not None
        pieces.append(local(parameter.grad).flatten())
        parameter.grad = None
    if padding:
        pieces.append(pieces[0].new_zeros(padding))
    return torch.cat(pieces)


def set_local_gradient(parameter: nn.Parameter, view: torch.Tensor) -> None:
    """Let a parameter's local gradient live in ``view``."""
    values = view.view_as(local(parameter))
    if isinstance(parameter, DTensor):
        parameter.grad = cast(
            torch.Tensor,
            DTensor.from_local(
                values,
                parameter.device_mesh,
                parameter.placements,
                run_check=False,
                shape=parameter.shape,
                stride=parameter.stride(),
            ),
        )
    else:
        parameter.grad = values
