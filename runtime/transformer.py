"""A Llama-style decoder (Touvron et al. 2023, arXiv 2302.13971) built from a ModelSpec, whole or one stage of it.

Parameters are fp32 and are cast where they are used, so that the compute format is one argument. Each parameter is
drawn from a stream named by (seed, its name in the whole model), so that any stage of any layout holds the same values.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from runtime.data import generator
from runtime.ranks import StageShare
from scenarios.model import Attention, Layer, Mlp, ModelSpec

ROPE_BASE = 10_000.0
"""Base of the rotary angles (Su et al. 2021, arXiv 2104.09864); it has no influence on speed."""
INIT_STD = 0.02
"""Standard deviation of all matrices at the start (as GPT-2 and Llama do)."""


class Linear(nn.Linear):
    """A linear map in the format of its input."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Map the last dimension."""
        bias = None if self.bias is None else self.bias.to(input.dtype)
        return functional.linear(input, self.weight.to(input.dtype), bias)


class RmsNorm(nn.Module):
    """Root mean square norm (Zhang and Sennrich 2019, arXiv 1910.07467), computed in fp32."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden_size))

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Normalise the last dimension."""
        return functional.rms_norm(input.float(), (input.shape[-1],), self.weight.float(), 1e-5).to(input.dtype)


def rotate(heads: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
    """Turn query or key heads of shape (batch, heads, seq, head_dim) by their position."""
    cos, sin = angles.cos().to(heads.dtype), angles.sin().to(heads.dtype)
    first, second = heads.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, first * sin + second * cos], dim=-1)


def rotary_angles(seq_length: int, head_dim: int, device: torch.device) -> torch.Tensor:
    """Return the angles of shape (seq_length, head_dim / 2)."""
    frequencies = ROPE_BASE ** (-torch.arange(0, head_dim, 2, device=device, dtype=torch.float32) / head_dim)
    return torch.arange(seq_length, device=device, dtype=torch.float32)[:, None] * frequencies


class SelfAttention(nn.Module):
    """Causal attention with grouped queries; under tensor parallelism it holds the heads of its rank."""

    def __init__(self, hidden_size: int, spec: Attention, recompute_core: bool) -> None:
        super().__init__()
        self.head_dim, self.recompute_core = spec.head_dim, recompute_core
        self.query = Linear(hidden_size, spec.heads * spec.head_dim, bias=spec.qkv_bias)
        self.key = Linear(hidden_size, spec.kv_heads * spec.head_dim, bias=spec.qkv_bias)
        self.value = Linear(hidden_size, spec.kv_heads * spec.head_dim, bias=spec.qkv_bias)
        self.output = Linear(spec.heads * spec.head_dim, hidden_size, bias=spec.output_bias)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Mix tokens; shape (batch, seq, hidden)."""
        batch, seq_length = input.shape[:2]
        query, key, value = (
            projection(input).view(batch, seq_length, -1, self.head_dim).transpose(1, 2)
            for projection in (self.query, self.key, self.value)
        )
        if self.recompute_core:
            mixed = checkpoint(self._core, query, key, value, use_reentrant=False, preserve_rng_state=False)
        else:
            mixed = self._core(query, key, value)
        return cast(torch.Tensor, self.output(mixed.transpose(1, 2).reshape(batch, seq_length, -1)))

    def _core(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        angles = rotary_angles(query.shape[2], self.head_dim, query.device)
        query, key = rotate(query, angles), rotate(key, angles)
        grouped = query.shape[1] != key.shape[1]
        return functional.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=grouped)


class FeedForward(nn.Module):
    """SwiGLU (Shazeer 2020, arXiv 2002.05202), or two matrices with GELU."""

    def __init__(self, hidden_size: int, spec: Mlp) -> None:
        super().__init__()
        self.up = Linear(hidden_size, spec.ffn_hidden_size, bias=spec.bias)
        self.gate = Linear(hidden_size, spec.ffn_hidden_size, bias=spec.bias) if spec.gated else None
        self.down = Linear(spec.ffn_hidden_size, hidden_size, bias=spec.bias)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Transform each token."""
        up = self.up(input)
        return cast(
            torch.Tensor,
            self.down(functional.gelu(up) if self.gate is None else functional.silu(self.gate(input)) * up),
        )


class Block(nn.Module):
    """One layer: norm, attention, norm, feed-forward, with residuals."""

    def __init__(self, hidden_size: int, spec: Layer, recompute: bool, recompute_core: bool) -> None:
        super().__init__()
        assert isinstance(spec.mixer, Attention)
        assert isinstance(spec.feed_forward, Mlp)
        self.recompute = recompute
        self.attention_norm = RmsNorm(hidden_size)
        self.attention = SelfAttention(hidden_size, spec.mixer, recompute_core and not recompute)
        self.mlp_norm = RmsNorm(hidden_size)
        self.mlp = FeedForward(hidden_size, spec.feed_forward)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Shape (batch, seq, hidden) in and out."""
        if self.recompute:
            return cast(torch.Tensor, checkpoint(self._layer, input, use_reentrant=False, preserve_rng_state=False))
        return self._layer(input)

    def _layer(self, input: torch.Tensor) -> torch.Tensor:
        attended = input + self.attention(self.attention_norm(input))
        return cast(torch.Tensor, attended + self.mlp(self.mlp_norm(attended)))


class Decoder(nn.Module):
    """The layers of one stage, with the embedding on the first and norm and head on the last."""

    def __init__(self, model: ModelSpec, share: StageShare, *, recompute_core: bool, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype
        self.embedding = nn.Embedding(model.vocab_size, model.hidden_size) if share.embedding else None
        self.layers = nn.ModuleDict(
            {
                str(index): Block(
                    model.hidden_size,
                    model.layers[index],
                    recompute=index < share.first + share.recompute_layers,
                    recompute_core=recompute_core,
                )
                for index in range(share.first, share.last)
            }
        )
        self.norm = RmsNorm(model.hidden_size) if share.head else None
        self.head = Linear(model.hidden_size, model.vocab_size, bias=False) if share.head else None
        self.tied = model.tied_embeddings
        self.tie()

    def blocks(self) -> list[Block]:
        """The layers of this stage."""
        return [layer for layer in self.layers.values() if isinstance(layer, Block)]

    def tie(self) -> None:
        """Let the head use the embedding's weight, where the model says so and both are here."""
        if self.tied and self.embedding is not None and self.head is not None:
            self.head.weight = self.embedding.weight

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Tokens (batch, seq) or hidden states (batch, seq, hidden) in; hidden states or logits out."""
        hidden = input if self.embedding is None else self.embedding(input)
        hidden = hidden.to(self.dtype)
        for layer in self.layers.values():
            hidden = layer(hidden)
        if self.norm is None or self.head is None:
            return hidden
        return cast(torch.Tensor, self.head(self.norm(hidden)))


def initialise(decoder: Decoder, seed: int) -> None:
    """Fill the parameters: matrices normal with INIT_STD, norms 1, biases 0, each from the stream of its own name."""
    with torch.no_grad():
        for name, parameter in decoder.named_parameters():
            if decoder.tied and name == "head.weight":
                name = "embedding.weight"
            if parameter.dim() > 1:
                drawn = torch.empty(parameter.shape).normal_(0.0, INIT_STD, generator=generator(seed, name))
                parameter.copy_(drawn)
            elif name.endswith("bias"):
                parameter.zero_()


def build_decoder(
    model: ModelSpec, share: StageShare, *, seed: int, recompute_core: bool, dtype: torch.dtype, device: torch.device
) -> Decoder:
    """Build and initialise one stage on a device."""
    decoder = Decoder(model, share, recompute_core=recompute_core, dtype=dtype)
    initialise(decoder, seed)
    return decoder.to(device)


LossFunction = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def token_loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Mean cross entropy in fp32 of logits (batch, seq, vocab) and targets (batch, seq)."""
    loss = functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())
    local = getattr(loss, "to_local", None)
    return loss if local is None else cast(torch.Tensor, local())
