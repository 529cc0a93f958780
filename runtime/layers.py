"""The smallest parts of a decoder: linear maps, norms, rotary positions, the dense feed-forward part.

Parameters are fp32 and are cast where they are used, so that the compute format is one argument.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, cast

import torch
from torch import nn
from torch._C._autograd import _top_saved_tensors_default_hooks
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate
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


def cast_again(weight: torch.Tensor, used: torch.Tensor) -> AbstractContextManager[Any]:
    """While a weight is used in another format, keep the weight for the backward pass and not its copy.

    Without this every micro-batch that is alive keeps a copy of all weights. Where a recompute or a compiler decides
    what is kept, nothing changes.

    Args:
        weight: a parameter, or this rank's part of it.
        used: its copy, which is used as it is or transposed.
    """
    decided_elsewhere = torch.compiler.is_compiling() or _top_saved_tensors_default_hooks(True) is not None
    if used.dtype == weight.dtype or decided_elsewhere:
        return nullcontext()
    kept, dtype, stride, copy = weight.detach(), used.dtype, used.stride(), _storage(used)

    def pack(tensor: torch.Tensor) -> torch.Tensor | bool:
        same = tensor.dtype == dtype and tensor.numel() == kept.numel() and _storage(tensor) == copy
        return tensor.stride() != stride if same else tensor

    def unpack(packed: torch.Tensor | bool) -> torch.Tensor:
        if isinstance(packed, torch.Tensor):
            return packed
        again = kept.to(dtype)
        return again.mT if packed else again

    return torch.autograd.graph.saved_tensors_hooks(pack, unpack)


def _storage(tensor: torch.Tensor) -> int:
    return int((tensor._local_tensor if isinstance(tensor, DTensor) else tensor).untyped_storage()._cdata)


def local(parameter: torch.Tensor) -> torch.Tensor:
    """The part of a tensor on this rank."""
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


class Linear(nn.Linear):
    """A linear map in the format of its input."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Map the last dimension."""
        bias = None if self.bias is None else met(self.bias, input)
        weight = met(self.weight, input)
        with cast_again(self.weight if isinstance(weight, DTensor) else local(self.weight), weight):
            return functional.linear(input, weight, bias)


class Embedding(nn.Embedding):
    """A table; where ranks share its rows each finds its own, and together they have them all.

    DTensor's own lookup would hold the gradient of the whole table on every rank.
    """

    split: Placement = Replicate()
    """How the ranks that share the rows share the result."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Look up tokens (batch, seq)."""
        if not isinstance(self.weight, DTensor):
            return super().forward(tokens)
        mesh, rows = self.weight.device_mesh, self.weight.to_local()
        places = tokens - mesh.get_local_rank() * len(rows)
        elsewhere = (places < 0) | (places >= len(rows))
        found = functional.embedding(places.masked_fill(elsewhere, 0), rows).masked_fill(elsewhere[..., None], 0.0)
        parts = DTensor.from_local(found, mesh, [Partial()], run_check=False)
        result: torch.Tensor = parts.redistribute(placements=[self.split]).to_local()
        return result


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
