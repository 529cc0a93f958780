"""Why one layout loses to another, in words with numbers."""

from __future__ import annotations

from simulator.outcome import MEMORY_PARTS, MemoryUse, StepTime
from topologies.units import format_quantity

PARTS = {
    "tp_comm": "TP communication",
    "pp_bubble": "pipeline bubble",
    "cp_comm": "CP communication",
    "ep_comm": "expert all-to-all",
    "pp_comm": "pipeline messages",
    "dp_comm": "exposed gradient and weight traffic",
    "optimizer": "optimizer update",
    "straggler": "waiting for stragglers",
    "gemm": "matrix multiplications (smaller or less even pieces)",
    "attention": "attention",
    "memory_bound": "memory-bound operations",
    "recompute": "recompute",
    "head": "output head",
    "host": "host time",
    "compute": "compute",
}
"""Parts of a step in words."""

EQUAL = 0.05
"""Per cent of the step below which two layouts are told as equal."""

SMALL = 0.10
"""A part that makes up less than this share of the difference is not told."""


def lost_because(loser: StepTime, winner: StepTime) -> str:
    """Say which parts of the step make the loser slower, largest first, and what it gains elsewhere."""
    difference = loser.total_seconds - winner.total_seconds
    share = 100 * abs(difference) / winner.total_seconds
    if share < EQUAL:
        return f"equal within {EQUAL} % of the step"
    deltas = _deltas(loser, winner)
    least = SMALL * abs(difference)
    more = sorted(((delta, part) for part, delta in deltas.items() if delta > least), reverse=True)[:3]
    less = sorted((delta, part) for part, delta in deltas.items() if delta < -least)[:2]
    losses = ", ".join(_told(part, delta, loser, winner) for delta, part in more)
    gains = ", ".join(f"{PARTS[part]} {_seconds(-delta)} less" for delta, part in less)
    if difference < 0:
        return f"{share:.1f} % faster: {gains}" + (f"; but {losses}" if losses else "")
    return f"{share:.1f} % slower: {losses}" + (f"; although {gains}" if gains else "")


def does_not_fit(memory: MemoryUse, step: StepTime | None = None, winner: StepTime | None = None) -> str:
    """Name the fullest stage and what it needs of what there is; and what the layout would gain, if it is told."""
    worst = max(range(len(memory.stages)), key=lambda stage: memory.stages[stage].total_bytes)
    sentence = (
        f"does not fit: stage {worst} needs {_bytes(memory.peak_bytes)} of {_bytes(memory.capacity_bytes)}, mostly "
        f"{largest_parts(memory, worst)}"
    )
    if step is None or winner is None or step.total_seconds >= winner.total_seconds:
        return sentence
    return f"{sentence}; it would be {100 * (1 - step.total_seconds / winner.total_seconds):.1f} % faster"


def largest_parts(memory: MemoryUse, stage: int, count: int = 2) -> str:
    """The parts that fill a stage most: ``activations 41 GB, optimizer 22 GB``."""
    use = memory.stages[stage]
    parts = sorted(((getattr(use, f"{part}_bytes"), part) for part in MEMORY_PARTS), reverse=True)[:count]
    return ", ".join(f"{part} {_bytes(size)}" for size, part in parts)


def _deltas(loser: StepTime, winner: StepTime) -> dict[str, float]:
    """Difference of each part; compute is split by cause where both say how."""
    mine, other = dict(loser.breakdown_seconds), dict(winner.breakdown_seconds)
    if loser.compute_parts_seconds and winner.compute_parts_seconds:
        for whole, parts in ((mine, loser.compute_parts_seconds), (other, winner.compute_parts_seconds)):
            del whole["compute"]
            whole.update(parts)
    return {part: mine.get(part, 0.0) - other.get(part, 0.0) for part in {**mine, **other}}


def _told(part: str, delta: float, loser: StepTime, winner: StepTime) -> str:
    if part == "pp_bubble":
        shares = [one.pp_bubble_seconds / one.total_seconds for one in (loser, winner)]
        return f"more bubble: {100 * shares[0]:.1f} % instead of {100 * shares[1]:.1f} % ({_seconds(delta)} more)"
    return f"{PARTS[part]} {_seconds(delta)} more"


def _seconds(value: float) -> str:
    return format_quantity(value, "seconds", 2)


def _bytes(value: float) -> str:
    return format_quantity(value, "bytes", 3)
