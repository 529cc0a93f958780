"""A script that is started by hand on every node, or on the one there is."""

from __future__ import annotations

from runtime.emit.launch import Launch
from runtime.emit.scripts import render
from runtime.emit.slurm import HOSTS


def torchrun_files(launch: Launch, *, bin_directory: str) -> dict[str, str]:
    """Write the files of a job without a scheduler."""
    script = render("job.sh.j2", launch=launch, bin_directory=bin_directory)
    hosts = {HOSTS: "\n".join(launch.hosts) + "\n"} if launch.hosts else {}
    return {"job.sh": script, **hosts, **launch.program.files}
