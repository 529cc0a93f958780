"""Token files in Megatron's format: PREFIX.bin holds the tokens, PREFIX.idx says where documents begin.

The index: nine bytes of magic, version, code of the token type, number of sequences and of document bounds, then the
lengths (int32) and byte offsets (int64) of the sequences, and the document bounds (int64, counted in sequences).
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from runtime.request import DataSettings
from scenarios.job import Job
from topologies.errors import InputError

MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
DTYPES: dict[int, type[np.integer[Any]]] = {
    1: np.uint8,
    2: np.int8,
    3: np.int16,
    4: np.int32,
    5: np.int64,
    8: np.uint16,
}
"""Codes of whole-number tokens (6 and 7 are floating-point)."""
HEADER = struct.Struct("<9sQBQQ")
MAKE = "make such files with 'headway data build'"


@dataclass(frozen=True, slots=True)
class IndexedTokens:
    """The tokens of a pair of files, mapped into memory: nothing is read before it is used."""

    prefix: Path
    tokens: npt.NDArray[Any]
    """All of them, in the order of the file."""
    lengths: npt.NDArray[np.int32]
    """Of the sequences."""
    bounds: npt.NDArray[np.int64]
    """Documents begin at these sequences; the last is the number of sequences."""

    def __len__(self) -> int:
        return int(self.tokens.shape[0])

    def sequence(self, index: int) -> npt.NDArray[Any]:
        """Tokens of one sequence."""
        begin = int(self.lengths[:index].sum(dtype=np.int64))
        return self.tokens[begin : begin + int(self.lengths[index])]


def bin_file(prefix: Path) -> Path:
    """Of the tokens."""
    return prefix.with_name(f"{prefix.name}.bin")


def idx_file(prefix: Path) -> Path:
    """Of the index."""
    return prefix.with_name(f"{prefix.name}.idx")


def read_indexed(prefix: str | Path) -> IndexedTokens:
    """Open a pair of token files.

    Raises:
        InputError: missing, not in this format, truncated, or the two do not fit together.
    """
    prefix = Path(str(prefix).removesuffix(".bin").removesuffix(".idx"))
    index, data = idx_file(prefix), bin_file(prefix)
    try:
        raw = index.read_bytes()
        size = data.stat().st_size
    except OSError as error:
        raise InputError(f"cannot be read: {error.strerror}", hint=MAKE, file=error.filename) from None
    if len(raw) < HEADER.size or raw[:9] != MAGIC:
        raise InputError("is not an index of Megatron's format", hint=MAKE, file=index)
    _, version, code, num_sequences, num_bounds = HEADER.unpack_from(raw)
    if version != VERSION or code not in DTYPES:
        raise InputError(f"has version {version} and token type {code}, which are not read", hint=MAKE, file=index)
    needed = HEADER.size + 12 * num_sequences + 8 * num_bounds
    if len(raw) < needed:
        raise InputError(f"is truncated: {len(raw)} of {needed} bytes", hint="copy or make it again", file=index)
    at = HEADER.size
    lengths = np.frombuffer(raw, np.int32, num_sequences, at)
    pointers = np.frombuffer(raw, np.int64, num_sequences, at + 4 * num_sequences)
    bounds = np.frombuffer(raw, np.int64, num_bounds, at + 12 * num_sequences)
    dtype = np.dtype(DTYPES[code])
    total = int(lengths.sum(dtype=np.int64))
    expected = np.cumsum(lengths, dtype=np.int64) * dtype.itemsize
    if num_sequences and (pointers[0] != 0 or not np.array_equal(pointers[1:], expected[:-1])):
        raise InputError("its sequences do not follow each other", hint="make it again", file=index)
    if size != total * dtype.itemsize:
        raise InputError(
            f"has {size} bytes, its index tells of {total * dtype.itemsize}", hint="copy or make it again", file=data
        )
    tokens = np.memmap(data, dtype, mode="r") if total else np.zeros(0, dtype)
    return IndexedTokens(prefix, tokens, lengths, bounds)


def write_indexed(prefix: Path, documents: Iterable[npt.NDArray[Any]], dtype: type[np.integer[Any]]) -> tuple[int, int]:
    """Write documents, one sequence each, whole or not at all.

    Returns:
        Numbers of documents and tokens.

    Raises:
        InputError: files of this name exist, or cannot be written.
    """
    code = next(code for code, known in DTYPES.items() if known is dtype)
    targets = (bin_file(prefix), idx_file(prefix))
    for target in targets:
        if target.exists():
            raise InputError("exists, and nothing is overwritten", hint="give another name with -o", file=target)
    partial = [target.with_name(f".{target.name}.partial") for target in targets]
    lengths: list[int] = []
    try:
        prefix.parent.mkdir(parents=True, exist_ok=True)
        with partial[0].open("wb") as stream:
            for document in documents:
                stream.write(np.ascontiguousarray(document, dtype).tobytes())
                lengths.append(len(document))
        sizes = np.asarray(lengths, np.int32)
        ends = np.cumsum(sizes, dtype=np.int64) * np.dtype(dtype).itemsize
        with partial[1].open("wb") as stream:
            stream.write(HEADER.pack(MAGIC, VERSION, code, len(lengths), len(lengths) + 1))
            stream.write(sizes.tobytes())
            stream.write(np.concatenate([np.zeros(1, np.int64), ends])[:-1].tobytes())
            stream.write(np.arange(len(lengths) + 1, dtype=np.int64).tobytes())
        for written, target in zip(partial, targets, strict=True):
            written.replace(target)
    except OSError as error:
        raise InputError(
            f"cannot be written: {os.strerror(error.errno or 0)}",
            hint="choose another place or free space",
            file=prefix,
        ) from None
    finally:
        for written in partial:
            written.unlink(missing_ok=True)
    return len(lengths), sum(lengths)


def check_data(data: DataSettings, job: Job) -> None:
    """Refuse token files that a job cannot be trained on.

    Raises:
        InputError: unreadable, too few tokens for one sequence, or made for a larger vocabulary.
    """
    tokens = read_indexed(data.prefix)
    told = tokens.prefix.with_name(f"{tokens.prefix.name}.json")
    made = json.loads(told.read_text(encoding="utf-8")) if told.is_file() else {}
    if made.get("vocab_size", 0) > job.model.vocab_size:
        raise InputError(
            f"was made with {made['vocab_size']} tokens ({made['tokenizer']}), the model has {job.model.vocab_size}",
            hint="make it with the model's tokenizer",
            file=bin_file(tokens.prefix),
        )
    if len(tokens) < job.seq_length + 1:
        raise InputError(
            f"holds {len(tokens)} tokens, fewer than one sequence of {job.seq_length} + 1",
            hint="give more text, or a smaller seq_length",
            file=bin_file(tokens.prefix),
        )
