"""The phases of a step that a job can time, as sums of the parts that are predicted."""

from __future__ import annotations

from scenarios.layout import Layout
from simulator.outcome import BREAKDOWN

FORWARD_BACKWARD = ("compute", "tp_comm", "cp_comm", "ep_comm", "pp_bubble", "pp_comm", "straggler")
GATHERED_INSIDE = ("zero2", "zero3")
"""Shardings whose data parallel traffic lies inside the forward and backward passes."""


def phase_parts(layout: Layout) -> dict[str, tuple[str, ...]]:
    """Parts of the prediction that make up each phase that a job can time."""
    inside = layout.optimizer_sharding in GATHERED_INSIDE
    return {part: (part,) for part in BREAKDOWN} | {
        "forward_backward": (*FORWARD_BACKWARD, *(["dp_comm"] if inside else [])),
        "gradient_reduction": () if inside else ("dp_comm",),
    }


def phase_seconds(breakdown: dict[str, float], layout: Layout, phase: str) -> float:
    """What is predicted of a phase, from the parts of the step."""
    return sum(breakdown.get(part, 0.0) for part in phase_parts(layout)[phase])
