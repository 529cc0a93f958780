"""The validation page: predictions against published measurements, in one picture and a few tables."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Sequence
from typing import Any

import numpy as np
from markupsafe import Markup
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullFormatter

from reports.charts import BLUE, FAINT, GREEN, INK, ORANGE, VERMILLION, WIDTH_INCHES, as_svg, styled
from reports.document import TEMPLATES, environment
from reports.tables import percent, seconds
from simulator.validation import Prediction, Summary, Validation, baseline_errors

WORST = 20
"""Rows that are shown as the farthest off."""

GROUPS = (
    ("dense, pretraining", BLUE, "o"),
    ("mixture of experts", ORANGE, "s"),
    ("LoRA", GREEN, "^"),
    ("fine-tuning", VERMILLION, "D"),
)


def validation_page(validation: Validation, file: str) -> str:
    """Write a validation as a self-contained HTML page; the same input gives the same bytes."""
    counted = validation.counted
    content = validation.as_json()
    worst = sorted(counted, key=lambda one: -abs(np.log1p(one.error)))[:WORST]
    return (
        environment()
        .get_template("validation.html.j2")
        .render(
            style=Markup((TEMPLATES / "report.css").read_text(encoding="utf-8")),
            file=file,
            left_out=validation.left_out,
            summary=content["summary"],
            baseline=percent(float(np.mean(np.abs(baseline_errors([one.case for one in counted]))))),
            scatter=Markup(scatter_chart(counted)),
            tables=[
                (title, [_row(name, summary) for name, summary in validation.by(key).items()])
                for title, key in (
                    ("By kind of model", lambda run: run.kind),
                    ("By task", lambda run: run.task),
                    ("By GPU", lambda run: str(run.hardware.get("gpu"))),
                    ("By precision", lambda run: str(run.precision.get("dtype"))),
                    ("By source", lambda run: run.source_group),
                )
            ],
            ranking=content["ranking"],
            worst=[_worst(one) for one in worst],
            skipped=content["skipped"],
            counted=len(counted),
            not_counted=len(validation.predictions) - len(counted),
            version=importlib.metadata.version("headway-planner"),
            percent=percent,
        )
    )


def _row(name: str, summary: Summary) -> list[str]:
    errors = [percent(value) for value in (summary.median_ape, summary.mape, summary.p90_ape)]
    return [name, str(summary.n), *errors, percent(summary.bias, sign=True), percent(summary.within_band)]


def _worst(one: Prediction) -> list[str]:
    run = one.case.run
    return [
        percent(one.error, sign=True),
        run.id,
        one.case.layout.label(),
        seconds(one.seconds),
        seconds(one.case.measured_seconds),
        "; ".join(one.case.assumptions) or "-",
    ]


@styled
def scatter_chart(predictions: Sequence[Prediction]) -> str:
    """Measured against predicted seconds on logarithmic axes, with lines at 20 % off."""
    figure = Figure(figsize=(WIDTH_INCHES, 5.6), layout="constrained")
    axes = figure.add_subplot()
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.grid(color=FAINT)
    for name, colour, marker in GROUPS:
        chosen = [one for one in predictions if _group(one) == name]
        axes.plot(
            [one.case.measured_seconds for one in chosen],
            [one.seconds for one in chosen],
            linestyle="none",
            marker=marker,
            markersize=3.4,
            markeredgewidth=0,
            alpha=0.7,
            color=colour,
            label=f"{name} ({len(chosen)})",
        )
    values: list[Any] = [value for one in predictions for value in (one.case.measured_seconds, one.seconds)]
    if values:
        ends = np.array([min(values) / 1.3, max(values) * 1.3])
        axes.plot(ends, ends, color=INK, linewidth=0.8)
        for factor in (1.2, 1 / 1.2):
            axes.plot(ends, factor * ends, color=INK, linewidth=0.5, linestyle="--")
        axes.set_xlim(*ends)
        axes.set_ylim(*ends)
    for axis in (axes.xaxis, axes.yaxis):  # plain numbers: mathematical text is off in the charts
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axis.set_minor_formatter(NullFormatter())
    axes.set_xlabel("measured step, seconds")
    axes.set_ylabel("predicted step, seconds")
    axes.legend(loc="upper left")
    return as_svg(figure, "scatter", "Predicted against measured step time of published runs")


def _group(one: Prediction) -> str:
    run = one.case.run
    if run.task == "lora":
        return "LoRA"
    if run.kind == "moe":
        return "mixture of experts"
    return "fine-tuning" if run.task == "sft" else "dense, pretraining"
