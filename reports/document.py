"""The report: one HTML file that needs nothing else, answer first."""

from __future__ import annotations

import importlib.metadata
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from planner.confirming import told
from planner.notes import stages_text
from planner.plan import Plan
from planner.waterfall import waterfall
from reports import comparison_tables, tables
from reports.answer import answer
from reports.charts import comparison_chart, memory_chart, step_chart
from reports.comparison import FLOP_CONVENTION, Comparison, compare, promised
from reports.dry_run import DryRun, traced_section
from reports.inputs import assumptions, by_source
from reports.link_charts import links_chart
from reports.timeline import MOST_RANKS, Picture, timeline_chart
from reports.whole_runs import Runs, runs_section
from scenarios.layout import Layout
from simulator.outcome import MEMORY_PARTS, Measurement

TEMPLATES = Path(__file__).parent / "templates"

MODELLED = (
    "compute of each layer by kind, at the efficiency that the sources below give",
    "exposed tensor, context, expert, pipeline and data parallel traffic on the tiers of the cluster's network",
    "the bubble of the pipeline schedule, the optimizer step, stragglers",
    "peak memory of each stage: weights, gradients, optimizer states, activations of the micro-batches in flight, "
    "logits, communication buffers, allocator reserve",
    "failures, recovery and checkpoints as averages over the run, where the scenario states failure rates",
)
NOT_MODELLED = (
    "waiting for data, evaluation, logging and other work beside the training step",
    "traffic of other jobs on the same network and storage",
    "whether the model converges: tokens are counted, not quality",
)


MEANINGS = {"schedule": "Order of forward and backward passes in the pipeline."}


def report(
    plan: Plan,
    measurements: Sequence[Measurement] = (),
    rivals: Sequence[tuple[Plan, Measurement]] = (),
    *,
    picture: Picture | None = None,
    runs: Runs | None = None,
    dry: DryRun | None = None,
    files: Sequence[str] = ("plan.json",),
    force: bool = False,
) -> str:
    """Write the report of a plan as a self-contained HTML page; the same input gives the same bytes.

    Args:
        plan: what is reported.
        measurements: real runs of this plan.
        rivals: other plans for the same scenario, each with its real run.
        picture: the step played event by event; None leaves the timeline out.
        runs: whole runs of the plan; None leaves them out.
        dry: a rank of the plan traced without weights.
        files: names of the plan file and the measurement files, for the commands that repeat the report.
        force: accept measurements of another plan.

    Raises:
        InputError: a measurement belongs to another plan; the plan lacks a figure.
    """
    promised(plan)
    comparisons = [compare(plan, measurement, force=force) for measurement in measurements]
    rival_comparisons = [compare(rival, measurement, force=force) for rival, measurement in rivals]
    return (
        environment()
        .get_template("report.html.j2")
        .render(
            style=Markup((TEMPLATES / "report.css").read_text(encoding="utf-8")),
            plan=plan,
            scenario=plan.scenario,
            answer=answer(plan, comparisons),
            layout_rows=_layout_rows(plan),
            step=_step(plan),
            memory=_memory(plan),
            timeline=_timeline(plan, picture),
            traced=traced_section(plan, dry, force=force),
            measured=_measured([*comparisons, *rival_comparisons]),
            whole_runs=runs_section(runs),
            alternatives=tables.alternative_rows(plan),
            checkpoint_rows=tables.facts(plan.checkpoint),
            goodput=tables.percent(plan.predicted.get("goodput")),
            confirmation=told(plan.predicted["confirmation"]) if "confirmation" in plan.predicted else None,
            faults=plan.scenario.faults,
            modelled=MODELLED,
            not_modelled=_not_modelled(plan),
            basis=plan.predicted.get("basis") or (),
            notes=plan.predicted.get("notes") or (),
            days_basis=plan.predicted.get("days_basis"),
            solver_rows=tables.facts({key: value for key, value in plan.solver.items() if key != "rejected_by_rule"}),
            rules=plan.solver.get("rejected_by_rule") or {},
            solver_verdict=_solver_verdict(plan.solver),
            assumptions=by_source(assumptions(plan.scenario)),
            commands=_commands(plan, files),
            version=importlib.metadata.version("headway-planner"),
            flop_convention=FLOP_CONVENTION,
            percent=tables.percent,
        )
    )


def environment() -> Environment:
    """Return the templates, with every value escaped and no value left undefined."""
    return Environment(
        loader=FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )


def _drawn(svg: str) -> Markup:
    return Markup(svg)  # matplotlib escapes the texts of its pictures


def _layout_rows(plan: Plan) -> list[tuple[str, str, str]]:
    values = plan.as_json()["layout"]
    rows = [
        (name, tables.fact(values[name]), (info.description or MEANINGS.get(name, "")).replace("``", ""))
        for name, info in Layout.model_fields.items()
        if name != "stages"
    ]
    count = ("num_microbatches", str(values["num_microbatches"]), "Micro-batches that each replica runs per step.")
    recomputed = sum(stage.recompute_layers for stage in plan.layout.stages)
    text = (stages_text(plan.layout) or "uniform") + (f"; {recomputed} of them recomputed" if recomputed else "")
    split = ("stages", text, "Layers of each virtual pipeline stage, in model order.")
    return [*rows, count, split]


def _step(plan: Plan) -> dict[str, Any]:
    step = plan.predicted["step_seconds"]
    parts = waterfall(plan.predicted)
    return {
        "chart": _drawn(step_chart(plan.predicted)),
        "rows": [
            (tables.part_name(part), tables.seconds_beside(part.value, step), tables.percent(part.value / step))
            for part in parts
        ],
        "total": tables.seconds_beside(step, step),
        "absent": tables.absent_parts(plan.predicted),
        "peak_known": plan.predicted["mfu"] is not None,
    }


def _memory(plan: Plan) -> dict[str, Any]:
    memory = plan.predicted["memory_bytes"]
    groups = tables.some_stages(memory["per_stage"])
    told = len(groups) == len(tables.stage_groups(memory["per_stage"]))
    parts = [part for part in MEMORY_PARTS if any(stage.get(f"{part}_bytes") for _, stage in groups)]
    totals = [sum(part.value for part in tables.memory_parts(stage)) for _, stage in groups]
    fullest = totals.index(max(totals))
    return {
        "chart": _drawn(memory_chart(memory)),
        "columns": [tables.PART_NAMES[part] for part in parts],
        "rows": [
            (name, [tables.size(stage.get(f"{part}_bytes") or None) for part in parts], tables.size(total))
            for (name, stage), total in zip(groups, totals, strict=True)
        ],
        "fullest": ("stages " if "-" in groups[fullest][0] else "stage ") + groups[fullest][0],
        "stages": f"{len(memory['per_stage'])} stage{'s' if len(memory['per_stage']) > 1 else ''}",
        "all_told": told,
        "peak": tables.size(memory["peak"]),
        "capacity": tables.size(memory["capacity"]),
        "headroom": tables.size(memory["capacity"] - memory["peak"]),
        "fits": memory["peak"] <= memory["capacity"],
    }


def _timeline(plan: Plan, picture: Picture | None) -> dict[str, Any] | None:
    if picture is None:
        return None
    total = plan.num_microbatches
    promise = plan.predicted["step_seconds"]
    return {
        "chart": _drawn(timeline_chart(picture.timeline)),
        "links": _drawn(links_chart(picture.timeline.counters, picture.timeline.step_seconds))
        if picture.timeline.counters
        else None,
        "played": picture.num_microbatches,
        "total": total,
        "step": tables.seconds(picture.timeline.step_seconds),
        "outside": not plan.predicted["step_seconds_low"]
        <= picture.timeline.step_seconds
        <= plan.predicted["step_seconds_high"]
        and picture.num_microbatches == total,
        "difference": tables.percent(picture.timeline.step_seconds / promise - 1, sign=True),
        "ranks": min(plan.layout.pp, MOST_RANKS),
        "pp": plan.layout.pp,
    }


def _measured(comparisons: Sequence[Comparison]) -> dict[str, Any] | None:
    if not comparisons:
        return None
    return {
        "chart": _drawn(comparison_chart(comparisons)),
        "runs": [
            {
                "comparison": one,
                "rows": comparison_tables.comparison_rows(one),
                "phases": comparison_tables.phase_rows(one),
                "goodput": comparison_tables.goodput_rows(one.run) if one.run else [],
                "goodput_words": comparison_tables.goodput_words(one.run) if one.run else "",
            }
            for one in comparisons
        ],
    }


def _not_modelled(plan: Plan) -> list[str]:
    memory = [f"memory: {what}" for what in plan.predicted["memory_bytes"].get("not_included", ())]
    model = [f"of the model: {what}" for what in plan.scenario.model.not_counted]
    return [*NOT_MODELLED, *memory, *model]


def _solver_verdict(solver: dict[str, Any]) -> str:
    gap = solver.get("gap")
    if not isinstance(gap, int | float):
        return "The search gives no bound: this is the best layout that it found, not a proof that none is better."
    return (
        f"By the bound of the search, no layout that was considered is faster than this one by more than "
        f"{100 * gap:.2g} % in headway's own model of a step; the error of that model is the band above."
    )


def _commands(plan: Plan, files: Sequence[str]) -> list[str]:
    names = [shlex.quote(Path(file).name) for file in files]
    scenario = shlex.quote(plan.inputs[0]["path"]) if plan.inputs else "SCENARIO"
    commands = [f"headway plan {scenario} -o {names[0]}", f"headway explain {names[0]}"]
    for name in names[1:]:
        commands += [f"headway run {names[0]} -o {name}", f"headway compare {names[0]} {name}"]
    return [*commands, f"headway report {' '.join(names)} -o report.html"]
