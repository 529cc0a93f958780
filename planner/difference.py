"""Where two plans differ."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from planner.plan import Plan

NOT_COMPARED = ("solver", "alternatives", "inputs", "format_version")
"""How a plan was found and from which files is not part of what it says."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """One key with its two values; ``change`` is relative, for numbers."""

    key: str
    before: Any
    after: Any
    change: float | None = None


def differences(before: Plan, after: Plan) -> list[Difference]:
    """Compare scenario, layout, placement, checkpoints and promise of two plans, key by key."""
    first, second = before.as_json(), after.as_json()
    found: list[Difference] = []
    for key in first:
        if key not in NOT_COMPARED:
            _compare(key, first[key], second[key], found)
    return found


def _compare(key: str, before: Any, after: Any, found: list[Difference]) -> None:
    if isinstance(before, dict) and isinstance(after, dict):
        for name in {**before, **after}:
            _compare(f"{key}.{name}", before.get(name), after.get(name), found)
    elif isinstance(before, list) and isinstance(after, list) and len(before) == len(after):
        for index, (one, other) in enumerate(zip(before, after, strict=True)):
            _compare(f"{key}[{index}]", one, other, found)
    elif before != after:
        numbers = _number(before) and _number(after) and before != 0
        found.append(Difference(key=key, before=before, after=after, change=after / before - 1 if numbers else None))


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
