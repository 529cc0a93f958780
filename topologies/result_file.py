"""JSON files that headway writes and reads back: plans and measurements."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from topologies.document import FORMAT_VERSION
from topologies.errors import InputError
from topologies.reading import read_json


def read_result_file(path: str | Path, *, kind: str, command: str) -> dict[str, Any]:
    """Read a result file whose ``format_version`` this headway knows.

    Args:
        path: of the file.
        kind: what it should be, such as ``plan``.
        command: the command that makes such a file.

    Raises:
        InputError: unreadable, truncated, not such a file, or of a newer format version.
    """
    path = Path(path)
    give, make = f"give the path of a {kind} file", f"make one with '{command}'"
    content = read_json(path, give, damaged=f"the file is truncated or was edited; make the {kind} again")
    if not isinstance(content, dict):
        raise InputError(f"is not a {kind}", hint=make, file=path)
    version = content.get("format_version")
    if not isinstance(version, int):
        raise InputError(f"is not a {kind}: it has no format_version", hint=make, file=path)
    if version > FORMAT_VERSION:
        raise InputError(
            f"has format_version {version}, and this headway reads up to {FORMAT_VERSION}",
            hint=f"upgrade headway, or make the {kind} again",
            file=path,
        )
    return content
