"""Attention over sequences that are split between ranks (context parallelism), and over whole ones.

ring, all-gather: a sequence is cut into 2 cp blocks and rank r holds the blocks r and 2 cp - 1 - r, so that causal work
is equal (zigzag; Llama 3, arXiv 2407.21783, section 3.3.2); keys and values come by one after the other, or together.
all-to-all: rank r holds the r-th of cp blocks, and for the attention all tokens of its share of the heads (DeepSpeed
Ulysses, arXiv 2309.14509).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.nn import functional

from runtime.collectives import exchange, gather
from runtime.reach import Reach
from runtime.ring import Ring, Rows, ring_attention
from scenarios.layout import ContextExchange


@dataclass(frozen=True, slots=True, kw_only=True)
class SequencePart:
    """The part of every sequence that a rank holds."""

    kind: ContextExchange = "ring"
    group: dist.ProcessGroup | None = None
    """None: all of it."""
    by_torch: bool = False
    """torch's ``context_parallel`` is entered around the step (``runtime.torch_context``)."""

    @property
    def size(self) -> int:
        """Ranks that share a sequence."""
        return 1 if self.group is None else self.group.size()

    def positions(self, local_length: int, device: torch.device | None = None) -> torch.Tensor:
        """Return the places of this rank's tokens in the sequence."""
        rank = 0 if self.group is None else self.group.rank()
        return self._positions_of(rank, local_length, device)

    def attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, reach: Reach, sinks: torch.Tensor | None
    ) -> torch.Tensor:
        """Attend from this rank's queries to the keys of all ranks; shapes are (batch, heads, seq, head_dim)."""
        if self.group is None:
            return attention(query, key, value, reach, sinks)
        if self.by_torch:
            key, value = (one.repeat_interleave(query.shape[1] // one.shape[1], 1) for one in (key, value))
            return attention(query, key, value, reach, sinks)
        if self.kind == "all-to-all":
            return self._by_heads(query, key, value, reach, sinks)
        if self.kind == "ring":
            length = query.shape[2]
            blocks = [self._blocks_of(rank, length) for rank in range(self.size)]
            return ring_attention(query, key, value, Ring(self.group, blocks, reach), sinks)
        return self._by_blocks(query, key, value, reach, sinks)

    def _positions_of(self, rank: int, local_length: int, device: torch.device | None) -> torch.Tensor:
        blocks = self._blocks_of(rank, local_length)
        return torch.cat([torch.arange(start, start + of.stop - of.start, device=device) for start, of in blocks])

    def _blocks_of(self, rank: int, local_length: int) -> list[Rows]:
        """The position of the first token of each block of a rank, and where it is in the local part."""
        if self.group is None or self.kind == "all-to-all":
            return [(rank * local_length, slice(0, local_length))]
        block = local_length // 2
        low, high = rank * block, (2 * self.size - 1 - rank) * block
        return [(low, slice(0, block)), (high, slice(block, local_length))]

    def _by_heads(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, reach: Reach, sinks: torch.Tensor | None
    ) -> torch.Tensor:
        assert self.group is not None
        if key.shape[1] % self.size:
            key, value = (heads.repeat_interleave(query.shape[1] // heads.shape[1], 1) for heads in (key, value))
        query, key, value = (self._heads_here(heads) for heads in (query, key, value))
        if sinks is not None:
            sinks = sinks.chunk(self.size)[self.group.rank()]
        mixed = attention(query, key, value, reach, sinks)
        back = exchange(mixed.unflatten(2, (self.size, -1)).movedim(2, 0), self.group)
        return back.movedim(0, 1).flatten(1, 2)

    def _heads_here(self, heads: torch.Tensor) -> torch.Tensor:
        """All tokens of a share of the heads, for some tokens of all heads."""
        assert self.group is not None
        parts = exchange(heads.unflatten(1, (self.size, -1)).movedim(1, 0), self.group)
        return parts.movedim(0, 2).flatten(2, 3)

    def _by_blocks(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, reach: Reach, sinks: torch.Tensor | None
    ) -> torch.Tensor:
        assert self.group is not None
        length = query.shape[2]
        held = torch.cat([self._positions_of(rank, length, query.device) for rank in range(self.size)])
        order = held.argsort()
        key, value = (gather(one, self.group).movedim(0, 2).flatten(2, 3)[:, :, order] for one in (key, value))
        mixed = []
        for start, rows in self._blocks_of(self.group.rank(), length):
            keys = slice(reach.first(start), start + rows.stop - rows.start)
            part = query[:, :, rows]
            mixed.append(attention(part, key[:, :, keys], value[:, :, keys], reach, sinks, start, keys.start))
        return torch.cat(mixed, dim=2)


WHOLE = SequencePart()


def attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    reach: Reach,
    sinks: torch.Tensor | None = None,
    first_query: int = 0,
    first_key: int = 0,
) -> torch.Tensor:
    """Softmax attention of grouped queries, by torch's fused kernels.

    torch's kernel for CPUs wants values as wide as queries: they are filled up with zeros, so that no scores are kept.

    Args:
        query: of shape (batch, heads, queries, head_dim).
        key: of shape (batch, kv_heads, keys, head_dim).
        value: as key; its head_dim may be another.
        reach: which keys a query sees.
        sinks: a logit for each head that takes its share of the softmax and gives nothing (gpt-oss); None: none.
        first_query: position of the first query; the others follow it.
        first_key: position of the first key.
    """
    scale = query.shape[-1] ** -0.5
    queries, keys = query.shape[2], key.shape[2]
    plain = first_query == first_key and queries == keys and not reach.limits(keys)
    seen = None
    if sinks is not None or not plain:
        at, of = (torch.arange(size, device=query.device) for size in (queries, keys))
        seen = reach.visible(first_query + at, first_key + of)
    if sinks is not None:
        assert seen is not None
        query, key, value = with_sinks(query, key, value, sinks, scale)
        seen = functional.pad(seen, (1, 0), value=True)
    grouped, width = query.shape[1] != key.shape[1], value.shape[-1]
    if not value.is_cuda and width < query.shape[-1]:
        value = functional.pad(value, (0, query.shape[-1] - width))
    mixed = functional.scaled_dot_product_attention(
        query, key, value, attn_mask=seen, is_causal=seen is None, scale=scale, enable_gqa=grouped
    )
    return mixed[..., :width]


def with_sinks(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, sinks: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Put a key in front whose logit is the sink of its head: one more dimension, in which queries are 1."""
    heads = query.shape[1]
    key, value = (one.repeat_interleave(heads // one.shape[1], 1) for one in (key, value))
    query = torch.cat([query, torch.ones_like(query[..., :1])], dim=-1)
    key = functional.pad(key, (0, 1, 1, 0))
    logits = functional.pad((sinks / scale).to(key.dtype)[None, :, None, None], (key.shape[-1] - 1, 0))
    key = torch.cat([logits.expand(key.shape[0], -1, -1, -1), key[:, :, 1:]], dim=2)
    return query, key, functional.pad(value, (0, 0, 1, 0))
