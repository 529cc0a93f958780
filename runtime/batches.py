"""Where the tokens of a step come from: synthetic ones, or files; a batch is a function of its index only."""

from __future__ import annotations

import hashlib
import os
import shutil
import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import numpy as np
import torch

from runtime.data import synthetic_batch
from runtime.indexed_data import IndexedTokens, bin_file, idx_file, read_indexed
from runtime.request import TrainRequest
from topologies.errors import InputError, RunFailed

Batch = tuple[torch.Tensor, torch.Tensor]
"""Inputs and targets, int64, (count, seq_length) each."""
CACHE_SECONDS = 3600.0
"""How long to wait for another rank's copy."""


class Batches(Protocol):
    """A source of batches."""

    def at(self, index: int, first: int, count: int) -> Batch:
        """Return sequences ``first`` to ``first + count`` of a global batch."""


@dataclass(frozen=True, slots=True)
class SyntheticBatches:
    """Tokens that cost nothing to read."""

    seed: int
    seq_length: int
    vocab_size: int

    def at(self, index: int, first: int, count: int) -> Batch:
        """Draw them from the stream of seed, index and place."""
        return synthetic_batch(self.seed, index, first, count, self.seq_length, self.vocab_size)


@dataclass(slots=True, kw_only=True)
class IndexedBatches:
    """Pieces of ``seq_length + 1`` tokens of a file, in an order that the seed shuffles over the whole file.

    Pieces do not end at documents: attention crosses them, as it does in Megatron's default. A new epoch has a new
    order. The next batch is read while the current one trains.
    """

    tokens: IndexedTokens
    seed: int
    seq_length: int
    global_batch_size: int
    vocab_size: int
    reader: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1, thread_name_prefix="data"))
    ahead: tuple[tuple[int, int, int], Future[Batch]] | None = None

    @property
    def num_samples(self) -> int:
        """Pieces in the file."""
        return (len(self.tokens) - 1) // self.seq_length

    def at(self, index: int, first: int, count: int) -> Batch:
        """Return a part of a batch, and begin to read the same part of the next one."""
        wanted, ready = (index, first, count), self.ahead
        batch = ready[1].result() if ready is not None and ready[0] == wanted else self.read(*wanted)
        following = (index + 1, first, count)
        self.ahead = following, self.reader.submit(self.read, *following)
        return batch

    def read(self, index: int, first: int, count: int) -> Batch:
        """Read a part of a batch.

        Raises:
            RunFailed: a token is not in the vocabulary of the model.
        """
        rows = []
        for place in range(first, first + count):
            epoch, position = divmod(index * self.global_batch_size + place, self.num_samples)
            begin = shuffled(position, self.num_samples, self.seed, epoch) * self.seq_length
            rows.append(self.tokens.tokens[begin : begin + self.seq_length + 1].astype(np.int64))
        pieces = torch.from_numpy(np.stack(rows))
        largest = int(pieces.max())
        if largest >= self.vocab_size or int(pieces.min()) < 0:
            raise RunFailed(
                f"{bin_file(self.tokens.prefix)} holds token {largest}, and the model has {self.vocab_size} tokens: "
                "it was made with another tokenizer"
            )
        return pieces[:, :-1].contiguous(), pieces[:, 1:].contiguous()


def shuffled(position: int, count: int, seed: int, epoch: int) -> int:
    """Return the place of a position in a random order of ``count`` things, without storing the order.

    A Feistel network over the next even number of bits, walked until the value is in range (format-preserving
    encryption; Black and Rogaway 2002): a permutation for every key.
    """
    half = max(1, ((count - 1).bit_length() + 1) // 2)
    mask = (1 << half) - 1
    value = position
    while True:
        left, right = value >> half, value & mask
        for turn in range(4):
            digest = hashlib.blake2b(f"{seed}/{epoch}/{turn}/{right}".encode(), digest_size=8).digest()
            left, right = right, left ^ (int.from_bytes(digest, "big") & mask)
        value = left << half | right
        if value < count:
            return value


def cached(prefix: Path, cache: Path, *, copies: bool) -> Path:
    """Copy token files to a local disk, once; ranks that do not copy wait for the one that does.

    Raises:
        InputError: the copy cannot be made.
    """
    name = f"{prefix.name}-{hashlib.sha256(str(prefix.absolute()).encode()).hexdigest()[:8]}"
    target = cache / name
    deadline = time.monotonic() + CACHE_SECONDS
    for source, local in ((bin_file(prefix), bin_file(target)), (idx_file(prefix), idx_file(target))):
        if copies and not _same(source, local):
            try:
                cache.mkdir(parents=True, exist_ok=True)
                partial = local.with_name(f".{local.name}.partial")
                shutil.copyfile(source, partial)
                os.utime(partial, (source.stat().st_atime, source.stat().st_mtime))
                partial.replace(local)
            except OSError as error:
                raise InputError(
                    f"cannot hold a copy of {source}: {error.strerror}",
                    hint="free space, or leave --data-cache",
                    file=cache,
                ) from None
        while not _same(source, local):
            if time.monotonic() > deadline:
                raise InputError(f"has no copy of {source}", hint="see whether the first rank failed", file=cache)
            time.sleep(0.1)
    return target


def _same(source: Path, local: Path) -> bool:
    """Tell whether a copy is as large as the source and as old."""
    try:
        one, other = source.stat(), local.stat()
    except OSError:
        return False
    return one.st_size == other.st_size and int(one.st_mtime) == int(other.st_mtime)


def batches_of(request: TrainRequest) -> Batches:
    """Choose by the request."""
    job = request.job
    if request.data is None:
        return SyntheticBatches(request.seed, job.seq_length, job.model.vocab_size)
    prefix = Path(request.data.prefix)
    if request.data.cache is not None:
        prefix = cached(prefix, Path(request.data.cache), copies=os.environ.get("LOCAL_RANK", "0") == "0")
    return IndexedBatches(
        tokens=read_indexed(prefix),
        seed=request.seed,
        seq_length=job.seq_length,
        global_batch_size=job.global_batch_size,
        vocab_size=job.model.vocab_size,
    )
