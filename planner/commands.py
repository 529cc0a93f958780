"""``headway plan``, ``headway explain`` and ``headway diff``."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import click
from rich.markup import escape
from rich.table import Table

from planner.placement import nodes_text
from planner.plan import Plan, read_plan, write_plan
from topologies.console import command, console, json_option, print_json, say, working, write_output
from topologies.document import InputFile, to_json
from topologies.units import format_quantity

OBJECTIVES = ("time", "cost", "goodput", "energy")


@command("plan")
@click.argument("scenario")
@click.option("-o", "--output", help="Write the plan to this file ('-': stdout).")
@click.option("--top", default=5, show_default=True, type=click.IntRange(min=0), help="Alternatives to tell.")
@click.option("--pin", "pins", multiple=True, metavar="FIELD=VALUE", help="Fix a field of the layout, such as tp=8.")
@click.option(
    "--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Change the scenario: job.seq_length=4096."
)
@click.option("--objective", type=click.Choice(OBJECTIVES), help="What to minimise; default: as the scenario says.")
@click.option("--deadline", metavar="TIME", help="The run must end in this time: '30 d'.")
@click.option(
    "--time-limit",
    metavar="SECONDS",
    type=click.FloatRange(min=0, min_open=True),
    help="Stop searching then, with the best plan so far and its gap; the answer then depends on the machine.",
)
@click.option("--exclude-nodes", metavar="NODES", help="Broken or reserved nodes: '3, 17-20', or names of the cluster.")
@click.option("--calibrate", is_flag=True, help="Measure this machine, run the best few layouts, keep the fastest.")
@click.option("--calibrate-dir", default="out/calibrated-plan", show_default=True, help="With --calibrate: its files.")
@json_option
def plan(
    scenario: str,
    output: str | None,
    top: int,
    pins: tuple[str, ...],
    overrides: tuple[str, ...],
    objective: str | None,
    deadline: str | None,
    time_limit: float | None,
    exclude_nodes: str | None,
    calibrate: bool,
    calibrate_dir: str,
    as_json: bool,
) -> None:
    r"""Choose the layout for SCENARIO, the name of a shipped scenario or a path.

    \b
    headway plan llama3-405b-16k-h100 --top 5 -o plan.json
    headway plan laptop --calibrate -o plan.json      the fastest by measurement, on this machine
    """
    from planner.pins import parse_pins
    from planner.planning import plan as make_plan
    from planner.planning import scenario_pins
    from planner.trials.commands import right_size_here
    from scenarios.scenario import load_scenario

    if calibrate:
        pinned = [word for pin in pins for word in ("--pin", pin)]
        changed = [word for change in overrides for word in ("--set", change)]
        wished = ["--objective", objective] if objective else []
        wished += ["--exclude-nodes", exclude_nodes] if exclude_nodes else []
        right_size_here(scenario, Path(calibrate_dir), [*pinned, *changed, *wished], output, as_json)
        return
    inputs: list[InputFile] = []
    changes = [*overrides, *([f"objective={objective}"] if objective else [])]
    changes += [f"job.deadline={json.dumps(deadline)}"] if deadline else []
    changes += [f"exclude_nodes={json.dumps(exclude_nodes)}"] if exclude_nodes else []
    asked = load_scenario(scenario, overrides=changes, inputs=inputs)
    fixed = parse_pins(pins, scenario_pins(asked))
    with working("bounding layouts") as tell:
        made = make_plan(
            asked, pins=fixed, top=top, inputs=inputs, time_limit_seconds=time_limit, told=partial(_tell, tell)
        )
    if output == "-":
        write_output("-", to_json(made.as_json()) + "\n")
        return
    if output is not None:
        write_plan(made, output)
        say(f"wrote {output}")
    if as_json:
        print_json(made.as_json())
    elif output is None:
        _show(made)
    else:
        say(_answer(made))


def _tell(tell: Callable[[str], None], found: Any) -> None:
    best = "none fits yet" if found.best is None else f"best step {found.best.found.seconds:.4g} s"
    tell(f"{len(found.opened)} layouts opened, {found.relaxed} relaxed, {best}")


@command("sweep")
@click.argument("scenario")
@click.option("--vary", multiple=True, required=True, metavar="KEY=[VALUES]", help="Values to try; all combinations.")
@click.option("--pin", "pins", multiple=True, metavar="FIELD=VALUE", help="Fix a field of the layout, such as tp=8.")
@click.option("--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Change the scenario for all points.")
@click.option("--runs", type=click.IntRange(min=1), help="Play this many whole runs at each point.")
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Of the runs' failures.")
@click.option("--jobs", type=click.IntRange(min=1), default=1, show_default=True, help="Processes.")
@click.option("-o", "--output", metavar="FILE", help="Write the rows: .csv as a table, anything else as JSON.")
@json_option
def sweep(
    scenario: str,
    vary: tuple[str, ...],
    pins: tuple[str, ...],
    overrides: tuple[str, ...],
    runs: int | None,
    seed: int,
    jobs: int,
    output: str | None,
    as_json: bool,
) -> None:
    r"""Answer SCENARIO for every combination of some values.

    \b
    headway sweep SCENARIO --vary 'cluster.num_nodes=[64,128]'
    headway sweep SCENARIO --vary 'checkpoint.interval=[5 min,10 min]' --vary 'faults.spares=[8,24]' --runs 50
    """
    from planner.sweep import parse_vary, rows_csv
    from planner.sweep import sweep as answer_all

    values, inputs = parse_vary(vary), list[InputFile]()
    rows = answer_all(
        scenario, values, pins=pins, overrides=overrides, runs=runs, seed=seed, jobs=jobs, inputs=inputs, tell=say
    )
    content = {"rows": rows, "vary": values, "seed": seed, "inputs": [asdict(one) for one in inputs]}
    if output is not None:
        write_output(output, rows_csv(rows) if output.endswith(".csv") else to_json(content) + "\n")
    if as_json:
        print_json(content)
    elif output is None:
        _sweep_table(rows, list(values))


def _sweep_table(rows: list[dict[str, Any]], keys: list[str]) -> None:
    table = Table(*keys, "layout", "step, s", "goodput", "simulated", "days")
    for row in rows:
        cells = [str(row[key]) for key in keys]
        if "infeasible" in row:
            table.add_row(*cells, escape(row["infeasible"]))
            continue
        played = row.get("simulated_goodput")
        days = "-" if row["days"] is None else f"{row['days']:.1f}"
        seen = "-" if played is None else f"{played['mean']:.2%} ({played['p10']:.2%} to {played['p90']:.2%})"
        table.add_row(*cells, row["layout"], f"{row['step_seconds']:.4g}", f"{row['goodput']:.2%}", seen, days)
    console().print(table)


@command("explain")
@click.argument("plan_file", metavar="PLAN")
@click.option("--quick", is_flag=True, help="Leave out the shadow prices, which plan again with one thing changed.")
@json_option
def explain(plan_file: str, quick: bool, as_json: bool) -> None:
    """Say why PLAN is what it is: limits, shadow prices, seconds, memory, rivals, rules, sources."""
    from planner.explain import explanation
    from planner.shadow import shadow_prices

    read = read_plan(plan_file)
    told = explanation(read, () if quick else shadow_prices(read, say))
    if as_json:
        print_json(told)
        return
    out = console()
    out.print(_answer(read), highlight=False)
    _list("What limits it", told["limits"])
    _list("What more would be worth", [one["words"] for one in told["shadow_prices"]])
    table = Table("of each step", "seconds", "share", title="From the peak to the predicted step")
    for entry in told["waterfall"]:
        table.add_row(entry["name"], f"{entry['seconds']:.4g}", f"{entry['share']:.1%}")
    table.add_row("predicted step", f"{read.predicted['step_seconds']:.4g}", "100 %", style="bold")
    out.print(table)
    out.print(_memory_table(read))
    out.print(_alternatives_table(read))
    rules = Table("rule", "rejected", "for example", title="Combinations that broke a rule")
    for name, entry in told["rejected_by_rule"].items():
        rules.add_row(name, f"{entry['count']:,}", escape(entry["example"]))
    rules.add_row("memory", f"{told['rejected_by_memory'] or 0:,}", "legal, but more than a GPU holds")
    out.print(rules)
    _list("Notes", told["notes"])
    _list("Assumptions", told["assumptions"])
    _list("Not in the memory figures", read.predicted["memory_bytes"].get("not_included", []))
    _list("How sure is the choice", [_certainty(read)])
    _list("Sources", [f"{one['document']}: {one['key']}: {one['source']}" for one in told["sources"]])
    _list("Input files", [f"{one['sha256'][:12]}  {one['path']}" for one in told["inputs"]])


@command("diff")
@click.argument("before", metavar="PLAN")
@click.argument("after", metavar="PLAN")
@json_option
@click.pass_context
def diff(context: click.Context, before: str, after: str, as_json: bool) -> None:
    """Show where two plans differ; exit 1 if they do."""
    from planner.difference import differences
    from planner.story import headline

    plans = read_plan(before), read_plan(after)
    found, told = differences(*plans), headline(*plans)
    if as_json:
        print_json({"headline": told, "differences": [asdict(one) for one in found]})
    elif found:
        _list("In short", told)
        table = Table("key", before, after, "change")
        for one in found:
            change = "" if one.change is None else f"{one.change:+.1%}"
            table.add_row(escape(one.key), escape(_short(one.before)), escape(_short(one.after)), change)
        console().print(table)
    else:
        say("the plans say the same")
    if found:
        context.exit(1)


@command("rules")
@click.argument("names", nargs=-1, metavar="[RULE]...")
@json_option
def rules(names: tuple[str, ...], as_json: bool) -> None:
    r"""Try rules of thumb (10b, 100b, 1t, pp4, checkpoint) and say where they are good and what they cost.

    \b
    headway rules
    headway rules 10b checkpoint --json
    """
    from planner.thumb import check_rules

    verdicts = list(check_rules(names, say))
    if as_json:
        print_json({"rules": [asdict(one) for one in verdicts]})
        return
    table = Table("rule of thumb", "tried on", "by the rule", "headway's choice", "verdict")
    for number, one in enumerate(verdicts):
        first = number == 0 or one.rule != verdicts[number - 1].rule
        table.add_row(one.saying if first else "", one.case, one.ruled, one.chosen, escape(one.verdict))
    console().print(table)


def _show(made: Plan) -> None:
    predicted, out = made.predicted, console()
    title = f"{made.scenario.name}: {made.scenario.model.name} on {made.scenario.cluster.name}"
    out.print(title, style="bold", highlight=False, markup=False)
    table = Table(show_header=False)
    for name, value in _summary(made):
        table.add_row(name, escape(value))
    out.print(table)
    parts = Table("of each step", "seconds", "share")
    for name, seconds in predicted["breakdown_seconds"].items():
        if seconds > 0:
            parts.add_row(name, f"{seconds:.4g}", f"{seconds / predicted['step_seconds']:.1%}")
    out.print(parts)
    out.print(_memory_table(made))
    if made.alternatives:
        out.print(_alternatives_table(made))
    _list("Notes", predicted["notes"])
    out.print(_certainty(made), style="dim", highlight=False, markup=False)


def _summary(made: Plan) -> list[tuple[str, str]]:
    predicted, checkpoint = made.predicted, made.checkpoint
    days, cost = predicted["days"], predicted["cost_usd"]
    band = f"{predicted['step_seconds_low']:.4g} to {predicted['step_seconds_high']:.4g}"
    rows = [
        ("layout", f"{made.layout.label()}, micro-batches: {_microbatches(made)}"),
        ("GPUs", f"{made.layout.world_size:,} on {nodes_text(made.placement)}"),
        ("step", f"{predicted['step_seconds']:.4g} s ({band} s with 80 % probability)"),
        ("speed", f"{_percent(predicted['mfu'])} MFU, {predicted['tflops_per_gpu']:.4g} TFLOP/s and "
         f"{predicted['tokens_per_second_per_gpu']:.4g} tokens/s per GPU"),
        ("memory", f"{format_quantity(predicted['memory_bytes']['peak'], 'bytes')} of "
         f"{format_quantity(predicted['memory_bytes']['capacity'], 'bytes')} on the fullest stage"),
        ("checkpoint", f"every {checkpoint['interval_steps']} steps "
         f"({format_quantity(checkpoint['interval_seconds'], 'seconds')}), {checkpoint['mode']}, "
         f"{format_quantity(checkpoint['bytes'], 'bytes')} to {', '.join(checkpoint['tiers']) or 'no stated storage'}"),
        ("goodput", f"{predicted['goodput']:.2%} of the wall time, expected{_confirmed(predicted)}"),
    ]  # fmt: skip
    rows += _uplinks(made.placement.get("uplinks"))
    rows += [("step assumes", text)] if (text := made.placement.get("step_assumes")) else []
    rows += [("proof", f"gap {made.solver['gap']:.2%} {text}")] if (text := made.solver.get("scope")) else []
    if predicted.get("spares") is not None:
        rows.append(("spares", f"{predicted['spares']} nodes: {checkpoint['spares_reason']}"))
    if days:
        rows.append(("run", f"{days['p50']:.3g} days ({days['p10']:.3g} to {days['p90']:.3g})"))
    else:
        rows.append(("run", predicted["days_basis"]))
    if cost is not None:
        rows.append(("cost", f"{cost:,.0f} USD"))
    energy = predicted["energy_kwh"]
    if energy is not None:
        rows.append(("energy", f"{energy:,.0f} kWh" if energy >= 100 else f"{energy:.3g} kWh"))
    return rows


def _microbatches(made: Plan) -> str:
    if not made.replicas:
        return str(made.num_microbatches)
    return ", ".join(f"{one['replicas']} x {one['num_microbatches']} on {one['node']}" for one in made.replicas)


def _uplinks(found: dict[str, Any] | None) -> list[tuple[str, str]]:
    if not found:
        return []
    saved = found["saved_bytes"] / max(found["rank_order_bytes"], 1.0)
    told = (
        f"{format_quantity(found['bytes'], 'bytes')} of a step leave the {found['level']} units of "
        f"{found['unit_nodes']} nodes, {saved:.1%} less than in rank order; no placement sends less than "
        f"{format_quantity(found['bound_bytes'], 'bytes')}"
    )
    return [("uplinks", told)]


def _confirmed(predicted: dict[str, Any]) -> str:
    from planner.confirming import told

    return f"; {told(predicted['confirmation'])}" if "confirmation" in predicted else ""


def _answer(made: Plan) -> str:
    predicted = made.predicted
    return (
        f"{made.layout.label()}: {predicted['step_seconds']:.4g} s per step, {_percent(predicted['mfu'])} MFU, "
        f"{format_quantity(predicted['memory_bytes']['peak'], 'bytes')} of "
        f"{format_quantity(predicted['memory_bytes']['capacity'], 'bytes')}, goodput {predicted['goodput']:.2%}"
    )


def _memory_table(made: Plan) -> Table:
    """Bytes by part, of the first, the fullest and the last stage (all where they are few)."""
    stages: list[dict[str, Any]] = made.predicted["memory_bytes"]["per_stage"]
    fullest = max(range(len(stages)), key=lambda stage: stages[stage]["total_bytes"])
    shown = sorted({0, fullest, len(stages) - 1}) if len(stages) > 8 else range(len(stages))
    parts = [name for name in stages[0] if name.endswith("_bytes") and name != "total_bytes"]
    table = Table("stage", *(name.removesuffix("_bytes") for name in parts), "total", title="Memory per rank, GB")
    for stage in shown:
        row = [f"{stages[stage][name] / 1e9:.2f}" for name in [*parts, "total_bytes"]]
        table.add_row(f"{stage}{' (fullest)' if stage == fullest else ''}", *row)
    return table


def _alternatives_table(made: Plan) -> Table:
    table = Table("runner-up", "step, s", "MFU", "why it lost", title="Alternatives")
    for one in made.alternatives:
        label = one.get("label") or ""
        table.add_row(label, f"{one['step_seconds']:.4g}", _percent(one["mfu"]), escape(one["lost_because"]))
    return table


def _certainty(made: Plan) -> str:
    solver = made.solver
    work = f"{solver['candidates']:,} combinations, {solver['legal']:,} legal, {solver['feasible']:,} of them bounded"
    work += f", {solver.get('opened', 0)} opened, {solver['solved_exactly']} solved, in {solver['seconds']:.2f} s"
    left_out = "".join(f"; left out: {one}" for one in solver.get("restrictions", []))
    return (
        f"{solver['name']}: {solver['status']}: {solver['objective_seconds']:.4g} s, no step below "
        f"{solver['bound_seconds']:.4g} s (gap {solver['gap']:.2%}); {work}; {solver['note']}{left_out}"
    )


def _list(title: str, lines: list[str]) -> None:
    if not lines:
        return
    out = console()
    out.print(title, style="bold")
    for line in lines:
        out.print(f"  - {line}", highlight=False, markup=False)


def _percent(value: float | None) -> str:
    return "unknown" if value is None else f"{value:.1%}"


def _short(value: Any) -> str:
    text = f"{value:.6g}" if isinstance(value, float) else str(value)
    return text if len(text) <= 40 else text[:37] + "..."
