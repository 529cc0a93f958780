"""Every legal layout of a question, made axis by axis; for the others, the rule that they broke."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from planner.question import Question
from planner.rule import Broken, Rule
from planner.rules import RULES, stages_rule
from scenarios.layout import RECOMPUTES, SCHEDULES, SHARDINGS
from simulator.arrays import SHARED, LayoutArrays

AXES = (
    "pp", "tp", "cp", "dp", "micro_batch_size", "ep", "etp", "schedule", "vpp", "sharding", "recompute",
    "sequence_parallel",
)  # fmt: skip
"""In the order in which they are chosen: those that break most rules first, so that the products stay small."""

MAX_CP = 64
"""Published runs use up to 16 (Llama 3 at 131,072 tokens, arXiv 2407.21783, section 3.3.2)."""
MAX_VPP = 16
"""Chunks per rank beyond this add point-to-point messages and no visible bubble saving."""
MAX_MICRO_BATCH_TOKENS = 131_072
"""Tokens of one micro-batch on one rank: the matrix shapes are long before that as good as they get."""
NONE = -1

Ints = npt.NDArray[Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidates:
    """What was enumerated. ``rejected`` counts combinations of the axes so far, by the first rule that they broke."""

    layouts: LayoutArrays
    rejected: dict[str, int]
    examples: dict[str, Broken]
    """One rejected combination of each rule, in words."""
    emptied_by: tuple[str, ...] = ()
    """Where nothing is left: the rules that rejected the last combinations."""


@dataclass(slots=True)
class _Search:
    rejected: Counter[str] = field(default_factory=Counter)
    examples: dict[str, Broken] = field(default_factory=dict)
    last: tuple[str, ...] = ()


def legal_layouts(question: Question, pins: dict[str, Any] | None = None, *, without: str | None = None) -> Candidates:
    """Enumerate all layouts that keep every rule.

    Args:
        question: job, cluster and allowances.
        pins: values of ``Layout`` fields that must not change.
        without: name of a rule that is not applied, to see whether it alone stands in the way.
    """
    pins = pins or {}
    pinned = pinned_axes(pins)
    rules = [rule for rule in RULES if not (rule.redundant and rule.axes[-1] in pinned)]
    rules = [rule for rule in rules if rule.name != without]
    if pins.get("stages"):
        rules.append(stages_rule(tuple(pins["stages"])))
    search = _Search()
    shared = {name: pins[name] for name in SHARED if pins.get(name)}
    rows = _apply([rule for rule in rules if not rule.axes], question, _rows({}, 1, shared), search)
    columns: dict[str, Ints] = {}
    for position, axis in enumerate(AXES):
        if not len(rows):
            break
        columns = _extended(columns, len(rows), axis, _values(axis, rows, question, pinned))
        chosen = set(AXES[: position + 1])
        due = [rule for rule in rules if axis in rule.axes and chosen.issuperset(rule.axes)]
        rows = _apply(due, question, _rows(columns, len(columns[axis]), shared), search)
        columns = {name: getattr(rows, name) for name in columns}
    emptied_by = () if len(rows) else search.last
    return Candidates(layouts=rows, rejected=dict(search.rejected), examples=search.examples, emptied_by=emptied_by)


def pinned_axes(pins: dict[str, Any]) -> dict[str, int]:
    """Translate pinned ``Layout`` fields into axis values; stages fix how many there are, not the axes."""
    codes: dict[str, tuple[str, tuple[Any, ...]]] = {
        "optimizer_sharding": ("sharding", SHARDINGS),
        "schedule": ("schedule", SCHEDULES),
        "recompute": ("recompute", RECOMPUTES),
    }
    result = {}
    for name, value in pins.items():
        if name in codes:
            axis, words = codes[name]
            result[axis] = words.index(value)
        elif name in AXES:
            result[name] = value
    return result


def _values(axis: str, rows: LayoutArrays, question: Question, pinned: dict[str, int]) -> Ints:
    """Values to try: one list for all rows, or a matrix with a line of values for each row (NONE: no value)."""
    if axis in pinned:
        return np.array([pinned[axis]])
    job, gpus = question.job, question.cluster.num_gpus
    match axis:
        case "pp":
            return np.arange(1, min(question.num_layers, gpus) + 1)
        case "tp":
            limit = gpus if question.allows("tp-across-domains") else question.largest_domain
            return np.arange(1, min(limit, gpus, max(question.heads + question.mamba_sizes, default=1)) + 1)
        case "cp":
            return np.arange(1, min(MAX_CP, gpus) + 1)
        case "dp" if question.all_gpus:
            each: Ints = np.maximum(gpus // (rows.tp * rows.cp * rows.pp), 1)
            return each.reshape(-1, 1)
        case "dp":
            return np.array([one for one in divisors(job.global_batch_size) if one <= gpus])
        case "micro_batch_size":
            return np.array([one for one in divisors(job.global_batch_size) if _micro_batch_size(one, job.seq_length)])
        case "ep":
            return np.array(divisors(math.gcd(*question.num_experts))) if question.num_experts else np.array([1])
        case "etp":
            return (
                np.stack([np.ones_like(rows.tp), np.where(rows.tp > 1, rows.tp, NONE)], axis=1)
                if question.num_experts
                else np.array([1])
            )
        case "schedule":
            return np.arange(len(SCHEDULES))
        case "vpp":
            return np.arange(1, MAX_VPP + 1)
        case "sharding":
            return np.arange(len(SHARDINGS))
        case "recompute":
            return np.array([0])  # chosen layer by layer, when the stages are
        case _:
            return np.array([False, True])


def _micro_batch_size(size: int, seq_length: int) -> bool:
    """Powers of two and three times them, as far as a rank has use for the tokens."""
    odd = size // (size & -size)
    return size == 1 or (odd in (1, 3) and size * seq_length <= MAX_MICRO_BATCH_TOKENS)


def divisors(number: int) -> list[int]:
    """Return all divisors in rising order.

    >>> divisors(12)
    [1, 2, 3, 4, 6, 12]
    """
    small = [one for one in range(1, math.isqrt(number) + 1) if number % one == 0]
    return sorted({*small, *(number // one for one in small)})


def _extended(columns: dict[str, Ints], count: int, axis: str, values: Ints) -> dict[str, Ints]:
    """Outer product of the rows so far with the values of one more axis."""
    choices = np.broadcast_to(values, (count, values.shape[-1]))
    repeated = {name: np.repeat(column, choices.shape[1]) for name, column in columns.items()}
    extended = repeated | {axis: choices.ravel()}
    given = extended[axis] != NONE
    return extended if given.all() else {name: column[given] for name, column in extended.items()}


def _rows(columns: dict[str, Ints], count: int, shared: dict[str, Any]) -> LayoutArrays:
    """Layouts with the axes chosen so far; the others stand at their neutral value without taking memory."""
    values: dict[str, Any] = dict.fromkeys(AXES, 1) | {"sharding": 0, "recompute": 0, "sequence_parallel": False}
    neutral: dict[str, Any] = {axis: np.broadcast_to(value, count) for axis, value in values.items()}
    return LayoutArrays(**(neutral | columns | shared))


def _apply(rules: list[Rule], question: Question, rows: LayoutArrays, search: _Search) -> LayoutArrays:
    before = len(rows)
    dropped = []
    for rule in rules:
        if not len(rows):
            break
        holds = np.broadcast_to(rule.holds(question, rows), len(rows)).astype(bool)
        wrong = np.flatnonzero(~holds)
        if not len(wrong):
            continue
        search.rejected[rule.name] += len(wrong)
        dropped.append(rule.name)
        if rule.name not in search.examples:
            plain = replace(rows, dp_replicate=1)  # dp, which it divides, may not be chosen yet
            layout = plain.row(int(wrong[plainest(rows, wrong)]))
            search.examples[rule.name] = Broken(rule.name, rule.sentence(question, layout))
        rows = rows.take(np.flatnonzero(holds))
    if before and not len(rows):
        search.last = tuple(dropped)
    return rows


def plainest(rows: LayoutArrays, among: Ints) -> int:
    """Of some rows the place of the one whose degrees are smallest, which makes the clearest example."""
    sizes = sum(np.log2(np.maximum(getattr(rows, axis)[among], 1)) for axis in ("tp", "cp", "pp", "ep", "vpp"))
    return int(np.argmin(sizes))
