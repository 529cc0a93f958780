"""A decoder built from a ModelSpec, whole or one stage of it (Llama-style: Touvron et al. 2023, arXiv 2302.13971)."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import torch
from torch import nn
from torch.nn import functional

from runtime.attention import LatentAttention, SelfAttention
from runtime.context import WHOLE, SequencePart
from runtime.experts import MixtureOfExperts
from runtime.layers import Embedding, FeedForward, LayerNorm, Linear, Norm, RmsNorm, repeated
from runtime.ranks import StageShare
from runtime.routing import Balance, Router
from scenarios.model import Attention, Layer, Mla, Mlp, ModelSpec, Moe

NO_BALANCE = Balance()


def norm_of(model: ModelSpec) -> Norm:
    """The kind of norm of a model."""
    return LayerNorm if model.norm_bias else RmsNorm


class Block(nn.Module):
    """One layer: norm, attention, norm, feed-forward, with residuals; norms behind both (Gemma), or one for both."""

    def __init__(self, model: ModelSpec, spec: Layer, mode: str, modules: tuple[str, ...]) -> None:
        """Build a layer; ``mode`` is f, s or n: recompute all of it, only ``modules``, or nothing."""
        super().__init__()
        assert isinstance(spec.mixer, Attention | Mla)
        assert isinstance(spec.feed_forward, Mlp | Moe)
        size, norm = model.hidden_size, norm_of(model)
        again = modules if mode == "s" else ()
        self.recompute, self.recompute_mlp = mode == "f", spec.feed_forward.type in again
        self.attention_norm = norm(size)
        self.attention: SelfAttention | LatentAttention
        if isinstance(spec.mixer, Attention):
            self.attention = SelfAttention(
                size, spec.mixer, "core_attn" in again, rotary=model.position_embeddings == 0
            )
        else:
            self.attention = LatentAttention(size, spec.mixer, "core_attn" in again)
        self.mlp_norm = norm(size) if spec.norms > 1 else None
        """None: attention and feed-forward work side by side on the same input (GPT-J)."""
        self.attention_post_norm = norm(size) if spec.norms == 4 else None
        self.mlp_post_norm = norm(size) if spec.norms == 4 else None
        self.mlp: FeedForward | MixtureOfExperts
        if isinstance(spec.feed_forward, Moe):
            self.mlp = MixtureOfExperts(size, spec.feed_forward)
        else:
            self.mlp = FeedForward(size, spec.feed_forward)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Shape (batch, seq, hidden) in and out."""
        return repeated(self.recompute, self._layer, input)

    def _layer(self, input: torch.Tensor) -> torch.Tensor:
        normed = self.attention_norm(input)
        mixed = self.attention(normed)
        if self.attention_post_norm is not None:
            mixed = self.attention_post_norm(mixed)
        attended = input + mixed
        if self.mlp_norm is not None:
            normed = self.mlp_norm(attended)
        transformed = repeated(self.recompute_mlp, self.mlp, normed)
        if self.mlp_post_norm is not None:
            transformed = self.mlp_post_norm(transformed)
        return cast(torch.Tensor, attended + transformed)


class Decoder(nn.Module):
    """The layers of one stage, with the embedding on the first and norm and head on the last."""

    def __init__(
        self,
        model: ModelSpec,
        share: StageShare,
        *,
        dtype: torch.dtype,
        recompute_modules: tuple[str, ...] = (),
        balance: Balance = NO_BALANCE,
    ) -> None:
        super().__init__()
        self.dtype = dtype
        norm, size = norm_of(model), model.hidden_size
        self.part: SequencePart = WHOLE
        learned = share.embedding and model.position_embeddings > 0
        self.embedding = Embedding(model.vocab_size, size) if share.embedding else None
        self.positions = Embedding(model.position_embeddings, size) if learned else None
        self.embedding_norm = norm(size) if share.embedding and model.embedding_norm else None
        self.layers = nn.ModuleDict(
            {
                str(index): Block(model, model.layers[index], mode, recompute_modules)
                for index, mode in zip(range(share.first, share.last), share.modes, strict=True)
            }
        )
        self.norm = norm(size) if share.head else None
        self.head = Linear(size, model.vocab_size, bias=model.head_bias) if share.head else None
        self.tied = model.tied_embeddings
        self.tie()
        for router in self.routers():
            router.balance = balance

    def blocks(self) -> list[Block]:
        """The layers of this stage."""
        return [layer for layer in self.layers.values() if isinstance(layer, Block)]

    def routers(self) -> list[Router]:
        """The routers of this stage."""
        return [block.mlp.router for block in self.blocks() if isinstance(block.mlp, MixtureOfExperts)]

    def tie(self) -> None:
        """Let the head use the embedding's weight, where the model says so and both are here."""
        if self.tied and self.embedding is not None and self.head is not None:
            self.head.weight = self.embedding.weight

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Tokens (batch, seq) or hidden states (batch, seq, hidden) in; hidden states or logits out."""
        hidden = input if self.embedding is None else self._embedded(input)
        hidden = hidden.to(self.dtype)
        for layer in self.layers.values():
            hidden = layer(hidden)
        if self.norm is None or self.head is None:
            return hidden
        return cast(torch.Tensor, self.head(self.norm(hidden)))

    def _embedded(self, tokens: torch.Tensor) -> torch.Tensor:
        assert self.embedding is not None
        hidden = self.embedding(tokens)
        if self.positions is not None:
            places = self.part.positions(tokens.shape[1], tokens.device)
            hidden = hidden + self.positions(places.expand_as(tokens))
        return cast(torch.Tensor, hidden if self.embedding_norm is None else self.embedding_norm(hidden))


LossFunction = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def token_loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Mean cross entropy in fp32 of logits (batch, seq, vocab) and targets (batch, seq)."""
    loss = functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())
    local = getattr(loss, "to_local", None)
    return loss if local is None else cast(torch.Tensor, local())
