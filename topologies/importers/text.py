"""Text as people paste it: labels of launchers, colours of terminals, and files that are no text at all."""

from __future__ import annotations

import contextlib
import json
import re
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

from topologies.document import not_yaml
from topologies.errors import InputError
from topologies.reading import read_bytes

_COLOUR = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
_LABEL = re.compile(
    r"""^(?:
        \s*\[\d+,\d+\]<std(?:out|err)>:[ ]?           # mpirun --tag-output
      | \[[\w./-]+\][ ](?=[\s#\d])                     # kubectl logs --prefix
      | \s*\d+:(?=\s)                                  # srun --label
      | [A-Za-z][\w.-]*:[ \t]+(?=\#|\d+\s+\d)          # pdsh
    )""",
    re.VERBOSE,
)


def read_text(path: str | Path) -> str:
    """Return the text of a file.

    Raises:
        InputError: the file cannot be read, is empty, or is not text.
    """
    path = Path(path)
    content = read_bytes(path)
    encoding = "utf-16" if content[:2] in (b"\xff\xfe", b"\xfe\xff") else "utf-8-sig"
    try:
        text = content.decode(encoding)
    except UnicodeDecodeError:
        text = "\0"
    require_text(text, path)
    return text


def require_text(text: str, file: str | Path | None) -> None:
    """Refuse what holds nothing or is binary.

    Raises:
        InputError: empty or binary content.
    """
    if "\0" in text:
        raise InputError("is not a text file", hint="give the output of the tool as it was printed", file=file)
    if not text.strip():
        raise InputError("is empty", hint="give the output of the tool as it was printed", file=file)


def numbered_lines(text: str, file: str | Path | None) -> list[tuple[int, str]]:
    """Return the lines from 1 on without colours.

    Raises:
        InputError: empty or binary content.
    """
    require_text(text, file)
    return [(number, _COLOUR.sub("", line)) for number, line in enumerate(text.splitlines(), 1)]


def without_label(line: str) -> str:
    """Remove what srun, mpirun, kubectl or pdsh put before a line.

    >>> without_label("[1,0]<stdout>:#   size   count")
    '#   size   count'
    >>> without_label(" 0: node-001:1001:1002 [0] NCCL INFO Using network IB")
    ' node-001:1001:1002 [0] NCCL INFO Using network IB'
    """
    return _LABEL.sub("", line, count=1)


def read_yaml(text: str, file: str | Path | None) -> Any:
    """Parse YAML 1.2 with positions, or JSON without, whatever its top level is.

    Raises:
        InputError: not valid YAML.
    """
    require_text(text, file)
    if text.lstrip()[0] in "{[":
        with contextlib.suppress(json.JSONDecodeError):
            return json.loads(text)
    try:
        return YAML(typ="rt").load(text)
    except YAMLError as error:
        raise not_yaml(error, file) from None


def line_of(node: Any, key: Any = None) -> int | None:
    """Return the line on which a parsed YAML node, or one of its keys, stands."""
    position = getattr(node, "lc", None)
    if position is None:
        return None
    where = (position.data or {}).get(key) if key is not None else None
    if where is not None:
        return int(where[0]) + 1
    return None if position.line is None else int(position.line) + 1
