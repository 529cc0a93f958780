"""The smallest parts of a decoder: linear maps, norms, rotary positions, the dense feed-forward part.

Parameters are fp32 and are cast where they are used, so that the compute format is one argument.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Partial
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from scenarios.model import Mlp

ROPE_BASE = 10_000.0
"""Base of the rotary angles (Su et al. 2021, arXiv 2104.09864); it has no influence on speed."""


def met(weight: torch.Tensor, input: torch.Tensor) -> torch.Tensor:
    """The weight that an input meets, in its format.

    Where all tensor parallel ranks hold a weight and each uses it on its own part of the tokens or heads, its gradient
    on a rank is a part of the sum.
    """
    if isinstance(weight, DTensor) and not isinstance(input, DTensor):
        weight = weight.to_local(grad_placements=[Partial()] * weight.device_mesh.ndim)
    return weight.to(input.dtype)


class Linear(nn.Linear):
    """A linear map in the format of its input."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Map the last dimension."""
        bias = None if self.bias is None else met(self.bias, input)
        return functional.linear(input, met(self.weight, input), bias)


class RmsNorm(nn.Module):
    """Root mean square norm (Zhang and Sennrich 2019, arXiv 1910.07467), computed in fp32."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden_size))

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Normalise the last dimension."""
        wide = input.float()
        return functional.rms_norm(wide, (input.shape[-1],), met(self.weight, wide), 1e-5).to(input.dtype)


class LayerNorm(nn.Module):
    """Norm with mean and bias (Ba et al. 2016, arXiv 1607.06450), computed in fp32."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden_size))
        self.bias = nn.Parameter(torch.zeros(hidden_size))

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Normalise the last dimension."""
        wide = input.float()
        weight, bias = met(self.weight, wide), met(self.bias, wide)
        return functional.layer_norm(wide, (input.shape[-1],), weight, bias, 1e-5).to(input.dtype)


Norm = Callable[[int], RmsNorm | LayerNorm]
"""Builds a norm of a size."""


def rotate(heads: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
    """Turn query or key heads of shape (batch, heads, seq, head_dim) by their position."""
    cos, sin = angles.cos().to(heads.dtype), angles.sin().to(heads.dtype)
    first, second = heads.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, first * sin + second * cos], dim=-1)


def rotary_angles(positions: torch.Tensor, head_dim: int) -> torch.Tensor:
    """Return the angles of positions (seq,); shape (seq, head_dim / 2)."""
    evens = torch.arange(0, head_dim, 2, device=positions.device, dtype=torch.float32)
    return positions.float()[:, None] * ROPE_BASE ** (-evens / head_dim)


def activated(up: torch.Tensor, gate: torch.Tensor | None) -> torch.Tensor:
    """SwiGLU (Shazeer 2020, arXiv 2002.05202), or GELU without a gate."""
    return functional.gelu(up) if gate is None else functional.silu(gate) * up


class FeedForward(nn.Module):
    """Two matrices, or three with a gate."""

    def __init__(self, hidden_size: int, spec: Mlp) -> None:
        super().__init__()
        self.up = Linear(hidden_size, spec.ffn_hidden_size, bias=spec.bias)
        self.gate = Linear(hidden_size, spec.ffn_hidden_size, bias=spec.bias) if spec.gated else None
        self.down = Linear(spec.ffn_hidden_size, hidden_size, bias=spec.bias)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Transform each token."""
        gate = None if self.gate is None else self.gate(input)
        return cast(torch.Tensor, self.down(activated(self.up(input), gate)))


def repeated(again: bool, part: Callable[..., torch.Tensor], *inputs: torch.Tensor) -> torch.Tensor:
    """Run a part of a layer, whose activations are recomputed in the backward pass if ``again``."""
    if not again:
        return part(*inputs)
    return cast(torch.Tensor, checkpoint(part, *inputs, use_reentrant=False, preserve_rng_state=False))
