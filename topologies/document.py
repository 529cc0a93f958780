"""From a YAML or JSON file to a checked model, with file, line and column in every complaint.

The flow: ``read_mapping`` parses the text and keeps positions, ``load`` lets pydantic check it and turns the first
complaint into an InputError. A field typed with ``reference`` takes the name of a shipped file, a path relative to the
file that says it, or the content itself.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import tempfile
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar

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
from ruamel.yaml.comments import CommentedMap
from ruamel.yaml.constructor import DuplicateKeyError
from ruamel.yaml.error import MarkedYAMLError, YAMLError

from topologies.complaints import did_you_mean as did_you_mean
from topologies.complaints import explain as explain
from topologies.errors import InputError
from topologies.reading import decoded, read_bytes
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
    overrides = list(overrides)
    for override in overrides:
        apply_override(raw, override)
    content = transform(raw) if transform else raw
    try:
        return check(content, model, LoadContext(path, inputs if inputs is not None else []), positions=raw)
    except InputError as error:
        for key in (override.partition("=")[0].strip() for override in overrides):
            touched = f".{key}".endswith(f".{error.key}") or key.startswith(f"{error.key}.")
            if error.file == str(path) and touched:
                raise InputError(error.what, hint=error.hint, file="--set", key=key) from None
        raise


def not_yaml(error: YAMLError, file: str | Path | None) -> InputError:
    """Say where a text stops being YAML."""
    if not isinstance(error, MarkedYAMLError):
        return InputError(f"is not valid YAML: {' '.join(str(error).split())}", file=file)
    mark = error.problem_mark or error.context_mark
    line, column = (mark.line + 1, mark.column + 1) if mark else (None, None)
    hint = "correct the syntax here"
    return InputError(f"is not valid YAML: {error.problem}", hint=hint, file=file, line=line, column=column)


def read_mapping(path: Path, inputs: list[InputFile] | None = None) -> CommentedMap:
    """Parse a YAML 1.2 or JSON file whose top level is a mapping; positions stay attached.

    Raises:
        InputError: unreadable path, not text, broken YAML, a key given twice, or no mapping at the top.
    """
    content = read_bytes(path)
    if inputs is not None:
        inputs.append(InputFile(path=str(path), sha256=hashlib.sha256(content).hexdigest()))
    try:
        parsed = YAML(typ="rt").load(decoded(content, path, "give a YAML or JSON file"))
    except DuplicateKeyError as error:
        mark = error.problem_mark
        what = str(error.problem).split(" with value")[0].replace("found duplicate key", "the key")
        raise InputError(
            f"{what} is given twice", hint="keep one", file=path, line=mark.line + 1, column=mark.column + 1
        ) from None
    except YAMLError as error:
        raise not_yaml(error, path) from None
    except RecursionError:
        raise InputError("is nested too deeply", hint="write it flatter", file=path) from None
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


def check(
    content: Mapping[str, Any],
    model: type[DocumentT],
    context: LoadContext,
    positions: Any = None,
    changed: tuple[Path, Any] | None = None,
) -> DocumentT:
    """Validate a parsed mapping; the first complaint becomes an InputError with its position (see ``explain``)."""
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
        raise explain(error, model, context.file, content if positions is None else positions, changed) from None


class _PlacedText(str):
    """A text among changes to another file; remembers the file that says it."""

    file: Path


class _PlacedMapping(dict[str, Any]):
    """A mapping among changes to another file; remembers where it was written."""

    file: Path
    positions: Any


def _placed(value: Any, file: Path) -> Any:
    """Mark all texts and mappings of a value as written in a file, unless they are marked already."""
    if isinstance(value, _PlacedText | _PlacedMapping):
        return value
    if isinstance(value, str):
        text = _PlacedText(value)
        text.file = file
        return text
    if isinstance(value, Mapping):
        mapping = _PlacedMapping({key: _placed(entry, file) for key, entry in value.items()})
        mapping.file, mapping.positions = file, value
        return mapping
    return [_placed(entry, file) for entry in value] if isinstance(value, list) else value


def merged(raw: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Lay changes over a mapping, key by key; a change inside a reference becomes a changed reference."""
    result = dict(raw)
    for key, change in changes.items():
        before = result.get(key)
        if isinstance(change, Mapping) and isinstance(before, str):
            result[key] = {"from": before, **change}
            if isinstance(change, _PlacedMapping):
                nested = _PlacedMapping(result[key])
                nested.file, nested.positions = change.file, change.positions
                result[key] = nested
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
    if "/" in name or name.endswith((*SUFFIXES, ".csv", ".txt")):
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
                return self._load(value, None, source, info.context)
            if isinstance(value, Mapping) and isinstance(value.get("from"), str):
                changes = _placed(value, info.context.file)
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

    def _load(
        self, name: str, changes: _PlacedMapping | None, model: type[DocumentT], context: LoadContext
    ) -> DocumentT:
        said_in = name.file if isinstance(name, _PlacedText) else context.file
        path = resolve(name, self.folder, LoadContext(said_in))
        raw = self.read_raw(path, context.inputs) if self.read_raw else read_mapping(path, context.inputs)
        inside = LoadContext(path, context.inputs)
        if changes is None:
            return check(raw, model, inside)
        content = merged(raw, {key: entry for key, entry in changes.items() if key != "from"})
        return check(content, model, inside, positions=raw, changed=(changes.file, changes.positions))


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
