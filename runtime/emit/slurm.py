"""An sbatch file: one torchrun per node, a gang by Slurm, saved before its time is up, restarted a few times."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterable

from runtime.emit.launch import Launch
from runtime.emit.scripts import render
from runtime.emit.shell import job_name
from topologies.errors import InputError

HOSTS = "hosts.txt"
"""The plan's nodes, one a line, in the order of ranks."""
OURS = (
    "nodes",
    "ntasks",
    "ntasks-per-node",
    "job-name",
    "requeue",
    "no-requeue",
    "signal",
    "open-mode",
    "wrap",
    "array",
)
"""Options that the plan or the script decides."""


def slurm_files(
    launch: Launch, *, options: Iterable[str] = (), bin_directory: str, segment: bool | None
) -> dict[str, str]:
    """Write the files of a Slurm job.

    Args:
        launch: what to start.
        options: further sbatch options, each ``NAME=VALUE`` or ``NAME``.
        bin_directory: folder of torchrun and headway-worker on the nodes.
        segment: whether ``--segment`` may be used; None: if the sbatch of this machine knows it.

    Raises:
        InputError: an option is not one of sbatch's form, or is decided by the plan.
    """
    asked = [sbatch_option(option) for option in options]
    resources = [f"--gpus-per-node={launch.gpus_per_node}"] if launch.gpus_per_node else []
    resources += [] if launch.gpus_per_node else [f"--cpus-per-task={launch.ranks_per_node}"]
    resources += [f"--exclude={','.join(launch.left_out)}"] if launch.left_out else []
    usable = sbatch_knows("--segment") if segment is None else segment
    script = render(
        "job.sbatch.j2",
        launch=launch,
        job_name=job_name(launch.name),
        options=[option for option in resources if option.partition("=")[0] not in {a.partition("=")[0] for a in asked}]
        + asked,
        bin_directory=bin_directory,
        segment=launch.segment,
        segment_usable=usable,
    )
    hosts = {HOSTS: "\n".join(launch.hosts) + "\n"} if launch.hosts else {}
    return {"job.sbatch": script, **hosts, **launch.program.files}


def sbatch_option(option: str) -> str:
    """Check one more option for sbatch and return it with its dashes.

    >>> sbatch_option("partition=batch")
    '--partition=batch'
    """
    name, _, value = option.partition("=")
    if not re.fullmatch(r"[a-z][a-z-]*", name) or not re.fullmatch(r"[A-Za-z0-9_.,:/@%+=\[\]-]*", value):
        raise InputError(
            f"{option!r} is not an sbatch option of the form NAME=VALUE without blanks and quotes",
            hint="for example --sbatch partition=batch",
            file="--sbatch",
        )
    if name in OURS:
        raise InputError(f"{name} is decided by the plan and the script", hint="leave it out", file="--sbatch")
    return f"--{option}"


def sbatch_knows(option: str) -> bool:
    """Tell whether the sbatch of this machine has an option; False where there is no sbatch."""
    if shutil.which("sbatch") is None:
        return False
    try:
        told = subprocess.run(["sbatch", "--help"], capture_output=True, text=True, timeout=10, check=False).stdout
    except (OSError, subprocess.TimeoutExpired):
        return False
    return option in told
