"""From pydantic's complaint to a sentence: file, line, column, key, what is wrong and what to do."""

from __future__ import annotations

import difflib
import re
import types
import typing
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any, Union

from pydantic import BaseModel, ValidationError
from ruamel.yaml.comments import CommentedMap, CommentedSeq

from topologies.errors import InputError


def explain(
    error: ValidationError,
    model: type[BaseModel],
    file: Path,
    positions: Any,
    changed: tuple[Path, Any] | None = None,
) -> InputError:
    """Turn pydantic's first complaint into a sentence with file, line, column, key, reason and remedy.

    Args:
        error: what pydantic found.
        model: what was checked.
        file: where the content comes from.
        positions: the parsed content of that file.
        changed: another file and its mapping of changes, where these were laid over the content.
    """
    errors = error.errors(include_url=False)
    first = next((one for one in errors if one["type"] == "extra_forbidden"), errors[0])
    location = tuple(part for part in first["loc"] if isinstance(part, int) or not re.search(r"[\[\](]", part))
    if changed is not None and (_spells_out(changed[1], location) or not _spells_out(positions, location)):
        file, positions = changed
    line, column, key = _position(positions, location)
    what, hint = first["msg"].removeprefix("Value error, "), None
    if first["type"] == "extra_forbidden":
        known = _known_keys(model, location[:-1])
        what = "is not a known key here"
        hint = did_you_mean(str(location[-1]), known) or f"known keys: {', '.join(known)}"
    elif first["type"] == "missing":
        what, hint = "is missing", "add this key"
    elif ";" in what:
        what, hint = (part.strip() for part in what.split(";", 1))
    elif first["type"] not in {"value_error", "assertion_error"}:
        what = f"{what[0].lower()}{what[1:]} (found {first['input']!r:.60})"
    return InputError(what, hint=hint, file=file, line=line, column=column, key=key)


def did_you_mean(word: str, known: Iterable[str]) -> str | None:
    """Suggest the nearest known words, or None.

    >>> did_you_mean("latencys", ["latency", "bandwidth"])
    "did you mean 'latency'?"
    """
    near = difflib.get_close_matches(word, list(known), n=3, cutoff=0.5)
    return f"did you mean {' or '.join(repr(name) for name in near)}?" if near else None


def _position(root: Any, location: tuple[int | str, ...]) -> tuple[int | None, int | None, str | None]:
    """Find where a complaint points, skipping parts of its path that the file does not spell out.

    A part that the file keeps at its top (``model``, ``stack``) is found there.
    """
    node, found = root, list[int | str]()
    line, column = None, None
    if isinstance(root, CommentedMap) and root.lc.line is not None:
        line, column = root.lc.line + 1, root.lc.col + 1
    for part in location:
        if not _holds(node, part) and _holds(root, part):
            node, found = root, list[int | str]()
        if _holds(node, part):
            where = node.lc.data.get(part) if node.lc.data else None
            if where:
                line, column = where[0] + 1, where[1] + 1
            node = node[part]
            found.append(part)
    if location and (not found or found[-1] != location[-1]):
        found.append(location[-1])
    return line, column, ".".join(map(str, found)) or None


def _holds(node: Any, part: int | str) -> bool:
    if isinstance(node, CommentedMap):
        return part in node
    return isinstance(node, CommentedSeq) and part in range(len(node))


def _spells_out(node: Any, location: tuple[int | str, ...]) -> bool:
    """Whether a parsed mapping holds all parts of a complaint's path."""
    for part in location:
        try:
            node = node[part]
        except (KeyError, IndexError, TypeError):
            return False
    return bool(location)


def _known_keys(model: type[BaseModel], location: tuple[int | str, ...]) -> list[str]:
    current: list[Any] = [model]
    for part in location:
        inner: list[Any] = []
        for annotation in current:
            if isinstance(annotation, type) and issubclass(annotation, BaseModel):
                inner += [
                    info.annotation for name, info in annotation.model_fields.items() if part in (name, info.alias)
                ]
            else:
                inner += [argument for argument in typing.get_args(annotation) if argument is not str]
        current = [plain for annotation in inner for plain in _unwrap(annotation)]
    return [
        info.alias or name
        for one in current
        if isinstance(one, type) and issubclass(one, BaseModel)
        for name, info in one.model_fields.items()
    ]


def _unwrap(annotation: Any) -> list[Any]:
    origin = typing.get_origin(annotation)
    if origin is Annotated:
        return _unwrap(typing.get_args(annotation)[0])
    if origin in (Union, types.UnionType):
        return [plain for argument in typing.get_args(annotation) for plain in _unwrap(argument)]
    return [annotation]
