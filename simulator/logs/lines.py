"""Lines of a log and what stands in them: numbers, times of day, key and value."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path

from topologies.importers.text import numbered_lines
from topologies.reading import read_bytes

NUMBER = r"[-+]?(?:\d[\d,]*\.?\d*|\.\d+)(?:[eE][-+]?\d+)?"
MIB, GIB = 2.0**20, 2.0**30

UNREADABLE_SHARE = 0.01
"""Share of characters that are not UTF-8 from which a file is no log; progress bars are sometimes cut in one."""

_NUMBER = re.compile(rf"\s*({NUMBER})")
_CLOCK = re.compile(r"(\d{4}-\d\d-\d\d)[T ](\d\d:\d\d:\d\d)(?:[.,](\d{1,6}))?")


def read_lines(path: str | Path) -> list[str]:
    """Return the lines of a log without colours.

    Raises:
        InputError: the file cannot be read, is empty, or is not text.
    """
    path = Path(path)
    content = read_bytes(path, "give the path of a log")
    encoding = "utf-16" if content[:2] in (b"\xff\xfe", b"\xfe\xff") else "utf-8-sig"
    text = content.decode(encoding, errors="replace")
    if text.count("\ufffd") > UNREADABLE_SHARE * len(text):
        text = "\0"
    return log_lines(text, path)


def log_lines(text: str, file: str | Path | None = None) -> list[str]:
    """Split a log into lines without colours; what a progress bar overwrites are lines of their own.

    Raises:
        InputError: empty or binary content.
    """
    return [line for _, line in numbered_lines(text, file)]


def number(text: str | None) -> float | None:
    """Return the number that a text begins with, None where there is none or it is not finite.

    >>> number(" 10,050 tokens"), number("13100.0/13240.9"), number("nan")
    (10050.0, 13100.0, None)
    """
    match = _NUMBER.match(text or "")
    value = float(match[1].replace(",", "")) if match else math.nan
    return value if math.isfinite(value) else None


def positive(text: str | None) -> float | None:
    """Return the number that a text begins with; zero means that nothing was measured.

    >>> positive("0.00GiB") is None
    True
    """
    value = number(text)
    return value if value and value > 0 else None


def whole(value: float | None, tolerance: float = 1e-3) -> int | None:
    """Return a number that is whole up to rounding as such, None otherwise.

    >>> whole(2047.9999), whole(4248.2)
    (2048, None)
    """
    if value is None or value < 1 or abs(value - round(value)) > tolerance:
        return None
    return round(value)


def clock(line: str) -> float | None:
    """Return the first time of day in a line in seconds, None where there is none.

    >>> clock("2026-02-24 19:46:19,145 - root") - clock("[titan] 2026-02-24 19:46:17,508 -")
    1.637...
    """
    match = _CLOCK.search(line)
    if match is None:
        return None
    try:
        moment = datetime.fromisoformat(f"{match[1]}T{match[2]}").replace(tzinfo=UTC)
    except ValueError:
        return None
    return moment.timestamp() + float(f"0.{match[3] or 0}")


def any_line(pattern: re.Pattern[str], lines: Iterable[str]) -> bool:
    """Tell whether a pattern occurs."""
    return any(pattern.search(line) for line in lines)


def largest(values: Iterable[float | None]) -> float | None:
    """Return the largest known value."""
    return max((value for value in values if value is not None), default=None)
