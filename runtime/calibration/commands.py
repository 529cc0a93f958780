"""``headway calibrate``. torch is imported by the workers only."""

from __future__ import annotations

import re
from pathlib import Path

import click

from runtime.calibrate import calibrate_machine
from runtime.launch import require_torch
from runtime.run_offsets import RunOffset, offset_of_runs
from topologies.cluster import Cluster
from topologies.cluster_file import to_yaml
from topologies.console import command, json_option, print_json, say, write_output
from topologies.document import to_json
from topologies.errors import InputError
from topologies.importers import Choices
from topologies.importers.assemble import to_yaml as mapping_to_yaml
from topologies.importers.curves import measured_by_logs
from topologies.units import format_quantity


@command()
@click.argument("more_runs", metavar="[LOG]...", nargs=-1)
@click.option("-o", "--output", help="Write the cluster document, or the offset, to this file ('-' is stdout).")
@click.option("--from", "logs", multiple=True, metavar="LOG...", help="Read curves from logs of nccl-tests instead.")
@click.option("--cluster", metavar="NAME|FILE", help="With --from: the cluster on which they were measured.")
@click.option("--runs", multiple=True, metavar="LOG...", help="Learn from measured runs instead: logs or measurements.")
@click.option("--plan", "plans", multiple=True, metavar="PLAN", help="With --runs: of all runs, or one for each.")
@click.option("--published", metavar="RUNS.json", help="Fit the simulator's parameters to published runs instead.")
@click.option("--ranks", metavar="N,N...", help="Group sizes of collectives (2, and as many as there are cores).")
@click.option("--force", is_flag=True, help="Measure again although the file holds for this machine.")
@json_option
def calibrate(
    more_runs: tuple[str, ...],
    output: str | None,
    logs: tuple[str, ...],
    cluster: str | None,
    runs: tuple[str, ...],
    plans: tuple[str, ...],
    published: str | None,
    ranks: str | None,
    force: bool,
    as_json: bool,
) -> None:
    r"""Measure this machine into a cluster document: rates by shape, collectives by size, fixed costs.

    With --from it measures nothing and reads how fast collectives are from logs of nccl-tests or rccl-tests: what is
    predicted for the cluster that it writes follows these curves. With --runs it learns from a few runs of a plan by
    how much predictions for their stack are off: one factor, pulled towards 1.

    \b
    headway calibrate -o this-machine.yaml
    headway calibrate --from all_reduce.log all_gather.log --cluster dgx-h100-superpod -o measured.yaml
    headway calibrate --runs first.log second.log --plan plan.json
    headway calibrate --published runs.json -o parameters.yaml
    """
    if published:
        if runs or more_runs or plans or logs:
            raise click.UsageError("--published fits to published runs alone; leave out --runs, --plan and logs")
        _fit_published(published, output, as_json)
        return
    if logs:
        if runs or plans:
            raise click.UsageError("--from reads curves of collectives, --runs learns from training runs: give one")
        _read_curves((*logs, *more_runs), cluster, output, as_json)
        return
    if cluster is not None:
        raise click.UsageError("--cluster goes with --from")
    if runs:
        _learn(offset_of_runs(plans, (*runs, *more_runs)), output, as_json)
        return
    if more_runs or plans:
        raise click.UsageError("logs go with --from or --runs: headway calibrate --runs LOG... --plan PLAN")
    require_torch("headway calibrate")
    if ranks is not None and not re.fullmatch(r"\d+(,\d+)*", ranks):
        raise InputError(f"--ranks {ranks!r} is not a list of numbers", hint="for example --ranks 2,4")
    sizes = None if ranks is None else tuple(sorted({int(word) for word in ranks.split(",")}))
    path = Path(output) if output and output != "-" else None
    measured, fresh = calibrate_machine(path, ranks=sizes, force=force, on_progress=lambda line: say(f"  {line}"))
    if path is not None:
        say(f"wrote {path}" if fresh else f"{path} holds for this machine and is used again (--force measures anew)")
    if output == "-":
        write_output("-", to_yaml(measured))
    elif as_json:
        print_json(measured.model_dump(mode="json"))
    else:
        _tell_calibration(measured)


def _read_curves(logs: tuple[str, ...], cluster: str | None, output: str | None, as_json: bool) -> None:
    raw, read = measured_by_logs(logs, Choices(cluster=cluster))
    for one in read:
        for warning in one.warnings:
            say(f"warning: {one.file}: {warning}")
    if output:
        write_output(output, mapping_to_yaml(raw))
    points = raw["measured"]["collectives"]
    if as_json and output != "-":
        print_json({"cluster": cluster, "collectives": points})
    elif output != "-":
        for kind, ranks in dict.fromkeys((one["kind"], one["ranks"]) for one in points):
            sizes = [one["size"] for one in points if (one["kind"], one["ranks"]) == (kind, ranks)]
            click.echo(f"{kind} of {ranks} ranks: {len(sizes)} sizes, {sizes[0]} to {sizes[-1]}")


def _fit_published(published: str, output: str | None, as_json: bool) -> None:
    from simulator.fitting import fit_json, fit_published, parameters_text
    from simulator.published import read_runs

    fit = fit_published(read_runs(published))
    if output:
        write_output(output, parameters_text(fit))
    if as_json and output != "-":
        print_json(fit_json(fit))
    elif output != "-":
        for name, one in fit_json(fit)["parameters"].items():
            ends = f"{one['low']:.4g} to {one['high']:.4g}"
            click.echo(f"{name:40} {one['value']:.4g}  ({ends}, prior {one['prior']:.4g})")
        say(f"fitted to {fit.rows} runs of {fit.sources} sources")


def _learn(found: RunOffset, output: str | None, as_json: bool) -> None:
    if output:
        write_output(output, to_json(found.as_json()) + "\n")
    if as_json and output != "-":
        print_json(found.as_json())
    elif output != "-":
        _tell_offset(found)
    for warning in found.offset.warnings:
        say(f"warning: {warning}")


def _tell_offset(found: RunOffset) -> None:
    offset = found.offset
    for one in found.runs:
        click.echo(
            f"{Path(one.file).name}: {one.measured_seconds:.4g} s measured, {one.predicted_seconds:.4g} s predicted "
            f"({one.measured_seconds / one.predicted_seconds:.3f})"
        )
        for note in one.notes:
            say(f"note: {note}")
    click.echo(
        f"factor {offset.factor:.3f}: {100 * offset.weight:.0f} % of the median {offset.at_face_value:.3f} is believed "
        f"after {offset.runs} run{'s' if offset.runs > 1 else ''}"
    )
    for plan, told in found.shifted.items():
        low, high = told["step_seconds_low"], told["step_seconds_high"]
        click.echo(f"{Path(plan).name}: {told['step_seconds']:.4g} s with it ({low:.4g} to {high:.4g} s)")
    say(f"to use it: headway plan SCENARIO --set stack.step_factor={found.step_factor:.3f}")


def _tell_calibration(cluster: Cluster) -> None:
    measured = cluster.measured
    assert measured is not None
    for precision, peak in cluster.gpu.peak_flop_per_second.items():
        click.echo(f"{precision:<11}{format_quantity(peak, 'flop_per_second')} per core, best matrix product")
    bandwidth = format_quantity(measured.memory_bandwidth_bytes_per_second, "bytes_per_second")
    click.echo(f"{'memory':<11}{bandwidth} per core, elementwise operations of a layer")
    busbw = format_quantity(cluster.scale_up.bus_bandwidth_bytes_per_second, "bytes_per_second")
    click.echo(f"{'all-reduce':<11}{busbw} bus bandwidth of two ranks")
    costs = ", ".join(f"{name} {1e3 * seconds:.2f} ms" for name, seconds in measured.host_seconds.items())
    click.echo(f"{'host':<11}{costs}")
    told = measured.environment
    click.echo(f"{'spread':<11}{told['spread']}; others took {told['foreign_cpu_share']} of the cores")
