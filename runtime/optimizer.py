"""AdamW and the sum of gradients over replicas, by how much of the state is sharded.

none    gradients are all-reduced, every replica updates everything
zero1   gradients are reduce-scattered, each replica updates its slice of one flat buffer, weights are all-gathered
        (Rajbhandari et al. 2020, arXiv 1910.02054, section 5.1)
zero2, zero3   FSDP2 has reduced the gradients; each replica updates its shards
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from runtime.collectives import all_gather, reduce_scatter
from runtime.mesh import Meshes
from scenarios.layout import Layout

WEIGHT_DECAY = 0.1
BETAS = (0.9, 0.95)
"""As Llama was trained (arXiv 2302.13971, section 2.3)."""


class ReplicaOptimizer(ABC):
    """What the training loop asks of an optimizer: reduce, update, clear."""

    @abstractmethod
    def reduce_gradients(self) -> None:
        """Average the gradients over the replicas."""

    @abstractmethod
    def update(self) -> None:
        """Change the weights."""

    @abstractmethod
    def clear(self) -> None:
        """Forget the gradients."""


def build_optimizer(modules: Iterable[nn.Module], layout: Layout, meshes: Meshes, rate: float) -> ReplicaOptimizer:
    """Choose by the layout's sharding."""
    parameters = [parameter for module in modules for parameter in module.parameters() if parameter.requires_grad]
    if layout.dp > 1 and layout.optimizer_sharding == "zero1":
        return FlatShardAdamW(parameters, meshes, rate)
    if layout.dp > 1 and layout.optimizer_sharding == "none":
        return ReplicatedAdamW(parameters, meshes, rate)
    return LocalAdamW(parameters, rate)


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


class ReplicatedAdamW(LocalAdamW):
    """Every replica holds everything; one all-reduce of one flat buffer averages the gradients."""

    def __init__(self, parameters: list[nn.Parameter], meshes: Meshes, rate: float) -> None:
        super().__init__(parameters, rate)
        self.group = meshes.dp.get_group()

    def reduce_gradients(self) -> None:
        """All-reduce; the gradients become views of the reduced buffer."""
        flat = flat_gradients(self.parameters)
        dist.all_reduce(flat, group=self.group)
        flat /= self.group.size()
        for parameter, view in zip(
            self.parameters, flat.split([local(p).numel() for p in self.parameters]), strict=True
        ):
            set_local_gradient(parameter, view)


class FlatShardAdamW(ReplicaOptimizer):
    """The weights are views of one flat buffer; each replica owns and updates an equal slice of it."""

    def __init__(self, parameters: list[nn.Parameter], meshes: Meshes, rate: float) -> None:
        self.parameters, self.group = parameters, meshes.dp.get_group()
        replicas = self.group.size()
        sizes = [local(parameter).numel() for parameter in parameters]
        self.padding = -sum(sizes) % replicas
        self.flat = torch.cat([local(p).detach().flatten() for p in parameters] + [torch.zeros(self.padding)])
        for parameter, view in zip(parameters, self.flat.split([*sizes, self.padding])[:-1], strict=True):
            set_local(parameter, view.view_as(local(parameter)))
        self.shard = nn.Parameter(self.flat.chunk(replicas)[self.group.rank()])
        self.inner = adamw([self.shard], rate)

    def reduce_gradients(self) -> None:
        """Reduce-scatter into the gradient of the slice."""
        flat = flat_gradients(self.parameters, self.padding)
        gradient = torch.empty_like(self.shard)
        reduce_scatter(gradient, flat, self.group)
        self.shard.grad = gradient.div_(self.group.size())

    def update(self) -> None:
        """Step on the slice, then gather all slices into the buffer that the weights are views of."""
        self.inner.step()
        with torch.no_grad():
            all_gather(self.flat, self.shard.detach().clone(), self.group)

    def clear(self) -> None:
        """Drop the gradients."""
        self.inner.zero_grad(set_to_none=True)
        for parameter in self.parameters:
            parameter.grad = None


def local(parameter: torch.Tensor) -> torch.Tensor:
    """The part of a tensor on this rank."""
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


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
    """Join the local gradients into one flat buffer."""
    pieces = []
    for parameter in parameters:
        settle(parameter)
        assert parameter.grad is not None
        pieces.append(local(parameter.grad).flatten())
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
