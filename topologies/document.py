"""From a YAML or JSON file to a checked model, with file, line and column in every complaint.

The flow: ``read_mapping`` parses the text and keeps positions, ``load`` lets pydantic check it and turns the first
complaint into an InputError. A field typed with ``reference`` takes the name of a shipped file, a path relative to the
file that says it, or the content itself.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import math
import os
import re
import tempfile
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, Union

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    ValidationError,
    ValidationInfo,
)
from pydantic_core import CoreSchema, core_schema
from ruamel.yaml import YAML
from ruamel.yaml.comments import CommentedMap, CommentedSeq
from ruamel.yaml.constructor import DuplicateKeyError
from ruamel.yaml.error import MarkedYAMLError, YAMLError

from topologies.errors import InputError
from topologies.units import document_key

FORMAT_VERSION = 1


class Document(BaseModel):
    """Base of everything that is read from a file: frozen, unknown keys refused, units written in the values."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        alias_generator=document_key,
        validate_by_name=True,
        validate_by_alias=True,
        use_attribute_docstrings=True,
    )


class FileDocument(Document):
    """A document that is a file of its own."""

    version: Literal[1] = 1
    """Version of the file format."""
    name: str = Field(min_length=1)
    """What the thing is called in reports."""
    source: dict[str, str] = Field(default_factory=dict)
    """Where each number comes from, by key; the key ``*`` covers the keys that are not listed."""


DocumentT = TypeVar("DocumentT", bound=Document)


@dataclass(frozen=True, slots=True, kw_only=True)
class InputFile:
    """A file that was read, with the SHA-256 of its bytes."""

    path: str
    sha256: str


@dataclass(slots=True)
class LoadContext:
    """What a reference needs to know while a document is loaded: where it stands, and which files were read so far."""

    file: Path
    inputs: list[InputFile] = field(default_factory=list)


def load(
    path: str | Path,
    model: type[DocumentT],
    *,
    inputs: list[InputFile] | None = None,
    overrides: Iterable[str] = (),
    transform: Callable[[dict[str, Any]], dict[str, Any]] | None = None,
) -> DocumentT:
    """Read a file into a checked document.

    Args:
        path: YAML or JSON file.
        model: the document class.
        inputs: receives every file that was read, this one and those that it refers to.
        overrides: ``key.path=value`` texts that replace values before the check; the value is read as YAML.
        transform: changes the raw mapping before the check (after the overrides).

    Raises:
        InputError: the file cannot be read or does not describe a ``model``.
    """
    path = Path(path)
    raw = read_mapping(path, inputs)
    for override in overrides:
        apply_override(raw, override)
    content = transform(raw) if transform else raw
    return check(content, model, LoadContext(path, inputs if inputs is not None else []), positions=raw)


def read_mapping(path: Path, inputs: list[InputFile] | None = None) -> CommentedMap:
    """Parse a YAML 1.2 or JSON file whose top level is a mapping; positions stay attached.

    Raises:
        InputError: unreadable path, not text, broken YAML, a key given twice, or no mapping at the top.
    """
    try:
        content = path.read_bytes()
    except OSError as error:
        raise InputError(
            f"cannot be read: {error.strerror}", hint="give the path of a readable file", file=path
        ) from None
    if inputs is not None:
        inputs.append(InputFile(path=str(path), sha256=hashlib.sha256(content).hexdigest()))
    try:
        parsed = YAML(typ="rt").load(content.decode("utf-8"))
    except UnicodeDecodeError:
        raise InputError("is not a text file in UTF-8", hint="give a YAML or JSON file", file=path) from None
    except DuplicateKeyError as error:
        mark = error.problem_mark
        what = str(error.problem).split(" with value")[0].replace("found duplicate key", "the key")
        raise InputError(
            f"{what} is given twice", hint="keep one", file=path, line=mark.line + 1, column=mark.column + 1
        ) from None
    except MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line, column = (mark.line + 1, mark.column + 1) if mark else (None, None)
        raise InputError(
            f"is not valid YAML: {error.problem}", hint="correct the syntax here", file=path, line=line, column=column
        ) from None
    except YAMLError as error:
        raise InputError(f"is not valid YAML: {error}", file=path) from None
    if not isinstance(parsed, CommentedMap):
        found = "nothing" if parsed is None else f"a {'list' if isinstance(parsed, list) else type(parsed).__name__}"
        raise InputError(f"holds {found} at its top level", hint="write 'key: value' lines", file=path)
    return parsed


def apply_override(raw: CommentedMap, override: str) -> None:
    """Set ``a.b.c=value`` in a parsed mapping; the value is YAML.

    Raises:
        InputError: the text has no ``=`` or walks through something that is not a mapping.
    """
    key, separator, text = override.partition("=")
    names = key.strip().split(".")
    if not separator or not all(names):
        raise InputError(
            f"{override!r} is not of the form key.path=value", hint="for example job.seq_length=8192", file="--set"
        )
    target: Any = raw
    for name in names[:-1]:
        if isinstance(target.get(name), str):
            target[name] = CommentedMap({"from": target[name]})
        target = target.setdefault(name, CommentedMap())
        if not isinstance(target, Mapping):
            raise InputError(f"{name!r} is not a mapping, so {override!r} cannot be set in it", file="--set", key=key)
    try:
        target[names[-1]] = YAML(typ="safe").load(text)
    except YAMLError:
        raise InputError(f"the value {text!r} is not valid YAML", file="--set", key=key) from None


def check(content: Mapping[str, Any], model: type[DocumentT], context: LoadContext, positions: Any = None) -> DocumentT:
    """Validate a parsed mapping; the first complaint becomes an InputError with its position."""
    version = content.get("version", FORMAT_VERSION)
    if isinstance(version, int) and version > FORMAT_VERSION and "version" in model.model_fields:
        raise InputError(
            f"has format version {version}, and this headway reads up to {FORMAT_VERSION}",
            hint="upgrade headway",
            file=context.file,
        )
    try:
        return model.model_validate(content, context=context, by_alias=True, by_name=False)
    except ValidationError as error:
        raise explain(error, model, context.file, content if positions is None else positions) from None


def explain(error: ValidationError, model: type[BaseModel], file: Path, positions: Any) -> InputError:
    """Turn pydantic's first complaint into a sentence with file, line, column, key, reason and remedy."""
    errors = error.errors(include_url=False)
    first = next((one for one in errors if one["type"] == "extra_forbidden"), errors[0])
    location = tuple(part for part in first["loc"] if isinstance(part, int) or not re.search(r"[\[\](]", part))
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
    """Find where a complaint points, skipping parts of its path that the file does not spell out."""
    node, found = root, []
    line, column = (root.lc.line + 1, root.lc.col + 1) if isinstance(root, CommentedMap) else (None, None)
    for part in location:
        present = (
            part in node
            if isinstance(node, CommentedMap)
            else part in range(len(node))
            if isinstance(node, CommentedSeq)
            else False
        )
        if present:
            where = node.lc.data.get(part) if node.lc.data else None
            if where:
                line, column = where[0] + 1, where[1] + 1
            node = node[part]
            found.append(part)
    if location and (not found or found[-1] != location[-1]):
        found.append(location[-1])
    return line, column, ".".join(map(str, found)) or None


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


def merged(raw: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Lay changes over a mapping, key by key; a change inside a reference becomes a changed reference."""
    result = dict(raw)
    for key, change in changes.items():
        before = result.get(key)
        if isinstance(change, Mapping) and isinstance(before, str):
            result[key] = {"from": before, **change}
        elif isinstance(change, Mapping) and isinstance(before, Mapping):
            result[key] = merged(before, change)
        else:
            result[key] = change
    return result


SUFFIXES = (".yaml", ".yml", ".json")


def shipped(folder: Path) -> dict[str, Path]:
    """Return the files that a folder ships, by name."""
    return {
        path.stem: path for path in sorted(folder.iterdir()) if path.suffix in SUFFIXES and ".schema" not in path.name
    }


def resolve(name: str, folder: Path, context: LoadContext) -> Path:
    """Find the file behind a reference: a path (relative to the file that says it) or a shipped name.

    Raises:
        ValueError: no such file; near names are listed.
    """
    if "/" in name or name.endswith(SUFFIXES):
        path = context.file.parent / name
        if not path.is_file():
            raise ValueError(f"there is no file {path}; paths are relative to the file that names them")
        return path
    known = shipped(folder)
    if name not in known:
        raise ValueError(
            f"{name!r} is not shipped with headway; {did_you_mean(name, known) or 'known: ' + ', '.join(known)}"
        )
    return known[name]


@dataclass(frozen=True, slots=True)
class Reference:
    """Marks a field that takes a shipped name, a path, a mapping, or a mapping with ``from`` that changes a file.

    ``Annotated[Gpu, Reference(folder)]`` reads ``gpu: h100-sxm``, ``gpu: ./my-gpu.yaml``, ``gpu: {name: ...}`` and
    ``gpu: {from: h100-sxm, power: 600 W}``. ``read_raw`` turns a file into the raw mapping where it is not plain YAML.
    """

    folder: Path
    read_raw: Callable[[Path, list[InputFile]], dict[str, Any]] | None = None

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        """Put the look-up before the validation of the model itself."""

        def follow(value: Any, info: ValidationInfo) -> Any:
            if not isinstance(info.context, LoadContext):
                return value
            if isinstance(value, str):
                return self._load(value, {}, source, info.context)
            if isinstance(value, Mapping) and isinstance(value.get("from"), str):
                changes = {key: entry for key, entry in value.items() if key != "from"}
                return self._load(value["from"], changes, source, info.context)
            return value

        return core_schema.with_info_before_validator_function(follow, handler(source))

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        """Describe the three forms to an editor."""
        return {
            "anyOf": [
                {"type": "string", "description": "name of a shipped file, or a path relative to this file"},
                {"type": "object"},
            ]
        }

    def _load(self, name: str, changes: dict[str, Any], model: type[DocumentT], context: LoadContext) -> DocumentT:
        path = resolve(name, self.folder, context)
        raw = self.read_raw(path, context.inputs) if self.read_raw else read_mapping(path, context.inputs)
        return check(merged(raw, changes), model, LoadContext(path, context.inputs), positions=raw)


def write_atomically(path: str | Path, content: str | bytes) -> None:
    """Write a file so that it is either the old one or the whole new one, never half of it.

    Raises:
        InputError: the place cannot be written.
    """
    path = Path(path)
    data = content.encode() if isinstance(content, str) else content
    temporary: str | None = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        with os.fdopen(handle, "wb") as stream:
            stream.write(data)
        Path(temporary).chmod(0o644)
        Path(temporary).replace(path)
    except OSError as error:
        raise InputError(
            f"cannot be written: {error.strerror}", hint="choose another place or free space", file=path
        ) from None
    finally:
        if temporary is not None:
            Path(temporary).unlink(missing_ok=True)


def to_json(content: Any) -> str:
    r"""Render plain data as indented JSON; infinities and NaN become null, because JSON has none.

    >>> to_json({"mfu": float("nan")})
    '{\n  "mfu": null\n}'
    """
    return json.dumps(_finite(content), indent=2, allow_nan=False)


def _finite(content: Any) -> Any:
    if isinstance(content, Mapping):
        return {str(key): _finite(value) for key, value in content.items()}
    if isinstance(content, list | tuple):
        return [_finite(value) for value in content]
    if isinstance(content, float):
        return content if math.isfinite(content) else None
    return content
