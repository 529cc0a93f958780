"""Pictures as inline SVG: the same input gives the same bytes, and the colours are safe for the colour-blind."""

from __future__ import annotations

import functools
import io
import re
from collections.abc import Callable, Sequence
from html import escape
from typing import Any, ParamSpec

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from planner.waterfall import waterfall
from reports.comparison import Comparison
from reports.tables import PART_NAMES, memory_parts, part_name, percent, seconds, seconds_beside, size, some_stages
from simulator.outcome import MEMORY_PARTS

BLUE, SKY, GREEN, ORANGE = "#0072B2", "#56B4E9", "#009E73", "#E69F00"
YELLOW, VERMILLION, PURPLE, GREY = "#F0E442", "#D55E00", "#CC79A7", "#9A9A9A"
"""Okabe and Ito, Color Universal Design (2008), with a grey."""

COLOURS = {
    "ideal": BLUE,
    "gemm": SKY,
    "gemm_below_peak": SKY,
    "below_peak": SKY,
    "compute": SKY,
    "attention": "#8CCBF0",
    "attention_below_peak": "#8CCBF0",
    "head": "#8CCBF0",
    "memory_bound": "#B5DDF5",
    "recompute": PURPLE,
    "host": "#5F6B73",
    "tp_comm": ORANGE,
    "cp_comm": "#B8860B",
    "ep_comm": "#8C5A2B",
    "pp_bubble": "#C8CDD1",
    "pp_comm": YELLOW,
    "dp_comm": VERMILLION,
    "optimizer": GREEN,
    "straggler": GREY,
    "weights": BLUE,
    "gradients": SKY,
    "activations": ORANGE,
    "logits": PURPLE,
    "buffers": YELLOW,
    "reserve": "#C8CDD1",
}
"""One colour for each part in every chart."""

INK, FAINT = "#1F2933", "#E4E7EB"
STYLE: Any = {
    "svg.fonttype": "none",
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],
    "font.size": 8.5,
    "text.parse_math": False,
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": "#9AA5B1",
    "axes.linewidth": 0.6,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "xtick.color": INK,
    "ytick.color": INK,
    "xtick.major.width": 0.6,
    "ytick.major.width": 0.6,
    "grid.color": FAINT,
    "grid.linewidth": 0.6,
    "legend.frameon": False,
    "legend.fontsize": 8.0,
    "svg.hashsalt": "headway",
}
WIDTH_INCHES = 8.4


Arguments = ParamSpec("Arguments")


def styled(draw: Callable[Arguments, str]) -> Callable[Arguments, str]:
    """Draw in headway's style and leave matplotlib's settings as they were."""

    @functools.wraps(draw)
    def drawn(*args: Arguments.args, **kwargs: Arguments.kwargs) -> str:
        with mpl.rc_context():
            mpl.rcdefaults()
            mpl.rcParams.update(STYLE)
            return draw(*args, **kwargs)

    return drawn


@styled
def step_chart(predicted: dict[str, Any]) -> str:
    """Waterfall from the time at peak to the predicted step, in seconds, with the share of each part."""
    parts, step = waterfall(predicted), predicted["step_seconds"]
    low, high = predicted["step_seconds_low"], predicted["step_seconds_high"]
    figure, axes = figure_of(rows=len(parts) + 1)
    reach, start = max(step, high), 0.0
    for row, part in enumerate(parts):
        axes.barh(
            row, part.value, left=start, height=0.68, color=COLOURS.get(part.key, GREY), edgecolor=INK, linewidth=0.3
        )
        if row:
            axes.plot([start, start], [row - 1 + 0.34, row - 0.34], color="#9AA5B1", linewidth=0.6)
        start += part.value
        _note(
            axes,
            max(start, start - part.value),
            row,
            f"{seconds_beside(part.value, step)}  ({percent(part.value / step)})",
            reach,
        )
    last = len(parts)
    axes.barh(last, step, height=0.68, color="#A9B4BF", edgecolor=INK, linewidth=0.3)
    axes.plot([low, high], [last, last], color=INK, linewidth=1.4)
    for edge in (low, high):
        axes.plot([edge, edge], [last - 0.18, last + 0.18], color=INK, linewidth=1.4)
    _note(axes, reach, last, f"{seconds(step)}  (80 % band {seconds(low)} to {seconds(high)})", reach, bold=True)
    name_rows(axes, [*(part_name(part) for part in parts), "Predicted step"])
    axes.set_xlim(min(0.0, *(part.value for part in parts)), reach * 1.7)
    axes.set_xlabel("seconds of one optimizer step")
    return as_svg(figure, "step", "Where each second of a step goes: waterfall from the peak to the predicted step")


@styled
def memory_chart(memory: dict[str, Any]) -> str:
    """Stacked peak memory of each pipeline stage (GB of one GPU) against the capacity."""
    shown = some_stages(memory["per_stage"])
    capacity = memory["capacity"] / 1e9
    figure, axes = figure_of(rows=len(shown), legend=True)
    used = [key for key in MEMORY_PARTS if any(part.key == key for _, stage in shown for part in memory_parts(stage))]
    reach = max(capacity, *(sum(part.value for part in memory_parts(stage)) / 1e9 for _, stage in shown))
    for row, (_, stage) in enumerate(shown):
        start = 0.0
        for part in memory_parts(stage):
            width = part.value / 1e9
            axes.barh(row, width, left=start, height=0.72, color=COLOURS[part.key], edgecolor="white", linewidth=0.4)
            start += width
        axes.text(reach * 1.115, row, size(start * 1e9), va="center", ha="right", fontsize=8)
    axes.axvline(capacity, color=INK, linewidth=1.2, linestyle=(0, (4, 2)))
    axes.annotate(
        f"usable: {size(capacity * 1e9)}", (capacity, -0.62), ha="right", va="bottom", fontsize=8, annotation_clip=False
    )
    name_rows(axes, [f"stage {name}" if "-" not in name else f"stages {name}" for name, _ in shown])
    axes.set_xlim(0, reach * 1.12)
    axes.set_xlabel("peak memory of one GPU, GB (1 GB = 10⁹ bytes)")
    add_legend(figure, [Patch(facecolor=COLOURS[key], label=PART_NAMES[key]) for key in used])
    return as_svg(figure, "memory", "Peak memory by pipeline stage against the capacity of a GPU")


@styled
def comparison_chart(comparisons: Sequence[Comparison]) -> str:
    """Predicted step with its 80 % band beside the measured median with its p10 to p90, for each layout."""
    figure, axes = figure_of(rows=1.4 * len(comparisons), legend=True)
    reach = 0.0
    for row, comparison in enumerate(comparisons):
        predicted = [float(comparison.predicted[f"step_seconds{end}"] or 0) for end in ("_low", "", "_high")]
        measured = [float(comparison.measured[f"step_seconds{end}"] or 0) for end in ("_p10", "", "_p90")]
        axes.barh(row - 0.16, predicted[2] - predicted[0], left=predicted[0], height=0.26, color="#CFE8F7", linewidth=0)
        axes.plot([predicted[1]] * 2, [row - 0.31, row - 0.01], color=BLUE, linewidth=2.2)
        axes.plot([measured[0], measured[2]], [row + 0.16] * 2, color=VERMILLION, linewidth=1.4)
        axes.plot(measured[1], row + 0.16, marker="o", markersize=5.5, color=VERMILLION, linestyle="")
        reach = max(reach, predicted[2], measured[2])
        error = percent(comparison.error["step_seconds"], sign=True)
        text = f"{seconds(predicted[1])} / {seconds(measured[1])}  ({error})" + (
            " contended" if comparison.contended else ""
        )
        _note(axes, max(predicted[2], measured[2]), row, text, reach)
    name_rows(axes, [_folded(comparison.layout) for comparison in comparisons])
    axes.set_xlim(0, reach * 1.42)
    axes.set_xlabel("seconds of one optimizer step")
    handles: list[Any] = [
        Patch(facecolor="#CFE8F7", label="predicted, 80 % band"),
        Line2D([], [], color=BLUE, linewidth=2.2, label="predicted"),
        Line2D([], [], color=VERMILLION, marker="o", markersize=5.5, label="measured median, p10 to p90"),
    ]
    add_legend(figure, handles)
    return as_svg(figure, "comparison", "Predicted and measured step time of each layout that was run")


def figure_of(*, rows: float, legend: bool = False) -> tuple[Figure, Axes]:
    """Make a figure that is as high as its rows need."""
    figure = Figure(figsize=(WIDTH_INCHES, 0.75 + 0.27 * rows + (0.35 if legend else 0)), layout="constrained")
    axes = figure.add_subplot()
    axes.grid(axis="x")
    return figure, axes


def name_rows(axes: Axes, names: Sequence[str]) -> None:
    """Write the names of the rows beside the axis, the first on top."""
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.4, -0.6)
    axes.tick_params(axis="y", length=0)


def _note(axes: Axes, x: float, row: float, text: str, reach: float, *, bold: bool = False) -> None:
    weight = "bold" if bold else "normal"
    axes.text(x + 0.012 * reach, row, text, va="center", ha="left", fontsize=8, fontweight=weight)


def add_legend(figure: Figure, handles: list[Any]) -> None:
    """Put the legend below the picture."""
    figure.legend(handles=handles, loc="outside lower center", ncols=min(4, len(handles)), handlelength=1.2)


def _folded(label: str) -> str:
    words = label.split()
    half = (len(words) + 1) // 2
    return label if len(label) <= 22 else " ".join(words[:half]) + "\n" + " ".join(words[half:])


_RECTANGLE = re.compile(r"M (\S+) (\S+)\s+L (\S+) \2\s+L \3 (\S+)\s+L \1 \4\s+z\s*")


def _short(path: str) -> str:
    r"""Write path data with hundredths of a point and rectangles by their corners: a timeline has thousands of them.

    >>> _short("M 10.126 5 \nL 20 5 \nL 20 9 \nL 10.126 9 \nz\n")
    'M10.12 5H20V9H10.12z'
    """
    rounded = re.sub(r"(\.\d\d)\d+", r"\1", path)
    return _RECTANGLE.sub(r"M\1 \2H\3V\4H\1z", rounded)


def as_svg(figure: Figure, name: str, title: str) -> str:
    """Render a figure as an ``svg`` element that can stand in a page beside others: no prolog, no colliding ids."""
    stream = io.StringIO()
    figure.savefig(stream, format="svg", metadata={"Date": None})
    text = stream.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"\s*<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r"\s*<style[^>]*>.*?</style>", "", text, flags=re.DOTALL)
    used = set(re.findall(r'(?:href="|url\()#([\w-]+)', text))
    text = re.sub(r' id="([\w.-]+)"', lambda match: f' id="{name}-{match[1]}"' if match[1] in used else "", text)
    text = re.sub(r'((?:href="|url\()#)([\w-]+)', rf"\g<1>{name}-\g<2>", text)
    text = re.sub(r' d="([^"]*)"', lambda match: f' d="{_short(match[1])}"', text)
    opening = f'<svg role="img" aria-label="{escape(title)}"'
    return re.sub(r'^<svg(?: width="[^"]*")?(?: height="[^"]*")?', opening, text, count=1)
