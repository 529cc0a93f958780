"""Collectives on whole tensors under one name, whatever torch calls them (2.13 renamed two of them)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

_GATHER: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_SCATTER: Callable[..., Any] = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def all_gather(whole: torch.Tensor, part: torch.Tensor, group: dist.ProcessGroup) -> None:
    """Fill ``whole`` with the parts of all ranks in order."""
    _GATHER(whole, part, group=group)


def reduce_scatter(part: torch.Tensor, whole: torch.Tensor, group: dist.ProcessGroup) -> None:
    """Fill ``part`` with this rank's share of the sum of all ``whole`` tensors."""
    _SCATTER(part, whole, group=group)
