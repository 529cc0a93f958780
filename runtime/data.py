"""Synthetic tokens that depend on the seed, the step and the place in the global batch, and on nothing else."""

from __future__ import annotations

import hashlib

import torch


def generator(*names: object) -> torch.Generator:
    """Return a CPU generator whose stream depends only on the names given (such as seed, step, sequence)."""
    digest = hashlib.sha256("/".join(map(str, names)).encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)


def synthetic_batch(
    seed: int, step: int, first: int, count: int, seq_length: int, vocab_size: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the inputs and targets of sequences ``first`` to ``first + count`` of a global batch.

    Small token numbers are more frequent than large ones (density proportional to u ** (-2/3) for u = token / vocab),
    so that a model has something to learn.

    Returns:
        Two int64 tensors of shape (count, seq_length); targets are the inputs shifted by one token.
    """
    rows = [
        torch.rand(seq_length + 1, generator=generator(seed, "tokens", step, sequence), dtype=torch.float64)
        for sequence in range(first, first + count)
    ]
    tokens = (torch.stack(rows) ** 3 * vocab_size).long()
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
