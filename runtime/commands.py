"""``headway run`` and ``headway data``. torch is imported by the workers only."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import click
from rich.table import Table

from planner.plan import Plan, read_plan, refuse_unequal
from runtime.build_data import build, byte_tokenizer, file_tokenizer
from runtime.dry_run import dry_run
from runtime.environment import CONTENDED_SHARE
from runtime.job import Durability, run_plan
from runtime.journal import Event
from runtime.launch import require_torch
from runtime.metrics import JobMetrics, serve
from runtime.pace import Pace, step_words
from runtime.request import DataSettings, Recipe
from simulator.outcome import Measurement, plain
from topologies.console import command, console, json_option, print_json, progress_bar, say, write_output
from topologies.document import to_json
from topologies.errors import InputError
from topologies.units import format_quantity, parse_quantity

Decorated = TypeVar("Decorated", bound=Callable[..., Any])


def durable_options(function: Decorated) -> Decorated:
    """Add the options for checkpoints, failures and data."""
    options = [
        click.option("--checkpoint-dir", "directory", metavar="DIR", help="Save there, and restart after failures."),
        click.option(
            "--checkpoint-interval",
            "interval_steps",
            type=click.IntRange(min=1),
            metavar="N",
            help="Steps between saves (the plan's).",
        ),
        click.option("--checkpoint-mode", "mode", type=click.Choice(["async", "sync"]), help="Of saves (the plan's)."),
        click.option("--keep", type=click.IntRange(min=1), metavar="K", help="Checkpoints that stay (the plan's)."),
        click.option("--archive", metavar="DIR", help="Copy each checkpoint to this durable place too."),
        click.option("--resume", is_flag=True, help="Go on from the newest checkpoint that is whole."),
        click.option(
            "--on-nan",
            type=click.Choice(["stop", "rollback"]),
            default="stop",
            show_default=True,
            help="What a loss that is not finite means: an end, or back to a checkpoint and on without that batch.",
        ),
        click.option("--max-restarts", type=click.IntRange(min=0), help="Starts after failures (3 with checkpoints)."),
        click.option(
            "--heartbeat-timeout", default="10 s", show_default=True, help="Kill a rank that is silent for so long."
        ),
        click.option(
            "--progress-timeout", default="2 min", show_default=True, help="Kill a rank that is behind for so long."
        ),
        click.option("--data", metavar="PREFIX", help="Tokens from PREFIX.bin and PREFIX.idx (synthetic ones)."),
        click.option("--data-cache", metavar="DIR", help="Copy the token files to this local folder first."),
    ]
    for option in reversed(options):
        function = option(function)
    return function


POSITIVE = click.FloatRange(min=0, min_open=True)
RECIPE_OPTIONS = (
    click.option("--learning-rate", type=POSITIVE, help="The highest of the schedule (3e-4)."),
    click.option("--lr-warmup", "warmup_steps", type=click.IntRange(min=0), help="Steps in which it rises (0)."),
    click.option("--lr-decay", "decay", type=click.Choice(["constant", "cosine", "linear"]), help="Then (constant)."),
    click.option("--clip-norm", type=POSITIVE, help="Longest gradient of the whole model (not clipped)."),
    click.option("--balance-loss", type=click.FloatRange(min=0), help="Coefficient for routed experts (0.001)."),
    click.option(
        "--compile",
        type=click.Choice(["default", "reduce-overhead"]),
        help="torch.compile of each layer; reduce-overhead replays CUDA graphs.",
    ),
    click.option("--v-order", type=click.Choice(["zbv", "dualpipev"]), help="Order of a plan's schedule zbv (zbv)."),
    click.option(
        "--split-attention",
        type=click.Choice(["own", "torch"]),
        help="Under cp: headway's own, or torch's context_parallel, on CUDA only (own).",
    ),
)


def recipe_options(function: Decorated) -> Decorated:
    """Add the options for what neither job nor layout says."""
    for option in reversed(RECIPE_OPTIONS):
        function = option(function)
    return function


def take_recipe(options: dict[str, Any]) -> Recipe:
    """Take what was said of a recipe out of the options of a command."""
    said = {name: options.pop(name) for name in Recipe.model_fields if name in options}
    return Recipe(**{name: value for name, value in said.items() if value is not None})


@command()
@click.argument("plan")
@click.option("--steps", type=click.IntRange(min=1), default=12, show_default=True, help="Optimizer steps; 2 warm up.")
@click.option("--seed", type=int, default=0, show_default=True, help="Of weights and tokens.")
@click.option("--launcher", type=click.Choice(["local", "slurm"]), default="local", show_default=True)
@click.option(
    "--job-dir",
    default="headway-job",
    show_default=True,
    metavar="DIR",
    help="Of the files of a Slurm job, on a file system that its nodes share.",
)
@click.option("--timeout", default="30 min", show_default=True, help="End the job after this time.")
@click.option("--dry-run", "only_tell", is_flag=True, help="Start nothing: say what would run, and trace one rank.")
@click.option("--trace/--no-trace", default=True, help="With --dry-run: memory and collectives of a rank, on shapes.")
@click.option("-o", "--output", help="Write the measurement (or dry run) to this file ('-' is stdout).")
@click.option("--metrics-port", type=click.IntRange(1, 65535), help="Serve Prometheus metrics of the job here.")
@click.option("--metrics-address", default="127.0.0.1", show_default=True, help="Of the machine, to be served on.")
@click.option("--profile", metavar="DIR", help="Write a torch.profiler trace of one step of each rank there.")
@durable_options
@recipe_options
@json_option
def run(
    plan: str,
    steps: int,
    seed: int,
    launcher: str,
    job_dir: str,
    timeout: str,
    only_tell: bool,
    trace: bool,
    output: str | None,
    metrics_port: int | None,
    metrics_address: str,
    profile: str | None,
    as_json: bool,
    **durable: Any,
) -> None:
    r"""Run PLAN as a real torch.distributed job and measure it.

    With --checkpoint-dir it saves as the plan says, and after a failure goes on from the newest checkpoint by itself.

    \b
    headway run plan.json --steps 200 --checkpoint-dir checkpoints -o measurement.json
    headway run plan.json --steps 400 --checkpoint-dir checkpoints --resume
    headway run plan-for-1024-gpus.json --dry-run -o dry-run.json
    """
    limit = _seconds(timeout)
    tokens = _tokens(durable.pop("data"), durable.pop("data_cache"))
    recipe = take_recipe(durable)
    durability = _durability(durable)
    chosen = read_plan(plan)
    refuse_unequal(chosen, "headway run")
    if only_tell:
        told = dry_run(chosen, steps=steps, seed=seed, trace=trace, recipe=recipe)
        if output:
            write_output(output, to_json(told) + "\n")
        if as_json and output != "-":
            print_json(told)
        elif output != "-":
            _tell_dry_run(told)
        return
    if launcher == "slurm":
        if tokens is not None or durability != Durability() or profile or recipe != Recipe():
            raise click.UsageError(
                "--launcher slurm saves in --job-dir as the plan says; leave out --profile and other options of saving"
            )
    else:
        require_torch("headway run")
        say(f"running {chosen.layout.label()} with {chosen.layout.world_size} ranks, {steps} steps, seed {seed}")
    with _watched(chosen, steps, seed, metrics_port, metrics_address) as (tell, on_event):
        if launcher == "slurm":
            measured = _run_on_slurm(chosen, job_dir, steps, seed, limit, tell, on_event)
        else:
            measured = run_plan(
                chosen,
                steps=steps,
                seed=seed,
                durability=durability,
                data=tokens,
                recipe=recipe,
                profile_directory=None if profile is None else str(Path(profile).absolute()),
                timeout_seconds=limit,
                on_progress=tell,
                on_event=on_event,
            )
    _hand_out(measured, output, as_json)


@contextmanager
def _watched(
    plan: Plan, steps: int, seed: int, port: int | None, address: str
) -> Iterator[tuple[Callable[[str], None], Callable[[Event], None]]]:
    """Show a job: a bar on a terminal, lines elsewhere, metrics where they are asked for."""
    metrics, pace, server = JobMetrics(plan, seed=seed), Pace.of(plan), None
    if port is not None:
        server = serve(metrics, port, address)
        say(f"metrics on http://{address}:{port}/metrics")
    try:
        with progress_bar(steps, "steps") as advance:

            def on_event(event: Event) -> None:
                metrics.take(event)
                if advance is not None and event["event"] == "step":
                    advance(event["step"] + 1, step_words(event, pace))

            def tell(line: str) -> None:
                if advance is None or not line.startswith("step "):
                    say(f"  {line}")

            yield tell, on_event
    finally:
        if server is not None:
            server.shutdown()


def _hand_out(measured: Measurement, output: str | None, as_json: bool) -> None:
    if output:
        write_output(output, to_json(plain(measured)) + "\n")
    if as_json and output != "-":
        print_json(plain(measured))
    elif output != "-":
        _tell_measurement(measured)


def _run_on_slurm(
    plan: Plan,
    job_dir: str,
    steps: int,
    seed: int,
    limit: float,
    tell: Callable[[str], None],
    on_event: Callable[[Event], None],
) -> Measurement:
    from runtime.emit.emitting import Wishes
    from runtime.emit.submitting import run_on_slurm

    wishes = Wishes(steps=steps, seed=seed)
    return run_on_slurm(plan, Path(job_dir), wishes, timeout_seconds=limit, on_progress=tell, on_event=on_event)


@click.group()
def data() -> None:
    """Make token files for training."""


@command("build")
@click.argument("inputs", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option("-o", "--output", "prefix", required=True, type=click.Path(path_type=Path), help="PREFIX of the files.")
@click.option("--tokenizer", type=click.Path(path_type=Path), help="A tokenizer.json (bytes are tokens).")
@click.option("--key", default="text", show_default=True, help="Of the text in .jsonl files.")
@json_option
def build_data(inputs: tuple[Path, ...], prefix: Path, tokenizer: Path | None, key: str, as_json: bool) -> None:
    r"""Tokenize text and .jsonl files into PREFIX.bin and PREFIX.idx, which Megatron reads too.

    \b
    headway data build corpus.jsonl -o tokens/corpus
    headway run plan.json --data tokens/corpus
    """
    chosen = byte_tokenizer() if tokenizer is None else file_tokenizer(tokenizer)
    told = build(list(inputs), prefix, tokenizer=chosen, key=key)
    if as_json:
        print_json(told)
    else:
        click.echo(
            f"{told['documents']} documents, {told['tokens']} tokens of a vocabulary of {told['vocab_size']} "
            f"({told['tokenizer']}) in {prefix}.bin and {prefix}.idx"
        )


data.add_command(build_data)


def _seconds(words: str, option: str = "--timeout") -> float:
    try:
        return parse_quantity(words, "seconds")
    except ValueError as error:
        raise InputError(str(error), file=option) from None


def _tokens(prefix: str | None, cache: str | None) -> DataSettings | None:
    if prefix is None and cache is not None:
        raise click.UsageError("--data-cache goes with --data")
    return None if prefix is None else DataSettings(prefix=str(Path(prefix).absolute()), cache=cache)


def _durability(given: dict[str, Any]) -> Durability:
    if given["directory"] is None:
        for option in ("interval_steps", "keep", "mode", "archive", "resume"):
            if given[option]:
                raise click.UsageError("--checkpoint-interval, --keep, --resume and the like go with --checkpoint-dir")
    silent = _seconds(given.pop("heartbeat_timeout"), "--heartbeat-timeout")
    behind = _seconds(given.pop("progress_timeout"), "--progress-timeout")
    return Durability(**given, heartbeat_timeout_seconds=silent, progress_timeout_seconds=behind)


def _tell_dry_run(told: dict[str, Any]) -> None:
    if told["fits_here"]:
        settings = " ".join(f"{name}={value}" for name, value in told["environment"].items())
        click.echo(f"{settings} \\\n  {' '.join(told['command'])}")
    else:
        say(f"not to be run here: {told['not_here']}")
    mesh = " x ".join(f"{axis} {size}" for axis, size in told["mesh"].items())
    click.echo(f"mesh {mesh}; {told['num_microbatches']} micro-batches; {told['data_parallel']}")
    if told["oversubscription"] > 1:
        click.echo(f"oversubscribed: {told['oversubscription']:g} ranks on each core")
    for one in told["ranks"]:
        place = " ".join(f"{axis}{index}" for axis, index in one["coordinates"].items())
        stages = "; ".join(_stage_words(stage) for stage in one["stages"])
        click.echo(f"rank {one['rank']} ({place}): {stages}")
    if len(told["ranks"]) < told["world_size"]:
        say(f"one rank of each pipeline rank is shown; all {told['world_size']:,} hold what it holds")
    if told["trace"] is None:
        say(f"no rank was traced: {told['trace_refused']}")
    else:
        _tell_trace(told["trace"])


def _tell_trace(traced: dict[str, Any]) -> None:
    memory = traced["traced_memory"]
    say(f"rank {traced['rank']} traced without weights; memory is fullest in: {memory['peak_moment']}")
    if traced["assumed"]:
        say(f"assumed: {traced['assumed']}")
    say("predicted: for headway's own runtime, as traced; promised by the plan: for the scenario's software stack")
    table = Table("memory of the rank", "traced", "predicted", "error", "promised by the plan")
    for row in traced["memory"]:
        error = "-" if row["error"] is None else f"{row['error']:+.1%}"
        seen, told, promised = (
            format_quantity(row[f"{side}_bytes"], "bytes") for side in ("traced", "predicted", "promised")
        )
        table.add_row(row["part"], seen, told, error, promised)
    console().print(table)
    table = Table("collective of a step", "axis", "dtype", "count", "buffer", "all")
    for one in traced["collectives"]:
        sizes = [format_quantity(size, "bytes") for size in (one["bytes"], one["bytes"] * one["count"])]
        table.add_row(one["operation"], one["axis"], one["dtype"], f"{one['count']:,}", *sizes)
    console().print(table)


def _stage_words(stage: dict[str, Any]) -> str:
    first, last = stage["layers"]
    parts = ["embedding"] if stage["embedding"] else []
    parts += [f"layers {first}-{last - 1}"] if last > first else []
    parts += ["head"] if stage["head"] else []
    again = f" ({stage['recompute_layers']} recomputed)" if stage["recompute_layers"] else ""
    return f"stage {stage['stage']}: {', '.join(parts) or 'nothing'}{again}"


def _tell_measurement(measured: Measurement) -> None:
    seconds, environment = measured.step_seconds, measured.environment
    spread = f"p10 {seconds['p10']:.3f}, p90 {seconds['p90']:.3f}"
    click.echo(f"step      {seconds['median']:.3f} s (median of the steady ones; {spread})")
    click.echo(f"MFU       {'unknown (no peak)' if measured.mfu is None else f'{100 * measured.mfu:.1f} %'}")
    click.echo(f"tokens/s  {measured.tokens_per_second_per_gpu:.0f} per rank")
    click.echo(f"memory    {format_quantity(measured.peak_memory_bytes, 'bytes')} peak of a rank")
    click.echo("phases    " + ", ".join(f"{name} {value:.3f} s" for name, value in measured.phases_seconds.items()))
    click.echo(f"losses    {measured.losses[0]:.4f} -> {measured.losses[-1]:.4f}")
    _tell_run(measured.run)
    if environment["oversubscription"] > 1:
        click.echo(f"note      oversubscribed: {environment['oversubscription']:g} ranks on each core")
    if environment["contended"]:
        share = 100 * environment["foreign_cpu_share"]
        cpu = environment["cpu_seconds_per_rank"]
        click.echo(
            f"note      contended: others took {share:.0f} % of the cores (more than {100 * CONTENDED_SHARE:.0f} %); "
            f"CPU time of a rank is {cpu:.3f} s per step"
        )


def _tell_run(run: dict[str, Any]) -> None:
    """Say how much of the time became progress, where checkpoints or failures took some of it."""
    if not run.get("saves") and not run.get("incidents"):
        return
    lost = ", ".join(f"{cause} {seconds:.2f} s" for cause, seconds in run["lost_seconds"].items() if seconds > 0.005)
    click.echo(f"goodput   {100 * run['goodput']:.1f} % of {run['wall_seconds']:.2f} s; lost: {lost or 'nothing'}")
    for one in run["incidents"]:
        if one["event"] == "failure":
            click.echo(f"failure   {one['cause']}: rank {one['rank']} on {one['host']} in step {one['step'] + 1}")
        elif one["event"] == "straggler":
            click.echo(f"slow      rank {one['rank']} on {one['host']}: {one['ratio']:.1f} times the others")
    for save in run["saves"]:
        if save["error"] is not None:
            click.echo(f"not saved step {save['step']}: {save['error']}")
