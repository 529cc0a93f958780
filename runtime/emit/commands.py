"""``headway emit``: a plan as files that others run."""

from __future__ import annotations

from pathlib import Path

import click

from planner.plan import read_plan
from runtime.emit.emitting import TARGETS, TRAINERS, Wishes, emit_plan, write_files
from topologies.console import command, json_option, print_json, say


@command()
@click.argument("target", type=click.Choice(TARGETS))
@click.argument("plan_file", metavar="PLAN")
@click.option("-o", "--output", required=True, help="Folder of the files ('-': print the first of them).")
@click.option(
    "--trainer", type=click.Choice(TRAINERS), default="headway", show_default=True, help="Of slurm, torchrun."
)
@click.option("--steps", type=click.IntRange(min=1), help="Optimizer steps; default: as the job needs (headway: 12).")
@click.option("--seed", type=int, default=0, show_default=True, help="Of weights and tokens (headway).")
@click.option("--entry", metavar="PATH", help="Program that the trainer starts from, such as pretrain_gpt.py.")
@click.option("--directory", metavar="PATH", help="Where the files will lie on the nodes; default: the output folder.")
@click.option("--bin", "bin_directory", metavar="PATH", help="Folder of torchrun on the nodes; default: this one's.")
@click.option("--env", "variables", multiple=True, metavar="NAME=VALUE", help="Set a variable for the ranks.")
@click.option(
    "--sbatch", "options", multiple=True, metavar="NAME=VALUE", help="Another sbatch option: partition=batch."
)
@click.option("--image", default="", help="Of the containers (volcano, jobset, trainjob).")
@click.option("--claim", metavar="NAME", help="Volume claim that holds the files (volcano, jobset).")
@click.option("--segment/--no-segment", default=None, help="Use Slurm's --segment; default: if sbatch here knows it.")
@click.option("--restarts", type=click.IntRange(min=0), default=3, show_default=True, help="Most restarts of the job.")
@json_option
def emit(
    target: str,
    plan_file: str,
    output: str,
    trainer: str,
    steps: int | None,
    seed: int,
    entry: str | None,
    directory: str | None,
    bin_directory: str | None,
    variables: tuple[str, ...],
    options: tuple[str, ...],
    image: str,
    claim: str | None,
    segment: bool | None,
    restarts: int,
    as_json: bool,
) -> None:
    r"""Write PLAN as a job for a scheduler, or as the settings of a trainer.

    \b
    headway emit slurm plan.json -o job && sbatch job/job.sbatch
    headway emit slurm plan.json -o job --trainer megatron --sbatch partition=batch --sbatch time=2-00:00:00
    headway emit torchtitan plan.json -o job
    """
    wishes = Wishes(
        trainer=trainer,
        steps=steps,
        seed=seed,
        entry=entry,
        directory=directory,
        variables=variables,
        options=options,
        image=image,
        claim=claim,
        segment=segment,
        restarts=restarts,
        **({} if bin_directory is None else {"bin_directory": bin_directory}),
    )
    folder = Path("." if output == "-" else output)
    launch, files = emit_plan(read_plan(plan_file), target, folder, wishes)
    for note in launch.notes:
        say(f"note: {note}")
    if output == "-":
        click.echo(next(iter(files.values())), nl=False)
        return
    paths = write_files(files, folder)
    if as_json:
        print_json(
            {
                "target": target,
                "trainer": launch.program.trainer,
                "files": [str(path) for path in paths],
                "nodes": launch.nodes,
                "ranks_per_node": launch.ranks_per_node,
                "command": list(launch.words()),
                "notes": list(launch.notes),
            }
        )
        return
    for path in paths:
        say(f"wrote {path}")
    say(f"next: sbatch {paths[0]}" if target == "slurm" else f"next: read the head of {paths[0]}")
