"""How much of the links a training step uses, moment by moment: one row for each kind of link."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from numpy.typing import NDArray

from reports.charts import BLUE, INK, ORANGE, SKY, WIDTH_INCHES, add_legend, as_svg, styled
from reports.tables import percent
from simulator.outcome import Counter

WAYS = ((" out", " in"), (" up", " down"), (" written", " read"))
"""Endings of the two directions of one kind of link."""
ROW_INCHES = 0.95
ALIKE = 0.005
"""Difference of shares below which two directions, or the rails, are drawn as one."""


def counters_of(content: Sequence[dict[str, Any]]) -> list[Counter]:
    """Return the counters of the ``links`` of ``headway simulate --step --json``."""
    return [
        Counter(
            name=str(one["name"]),
            start_seconds=tuple(float(one["seconds"]) * k for k in range(len(one["shares"]))),
            values=tuple(map(float, one["shares"])),
        )
        for one in content
    ]


@styled
def links_chart(counters: Sequence[Counter], step_seconds: float) -> str:
    """Areas of the share of each kind of link in use; rails are averaged, and their range is drawn if they differ."""
    rows = _rows(counters)
    unit, scale = ("ms", 1e3) if step_seconds < 1 else ("seconds", 1.0)
    figure = Figure(figsize=(WIDTH_INCHES, 1.0 + ROW_INCHES * len(rows)), layout="constrained")
    grid = figure.subplots(len(rows), 1, sharex=True, squeeze=False)[:, 0]
    shown = {"two": False, "range": False}
    starts = np.append(counters[0].start_seconds, step_seconds) * scale
    for axes, (name, tables) in zip(grid, rows.items(), strict=True):
        means = [table.mean(axis=0) for table in tables]
        axes.stairs(100 * means[0], starts, fill=True, color=SKY, linewidth=0)
        axes.stairs(100 * means[0], starts, color=BLUE, linewidth=0.6)
        if len(means) > 1 and float(np.abs(means[1] - means[0]).max()) > ALIKE:
            axes.stairs(100 * means[1], starts, color=ORANGE, linewidth=0.9)
            shown["two"] = True
        low, high = tables[0].min(axis=0), tables[0].max(axis=0)
        if float((high - low).max()) > ALIKE:
            axes.stairs(100 * high, starts, baseline=100 * low, fill=True, color=INK, alpha=0.25, linewidth=0)
            shown["range"] = True
        peak = max(float(table.max()) for table in tables)
        axes.set_ylim(0, 100 * max(1.3 * peak, 0.02))
        rails = f"\n{len(tables[0])} rails" if len(tables[0]) > 1 else ""
        axes.set_ylabel(f"{name}{rails}", rotation=0, ha="right", va="center", labelpad=10)
        told = f"mean {percent(float(means[0].mean()))}, busiest moment {percent(peak)}"
        axes.text(0.995, 0.96, told, transform=axes.transAxes, ha="right", va="top", fontsize=7.5)
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:g} %")
        axes.locator_params(axis="y", nbins=3)
        axes.grid(axis="both")
        axes.set_xlim(0, step_seconds * scale)
    figure.align_ylabels(grid)
    grid[0].set_title(f"Share of their capacity that links carry, in a step of {step_seconds * scale:.3g} {unit}")
    grid[-1].set_xlabel(f"{unit} since the start of the step")
    first = "Share in use" if not shown["two"] else "Out, up, written"
    handles: list[Any] = [Patch(facecolor=SKY, edgecolor=BLUE, label=first)]
    if shown["two"]:
        handles.append(Line2D([], [], color=ORANGE, linewidth=1.0, label="In, down, read"))
    if shown["range"]:
        handles.append(Patch(facecolor=INK, alpha=0.25, label="Range of the rails"))
    add_legend(figure, handles)
    return as_svg(figure, "links", "Links in use: the share of each kind of link that a step uses in time")


def _rows(counters: Sequence[Counter]) -> dict[str, list[NDArray[np.float64]]]:
    """Counters by kind of link: a table of rails and moments for each direction."""
    found: dict[str, dict[str, list[tuple[float, ...]]]] = {}
    for one in counters:
        kind = one.name.split(", rail")[0]
        base = next((kind.removesuffix(way) for pair in WAYS for way in pair if kind.endswith(way)), kind)
        found.setdefault(base, {}).setdefault(kind, []).append(one.values)
    return {base: [np.array(values) for values in kinds.values()] for base, kinds in found.items()}
