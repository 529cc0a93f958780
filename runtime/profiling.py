"""The time that a rank spends inside collectives and inside matrix products, from torch's profiler."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

PREFIXES = ("gloo:", "nccl:")
"""How torch names the spans of its communication backends."""
PRODUCTS = ("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", "aten::_scaled_dot_product", "aten::_grouped_mm")
"""Beginnings of the names of its matrix products and attention cores."""


def profiled_seconds(run: Callable[[], object], trace: Path | None = None) -> tuple[float, float]:
    """Run something once; return the seconds during which a collective was under way, and those of matrix products.

    Overlaps of collectives count once.

    ``trace`` is a file for the whole timeline, which Perfetto and chrome://tracing open.
    """
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])]
    with profile(activities=activities) as profiler:
        run()
    if trace is not None:
        trace.parent.mkdir(parents=True, exist_ok=True)
        profiler.export_chrome_trace(str(trace))
    spans = sorted(
        (event.time_range.start, event.time_range.end)
        for event in profiler.events() or ()
        if event.name.startswith(PREFIXES)
    )
    total, reached = 0.0, float("-inf")
    for start, end in spans:
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    products = sum(event.self_cpu_time_total for event in profiler.events() or () if event.name.startswith(PRODUCTS))
    return total * 1e-6, products * 1e-6
