"""Token mixers of a decoder: attention with grouped queries, and multi-head latent attention."""

from __future__ import annotations

from typing import cast

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from runtime.collectives import shared_by
from runtime.context import WHOLE, SequencePart
from runtime.layers import Linear, RmsNorm, repeated, rotary_angles, rotate
from runtime.reach import Reach
from scenarios.model import Attention, Mla


class SelfAttention(nn.Module):
    """Causal attention with grouped queries; under tensor parallelism it holds the heads of its rank."""

    def __init__(self, hidden_size: int, spec: Attention, recompute_core: bool, *, rotary: bool = True) -> None:
        super().__init__()
        self.head_dim, self.recompute_core, self.rotary = spec.head_dim, recompute_core, rotary
        self.reach = Reach(window=spec.window, chunk=spec.chunk)
        self.part: SequencePart = WHOLE
        self.query = Linear(hidden_size, spec.heads * spec.head_dim, bias=spec.qkv_bias)
        self.key = Linear(hidden_size, spec.kv_heads * spec.head_dim, bias=spec.qkv_bias)
        self.value = Linear(hidden_size, spec.kv_heads * spec.head_dim, bias=spec.qkv_bias)
        self.output = Linear(spec.heads * spec.head_dim, hidden_size, bias=spec.output_bias)
        self.query_norm = RmsNorm(spec.head_dim) if spec.qk_norm else None
        self.key_norm = RmsNorm(spec.head_dim) if spec.qk_norm else None
        self.sinks = nn.Parameter(torch.zeros(spec.heads)) if spec.sinks else None

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Mix tokens; shape (batch, seq, hidden)."""
        batch, seq_length = input.shape[:2]
        query, key, value = (
            projection(input).view(batch, seq_length, -1, self.head_dim).transpose(1, 2)
            for projection in (self.query, self.key, self.value)
        )
        mixed = repeated(self.recompute_core, self._core, query, key, value)
        return cast(torch.Tensor, self.output(mixed.transpose(1, 2).reshape(batch, seq_length, -1)))

    def _core(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        if self.query_norm is not None and self.key_norm is not None:
            query, key = self.query_norm(query), self.key_norm(key)
        if self.rotary:
            angles = rotary_angles(self.part.positions(query.shape[2], query.device), self.head_dim)
            query, key = rotate(query, angles), rotate(key, angles)
        sinks = None if self.sinks is None else local_heads(self.sinks)
        return self.part.attend(query, key, value, self.reach, sinks)


class LatentAttention(nn.Module):
    """Keys and values of all heads from one small latent vector (DeepSeek-V2, arXiv 2405.04434, section 2.1).

    Under tensor parallelism every rank makes the latents, and the heads of its share from them.
    """

    def __init__(self, hidden_size: int, spec: Mla, recompute_core: bool) -> None:
        super().__init__()
        self.spec, self.recompute_core = spec, recompute_core
        self.part: SequencePart = WHOLE
        self.tp: DeviceMesh | None = None
        """The ranks that share the heads."""
        query_size = spec.heads * (spec.qk_nope_head_dim + spec.qk_rope_head_dim)
        self.query_down = self.query_norm = None
        if spec.q_lora_rank is not None:
            self.query_down = Linear(hidden_size, spec.q_lora_rank, bias=False)
            self.query_norm = RmsNorm(spec.q_lora_rank)
        self.query_up = Linear(spec.q_lora_rank or hidden_size, query_size, bias=False)
        self.down = Linear(hidden_size, spec.kv_lora_rank + spec.qk_rope_head_dim, bias=False)
        self.norm = RmsNorm(spec.kv_lora_rank)
        self.up = Linear(spec.kv_lora_rank, spec.heads * (spec.qk_nope_head_dim + spec.v_head_dim), bias=False)
        self.output = Linear(spec.heads * spec.v_head_dim, hidden_size, bias=False)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Mix tokens; shape (batch, seq, hidden)."""
        batch, seq_length = input.shape[:2]
        latent = input
        if self.query_down is not None and self.query_norm is not None:
            latent = self.query_norm(self.query_down(input))
        query = self._heads(self.query_up(latent))
        compressed, position = self.down(input).split([self.spec.kv_lora_rank, self.spec.qk_rope_head_dim], dim=-1)
        if self.tp is not None:
            position = shared_by(position, self.tp)
        both = self._heads(self.up(self.norm(compressed)))
        mixed = repeated(self.recompute_core, self._core, query, both, position[:, None])
        return cast(torch.Tensor, self.output(mixed.transpose(1, 2).reshape(batch, seq_length, -1)))

    def _heads(self, projected: torch.Tensor) -> torch.Tensor:
        """Divide the last dimension into the heads of this rank; shape (batch, heads, seq, size)."""
        heads = self.spec.heads // (1 if self.tp is None else self.tp.size())
        split: torch.Tensor = projected.unflatten(-1, (heads, -1))
        return split.transpose(1, 2)

    def _core(self, query: torch.Tensor, both: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        """Attend with queries and keys that have a part with and a part without a position."""
        spec = self.spec
        angles = rotary_angles(self.part.positions(query.shape[2], query.device), spec.qk_rope_head_dim)
        plain, turned = query.split([spec.qk_nope_head_dim, spec.qk_rope_head_dim], dim=-1)
        key, value = both.split([spec.qk_nope_head_dim, spec.v_head_dim], dim=-1)
        query = torch.cat([plain, rotate(turned, angles)], dim=-1)
        key = torch.cat([key, rotate(position, angles).expand(-1, key.shape[1], -1, -1)], dim=-1)
        return self.part.attend(query, key, value, Reach(), None)


def local_heads(per_head: torch.Tensor) -> torch.Tensor:
    """The values of this rank's heads."""
    to_local = getattr(per_head, "to_local", None)
    return per_head if to_local is None else cast(torch.Tensor, to_local())
