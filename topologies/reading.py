"""The bytes and the text of a file, or one complaint that names it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from topologies.errors import InputError

ANY = "give the path of a readable file"


def read_bytes(path: Path, hint: str = ANY) -> bytes:
    """Return what a file holds.

    Raises:
        InputError: the file cannot be read.
    """
    try:
        return path.read_bytes()
    except OSError as error:
        raise InputError(f"cannot be read: {error.strerror}", hint=hint, file=path) from None


def read_utf8(path: Path, hint: str = ANY) -> str:
    """Return the text that a file holds.

    Raises:
        InputError: the file cannot be read, or is no text in UTF-8.
    """
    return decoded(read_bytes(path, hint), path, hint)


def decoded(content: bytes, path: Path, hint: str = ANY) -> str:
    """Return bytes of a file as text.

    Raises:
        InputError: they are no text in UTF-8.
    """
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError:
        raise InputError("is not a text file in UTF-8", hint=hint, file=path) from None


def read_json(path: Path, hint: str = ANY, *, damaged: str | None = None) -> Any:
    """Return the content of a JSON file; ``damaged`` is the remedy where it is not whole.

    Raises:
        InputError: the file cannot be read, or is not complete JSON; with line and column.
    """
    try:
        return json.loads(read_utf8(path, hint))
    except json.JSONDecodeError as error:
        raise InputError(
            f"is not complete JSON: {error.msg}",
            hint=damaged or hint,
            file=path,
            line=error.lineno,
            column=error.colno,
        ) from None
    except RecursionError:
        raise InputError("is nested too deeply", hint=hint, file=path) from None
