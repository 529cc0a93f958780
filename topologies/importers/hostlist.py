"""Host lists as Slurm writes them: ``node[1-8,10],srv[001-003]``."""

from __future__ import annotations

import itertools
import re
from pathlib import Path

from topologies.errors import InputError

MOST_HOSTS = 1_000_000
"""A longer list is a slip of the pen, not a cluster."""

_ITEM = re.compile(r"(?:[^\[\],]|\[[^\[\]]*\])+")
_PART = re.compile(r"\[([^\[\]]*)\]|([^\[\]]+)")
_RANGE = re.compile(r"(\d+)(?:-(\d+))?")


def expand(text: str, *, file: str | Path | None = None, line: int | None = None) -> tuple[str, ...]:
    """Return the hosts of a list, in the order written; leading zeros keep the width of the lower bound.

    Raises:
        InputError: brackets that do not match, a range that runs backwards, or more than a million hosts.

    >>> expand("node[08-10],login")
    ('node08', 'node09', 'node10', 'login')
    >>> expand("r[1-2]n[1-2]")
    ('r1n1', 'r1n2', 'r2n1', 'r2n2')
    """
    compact = re.sub(r"\s+", "", text)
    items = _ITEM.findall(compact)
    if not items or ",".join(items) != compact:
        raise InputError(
            f"{text!r} is not a host list", hint="write names and ranges such as node[01-08,12]", file=file, line=line
        )
    hosts: list[str] = []
    for item in items:
        choices = [[plain] if plain else _numbers(ranges, text, file, line) for ranges, plain in _PART.findall(item)]
        count = 1
        for choice in choices:
            count *= len(choice)
        if len(hosts) + count > MOST_HOSTS:
            raise InputError(f"{text!r} names more than {MOST_HOSTS:,} hosts", file=file, line=line)
        hosts += ["".join(parts) for parts in itertools.product(*choices)]
    return tuple(hosts)


def _numbers(ranges: str, text: str, file: str | Path | None, line: int | None) -> list[str]:
    numbers: list[str] = []
    for piece in ranges.split(","):
        match = _RANGE.fullmatch(piece)
        low, high = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
        if match is None or high < low or high - low >= MOST_HOSTS:
            raise InputError(
                f"{piece!r} in {text!r} is not a range", hint="write low-high, as in [01-08]", file=file, line=line
            )
        numbers += [str(number).zfill(len(match[1])) for number in range(low, high + 1)]
    return numbers
