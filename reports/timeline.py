"""The pipeline as a picture: what each pipeline rank does during one step, played event by event."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np
from matplotlib.axes import Axes
from matplotlib.patches import Patch, PathPatch
from matplotlib.path import Path

from planner.plan import Plan
from reports.charts import COLOURS, FAINT, GREY, add_legend, as_svg, figure_of, name_rows, styled
from simulator.outcome import Span, StepTimeline
from simulator.rank_places import placed_gpus
from simulator.shared_step import shared_step

KINDS = {
    "forward": ("Forward", "#56B4E9"),
    "backward": ("Backward", "#0072B2"),
    "backward_input": ("Backward, inputs", "#0072B2"),
    "backward_weight": ("Backward, weights", "#7A9CC6"),
    "recompute": ("Recomputation", COLOURS["recompute"]),
    "p2p": ("Pipeline traffic", COLOURS["pp_comm"]),
    "tp_comm": ("Tensor parallel traffic", COLOURS["tp_comm"]),
    "cp_comm": ("Context parallel traffic", COLOURS["cp_comm"]),
    "ep_comm": ("Expert parallel traffic", COLOURS["ep_comm"]),
    "dp_comm": ("Data parallel traffic", COLOURS["dp_comm"]),
    "optimizer": ("Optimizer", COLOURS["optimizer"]),
}
"""Name and colour of each kind of span."""

MOST_RANKS = 16
MOST_OPERATIONS = 16_384
"""Forward and backward passes that a picture plays; of a longer step fewer micro-batches are played."""
FINEST = 1 / 1500
"""Spans of one kind that follow each other within this share of the step are drawn as one: no screen shows more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Picture:
    """A step that was played event by event, and how many of its micro-batches."""

    timeline: StepTimeline
    num_microbatches: int


def play(plan: Plan) -> Picture:
    """Play one step of a plan; a step of very many micro-batches is played with as many as a picture can show."""
    layout, job = plan.layout, plan.scenario.job
    every = plan.num_microbatches
    most = max(2, MOST_OPERATIONS // (2 * layout.pp**2 * layout.vpp)) * layout.pp
    played = every if every <= most else most
    fewer = job.model_copy(update={"global_batch_size": played * layout.dp * layout.micro_batch_size})
    gpus = placed_gpus(layout, plan.scenario.cluster.node.gpus_per_node, plan.placement)
    timeline = shared_step(plan.scenario.cluster, fewer, layout, gpus=gpus).timeline
    spans = tuple(span for span in timeline.spans if span.rank < layout.pp)  # of the replicas that most are like
    return Picture(timeline=replace(timeline, spans=spans, rank_names=()), num_microbatches=played)


def shown_ranks(ranks: Iterable[int]) -> list[int]:
    """Choose at most 16 ranks, first and last among them, evenly spread.

    >>> shown_ranks(range(64))[:4], len(shown_ranks(range(64))), shown_ranks(range(3))
    ([0, 4, 8, 13], 16, [0, 1, 2])
    """
    every = sorted(set(ranks))
    if len(every) <= MOST_RANKS:
        return every
    step = (len(every) - 1) / (MOST_RANKS - 1)
    return [every[round(index * step)] for index in range(MOST_RANKS)]


@styled
def timeline_chart(timeline: StepTimeline) -> str:
    """Gantt picture: compute of each rank above its traffic; grey is idle."""
    ranks = shown_ranks(span.rank for span in timeline.spans)
    unit, scale = ("ms", 1e3) if timeline.step_seconds < 1 else ("seconds", 1.0)
    end = timeline.step_seconds * scale
    figure, axes = figure_of(rows=1.25 * len(ranks), legend=True)
    axes.grid(visible=False)
    _boxes(axes, [(0.0, end, row - 0.42, 0.5) for row in range(len(ranks))], FAINT, edge=False)
    rows = {rank: row for row, rank in enumerate(ranks)}
    present = []
    for kind in sorted({span.kind for span in timeline.spans}, key=_order):
        spans = [span for span in timeline.spans if span.kind == kind and span.rank in rows]
        boxes = []
        for start, finish, rank, stream in merged(spans, FINEST * timeline.step_seconds):
            top, height = (-0.42, 0.5) if stream == "compute" else (0.12, 0.22)
            boxes.append((start * scale, finish * scale, rows[rank] + top, height))
        if boxes:
            _boxes(axes, boxes, colour(kind), edge=max(box[1] - box[0] for box in boxes) > end / 120)
            present.append(kind)
    name_rows(axes, [f"rank {rank}" for rank in ranks])
    axes.set_xlim(0, end)
    axes.set_xlabel(f"{unit} since the start of the step")
    handles = [
        Patch(facecolor=colour(kind), label=KINDS.get(kind, (kind.replace("_", " "), ""))[0]) for kind in present
    ]
    add_legend(figure, [*handles, Patch(facecolor=FAINT, label="Idle")])
    return as_svg(figure, "timeline", "Pipeline timeline: what each pipeline rank does during one step")


def colour(kind: str) -> str:
    """Colour of a kind of span."""
    return KINDS[kind][1] if kind in KINDS else GREY


def merged(spans: Iterable[Span], gap_seconds: float) -> list[tuple[float, float, int, str]]:
    """Join neighbours of one rank and stream that lie closer than ``gap_seconds`` and are too short to be seen apart.

    Returns:
        (start seconds, end seconds, rank, stream) of each box.
    """
    boxes: list[tuple[float, float, int, str]] = []
    for span in sorted(spans, key=lambda span: (span.rank, span.stream, span.start_seconds)):
        finish = span.start_seconds + span.duration_seconds
        last = boxes[-1] if boxes else None
        near = last is not None and last[2:] == (span.rank, span.stream) and span.start_seconds - last[1] < gap_seconds
        if last is not None and near and span.duration_seconds < 2 * gap_seconds:
            boxes[-1] = (last[0], max(last[1], finish), span.rank, span.stream)
        else:
            boxes.append((span.start_seconds, finish, span.rank, span.stream))
    return boxes


def _order(kind: str) -> tuple[int, str]:
    names = list(KINDS)
    return (names.index(kind) if kind in KINDS else len(names), kind)


def _boxes(axes: Axes, boxes: list[tuple[float, float, float, float]], colour: str, *, edge: bool) -> None:
    """Draw (left, right, top, height) boxes of one colour as a single path, which keeps the file small."""
    corners = np.array(
        [
            [(left, top), (right, top), (right, top + height), (left, top + height), (left, top)]
            for left, right, top, height in boxes
        ]
    ).reshape(-1, 2)
    codes = np.tile([Path.MOVETO, Path.LINETO, Path.LINETO, Path.LINETO, Path.CLOSEPOLY], len(boxes))
    line = {"edgecolor": "white", "linewidth": 0.35} if edge else {"edgecolor": "none", "linewidth": 0}
    axes.add_patch(PathPatch(Path(corners, codes), facecolor=colour, **line))
