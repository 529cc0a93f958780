"""What sets one layout, or one plan, apart from another, in words."""

from __future__ import annotations

from typing import Any

from planner.notes import stages_text
from planner.plan import Plan
from planner.waterfall import NAMES
from scenarios.layout import Layout
from topologies.units import format_quantity

DEGREES = ("tp", "cp", "pp", "vpp", "ep", "etp", "dp")
SMALL = 1e-3
"""Parts of a step that differ by less than this share of it are not told."""


def changed_layout(before: Layout, after: Layout) -> str:
    """What the second layout has instead of the first: ``TP4 instead of TP8, no recompute instead of 14 layers``."""
    told = [
        f"{axis.upper()}{getattr(after, axis)} instead of {axis.upper()}{getattr(before, axis)}"
        for axis in DEGREES
        if getattr(before, axis) != getattr(after, axis)
    ]
    for name in ("micro_batch_size", "optimizer_sharding", "schedule"):
        first, second = getattr(before, name), getattr(after, name)
        if first != second:
            told.append(f"{name.replace('_', ' ')} {second} instead of {first}")
    repeated = [recomputed_text(one) for one in (before, after)]
    if repeated[0] != repeated[1]:
        told.append(f"{repeated[1]} instead of {repeated[0]}")
    if not told and before.stages != after.stages:
        told.append(f"stages of {stages_text(after)} layers instead of {stages_text(before)}")
    return ", ".join(told)


def recomputed_text(layout: Layout) -> str:
    """How much a layout recomputes: ``full recompute of 12 layers``."""
    letters = "".join(stage.modes(layout.recompute) for stage in layout.stages)
    full, selective = letters.count("f"), letters.count("s")
    if not letters or full + selective == 0:
        return "no recompute" if layout.recompute == "none" or letters else f"{layout.recompute} recompute"
    parts = [
        *([f"full recompute of {full} layers"] if full else []),
        *([f"selective recompute of {selective} layers"] if selective else []),
    ]
    return " and ".join(parts)


def per_token(made: Plan) -> float:
    """The objective per token: wall seconds, US dollars, joules, or the lost share."""
    predicted, job = made.predicted, made.scenario.job
    wall: float = predicted["step_seconds"] / max(predicted["goodput"], 1e-9) / job.tokens_per_step
    match made.scenario.objective:
        case "goodput":
            return 1 - float(predicted["goodput"])
        case "cost" if predicted["cost_usd"]:
            return float(predicted["cost_usd"])
        case "energy" if predicted["energy_kwh"]:
            return float(predicted["energy_kwh"])
        case "cost" | "energy":
            return wall * made.layout.world_size
        case _:
            return wall


def headline(before: Plan, after: Plan) -> list[str]:
    """The difference between two plans in a few sentences: layout, step by its parts, goodput, run, cost."""
    told = []
    layout = changed_layout(before.layout, after.layout)
    if layout:
        told.append(f"layout: {layout}")
    first, second = before.predicted, after.predicted
    change = second["step_seconds"] / first["step_seconds"] - 1
    if abs(change) > 1e-9:
        told.append(f"step: {100 * change:+.1f} %: {_parts(first, second) or 'no part by much'}")
    if first["goodput"] != second["goodput"]:
        told.append(f"goodput: {100 * (second['goodput'] - first['goodput']):+.2f} points")
    for name, words in (("cost_usd", "cost"), ("energy_kwh", "energy")):
        if first.get(name) and second.get(name) and first[name] != second[name]:
            told.append(f"{words}: {100 * (second[name] / first[name] - 1):+.1f} %")
    if first.get("days") and second.get("days") and first["days"] != second["days"]:
        told.append(f"run: {first['days']['p50']:.3g} days before, {second['days']['p50']:.3g} after")
    hashes = [{one["path"]: one["sha256"] for one in made.inputs} for made in (before, after)]
    moved = [path for path in hashes[0].keys() & hashes[1].keys() if hashes[0][path] != hashes[1][path]]
    if moved:
        told.append(f"changed input files: {', '.join(sorted(moved))}")
    return told


def _parts(first: dict[str, Any], second: dict[str, Any]) -> str:
    """The parts of the step that changed most, largest first."""
    deltas = {
        name: second["breakdown_seconds"].get(name, 0.0) - seconds
        for name, seconds in first["breakdown_seconds"].items()
    }
    least = SMALL * first["step_seconds"]
    ranked = sorted((name for name in deltas if abs(deltas[name]) > least), key=lambda name: -abs(deltas[name]))[:4]
    return ", ".join(
        f"{NAMES.get(name, name)} {format_quantity(abs(deltas[name]), 'seconds', 2)} "
        f"{'more' if deltas[name] > 0 else 'less'}"
        for name in ranked
    )
