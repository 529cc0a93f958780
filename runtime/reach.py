"""Which keys a query of causal attention sees."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class Reach:
    """Which keys a query may see: causal, within a window, inside a chunk."""

    window: int | None = None
    chunk: int | None = None

    def limits(self, seq_length: int) -> bool:
        """Tell whether it hides more than the future of a sequence."""
        return any(span is not None and span < seq_length for span in (self.window, self.chunk))

    def first(self, position: int) -> int:
        """The first key that a query sees."""
        within = 0 if self.window is None else max(0, position - self.window + 1)
        return within if self.chunk is None else max(within, position // self.chunk * self.chunk)

    def hides_nothing(self, query: int, last_query: int, key: int, last_key: int) -> bool:
        """Tell whether all queries of a range of positions see all keys of another."""
        within = self.window is None or last_query - key < self.window
        together = self.chunk is None or key // self.chunk == last_query // self.chunk
        return last_key <= query and within and together

    def visible(self, queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        """Return which keys each query sees; both arguments are positions, the result has shape (queries, keys)."""
        ahead = queries[:, None] - keys[None, :]
        seen = ahead >= 0
        if self.window is not None:
            seen &= ahead < self.window
        if self.chunk is not None:
            seen &= queries[:, None] // self.chunk == keys[None, :] // self.chunk
        return seen
