"""Pictures of whole runs: goodput against the checkpoint interval, and what one run did when."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from reports.charts import (
    BLUE,
    GREEN,
    GREY,
    INK,
    ORANGE,
    PURPLE,
    SKY,
    VERMILLION,
    WIDTH_INCHES,
    YELLOW,
    add_legend,
    as_svg,
    styled,
)
from reports.link_charts import counters_of, links_chart
from topologies.errors import InputError
from topologies.reading import read_json
from topologies.units import format_quantity

DAY = 86_400.0
INTERVAL = "checkpoint_interval_seconds"
SERIES = (BLUE, VERMILLION, GREEN, PURPLE, ORANGE, SKY, GREY, YELLOW)

DOING = {
    "training": GREEN,
    "training slowly": "#9BD3BF",
    "detection": VERMILLION,
    "diagnosis": VERMILLION,
    "manual": PURPLE,
    "outage": "#5F6B73",
    "waiting": INK,
    "load": YELLOW,
    "maintenance": SKY,
}
"""Colour of what a run does; the phases of a restart share one."""
RESTART = ORANGE
LINE_DAYS = 7.0
"""A timeline has a line for each week, or for each sixteenth of a longer run."""


def picture_of(path: Path, kind: str = "run") -> str:
    """Draw what a file of ``headway simulate`` (a step or runs) or ``headway sweep`` holds, as SVG.

    Of a file of ``simulate`` the timeline of a run, or (kind ``interval``) goodput against the interval.

    Raises:
        InputError: the file is neither.
    """
    content = read_json(path, "give a file of simulate or sweep")
    if isinstance(content, dict) and isinstance(content.get("timeline"), dict):
        intervals = content.get("intervals") or []
        if kind == "interval" and len(intervals) > 1:
            return goodput_chart(intervals, optimum=content["analytic"]["optimum_interval_seconds"])
        return run_chart(content["timeline"])
    links = content.get("links") if isinstance(content, dict) else None
    if isinstance(links, dict) and isinstance(content.get("step_seconds"), float):
        try:
            return links_chart(counters_of(links["counters"]), content["step_seconds"])
        except (KeyError, TypeError, ValueError) as error:
            raise InputError(f"has no use of links that can be drawn: {error!r}", file=path, key="links") from None
    if isinstance(content, dict) and isinstance(content.get("rows"), list):
        varied = [key for key in content.get("vary", {}) if key != "checkpoint.interval"]
        return goodput_chart(content["rows"], varied)
    raise InputError(
        "holds neither the links of a step, nor the timeline of a run, nor the rows of a sweep",
        hint="make one with 'headway simulate --step --json', 'headway simulate --runs N -o FILE' or 'headway sweep'",
        file=path,
    )


@styled
def goodput_chart(rows: Sequence[dict[str, Any]], varied: Sequence[str] = (), *, optimum: float | None = None) -> str:
    """Goodput against the checkpoint interval: closed form as a line, simulated mean with its 95 % band.

    Args:
        rows: of a sweep that varies the checkpoint interval.
        varied: further keys that were varied; each combination is a line of its own.
        optimum: seconds of the exact optimum of the interval, drawn where it is known.

    Raises:
        InputError: fewer than two intervals.
    """
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for row in rows:
        if "infeasible" not in row:
            groups.setdefault(tuple(row[key] for key in varied), []).append(row)
    if not any(len({row[INTERVAL] for row in group}) > 1 for group in groups.values()):
        raise InputError(
            "holds fewer than two checkpoint intervals", hint="sweep with --vary 'checkpoint.interval=[...]'"
        )
    figure = Figure(figsize=(WIDTH_INCHES, 4.2), layout="constrained")
    axes = figure.add_subplot()
    axes.grid()
    handles: list[Any] = []
    for place, (values, group) in enumerate(groups.items()):
        colour = SERIES[place % len(SERIES)]
        ordered = sorted(group, key=lambda row: float(row[INTERVAL]))
        minutes = [row[INTERVAL] / 60 for row in ordered]
        axes.plot(
            minutes, [100 * row["goodput"] for row in ordered], color=colour, linewidth=1.2, linestyle=(0, (4, 2))
        )
        played = [row for row in ordered if "simulated_goodput" in row]
        if played:
            at = [row[INTERVAL] / 60 for row in played]
            seen = [row["simulated_goodput"] for row in played]
            means = [100 * one["mean"] for one in seen]
            bands = [one["ci95"] or [one["mean"], one["mean"]] for one in seen]
            axes.fill_between(
                at, [100 * b[0] for b in bands], [100 * b[1] for b in bands], color=colour, alpha=0.2, lw=0
            )
            axes.plot(at, means, color=colour, marker="o", markersize=4, linewidth=1.0)
        best = max(ordered, key=lambda row: float(row["goodput"]))
        axes.plot(best[INTERVAL] / 60, 100 * best["goodput"], marker="*", markersize=11, color=colour, linestyle="")
        label = ", ".join(f"{key} {value}" for key, value in zip(varied, values, strict=True))
        handles += [Line2D([], [], color=colour, label=label)] if label else []
    handles += [
        Line2D([], [], color=INK, linewidth=1.2, linestyle=(0, (4, 2)), label="closed form"),
        Line2D([], [], color=INK, marker="o", markersize=4, linewidth=1.0, label="simulated, 95 % band of the mean"),
        Line2D([], [], color=INK, marker="*", markersize=10, linestyle="", label="best of the closed form"),
    ]
    if optimum is not None:
        axes.axvline(optimum / 60, color=INK, linewidth=0.9, linestyle=":")
        handles.append(Line2D([], [], color=INK, linewidth=0.9, linestyle=":", label="exact optimum"))
    axes.set_xscale("log")
    ticks = sorted({row[INTERVAL] / 60 for group in groups.values() for row in group})
    axes.set_xticks(ticks, [format_quantity(60 * tick, "seconds", 2) for tick in ticks])
    axes.minorticks_off()
    axes.set_xlabel("work between checkpoints")
    axes.set_ylabel("goodput, %")
    add_legend(figure, handles)
    return as_svg(figure, "goodput", "Goodput against the checkpoint interval, closed form and simulated")


@styled
def run_chart(timeline: dict[str, Any]) -> str:
    """What one whole run did when, a line a week: training, stalls, failures, waits.

    Args:
        timeline: ``spans`` of start, end (seconds) and what was done, and ``wall_seconds``.
    """
    days = timeline["wall_seconds"] / DAY
    length = max(LINE_DAYS, days / 16)
    lines = max(1, -(-int(days * 1e6) // int(length * 1e6)))
    figure = Figure(figsize=(WIDTH_INCHES, 1.3 + 0.3 * lines), layout="constrained")
    axes = figure.add_subplot()
    shown: dict[str, list[list[tuple[float, float]]]] = {}
    for start, end, doing, seen in _visible(timeline["spans"], length / 900 * DAY):
        first = start / DAY
        while first < end / DAY - 1e-12:
            line = min(lines - 1, int(first / length + 1e-9))
            last = min(end / DAY, (line + 1) * length)
            if last <= first:
                last = end / DAY
            width = max(last - first, seen / DAY)
            shown.setdefault(doing, [[] for _ in range(lines)])[line].append((first - line * length, width))
            first = last
    order = sorted(shown, key=lambda doing: (list(DOING).index(doing) if doing in DOING else len(DOING), doing))
    for doing in order:
        colour = DOING.get(doing, RESTART)
        for line, bars in enumerate(shown[doing]):
            axes.broken_barh(bars, (line - 0.36, 0.72), color=colour, linewidth=0)
    axes.set_yticks(range(lines), [f"day {line * length:.0f}" for line in range(lines)])
    axes.set_ylim(lines - 0.4, -0.6)
    axes.tick_params(axis="y", length=0)
    axes.set_xlim(0, length)
    axes.set_xlabel(f"days of the line; goodput of this run {100 * timeline['goodput']:.1f} %")
    names = {doing: doing if doing in DOING else "restart" for doing in order}
    colours = {names[doing]: DOING.get(doing, RESTART) for doing in order}
    add_legend(figure, [Patch(facecolor=colour, label=name) for name, colour in colours.items()])
    return as_svg(figure, "run", "What one whole run did when: training, failures, restarts and waits")


def _visible(spans: Sequence[Sequence[Any]], least: float) -> Iterator[tuple[float, float, str, float]]:
    """Spans with the seconds that they are drawn with: of each stop the longest part is never narrower than a pixel."""
    stop: list[Sequence[Any]] = []
    for span in [*spans, None]:
        if span is not None and not span[2].startswith("training"):
            stop.append(span)
            continue
        longest = max((one[1] - one[0] for one in stop), default=0.0)
        for start, end, doing, *_ in stop:
            yield start, end, doing, least if end - start == longest else 0.0
        stop = []
        if span is not None:
            yield span[0], span[1], span[2], 0.0
