"""``headway model``, ``headway scenario`` and ``headway schema``."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import click
from rich.markup import escape
from rich.table import Table

from scenarios.json_schema import DOCUMENTS, document_schema
from scenarios.model import MODELS, load_model
from scenarios.scenario import SCENARIOS, load_scenario
from scenarios.summary import check_scenario, model_row, model_summary, scenario_row, scenario_summary
from topologies.console import command, console, json_option, print_json, write_output
from topologies.document import InputFile, shipped, to_json
from topologies.units import format_quantity

DEFAULT_SEQ_LENGTH = 4096
"""Where nobody says how long a sequence is; shorter where the model is made for less."""


@click.group()
def model() -> None:
    """List and show models; read a Hugging Face config.json."""


@command("list")
@json_option
def list_models(as_json: bool) -> None:
    """List the shipped models."""
    rows = [{"name": name, **model_row(load_model(name))} for name in shipped(MODELS)]
    if as_json:
        print_json({"models": rows})
        return
    table = _table("name", "parameters", "active", "layers", "kinds of layer", right=(1, 2, 3))
    for row in rows:
        kinds = ", ".join(f"{count} {kind}" for kind, count in row["layer_kinds"].items())
        counts = f"{row['parameters']:,}", f"{row['active_parameters']:,}", str(row["num_layers"])
        table.add_row(row["name"], *counts, kinds)
    console().print(table)


@command("show")
@click.argument("name")
@click.option("--seq-length", type=click.IntRange(min=1), help="Tokens per sequence, for the FLOPs of attention.")
@json_option
def show_model(name: str, seq_length: int | None, as_json: bool) -> None:
    """Show parameters and FLOPs of a model: a shipped NAME, a config.json or a YAML file."""
    inputs: list[InputFile] = []
    spec = load_model(name, inputs=inputs)
    length = seq_length or min(DEFAULT_SEQ_LENGTH, spec.max_seq_length or DEFAULT_SEQ_LENGTH)
    summary = model_summary(spec, length)
    if as_json:
        print_json({**summary, "inputs": [asdict(file) for file in inputs]})
    else:
        _show_model(summary)


def _show_model(summary: dict[str, Any]) -> None:
    out, parameters, flops = console(), summary["parameters"], summary["flops_per_token"]
    out.print(f"[bold]{escape(summary['name'])}[/bold]: {parameters['total']:,} parameters", highlight=False)
    out.print(f"{parameters['active']:,} of them are met by one token\n", highlight=False)
    table = _table("part", "layers", "parameters each", "active each", "forward FLOPs per token", right=(1, 2, 3, 4))
    table.add_row("embedding", "", f"{parameters['embedding']:,}", f"{parameters['embedding']:,}", "0")
    for kind, facts in summary["layer_kinds"].items():
        each = (f"{facts[key]:,}" for key in ("parameters_per_layer", "active_parameters_per_layer"))
        table.add_row(kind, str(facts["layers"]), *each, f"{facts['forward_flops_per_token_per_layer']:,.0f} each")
    table.add_row("head", "", f"{parameters['head']:,}", f"{parameters['head']:,}", f"{flops['forward']['head']:,.0f}")
    out.print(table)
    table = _table("forward FLOPs per token", "GFLOP", "share", right=(1, 2))
    for part, value in flops["forward"].items():
        if value:
            table.add_row(part, f"{value / 1e9:,.4f}", f"{value / flops['forward_total']:.1%}")
    table.add_row("forward", f"{flops['forward_total'] / 1e9:,.4f}", "100.0%")
    table.add_row("training (3 x forward)", f"{flops['training'] / 1e9:,.4f}", "")
    out.print()
    out.print(table)
    out.print(f"at {flops['seq_length']:,} tokens per sequence; attention {flops['attention']}", highlight=False)
    if parameters["multi_token_prediction"]:
        out.print(f"multi-token prediction: {parameters['multi_token_prediction']:,} parameters more", highlight=False)
    for title, lines in (("not counted", summary["not_counted"]), ("sources", _lines(summary["source"]))):
        if lines:
            out.print(f"\n{title}")
        for line in lines:
            out.print(f"  {line}", style="dim", highlight=False, markup=False)


@click.group()
def scenario() -> None:
    """List, show and check scenarios."""


@command("list")
@json_option
def list_scenarios(as_json: bool) -> None:
    """List the shipped scenarios."""
    rows = [{"name": name, **scenario_row(load_scenario(name))} for name in shipped(SCENARIOS)]
    if as_json:
        print_json({"scenarios": rows})
        return
    table = _table("name", "model", "cluster", "GPUs", "tokens", "batch", "precision", right=(3, 4, 5))
    for row in rows:
        counts = (f"{row[key]:,}" for key in ("num_gpus", "seq_length", "global_batch_size"))
        table.add_row(row["name"], row["model"], row["cluster"], *counts, row["precision"])
    console().print(table)


@command("show")
@click.argument("name")
@click.option(
    "--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Change a value, e.g. job.seq_length=8192."
)
@json_option
def show_scenario(name: str, overrides: tuple[str, ...], as_json: bool) -> None:
    """Show what a scenario asks: a shipped NAME or a file."""
    inputs: list[InputFile] = []
    summary = scenario_summary(load_scenario(name, overrides=overrides, inputs=inputs), inputs)
    if as_json:
        print_json(summary)
    else:
        _show_scenario(summary)


def _show_scenario(summary: dict[str, Any]) -> None:
    out, job, cluster = console(), summary["job"], summary["cluster"]
    out.print(f"[bold]{escape(summary['name'])}[/bold] (objective: {summary['objective']})")
    between, steps = summary["faults"]["mean_seconds_between_failures"], summary["steps"]
    broken = "never" if between is None else f"every {format_quantity(between, 'seconds')}"
    facts = {
        "model": f"{summary['model']['name']}, {summary['model']['parameters']:,} parameters",
        "cluster": f"{cluster['name']}: {cluster['num_gpus']:,} x {cluster['gpu']} in {cluster['num_nodes']:,} nodes",
        "step": f"{job['global_batch_size']:,} sequences of {job['seq_length']:,} tokens in {job['precision']}, "
        f"{summary['flops_per_step']:.3g} model FLOPs",
        "run": "not asked for" if steps is None else f"{job['target_tokens']:.4g} tokens, {steps:,.0f} steps",
        "failures": f"{summary['faults']['name']}: {broken}",
        "prices": summary["prices"]["name"],
        "pinned": ", ".join(_lines(summary["layout"])) or "nothing",
    }
    table = _table()
    for key, text in facts.items():
        table.add_row(key, escape(text))
    out.print(table)
    for file in summary["inputs"]:
        out.print(f"  {file['sha256'][:12]} {file['path']}", style="dim", highlight=False, markup=False)


@command("check")
@click.argument("name")
@json_option
@click.pass_context
def check_command(context: click.Context, name: str, as_json: bool) -> None:
    """Check a scenario by NAME or from a file; exit 1 where it cannot work, 2 where it cannot be read."""
    found = load_scenario(name)
    findings = check_scenario(found)
    failures = sum(finding.level == "failure" for finding in findings)
    if as_json:
        print_json({"name": found.name, "ok": not failures, "findings": [asdict(finding) for finding in findings]})
    else:
        for finding in findings:
            click.echo(f"{finding.level}: {finding.rule}: {finding.text}")
        click.echo(f"{found.name}: {failures} failures, {len(findings) - failures} warnings")
    if failures:
        context.exit(1)


@command("schema")
@click.argument("kind", type=click.Choice(list(DOCUMENTS)))
@click.option("-o", "--output", default="-", show_default=True, help="File to write.")
def schema(kind: str, output: str) -> None:
    """Print the JSON Schema of a KIND of document, for editors."""
    write_output(output, to_json(document_schema(kind)) + "\n")


def _table(*headings: str, right: tuple[int, ...] = ()) -> Table:
    table = Table(box=None, pad_edge=False, show_header=bool(headings))
    for index, heading in enumerate(headings):
        table.add_column(heading, justify="right" if index in right else "left")
    return table


def _lines(facts: dict[str, Any]) -> list[str]:
    return [f"{key}: {value}" for key, value in facts.items()]


for each in (list_models, show_model):
    model.add_command(each)
for each in (list_scenarios, show_scenario, check_command):
    scenario.add_command(each)
