"""``headway compare``, ``headway report`` and ``headway validate``."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click
from rich.table import Table

from planner.plan import read_plan
from reports.comparison import FLOP_CONVENTION, Comparison
from reports.comparison import compare as compare_with
from reports.comparison_tables import comparison_rows, goodput_rows, goodput_words, phase_rows
from reports.dry_run import read_dry_run
from reports.learning import update_profile
from reports.log_comparison import compare_file
from reports.tables import percent, seconds
from simulator.outcome import read_measurement
from simulator.parameters import Parameters
from simulator.published import compact_text, read_runs
from simulator.published_cases import cases
from simulator.residuals import FACTORS, Lesson
from simulator.shifts import shifted
from simulator.validation import Validation
from simulator.validation import validate as validate_runs
from topologies.console import command, console, json_option, print_json, say, write_output
from topologies.document import load as load_parameters
from topologies.errors import InputError, MissingExtra
from topologies.units import format_quantity

PLAYED_RUNS = 48
"""Whole runs that a report plays: a few seconds, and the mean to about 0.3 points."""
force_option = click.option("--force", is_flag=True, help="Accept a measurement of another plan.")


@command()
@click.argument("plan_file", metavar="PLAN", type=click.Path(path_type=Path))
@click.argument("measurement_file", metavar="MEASUREMENT|LOG", type=click.Path(path_type=Path))
@click.option("--update", metavar="PROFILE", help="File the residual in this profile, which predictions then use.")
@force_option
@json_option
def compare(plan_file: Path, measurement_file: Path, update: str | None, force: bool, as_json: bool) -> None:
    r"""Compare what a plan promised with what a real job showed.

    The job may be headway's own, or that of another trainer: logs of Megatron, torchtitan, NeMo, Composer, DeepSpeed,
    InternEvo and Primus are read as they are.

    \b
    headway run plan.json -o measurement.json
    headway compare plan.json measurement.json
    headway compare plan.json megatron.log
    headway compare plan.json measurement.json --update machine.yaml
    """
    plan = read_plan(plan_file)
    comparison = compare_file(plan, measurement_file, force=force)
    lessons = () if update is None else update_profile(Path(update), plan, comparison)
    if as_json:
        told = [asdict(lesson) for lesson in lessons]
        print_json(comparison.as_json() | ({"lesson": told[0], "lessons": told} if told else {}))
        return
    _show(comparison)
    for lesson in lessons:
        _tell_lesson(str(update), lesson)


def _tell_lesson(profile: str, lesson: Lesson) -> None:
    def shown(value: float) -> str:
        return f"x {value:.3f}" if lesson.cost in FACTORS else format_quantity(value, "seconds")

    before, after = shown(lesson.before_seconds), shown(lesson.after_seconds)
    if lesson.note:
        say(f"{profile}: {lesson.cost} stays {after}: {lesson.note}")
        return
    spread = "" if lesson.spread_seconds is None else f", spread {shown(lesson.spread_seconds)}"
    say(f"{profile}: {lesson.cost} {before} -> {after} ({lesson.runs} run{'s' if lesson.runs > 1 else ''}{spread})")


def _show(comparison: Comparison) -> None:
    table = Table("", "predicted", "measured", "error", title=comparison.layout, title_justify="left")
    for column in table.columns[1:]:
        column.justify = "right"
    for row in comparison_rows(comparison):
        table.add_row(*row)
    if comparison.phases:
        table.add_section()
        for row in phase_rows(comparison):
            table.add_row(*row)
    if comparison.run:
        table.add_section()
        for row in goodput_rows(comparison.run):
            table.add_row(*row)
    console().print(table)
    low, high = (seconds(comparison.predicted[f"step_seconds_{end}"]) for end in ("low", "high"))
    inside = "inside" if comparison.within_band else "outside"
    if comparison.source != "headway run":
        say(f"measured: {comparison.source}")
    say(f"the measured step lies {inside} the predicted 80 % band, {low} to {high}")
    say(f"error: predicted over measured, less one. {FLOP_CONVENTION}")
    if comparison.run:
        say(goodput_words(comparison.run))
    for note in (*comparison.notes, *(comparison.run.notes if comparison.run else ())):
        say(f"note: {note}")
    for remark in comparison.remarks:
        say(f"the job says: {remark}")


@command()
@click.argument("plan_file", metavar="PLAN", type=click.Path(path_type=Path))
@click.argument("given_files", metavar="[MEASUREMENT|RUNS]...", nargs=-1, type=click.Path(path_type=Path))
@click.option(
    "--rival",
    "rival_files",
    metavar="PLAN MEASUREMENT",
    nargs=2,
    multiple=True,
    type=click.Path(path_type=Path),
    help="Another plan and its measurement, to show beside this one; may be given several times.",
)
@click.option("--dry-run", "dry_run_file", metavar="FILE", help="A dry run of the plan: traced memory, collectives.")
@click.option(
    "--runs",
    type=click.IntRange(min=0),
    default=PLAYED_RUNS,
    show_default=True,
    help="Whole runs to play where failure rates are stated and no file of 'simulate --runs' is given; 0: none.",
)
@click.option("-o", "--output", default="report.html", show_default=True, help="File to write; - is stdout.")
@force_option
@json_option
def report(
    plan_file: Path,
    given_files: tuple[Path, ...],
    rival_files: tuple[tuple[Path, Path], ...],
    runs: int,
    dry_run_file: str | None,
    output: str,
    force: bool,
    as_json: bool,
) -> None:
    r"""Write a plan, its measurements and its whole runs as one self-contained HTML page.

    \b
    headway report plan.json -o report.html
    headway simulate plan.json --runs 200 -o runs.json; headway report plan.json runs.json
    headway run plan.json --dry-run -o dry.json; headway report plan.json --dry-run dry.json
    headway report plan.json measurement.json --rival other-plan.json other-measurement.json -o report.html
    """
    if as_json and output == "-":
        raise InputError("--json and '-o -' would both write to stdout", hint="name a file with -o", key="-o")
    try:
        from reports.document import report as write
        from reports.timeline import play
        from reports.whole_runs import is_runs_file, play_plan, read_runs
    except ModuleNotFoundError as error:
        if error.name in {"matplotlib", "jinja2"}:
            raise MissingExtra("'headway report'", "reports") from None
        raise
    plan = read_plan(plan_file)
    runs_files = [file for file in given_files if is_runs_file(file)]
    if len(runs_files) > 1:
        raise InputError("is a second file of whole runs", hint="give one", file=runs_files[1])
    measurements = [read_measurement(file) for file in given_files if file not in runs_files]
    rivals = [(read_plan(rival), read_measurement(file)) for rival, file in rival_files]
    files = [str(plan_file), *(str(file) for file in given_files if file not in runs_files)]
    whole = read_runs(runs_files[0], plan, force=force) if runs_files else play_plan(plan, runs)
    dry = None if dry_run_file is None else read_dry_run(dry_run_file)
    page = write(plan, measurements, rivals, picture=play(plan), runs=whole, dry=dry, files=files, force=force)
    write_output(output, page)
    if as_json:
        pairs = [*((plan, one) for one in measurements), *rivals]
        comparisons = [compare_with(one, measurement, force=force).as_json() for one, measurement in pairs]
        print_json({"report": output, "bytes": len(page.encode()), "comparisons": comparisons})


@command()
@click.argument("runs_file", metavar="[RUNS.json]", required=False, type=click.Path(path_type=Path))
@click.option("--leave-one-source-out", "left_out", is_flag=True, help="Fit without each source, then predict it.")
@click.option("--parameters", "parameters_file", metavar="FILE", help="Parameters to use instead of the shipped ones.")
@click.option("-o", "--output", metavar="FILE", help="Also write an HTML page with a picture; - is stdout.")
@click.option("--write-compact", metavar="FILE", hidden=True, help="Write RUNS.json in the form that headway ships.")
@json_option
def validate(
    runs_file: Path | None,
    left_out: bool,
    parameters_file: str | None,
    output: str | None,
    write_compact: str | None,
    as_json: bool,
) -> None:
    r"""Predict published, measured training runs and say how far off the predictions are.

    Without RUNS.json the runs that ship with headway are used.

    \b
    headway validate
    headway validate runs.json --leave-one-source-out -o validation.html
    """
    if as_json and output == "-":
        raise InputError("--json and '-o -' would both write to stdout", hint="name a file with -o", key="-o")
    if left_out and parameters_file:
        raise click.UsageError("--leave-one-source-out fits the parameters itself; leave out --parameters")
    if write_compact:
        if runs_file is None:
            raise click.UsageError("--write-compact needs RUNS.json")
        write_output(write_compact, compact_text(runs_file))
        return
    runs = read_runs(runs_file)
    parameters = None if parameters_file is None else load_parameters(Path(parameters_file), Parameters)
    by_source = None
    if left_out:
        from simulator.fitting import fit_without_each_source

        say("fitting the parameters once for each source, without its runs")
        fits = fit_without_each_source(cases([run for run in runs if run.counted])[0])
        by_source = {source: fit.parameters for source, fit in fits.items()}
    found = validate_runs(runs, parameters=parameters, parameters_by_source=by_source)
    if output:
        write_output(output, _validation_page(found, runs_file))
    if as_json:
        print_json(found.as_json() | {"with_measured_runs": _with_measured_runs(found)})
    elif output != "-":
        _show_validation(found)


def _with_measured_runs(found: Validation) -> list[dict[str, Any]]:
    """What a few measured runs of the same stack would bring (``headway calibrate --runs``)."""
    try:
        return [asdict(shifted(found.counted, runs)) for runs in (1, 3, 5)]
    except ValueError:  # too few rows of one stack
        return []


def _validation_page(found: Validation, runs_file: Path | None) -> str:
    try:
        from reports.validation import validation_page
    except ModuleNotFoundError as error:
        if error.name in {"matplotlib", "jinja2"}:
            raise MissingExtra("'headway validate -o'", "reports") from None
        raise
    return validation_page(found, "The runs that ship with headway" if runs_file is None else runs_file.name)


def _show_validation(found: Validation) -> None:
    content = found.as_json()
    for key, title in (
        ("by_source", "source"),
        ("by_gpu", "GPU"),
        ("by_precision", "precision"),
        ("by_kind", "kind"),
        ("by_band", "band"),
    ):
        table = Table(title, "runs", "median", "mean", "p90", "bias", "in band", title_justify="left")
        for column in table.columns[1:]:
            column.justify = "right"
        for name, one in content[key].items():
            errors = [percent(one[part]) for part in ("median_ape", "mape", "p90_ape")]
            table.add_row(name, str(one["n"]), *errors, percent(one["bias"], sign=True), percent(one["within_band"]))
        console().print(table)
    summary, ranking = content["summary"], content["ranking"]
    click.echo(
        f"{summary['n']} runs: median error {percent(summary['median_ape'])}, mean {percent(summary['mape'])}, p90 "
        f"{percent(summary['p90_ape'])}, bias {percent(summary['bias'], sign=True)}; constant MFU "
        f"{percent(summary['constant_mfu_mape'])}; {percent(summary['within_band'])} in the 80 % band"
    )
    if ranking["groups"]:
        click.echo(
            f"ranking of {ranking['groups']} groups: regret {percent(ranking['regret']['mean'])} (worst "
            f"{percent(ranking['regret']['worst'])}), {percent(ranking['pairs_ordered'])} of {ranking['pairs']} pairs "
            "in order"
        )
    for one in _with_measured_runs(found):
        click.echo(
            f"with {one['runs']} measured runs of the same stack: median {percent(one['median_ape_before'])} to "
            f"{percent(one['median_ape'])}, mean {percent(one['mape_before'])} to {percent(one['mape'])} "
            f"({percent(one['mape_at_face_value'])} if believed whole)"
        )
    reasons = Counter(one["reason"] for one in content["skipped"])
    for reason, count in reasons.most_common():
        say(f"skipped {count}: {reason}")


@command()
@click.argument("runs_file", metavar="FILE", type=click.Path(path_type=Path))
@click.option("-o", "--output", required=True, metavar="FILE", help="Where to write the SVG.")
@click.option("--intervals", is_flag=True, help="Of a file of 'simulate': goodput against the checkpoint interval.")
def picture(runs_file: Path, output: str, intervals: bool) -> None:
    r"""Draw whole runs, goodput against the interval of a sweep, or the links that a step uses.

    \b
    headway simulate plan.json --step --json > step.json
    headway picture step.json -o links.svg
    headway simulate plan.json --runs 100 -o runs.json
    headway picture runs.json -o run.svg
    headway picture runs.json --intervals -o goodput.svg
    headway sweep SCENARIO --pin dp=8 --vary 'checkpoint.interval=[5 min,20 min]' --runs 50 -o sweep.json
    headway picture sweep.json -o goodput.svg
    """
    from reports.run_charts import picture_of

    write_output(output, picture_of(runs_file, "interval" if intervals else "run"))
