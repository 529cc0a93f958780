"""A no with its reason: the rule that pins break, the stage that does not fit, and the nearest layout that works."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from planner.candidates import Candidates, legal_layouts, pinned_axes, plainest
from planner.pricing import capacity_bytes, peaks, times
from planner.question import Question
from planner.reasons import does_not_fit
from planner.rule import Broken
from planner.rules import RULES
from scenarios.layout import Layout
from simulator.arrays import DEGREES, LayoutArrays
from simulator.memory import memory_use
from topologies.errors import Infeasible
from topologies.units import format_quantity

SAMPLE = 200_000
"""Nearest layouts that are checked for memory before the nearest legal one is named without that check."""


FIXED_BY_THE_JOB = ("precision",)
"""Rules without an axis of a layout: no layout is a near miss of them."""


def rule_refusal(question: Question, pins: dict[str, Any], found: Candidates) -> Infeasible:
    """Explain why no layout keeps all rules, pins included."""
    reasons = [found.examples[name] for name in found.emptied_by]
    told = "; ".join(f"{reason.sentence} (rule {reason.rule})" for reason in reasons[:3])
    near_miss = _near_miss_text(near_misses(question, pins, found), {reason.rule for reason in reasons[:3]})
    if not pins:
        return Infeasible(
            f"no layout of {question.job.model.name} on {question.cluster.name} keeps all rules: {told}",
            nearest=near_miss,
        )
    free = legal_layouts(question).layouts
    constraint = f"the pinned layout ({pins_text(pins)}) cannot work: {told}"
    if not len(free):
        return Infeasible(
            constraint,
            nearest=near_miss,
            relax=("change the job or the cluster: without pins no layout is legal either",),
        )
    near, fits = nearest(question, pinned_axes(pins), free)
    words = pins_text(_pinned_values(near, pins))
    memory = "" if fits else ", though it does not fit in memory"
    instead = f"pin {words} instead, the nearest layout that keeps the rules{memory} ({near.label()})"
    return Infeasible(constraint, nearest=near_miss, relax=(instead, "leave the planner free to choose"))


def near_misses(question: Question, pins: dict[str, Any], found: Candidates) -> list[tuple[Broken, Layout]]:
    """For each rule that alone stands in the way, the plainest layout that breaks no other one.

    Rules that rejected the last combinations come first. Empty where at least two rules would have to give way.
    """
    told: list[tuple[Broken, Layout]] = []
    for name in dict.fromkeys((*found.emptied_by, *sorted(found.rejected, key=lambda one: found.rejected[one]))):
        rule = next((one for one in RULES if one.name == name), None)
        if rule is None or name in FIXED_BY_THE_JOB:
            continue
        layouts = legal_layouts(question, pins, without=name).layouts
        if len(layouts):
            near = layouts.row(plainest(layouts, np.arange(len(layouts))))
            told.append((Broken(name, rule.sentence(question, near)), near))
    return told


def _near_miss_text(misses: list[tuple[Broken, Layout]], known: set[str]) -> str:
    """Near misses in words; reasons that were told already are not repeated."""
    if not misses:
        return "none: at least two rules would have to give way"
    return "; ".join(
        f"{near.label()}, but for rule {broken.rule}" + ("" if broken.rule in known else f": {broken.sentence}")
        for broken, near in misses[:3]
    )


def memory_refusal(
    question: Question, pins: dict[str, Any], layouts: LayoutArrays, peak: npt.NDArray[Any]
) -> Infeasible:
    """Explain why no legal layout fits: the nearest miss, its fullest stage, and what would have to change."""
    cluster, job = question.cluster, question.job
    near = layouts.row(int(np.argmin(peak)))
    use = memory_use(cluster, job, near)
    over = use.peak_bytes - use.capacity_bytes
    return Infeasible(
        f"no layout of {job.model.name} fits in the memory of {cluster.num_gpus} {cluster.gpu.name}"
        + (f" with {pins_text(pins)}" if pins else ""),
        needed=format_quantity(use.peak_bytes, "bytes"),
        available=format_quantity(use.capacity_bytes, "bytes"),
        nearest=f"{near.label()} {does_not_fit(use)}, {format_quantity(over, 'bytes')} too much",
        relax=tuple(_remedies(question, pins, near)),
    )


def _remedies(question: Question, pins: dict[str, Any], near: Layout) -> list[str]:
    """What could still give way, found by asking again without each pin and with more nodes."""
    found = []
    for name in pins:
        if name in ("stages", "rank_order"):
            continue
        rest = {key: value for key, value in pins.items() if key != name}
        if _anything_fits(question, rest):
            found.append(f"free {name} from {pins[name]}")
    if near.recompute != "full" and "recompute" not in pins:
        found.append("recompute: full")
    if near.micro_batch_size > 1 and "micro_batch_size" not in pins:
        found.append("a smaller micro-batch")
    for factor in (2, 4, 8, 16, 32, 64):
        pools = tuple(pool.model_copy(update={"num_nodes": pool.num_nodes * factor}) for pool in question.cluster.pools)
        larger = Question(
            cluster=question.cluster.model_copy(update={"pools": pools}), job=question.job, allow=question.allow
        )
        if _anything_fits(larger, pins):
            found.append(f"{factor} times the GPUs ({larger.cluster.num_gpus}), where a layout fits")
            break
    else:
        found.append("GPUs with more memory")
    if question.job.seq_length > 1024:
        found.append("shorter sequences")
    return found


def _anything_fits(question: Question, pins: dict[str, Any]) -> bool:
    layouts = legal_layouts(question, pins).layouts
    return bool(len(layouts)) and bool((peaks(question, layouts) <= capacity_bytes(question)).any())


def nearest(question: Question, pinned: dict[str, int], layouts: LayoutArrays) -> tuple[Layout, bool]:
    """Return the legal layout with the smallest change, and whether it fits in memory.

    The change is the sum of doublings or halvings of the pinned degrees, and 1 for each other pinned choice; among
    equal changes the fastest layout is taken.
    """
    change = np.zeros(len(layouts))
    for axis, value in pinned.items():
        column = getattr(layouts, axis)
        change += np.abs(np.log2(column / value)) if axis in DEGREES else column != value
    order = np.argsort(change, kind="stable")[:SAMPLE]
    close = layouts.take(order)
    fits = peaks(question, close) <= capacity_bytes(question)
    pool = np.flatnonzero(fits) if fits.any() else np.arange(len(order))
    best = pool[np.isclose(change[order[pool]], change[order[pool]].min())]
    fastest = best[int(np.argmin(times(question, close.take(best))))]
    return close.row(int(fastest)), bool(fits.any())


def _pinned_values(layout: Layout, pins: dict[str, Any]) -> dict[str, Any]:
    return {name: getattr(layout, name) for name in pins if name not in ("stages", "rank_order")}


def pins_text(pins: dict[str, Any]) -> str:
    """Pins in words: ``tp=8, pp=16``."""
    return ", ".join(
        f"stages of {'/'.join(str(stage.layers) for stage in value)} layers" if name == "stages" else f"{name}={value}"
        for name, value in pins.items()
    )
