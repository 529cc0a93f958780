"""Collectives on whole tensors under one name, whatever torch calls them (2.13 renamed two), and with gradients.

The gradient of each of these is the collective that carries it back to where the values came from.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate

_GATHER: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_SCATTER: Callable[..., Any] = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def all_gather(whole: torch.Tensor, part: torch.Tensor, group: dist.ProcessGroup) -> None:
    """Fill ``whole`` with the parts of all ranks in order."""
    _GATHER(whole, part, group=group)


def reduce_scatter(part: torch.Tensor, whole: torch.Tensor, group: dist.ProcessGroup) -> None:
    """Fill ``part`` with this rank's share of the sum of all ``whole`` tensors."""
    _SCATTER(part, whole, group=group)


def gather(part: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Stack the parts of all ranks in order; shape (ranks, *part.shape)."""
    return _call(_Gather, part, group)


def exchange(
    rows: torch.Tensor, group: dist.ProcessGroup, *, sent: list[int] | None = None, received: list[int] | None = None
) -> torch.Tensor:
    """Send rows to every rank and take theirs, in the order of the ranks.

    Args:
        rows: the first dimension is divided.
        group: of the ranks.
        sent: rows for each rank; None: equally many.
        received: rows from each rank; None: equally many.
    """
    return _call(_Exchange, rows, group, sent, received)


def shared_by(value: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    """Mark a value that all ranks of a mesh have alike and use in parts: its gradient is the sum of theirs."""
    alike = DTensor.from_local(value, mesh, [Replicate()] * mesh.ndim, run_check=False)
    local: torch.Tensor = alike.to_local(grad_placements=[Partial()] * mesh.ndim)
    return local


def _call(function: Any, *arguments: object) -> torch.Tensor:
    result: torch.Tensor = function.apply(*arguments)
    return result


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        whole = part.new_empty((group.size(), *part.shape))
        all_gather(whole.flatten(0, 1), part.contiguous(), group)
        return whole

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        part = gradients[0].new_empty(gradients[0].shape[1:])
        reduce_scatter(part, gradients[0].contiguous().flatten(0, 1), ctx.group)
        return part, None


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        rows: torch.Tensor,
        group: dist.ProcessGroup,
        sent: list[int] | None,
        received: list[int] | None,
    ) -> torch.Tensor:
        ctx.group, ctx.sent, ctx.received = group, sent, received
        return _exchanged(rows, group, sent, received)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        return _exchanged(gradients[0], ctx.group, ctx.received, ctx.sent), None, None, None


def _exchanged(
    rows: torch.Tensor, group: dist.ProcessGroup, sent: list[int] | None, received: list[int] | None
) -> torch.Tensor:
    count = rows.shape[0] if received is None else sum(received)
    result = rows.new_empty((count, *rows.shape[1:]))
    dist.all_to_all_single(result, rows.contiguous(), received, sent, group=group)
    return result
