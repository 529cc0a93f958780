"""``headway health``."""

from __future__ import annotations

from pathlib import Path

import click
from rich.table import Table

from runtime.environment import usable_cores
from runtime.health.verdict import Verdict, judge
from runtime.job import gpus_here
from runtime.launch import launch, require_torch
from runtime.request import HealthRequest
from topologies.cluster import Cluster
from topologies.console import command, console, json_option, print_json, say, write_output
from topologies.document import LoadContext, load, resolve, to_json
from topologies.hardware import CATALOG
from topologies.units import format_quantity

TIMEOUT_SECONDS = 300.0


@command()
@click.option("--cluster", metavar="NAME|FILE", help="What to expect; a calibrated cluster ('headway calibrate').")
@click.option("--ranks", type=click.IntRange(min=1), help="Ranks to examine (the GPUs, or the cores).")
@click.option(
    "--threshold", type=click.FloatRange(0, 1), default=0.7, show_default=True, help="Less of what is expected is bad."
)
@click.option("-o", "--output", help="Write the findings as JSON to this file ('-' is stdout).")
@json_option
@click.pass_context
def health(
    context: click.Context, cluster: str | None, ranks: int | None, threshold: float, output: str | None, as_json: bool
) -> None:
    r"""Examine this machine before a job: compute, memory, every pair of ranks, all together.

    Ranks below the threshold are named with their hosts, and the exit code is 1.

    \b
    headway health
    headway health --cluster this-machine.yaml --json
    """
    require_torch("headway health")
    known = None if cluster is None else load(resolve(cluster, CATALOG / "clusters", LoadContext(Path())), Cluster)
    gpus = gpus_here()
    request = HealthRequest(ranks=ranks or gpus or usable_cores(), device="cuda" if gpus else "cpu")
    result = launch(request, timeout_seconds=TIMEOUT_SECONDS, on_progress=lambda line: say(f"  {line}"))
    verdict = judge(result, known, threshold)
    if output:
        write_output(output, to_json(verdict.as_json()) + "\n")
    if as_json and output != "-":
        print_json(verdict.as_json())
    elif output != "-":
        _tell(verdict)
    if verdict.findings:
        context.exit(1)


def _tell(verdict: Verdict) -> None:
    table = Table("rank", "host", "matrix product", "memory", "best pair")
    for one in verdict.ranks:
        cells = []
        for key, dimension in (("gemm_flop", "flop_per_second"), ("memory_bytes", "bytes_per_second")):
            cells.append(_cell(one[f"{key}_per_second"], one[f"{key}_share"], dimension))
        pair = _cell(one["pair_bytes_per_second"], one["pair_bytes_share"], "bytes_per_second")
        table.add_row(str(one["rank"]), one["host"], *cells, pair)
    console().print(table)
    group = verdict.group
    busbw = format_quantity(group["busbw_bytes_per_second"], "bytes_per_second")
    click.echo(f"all-reduce of {group['ranks']} ranks: {busbw} bus bandwidth")
    for finding in verdict.findings:
        who = f"rank {finding.rank} on {finding.host}: {finding.what}" if finding.rank >= 0 else finding.what
        click.echo(f"slow: {who} reaches {100 * finding.share:.0f} % of {finding.expected_by}")
    if verdict.excluded:
        click.echo(f"leave out: {','.join(verdict.excluded)}")
    elif not verdict.findings:
        click.echo("healthy")


def _cell(value: float | None, share: float | None, dimension: str) -> str:
    if value is None:
        return "-"
    return format_quantity(value, dimension) + ("" if share is None else f" ({100 * share:.0f} %)")
