"""Parts of an ensemble as files of JSON lines: made on many machines, put together into one answer."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from simulator.outcome import RunOutcome, plain
from topologies.document import FORMAT_VERSION
from topologies.errors import InputError
from topologies.reading import read_utf8

KIND = "headway runs"
MAKE = "headway simulate SCENARIO --runs 1000 --part 1/4 -o part-1.jsonl"


def part_range(part: str, runs: int) -> tuple[int, int]:
    """First run and number of runs of part ``K/N`` (counted from 1).

    Raises:
        InputError: not of that form, or an empty part.
    """
    number, _, parts = part.partition("/")
    if not (number.isdecimal() and parts.isdecimal() and 1 <= int(number) <= int(parts)):
        raise InputError(f"{part!r} is not K/N with 1 <= K <= N", hint="for example --part 2/4", file="--part")
    k, n = int(number), int(parts)
    first, last = runs * (k - 1) // n, runs * k // n
    if first == last:
        raise InputError(
            f"part {part} of {runs} runs is empty", hint="ask for more --runs or fewer parts", file="--part"
        )
    return first, last - first


def part_text(outcomes: Sequence[RunOutcome], seed: int, first_run: int, known: dict[str, Any]) -> str:
    """One line that says what was played, then one line for each run."""
    body = json.dumps(known, sort_keys=True)
    head = {
        "kind": KIND,
        "format_version": FORMAT_VERSION,
        "question_sha256": hashlib.sha256(body.encode()).hexdigest(),
        "seed": seed,
        "first_run": first_run,
        "runs": len(outcomes),
        "known": known,
    }
    lines = [json.dumps(head), *(json.dumps(plain(one) | {"spans": []}) for one in outcomes)]
    return "\n".join(lines) + "\n"


def merge_parts(paths: Sequence[Path]) -> tuple[tuple[RunOutcome, ...], int, dict[str, Any]]:
    """Read parts of one ensemble and return its outcomes in order, the seed, and what is known beside luck.

    Raises:
        InputError: not a part, truncated, parts of different questions or seeds, or runs that are there twice.
    """
    parts = sorted((_read(path) for path in paths), key=lambda part: int(part[0]["first_run"]))
    head = parts[0][0]
    outcomes: list[RunOutcome] = []
    last = 0
    for place, (other, found, path) in enumerate(parts):
        for key, what in (("question_sha256", "another question"), ("seed", "another seed")):
            if other[key] != head[key]:
                raise InputError(f"is a part of {what}", hint="merge parts of one ensemble", file=path, key=key)
        if place and other["first_run"] < last:
            raise InputError("holds runs that another part holds too", hint="give each part once", file=path)
        last = other["first_run"] + other["runs"]
        outcomes += found
    return tuple(outcomes), int(head["seed"]), dict(head["known"])


def _read(path: Path) -> tuple[dict[str, Any], list[RunOutcome], Path]:
    lines = read_utf8(path, f"make one with '{MAKE}'").splitlines()
    try:
        head, *rows = (json.loads(line) for line in lines)
    except ValueError:
        raise InputError(
            "is not a whole part", hint="it is truncated or was edited; make it again", file=path
        ) from None
    if not isinstance(head, dict) or head.get("kind") != KIND:
        raise InputError("is not a part of an ensemble", hint=f"make one with '{MAKE}'", file=path)
    if head.get("format_version") != FORMAT_VERSION:
        raise InputError(f"has format_version {head.get('format_version')}", hint="make the part again", file=path)
    if len(rows) != head["runs"]:
        raise InputError(f"holds {len(rows)} of {head['runs']} runs", hint="make the part again", file=path)
    try:
        return head, [RunOutcome(**row | {"spans": ()}) for row in rows], path
    except TypeError:
        raise InputError("holds a run with unknown keys", hint="make the part again", file=path) from None
