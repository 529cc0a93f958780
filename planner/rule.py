"""What a rule about layouts is, and the arithmetic that rules share: divisions, micro-batches, codes of schedules.

A rule looks at some axes of a layout. ``holds`` checks many layouts at once, ``sentence`` tells what is wrong with one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from planner.question import Question
from scenarios.layout import SCHEDULES, Layout
from simulator.arrays import LayoutArrays

Bools = npt.NDArray[np.bool_]
GPIPE, ONE_F_ONE_B, INTERLEAVED, ZB_H1, ZBV, DUALPIPE, ZB_H2 = range(len(SCHEDULES))


@dataclass(frozen=True, slots=True)
class Rule:
    """One condition on a layout."""

    name: str
    axes: tuple[str, ...]
    """Fields of a layout that the rule looks at; none: the rule is about the job and the cluster."""
    holds: Callable[[Question, LayoutArrays], Bools]
    sentence: Callable[[Question, Layout], str]
    redundant: bool = False
    """Not wrong, but the same as a simpler layout: left out of a search, allowed where pinned."""


@dataclass(frozen=True, slots=True)
class Broken:
    """A rule that a layout breaks, and how."""

    rule: str
    sentence: str


def splits(sizes: Iterable[int], parts: npt.NDArray[Any]) -> Bools:
    """True where every size divides evenly over the parts."""
    result = np.ones(parts.shape, dtype=bool)
    for size in sizes:
        result &= size % parts == 0
    return result


def splits_or_repeats(sizes: Iterable[int], parts: npt.NDArray[Any]) -> Bools:
    """True where every size divides over the parts, or can be repeated evenly to fill them."""
    result = np.ones(parts.shape, dtype=bool)
    for size in sizes:
        result &= (size % parts == 0) | (parts % size == 0)
    return result


def everywhere(value: bool, rows: LayoutArrays) -> Bools:
    """The same answer for every layout."""
    return np.full(len(rows), value)


def microbatches(question: Question, rows: LayoutArrays) -> npt.NDArray[Any]:
    """Micro-batches of a replica in a step, of every layout."""
    return np.asarray(question.job.global_batch_size // np.maximum(rows.dp * rows.micro_batch_size, 1))


def left(size: int, parts: int) -> str:
    """What a division leaves, in words."""
    return f"{size} % {parts} = {size % parts}"


def lefts(sizes: Iterable[int], parts: int) -> str:
    """The same for all sizes that do not divide."""
    return ", ".join(left(size, parts) for size in sizes if size % parts)


def count(question: Question, layout: Layout) -> int:
    """Micro-batches of a replica in a step."""
    return question.job.global_batch_size // (layout.dp * layout.micro_batch_size)
