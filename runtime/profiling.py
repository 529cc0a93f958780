"""The time that a rank spends inside collectives, from torch's profiler."""

from __future__ import annotations

from collections.abc import Callable

from torch.profiler import ProfilerActivity, profile

PREFIXES = ("gloo:", "nccl:")
"""How torch names the spans of its communication backends."""


def communication_seconds(run: Callable[[], object]) -> float:
    """Run something once and return the seconds during which a collective was under way, overlaps counted once."""
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        run()
    spans = sorted(
        (event.time_range.start, event.time_range.end)
        for event in profiler.events() or ()
        if event.name.startswith(PREFIXES)
    )
    total, reached = 0.0, float("-inf")
    for start, end in spans:
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total * 1e-6
