"""Pictures of what whole runs lose: seconds by cause, and tokens per second over time."""

from __future__ import annotations

from typing import Any

from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from reports.charts import BLUE, GREEN, INK, VERMILLION, WIDTH_INCHES, add_legend, as_svg, figure_of, name_rows, styled
from reports.tables import percent

DAY = 86_400.0
NEGLIGIBLE = 5e-4
"""Share of the wall time that is not shown."""
BINS = 240
"""Bars of tokens per second over the length of a run."""


def losses(content: dict[str, Any]) -> list[tuple[str, float]]:
    """Causes with their share of the mean wall time, largest first; what would be told as 0.0 % is left out."""
    wall = content["wall_seconds"]["mean"]
    shares = [(cause, seconds / wall) for cause, seconds in content["lost_seconds"].items()]
    return sorted((one for one in shares if one[1] >= NEGLIGIBLE), key=lambda one: -one[1])


@styled
def loss_chart(content: dict[str, Any]) -> str:
    """Share of the wall time that is lost, by cause, mean of the runs."""
    rows = losses(content)
    figure, axes = figure_of(rows=max(1, len(rows)))
    for row, (_, share) in enumerate(rows):
        axes.barh(row, 100 * share, height=0.68, color=VERMILLION, edgecolor=INK, linewidth=0.3)
        axes.text(100 * share, row, f"  {percent(share)}", va="center", ha="left", fontsize=8)
    name_rows(axes, [cause for cause, _ in rows])
    axes.set_xlim(0, 115 * max((share for _, share in rows), default=0.01))
    axes.set_xlabel("% of the wall time, mean of the runs")
    return as_svg(figure, "losses", "Wall time that is lost, by cause")


@styled
def tokens_chart(timeline: dict[str, Any]) -> str:
    """Tokens per second of one run over time: what was trained in each of many equal stretches, and what was kept.

    Args:
        timeline: ``spans`` of start, end (seconds), what was done, tokens per second; ``wall_seconds``, ``tokens``.
    """
    wall = timeline["wall_seconds"]
    width = wall / BINS
    trained = [0.0] * BINS
    for start, end, _, rate in timeline["spans"]:
        if not rate:
            continue
        for place in range(min(BINS - 1, int(start / width)), min(BINS - 1, int(end / width)) + 1):
            inside = min(end, (place + 1) * width) - max(start, place * width)
            trained[place] += rate * max(0.0, inside)
    fastest = max((rate for *_, rate in timeline["spans"]), default=0.0)
    kept = timeline["tokens"] / wall
    figure = Figure(figsize=(WIDTH_INCHES, 2.6), layout="constrained")
    axes = figure.add_subplot()
    axes.grid(axis="y")
    edges = [place * width / DAY for place in range(BINS + 1)]
    axes.stairs([one / width / 1e6 for one in trained], edges, fill=True, color=GREEN, alpha=0.6, linewidth=0)
    axes.axhline(fastest / 1e6, color=INK, linewidth=0.8, linestyle=(0, (4, 2)))
    axes.axhline(kept / 1e6, color=BLUE, linewidth=1.4)
    axes.set_xlim(0, wall / DAY)
    axes.set_ylim(0, 1.12 * fastest / 1e6 or 1)
    axes.set_xlabel("days")
    axes.set_ylabel("million tokens/s")
    handles: list[Any] = [
        Line2D([], [], color=GREEN, linewidth=5, alpha=0.6, label=f"trained, mean of {_length(width)}"),
        Line2D([], [], color=INK, linewidth=0.8, linestyle=(0, (4, 2)), label="while training at full speed"),
        Line2D([], [], color=BLUE, linewidth=1.4, label="kept, mean of the run"),
    ]
    add_legend(figure, handles)
    return as_svg(figure, "tokens", "Tokens per second of one run over time")


def _length(seconds: float) -> str:
    return f"{seconds / 3600:.2g} h" if seconds >= 3600 else f"{seconds / 60:.2g} min"
