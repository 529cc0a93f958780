"""Ring attention (Liu et al. 2023, arXiv 2310.01889): keys and values travel from rank to rank beside the computation.

Queries stay; each block of keys that comes by adds its part of the softmax (Milakov and Gimelshein 2018, arXiv
1805.02867). In the backward pass the gradients of keys and values travel along and are home after a whole round.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from runtime.reach import Reach

Rows = tuple[int, slice]
"""Position of the first of some neighbouring tokens, and where they are in the local part."""


class Ring:
    """Which tokens the ranks of a ring hold, as blocks of neighbours, and which keys a query sees."""

    def __init__(self, group: dist.ProcessGroup, blocks: list[list[Rows]], reach: Reach) -> None:
        self.group, self.blocks, self.reach = group, blocks, reach
        self.size, self.rank = group.size(), group.rank()

    def pairs(self, hop: int) -> Iterator[tuple[slice, slice, torch.Tensor | None]]:
        """Return the blocks of own queries and of the keys present after some hops that see each other, and a mask."""
        for query, rows in self.blocks[self.rank]:
            last = query + rows.stop - rows.start - 1
            for key, columns in self.blocks[(self.rank - hop) % self.size]:
                length = columns.stop - columns.start
                if key > last or key + length <= self.reach.first(query):
                    continue
                if self.reach.hides_nothing(query, last, key, key + length - 1):
                    yield rows, columns, None
                else:
                    at, of = torch.arange(query, last + 1), torch.arange(key, key + length)
                    yield rows, columns, self.reach.visible(at, of)

    def pass_on(self, tensors: list[torch.Tensor]) -> tuple[list[torch.Tensor], list[dist.Work]]:
        """Begin to send tensors to the next rank and to receive those of the one before."""
        coming = [torch.empty_like(tensor) for tensor in tensors]
        after, before = (dist.get_global_rank(self.group, (self.rank + by) % self.size) for by in (1, -1))
        sends = [dist.P2POp(dist.isend, tensor, after, self.group) for tensor in tensors]
        receives = [dist.P2POp(dist.irecv, tensor, before, self.group) for tensor in coming]
        return coming, dist.batch_isend_irecv(sends + receives)


def ring_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, ring: Ring, sinks: torch.Tensor | None
) -> torch.Tensor:
    """Attend from this rank's queries to the keys of all ranks; shapes as in ``runtime.context.attention``."""
    heads = query.shape[1]
    key, value = (one.repeat_interleave(heads // one.shape[1], 1) for one in (key, value))
    mixed, logsum = _Ring.apply(query, key, value, ring)  # type: ignore[no-untyped-call]
    if sinks is not None:
        mixed = mixed * torch.sigmoid(logsum - sinks.float()[:, None])[..., None]
    result: torch.Tensor = mixed.to(query.dtype)
    return result


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, ring: Ring
    ) -> tuple[torch.Tensor, torch.Tensor]:
        wide = query.float() * query.shape[-1] ** -0.5
        mixed = wide.new_zeros((*query.shape[:-1], value.shape[-1]))
        largest = wide.new_full(query.shape[:-1], float("-inf"))
        total = torch.zeros_like(largest)
        here = [key.contiguous(), value.contiguous()]
        for hop in range(ring.size):
            coming, works = ring.pass_on(here) if hop + 1 < ring.size else (here, [])
            keys, values = (one.float() for one in here)
            for rows, columns, seen in ring.pairs(hop):
                scores = _scores(wide[:, :, rows], keys[:, :, columns], seen)
                top = torch.maximum(largest[:, :, rows], scores.amax(-1))
                safe = top.masked_fill(top.isinf(), 0.0)
                shares = (scores - safe[..., None]).exp()
                shrink = (largest[:, :, rows] - safe).exp()
                total[:, :, rows] = total[:, :, rows] * shrink + shares.sum(-1)
                mixed[:, :, rows] = mixed[:, :, rows] * shrink[..., None] + shares @ values[:, :, columns]
                largest[:, :, rows] = top
            for work in works:
                work.wait()
            here = coming
        mixed, logsum = mixed / total[..., None], largest + total.log()
        ctx.save_for_backward(query, key, value, mixed, logsum)
        ctx.ring = ring
        return mixed, logsum

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, None]:
        query, key, value, mixed, logsum = ctx.saved_tensors
        ring: Ring = ctx.ring
        of_mixed, of_logsum = gradients
        scale = query.shape[-1] ** -0.5
        wide = query.float() * scale
        inner = (of_mixed * mixed).sum(-1) - of_logsum
        of_query = torch.zeros_like(wide)
        here = [key.contiguous(), value.contiguous(), torch.zeros_like(key.float()), torch.zeros_like(value.float())]
        for hop in range(ring.size):
            keys, values = (one.float() for one in here[:2])
            for rows, columns, seen in ring.pairs(hop):
                scores = _scores(wide[:, :, rows], keys[:, :, columns], seen)
                shares = (scores - logsum[:, :, rows, None]).exp()
                here[3][:, :, columns] += shares.transpose(-1, -2) @ of_mixed[:, :, rows]
                of_shares = of_mixed[:, :, rows] @ values[:, :, columns].transpose(-1, -2)
                of_scores = shares * (of_shares - inner[:, :, rows, None])
                of_query[:, :, rows] += of_scores @ keys[:, :, columns] * scale
                here[2][:, :, columns] += of_scores.transpose(-1, -2) @ wide[:, :, rows]
            here, works = ring.pass_on(here)
            for work in works:
                work.wait()
        return of_query.to(query.dtype), here[2].to(key.dtype), here[3].to(value.dtype), None


def _scores(query: torch.Tensor, key: torch.Tensor, seen: torch.Tensor | None) -> torch.Tensor:
    scores = query @ key.transpose(-1, -2)
    return scores if seen is None else scores.masked_fill(~seen.to(scores.device), float("-inf"))
