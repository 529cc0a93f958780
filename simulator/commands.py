"""``headway simulate`` and ``headway merge``: a step or whole runs of what the user names."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, get_args

import click
from rich.console import Console
from rich.markup import escape
from rich.progress import Progress
from rich.table import Table

from scenarios.operations import CheckpointMode
from simulator.disturbance_texts import (
    BESIDE_HELP,
    DEAD_HELP,
    SLOW_LINK_HELP,
    read_faults,
    read_others,
    read_share,
    read_slow_gpus,
)
from simulator.disturbances import Disturbances, checkpoint_drain
from simulator.ensemble import Backend, available_cores, ensemble_json
from simulator.fabric_notes import step_warnings
from simulator.inputs import Subject, read_subject
from simulator.memory import memory_use
from simulator.outcome import MemoryUse
from simulator.parts import merge_parts, part_range, part_text
from simulator.run_answers import interval_curve, timeline
from simulator.shared_step import SharedStep, shared_step
from simulator.step_report import network_json, network_lines
from simulator.traces import trace_bytes
from simulator.training import StepPlay, explained_step
from simulator.whole_runs import WholeRun, known, play, whole_run
from topologies.console import command, console, inputs_json, json_option, print_json, say, tell_inputs, write_output
from topologies.document import to_json
from topologies.units import format_quantity

DEFAULT_SEED = 0


@command()
@click.argument("name", metavar="PLAN|SCENARIO")
@click.option("--pin", "pins", multiple=True, metavar="FIELD=VALUE", help="Fix a field of the layout: --pin tp=8.")
@click.option("--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Change the scenario.")
@click.option("--step", "step_only", is_flag=True, help="Play one optimizer step event by event (the default).")
@click.option("--runs", type=click.IntRange(min=1), help="Play this many whole runs with failures.")
@click.option(
    "--seed",
    type=click.IntRange(min=0),
    default=DEFAULT_SEED,
    show_default=True,
    help="Of failures, jitter and hashed paths.",
)
@click.option("--jobs", type=click.IntRange(min=1), help="Processes; default: as many as there are cores.")
@click.option("--backend", type=click.Choice(get_args(Backend)), default="processes", help="Where the runs are played.")
@click.option("--part", metavar="K/N", help="Play only this part of the runs, for 'headway merge'; needs -o.")
@click.option("-o", "--output", metavar="FILE", help="Write the runs: the part, or the answer with what pictures need.")
@click.option("--trace", metavar="FILE", help="Write the step for ui.perfetto.dev (gzip unless FILE ends in .json).")
@click.option("--dead", multiple=True, metavar="LINK", help=DEAD_HELP)
@click.option("--slow-link", multiple=True, metavar="LINK=SHARE", help=SLOW_LINK_HELP)
@click.option("--slow-gpu", multiple=True, metavar="GPU=SPEED", help="A GPU of the step that is slow: 17='80 %'.")
@click.option("--jitter", metavar="SHARE", help="Draw the time of each op on each GPU with this variation: '2 %'.")
@click.option("--beside", multiple=True, metavar="KIND:FIRST-LAST:SIZE", help=BESIDE_HELP)
@click.option("--drain", is_flag=True, help="Send a checkpoint to the shared storage during the step.")
@json_option
def simulate(
    name: str,
    pins: tuple[str, ...],
    overrides: tuple[str, ...],
    step_only: bool,
    runs: int | None,
    seed: int,
    jobs: int | None,
    backend: Backend,
    part: str | None,
    output: str | None,
    trace: str | None,
    dead: tuple[str, ...],
    slow_link: tuple[str, ...],
    slow_gpu: tuple[str, ...],
    jitter: str | None,
    beside: tuple[str, ...],
    drain: bool,
    as_json: bool,
) -> None:
    r"""Predict a step or whole runs of a PLAN file, or of a SCENARIO whose layout is pinned.

    \b
    headway simulate plan.json --step --trace step.json.gz
    headway simulate plan.json --step --slow-gpu 17='80 %' --dead leaf0.0.3-spine0.0.1
    headway simulate plan.json --runs 1000 --seed 1 --json
    headway simulate plan.json --runs 1000 --part 1/4 -o part-1.jsonl
    headway merge part-*.jsonl
    """
    if runs is not None and (step_only or trace is not None):
        raise click.UsageError("--runs plays whole runs; leave it out for --step and --trace")
    if runs is None and (part is not None or output is not None):
        raise click.UsageError("--part and -o are for whole runs; say how many with --runs")
    if part is not None and output is None:
        raise click.UsageError("--part writes its runs to a file; name it with -o")
    faults, slow_gpus, others = read_faults(dead, slow_link), read_slow_gpus(slow_gpu), read_others(beside)
    varied = 0.0 if jitter is None else read_share(jitter, "--jitter")
    if runs is not None and (faults or slow_gpus or others or varied or drain):
        raise click.UsageError("--dead, --slow-link, --slow-gpu, --jitter, --beside and --drain are for one step")
    subject = read_subject(name, pins=pins, overrides=overrides)
    tell_inputs(subject.inputs)
    scenario, layout = subject.scenario, subject.layout
    if runs is None:
        wish = Disturbances(
            slow_gpus=slow_gpus,
            faults=faults,
            jitter=varied,
            others=others,
            drain=checkpoint_drain(scenario.cluster, scenario.job, layout) if drain else None,
            seed=seed,
        )
        _answer_step(subject, wish, trace, as_json)
        return
    played = explained_step(scenario.cluster, scenario.job, layout)
    run = _whole_run(subject, played)
    say(f"seed: {seed}")
    told = known(run) | {"layout": _layout_json(subject), "inputs": inputs_json(subject.inputs)}
    first, count = (0, runs) if part is None else part_range(part, runs)
    with _progress_bar(count) as tell:
        outcomes = play(run, count, seed, jobs or available_cores(), first_run=first, backend=backend, tell=tell)
    if part is not None and output is not None:
        write_output(output, part_text(outcomes, seed, first, told))
        return
    content = ensemble_json(outcomes, seed, told)
    _warn(content)
    if output is not None:
        drawn = {"timeline": timeline(run, seed), "intervals": interval_curve(run, runs // 4, seed, jobs or 1)}
        write_output(output, to_json(content | drawn) + "\n")
    if as_json and output != "-":
        print_json(content)
    elif output != "-":
        _show_runs(content)


def _answer_step(subject: Subject, wish: Disturbances, trace: str | None, as_json: bool) -> None:
    scenario, layout = subject.scenario, subject.layout
    found = shared_step(scenario.cluster, scenario.job, layout, wish, gpus=subject.gpus())
    memory = memory_use(scenario.cluster, scenario.job, layout)
    if memory.headroom_bytes < 0:
        say(
            f"warning: the layout does not fit: the fullest stage needs {_gib(memory.peak_bytes)}, "
            f"a GPU holds {_gib(memory.capacity_bytes)}"
        )
    for warning in step_warnings(scenario.cluster, layout, draining=wish.drain is not None):
        say(f"warning: {warning}")
    if trace is not None:
        write_output(trace, trace_bytes(found.timeline, scenario.name, compress=not trace.endswith(".json")))
    if trace == "-":
        return
    if as_json:
        print_json(_step_json(subject, found, memory))
    else:
        _show_step(subject, found, memory)


@command()
@click.argument("parts", metavar="PART...", nargs=-1, required=True, type=click.Path(path_type=Path))
@json_option
def merge(parts: tuple[Path, ...], as_json: bool) -> None:
    """Put the PARTs of an ensemble together: files of 'headway simulate --part'."""
    outcomes, seed, told = merge_parts(parts)
    content = ensemble_json(outcomes, seed, told)
    _warn(content)
    if as_json:
        print_json(content)
    else:
        _show_runs(content)


def _whole_run(subject: Subject, played: StepPlay) -> WholeRun:
    """Checkpoint as the plan says, or as is best."""
    planned = subject.checkpoint or {}
    steps, mode = planned.get("interval_steps"), planned.get("mode")
    return whole_run(
        subject.scenario,
        subject.layout,
        played.timeline.step_seconds,
        step=played.predicted,
        mode=mode if mode in get_args(CheckpointMode) else None,
        interval_steps=steps if isinstance(steps, int) and steps >= 1 else None,
        planned=planned,
    )


@contextmanager
def _progress_bar(runs: int) -> Iterator[Callable[[int], None] | None]:
    """A bar on stderr, on a terminal only."""
    if not sys.stderr.isatty():
        yield None
        return
    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("runs", total=runs)
        yield lambda done: bar.advance(task, done)


def _warn(content: dict[str, Any]) -> None:
    if content["customary_length"]:
        say("the job names no target_tokens: a run is 30 days of useful work")
    if not content["failures"]:
        say("the scenario names no failure rates: only checkpoint stalls are lost")
    runs, given_up = content["runs"], content["runs"] - content["completed_runs"]
    if given_up:
        say(f"warning: {given_up} of {runs} runs were given up: they made hardly any progress between failures")


def _layout_json(subject: Subject) -> dict[str, Any]:
    layout = subject.layout
    return layout.model_dump(mode="json") | {"num_microbatches": layout.num_microbatches(subject.scenario.job)}


def _step_json(subject: Subject, played: SharedStep, memory: MemoryUse) -> dict[str, Any]:
    step = played.timeline.step_seconds
    return {
        "step_seconds": step,
        "mfu": played.mfu,
        "breakdown_seconds": played.breakdown_seconds,
        "memory_bytes": memory.as_json(),
        "closed_form": {
            "step_seconds": played.predicted.total_seconds,
            "breakdown_seconds": played.predicted.breakdown_seconds,
        },
        "tokens_per_second_per_gpu": subject.scenario.job.tokens_per_step / step / subject.layout.world_size,
        "layout": _layout_json(subject),
        "inputs": inputs_json(subject.inputs),
        **network_json(played),
    }


def _show_step(subject: Subject, played: SharedStep, memory: MemoryUse) -> None:
    step, closed = played.timeline.step_seconds, played.predicted.total_seconds
    out = console()
    out.print(f"[bold]{escape(subject.scenario.name)}[/bold]: {escape(subject.layout.label())}")
    mfu = "" if played.mfu is None else f", MFU {100 * played.mfu:.1f} %"
    tokens = subject.scenario.job.tokens_per_step / step
    out.print(f"step {format_quantity(step, 'seconds', 4)}{mfu}, {tokens:,.0f} tokens/s")
    out.print(f"closed form {format_quantity(closed, 'seconds', 4)} ({100 * (step / closed - 1):+.2f} %)\n")
    table = Table(box=None, pad_edge=False)
    table.add_column("where the step goes")
    for heading in ("seconds", "share", "closed form"):
        table.add_column(heading, justify="right")
    for part, seconds in played.breakdown_seconds.items():
        expected = played.predicted.breakdown_seconds.get(part)
        if abs(seconds) < 1e-9 and not expected:
            continue
        told = "-" if expected is None else f"{expected:.4f}"
        table.add_row(part.replace("_", " "), f"{seconds:.4f}", f"{100 * seconds / step:.1f} %", told)
    out.print(table)
    out.print()
    for line in network_lines(played):
        out.print(escape(line), soft_wrap=True, highlight=False)
    out.print(f"\nmemory: {_gib(memory.peak_bytes)} of {_gib(memory.capacity_bytes)} on the fullest stage")


def _show_runs(content: dict[str, Any]) -> None:
    out, policy = console(), content["checkpoint"]
    out.print(f"[bold]{escape(content['scenario'])}[/bold]: {escape(content['layout_label'])}")
    out.print(
        f"{content['runs']} runs of {content['num_steps']:,} steps; {policy['mode']} save every "
        f"{policy['interval_steps']:,} steps ({format_quantity(policy['interval_seconds'], 'seconds')})"
    )
    out.print(f"{escape(policy['reason'])}\n")
    table = Table(box=None, pad_edge=False)
    for heading in ("", "mean", "p10", "p50", "p90", "95 % of mean"):
        table.add_column(heading, justify="left" if not heading else "right")
    for label, key, scale, unit in (
        ("goodput", "goodput", 100.0, " %"),
        ("wall time", "wall_seconds", 1 / 86400, " d"),
        ("energy", "energy_kwh", 1e-3, " MWh"),
        ("cost", "cost_usd", 1e-6, " M USD"),
    ):
        values = content.get(key)
        if values is None:
            continue
        cells = [f"{scale * values[name]:.2f}{unit}" for name in ("mean", "p10", "p50", "p90")]
        interval = values["ci95"]
        cells.append("-" if interval is None else f"{scale * interval[0]:.2f} to {scale * interval[1]:.2f}{unit}")
        table.add_row(label, *cells)
    out.print(table)
    out.print(f"quantiles include {content['quantiles_include']}")
    if content.get("energy_kwh"):
        out.print(_energy_line(content), soft_wrap=True)
    analytic = content["analytic"]
    out.print(f"\nclosed form: goodput {100 * analytic['goodput']:.2f} % ({analytic['difference_points']:+.2f} points)")
    if abs(analytic["difference_points"]) > 1:
        out.print(f"it leaves out: {escape('; '.join(analytic['leaves_out']) or 'nothing known')}")
    lost = Table(box=None, pad_edge=False)
    lost.add_column("\nlost to")
    lost.add_column("\nof the wall time", justify="right")
    for cause, seconds in content["lost_seconds"].items():
        if seconds > 1e-9 * content["wall_seconds"]["mean"]:
            lost.add_row(cause, f"{100 * seconds / content['wall_seconds']['mean']:.2f} %")
    out.print(lost)
    if content["failures"]:
        failures = ", ".join(f"{name} {count:.1f}" for name, count in content["failures"].items())
        out.print(f"\nfailures per run: {escape(failures)}")
    if content["not_modelled"]:
        out.print(f"not modelled: {'; '.join(content['not_modelled'])}")


def _energy_line(content: dict[str, Any]) -> str:
    power, (low, high) = content["power"], (1e-3 * end for end in content["energy_kwh"]["band"])
    line = f"energy: {low:,.0f} to {high:,.0f} MWh for what is known of the draw of a node"
    if power["assumed"]:
        line += f"; assumed, not measured: {', '.join(power['assumed'])}"
    return line + " (sources: --json)"


def _gib(size_bytes: float) -> str:
    return f"{size_bytes / 2**30:.1f} GiB"
