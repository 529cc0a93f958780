"""From text to token files: read documents, tokenize, write Megatron's format and what is known about it."""

from __future__ import annotations

import importlib
import importlib.util
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from runtime.indexed_data import write_indexed
from topologies.document import FORMAT_VERSION, to_json, write_atomically
from topologies.errors import InputError, MissingExtra
from topologies.reading import read_utf8

END_OF_DOCUMENT = 256
"""Of the byte-level tokenizer; the tokens before it are the bytes of UTF-8."""
END_NAMES = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|eot_id|>")
"""What tokenizers call the end of a document."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tokenizer:
    """Text to tokens."""

    name: str
    vocab_size: int
    end: int | None
    """Appended to every document; None: the tokenizer has no such token."""
    encode: Callable[[str], list[int]]


def byte_tokenizer() -> Tokenizer:
    """Each byte of UTF-8 is a token; nothing needs to be downloaded."""
    return Tokenizer(
        name="bytes", vocab_size=257, end=END_OF_DOCUMENT, encode=lambda text: list(text.encode("utf-8", "replace"))
    )


def file_tokenizer(path: Path) -> Tokenizer:
    """Read a Hugging Face tokenizer.json.

    Raises:
        MissingExtra: the library is not installed.
        InputError: the file is not a tokenizer.
    """
    if importlib.util.find_spec("tokenizers") is None:
        raise MissingExtra("reading a tokenizer.json", "tokenizers")
    text = read_utf8(path, "give a tokenizer.json")
    try:
        library = importlib.import_module("tokenizers").Tokenizer.from_str(text)
    except Exception as error:  # the library raises a bare Exception
        raise InputError(f"is not a tokenizer: {error}", hint="give a tokenizer.json", file=path) from None
    known = (library.token_to_id(name) for name in END_NAMES)

    def encode(text: str) -> list[int]:
        return list(library.encode(text, add_special_tokens=False).ids)

    return Tokenizer(
        name=str(path),
        vocab_size=library.get_vocab_size(),
        end=next((one for one in known if one is not None), None),
        encode=encode,
    )


def documents(path: Path, key: str) -> Iterator[str]:
    """Read the documents of a file: one in each line of a .jsonl file, else the whole file is one.

    Raises:
        InputError: unreadable, not UTF-8, or a line that is not a JSON object with the key.
    """
    try:
        if path.suffix != ".jsonl":
            yield path.read_text(encoding="utf-8")
            return
        with path.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    yield _text(line, key, path, number)
    except OSError as error:
        raise InputError(f"cannot be read: {error.strerror}", hint="give text or .jsonl files", file=path) from None
    except UnicodeDecodeError:
        raise InputError("is not UTF-8 text", hint="give text or .jsonl files", file=path) from None


def _text(line: str, key: str, path: Path, number: int) -> str:
    try:
        content = json.loads(line)
    except json.JSONDecodeError as error:
        raise InputError(f"is not JSON: {error.msg}", hint="one object on each line", file=path, line=number) from None
    text = content.get(key) if isinstance(content, dict) else None
    if not isinstance(text, str):
        raise InputError(f"has no text under {key!r}", hint="name the key with --key", file=path, line=number)
    return text


def build(inputs: list[Path], prefix: Path, *, tokenizer: Tokenizer, key: str = "text") -> dict[str, Any]:
    """Tokenize files into PREFIX.bin and PREFIX.idx, with PREFIX.json beside them that says how.

    Raises:
        InputError: an input cannot be used, nothing to write, or files of this name exist.
    """
    dtype: type[np.integer[Any]] = np.uint16 if tokenizer.vocab_size <= 2**16 else np.int32

    def tokenized() -> Iterator[npt.NDArray[Any]]:
        for path in inputs:
            for text in documents(path, key):
                tokens = tokenizer.encode(text)
                if tokens:
                    yield np.asarray([*tokens, *([] if tokenizer.end is None else [tokenizer.end])], dtype)

    num_documents, num_tokens = write_indexed(prefix, tokenized(), dtype)
    told = {
        "format_version": FORMAT_VERSION,
        "tokenizer": tokenizer.name,
        "vocab_size": tokenizer.vocab_size,
        "end_of_document": tokenizer.end,
        "documents": num_documents,
        "tokens": num_tokens,
        "inputs": [str(path) for path in inputs],
    }
    write_atomically(prefix.with_name(f"{prefix.name}.json"), to_json(told) + "\n")
    return told
