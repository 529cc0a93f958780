"""The report's section on whole runs: from a file of ``headway simulate --runs``, or played for the plan."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from markupsafe import Markup

from planner.plan import Plan
from reports.run_charts import goodput_chart, run_chart
from reports.run_losses import loss_chart, losses, tokens_chart
from reports.tables import percent, seconds
from simulator.run_answers import answer, interval_curve, timeline
from simulator.whole_runs import whole_run
from topologies.errors import InputError

KEYS = {"runs", "seed", "goodput", "wall_seconds", "lost_seconds", "failures", "analytic", "layout_label", "scenario"}
MAKE = "headway simulate plan.json --runs 200 -o runs.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Runs:
    """Whole runs of a plan: the answer of ``headway simulate --runs``, with what pictures need where it is there."""

    content: dict[str, Any]
    source: str


def is_runs_file(path: Path) -> bool:
    """Whether a JSON file holds whole runs, by its keys."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False  # the reader of measurements says what is wrong
    return isinstance(content, dict) and content.keys() >= {"runs", "goodput", "lost_seconds", "analytic"}


def read_runs(path: Path, plan: Plan, *, force: bool = False) -> Runs:
    """Read the runs of a plan from a file.

    Raises:
        InputError: a key is missing, or the runs are of another scenario or layout.
    """
    content = json.loads(path.read_text(encoding="utf-8"))
    missing = sorted(KEYS - content.keys())
    if missing:
        raise InputError(f"has no {', '.join(missing)}", hint=f"make it again with '{MAKE}'", file=path)
    for key, wanted in (("scenario", plan.scenario.name), ("layout_label", plan.layout.label())):
        if content[key] != wanted and not force:
            raise InputError(
                f"is of {content[key]}, the plan is of {wanted}",
                hint="simulate this plan, or accept it with --force",
                file=path,
                key=key,
            )
    return Runs(content=content, source=path.name)


def play_plan(plan: Plan, runs: int, seed: int = 0) -> Runs | None:
    """Play whole runs of a plan; None for no run, or where its scenario names nothing that fails."""
    if not runs or (not plan.scenario.faults.failures and plan.scenario.faults.trace is None):
        return None
    run = whole_run(
        plan.scenario,
        plan.layout,
        plan.predicted["step_seconds"],
        planned=plan.checkpoint,
    )
    content = answer(run, runs, seed)
    drawn = {"timeline": timeline(run, seed), "intervals": interval_curve(run, runs // 4, seed)}
    return Runs(content=content | drawn, source=f"played for this report with seed {seed}")


def runs_section(found: Runs | None) -> dict[str, Any] | None:
    """What the template shows of whole runs; None without any."""
    if found is None:
        return None
    content = found.content
    goodput, analytic = content["goodput"], content["analytic"]
    days = {name: content["wall_seconds"][name] / 86_400 for name in ("p10", "p50", "p90")}
    low, high = goodput["ci95"] or (goodput["mean"], goodput["mean"])
    difference = f"{analytic['difference_points']:+.2f} points"
    verdict = f"The closed form expects {percent(analytic['goodput'])}; the simulated mean is {difference} beside it, "
    if abs(analytic["difference_points"]) <= 1:
        verdict += "within one goodput point."
    else:
        verdict += "more than one goodput point" + (
            " (no more than the confidence interval of the mean allows). " if analytic["agrees"] else ". "
        )
        verdict += f"The closed form leaves out: {'; '.join(analytic['leaves_out']) or 'nothing known'}."
    rows = content.get("intervals") or []
    told, optimum = content.get("timeline"), analytic.get("optimum_interval_seconds")
    return {
        "source": found.source,
        "runs": content["runs"],
        "given_up": content["runs"] - content.get("completed_runs", content["runs"]),
        "goodput": percent(goodput["mean"]),
        "interval": f"{percent(low)} to {percent(high)}",
        "p10": percent(goodput["p10"]),
        "p90": percent(goodput["p90"]),
        "days": f"{days['p50']:.3g} days ({days['p10']:.3g} to {days['p90']:.3g})",
        "include": content.get("quantiles_include"),
        "verdict": verdict,
        "agrees": analytic["agrees"],
        "losses": [
            (cause, percent(share), seconds(content["lost_seconds"][cause])) for cause, share in losses(content)
        ],
        "failures": [(name, f"{count:.1f}") for name, count in content["failures"].items()],
        "loss_chart": Markup(loss_chart(content)) if losses(content) else None,
        "curve": Markup(goodput_chart(rows, optimum=optimum)) if len(rows) > 1 else None,
        "timeline": Markup(run_chart(told)) if told else None,
        "tokens": Markup(tokens_chart(told)) if told and told.get("tokens") else None,
        "not_modelled": content.get("not_modelled") or [],
    }
