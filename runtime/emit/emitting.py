"""From a plan to files: choose the program of a rank, then the launcher around it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

from planner.plan import Plan, refuse_unequal
from runtime.emit.bridge import bridge_program
from runtime.emit.deepspeed import deepspeed_program
from runtime.emit.headway import headway_program
from runtime.emit.kubernetes import Pods, kubernetes_files, pinned
from runtime.emit.launch import MAX_RESTARTS, Launch, Program, describe
from runtime.emit.megatron import megatron_program
from runtime.emit.shell import environment
from runtime.emit.slurm import slurm_files
from runtime.emit.torchrun import torchrun_files
from runtime.emit.torchtitan import torchtitan_program
from topologies.document import write_atomically
from topologies.errors import InputError

TRAINERS = ("headway", "megatron", "bridge", "torchtitan", "deepspeed")
CLUSTERS = ("volcano", "jobset", "trainjob")
LAUNCHERS = ("slurm", *CLUSTERS, "torchrun")
TARGETS = (*LAUNCHERS, *TRAINERS[1:])
"""What can be emitted: a launcher around a trainer, or the settings of a trainer with a torchrun script."""
DEFAULT_STEPS = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class Wishes:
    """What the user chooses beside the plan."""

    trainer: str = "headway"
    steps: int | None = None
    """None: as many as the plan's job needs."""
    seed: int = 0
    entry: str | None = None
    """Program that the trainer starts from; None: the usual one."""
    directory: str | None = None
    """Where the files will lie on the nodes; None: where they are written."""
    bin_directory: str = field(default_factory=lambda: str(Path(sys.executable).parent))
    """Folder of torchrun on the nodes."""
    variables: tuple[str, ...] = ()
    options: tuple[str, ...] = ()
    """Further options for sbatch."""
    segment: bool | None = None
    image: str = ""
    """Of the containers."""
    claim: str | None = None
    """Volume claim with the files."""
    restarts: int = MAX_RESTARTS


def emit_plan(plan: Plan, target: str, output: Path, wishes: Wishes) -> tuple[Launch, dict[str, str]]:
    """Make the files of a target, without writing them.

    Args:
        plan: what to run.
        target: one of TARGETS.
        output: folder that they will be written to.
        wishes: what the user chooses.

    Returns:
        The job as its launcher sees it, and the content of each file by name, the script first.

    Raises:
        InputError: the trainer cannot express the plan, or a wish has the wrong form.
    """
    trainer = wishes.trainer if target in LAUNCHERS else target
    refuse_unequal(plan, trainer)
    launch = describe(
        plan,
        program_of(plan, trainer, wishes),
        directory=wishes.directory or str(output.resolve()),
        variables=environment(wishes.variables),
        restarts=wishes.restarts,
    )
    if target == "slurm":
        files = slurm_files(launch, options=wishes.options, bin_directory=wishes.bin_directory, segment=wishes.segment)
    elif wishes.options:
        raise InputError("is for slurm only", hint="leave it out", file="--sbatch")
    elif target in CLUSTERS:
        pods = Pods(image=wishes.image, claim=wishes.claim, vendor=plan.scenario.cluster.gpu.vendor)
        if launch.hosts and not pinned(launch, target):
            order = (
                "the scheduler places the pods: neither the plan's order of nodes nor what it leaves out is told to it"
            )
            launch = replace(launch, notes=(*launch.notes, order))
        files = kubernetes_files(launch, target, pods)
    else:
        files = torchrun_files(launch, bin_directory=wishes.bin_directory)
    return launch, files | {"plan.json": plan.as_text()}


def program_of(plan: Plan, trainer: str, wishes: Wishes) -> Program:
    """Describe what each rank runs under one trainer.

    Raises:
        InputError: the trainer cannot run the plan.
    """
    if trainer == "headway":
        return headway_program(plan, steps=wishes.steps or DEFAULT_STEPS, seed=wishes.seed)
    if trainer == "torchtitan":
        return torchtitan_program(plan, steps=wishes.steps)
    programs: dict[str, Callable[..., Program]] = {
        "megatron": megatron_program,
        "bridge": bridge_program,
        "deepspeed": deepspeed_program,
    }
    entry = {} if wishes.entry is None else {"entry": wishes.entry}
    return programs[trainer](plan, steps=wishes.steps, **entry)


def write_files(files: dict[str, str], folder: Path) -> list[Path]:
    """Write all files into a folder, each whole or not at all."""
    paths = []
    for name, content in files.items():
        write_atomically(folder / name, content)
        paths.append(folder / name)
    return paths
