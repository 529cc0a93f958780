"""Submit a plan to Slurm, follow its log, and measure it when it has ended."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

from planner.plan import Plan
from runtime.emit.emitting import Wishes, emit_plan, write_files
from runtime.follow import Follower
from runtime.journal import Event, read_journals
from runtime.measurement import measurement_from
from runtime.request import RESULT_FILE, TrainRequest, read_request
from runtime.worker import PROGRESS
from simulator.outcome import Measurement
from topologies.errors import InputError, RunFailed

POLL_SECONDS = 1.0
TAIL_LINES = 30
GONE = ("COMPLETED", "FAILED", "TIMEOUT", "CANCELLED", "NODE_FAIL", "OUT_OF_MEMORY", "BOOT_FAIL", "DEADLINE", "")


def run_on_slurm(
    plan: Plan,
    folder: Path,
    wishes: Wishes,
    *,
    timeout_seconds: float,
    on_progress: Callable[[str], None] | None = None,
    on_event: Callable[[Event], None] | None = None,
) -> Measurement:
    """Submit a plan and wait for its end, through requeues; cancel the job if this is interrupted.

    Args:
        plan: what to run.
        folder: for the job's files, on a file system that the nodes share.
        wishes: what the user chooses beside the plan.
        timeout_seconds: after this the job is cancelled, the wait in the queue included.
        on_progress: receives lines of progress.
        on_event: receives each event of the journals as it comes.

    Raises:
        InputError: there is no sbatch here, or it refuses the job.
        RunFailed: the job ended badly, with the last lines of its log.
    """
    if shutil.which("sbatch") is None:
        raise InputError("there is no sbatch here", hint="submit from a login node of the cluster", file="--launcher")
    tell = on_progress or (lambda _: None)
    _, files = emit_plan(plan, "slurm", folder, wishes)
    script, *_ = write_files(files, folder)
    log = folder.resolve() / "job.log"
    for stale in (log, folder / RESULT_FILE, *folder.glob("rank*")):
        stale.unlink(missing_ok=True)
    job = submit(script, log)
    tell(f"submitted job {job}; its log is {log}")
    state = "CANCELLED"
    try:
        state = _follow(job, log, timeout_seconds, tell, Follower(folder, on_event or (lambda _: None)))
    finally:
        if state == "CANCELLED":
            subprocess.run(["scancel", job], check=False, capture_output=True, timeout=30)
    result = folder / RESULT_FILE
    if state not in ("COMPLETED", "") or not result.is_file():
        said = "\n".join(_lines(log)[-TAIL_LINES:])
        raise RunFailed(f"job {job} ended as {state or 'unknown'}; the last lines of its log:\n{said}")
    request = read_request(folder)
    assert isinstance(request, TrainRequest)
    return measurement_from(plan, request, json.loads(result.read_text(encoding="utf-8")), read_journals(folder))


def submit(script: Path, log: Path) -> str:
    """Hand a batch file to sbatch and return the job's number.

    Raises:
        InputError: sbatch refuses it, in its words.
    """
    words = ["sbatch", "--parsable", f"--output={log}", str(script)]
    done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=60)
    if done.returncode:
        told = done.stderr.strip().removeprefix("sbatch: error: ") or "no reason given"
        raise InputError(f"sbatch refuses the job: {told}", hint="set SBATCH_PARTITION or SBATCH_ACCOUNT", file=script)
    return done.stdout.strip().split(";")[0]


def _follow(job: str, log: Path, timeout_seconds: float, tell: Callable[[str], None], journals: Follower) -> str:
    """Hand on new lines of progress until the job is gone; return its state ('' where Slurm has forgotten it)."""
    deadline = time.monotonic() + timeout_seconds
    told, state = 0, "PENDING"
    while state not in GONE:
        time.sleep(POLL_SECONDS)
        state = job_state(job)
        lines = _lines(log)
        for line in lines[told:]:
            if line.startswith(PROGRESS):
                tell(line.removeprefix(PROGRESS))
        told = len(lines)
        journals.look()
        if time.monotonic() > deadline:
            tell(f"the job did not end within {timeout_seconds:g} s and is cancelled; give more time with --timeout")
            return "CANCELLED"
    return state


def job_state(job: str) -> str:
    """Slurm's word for the state of a job; '' where it does not know the job any more."""
    done = subprocess.run(
        ["scontrol", "--oneliner", "show", "job", job], capture_output=True, text=True, check=False, timeout=60
    )
    found = re.search(r"\bJobState=(\w+)", done.stdout)
    return found[1] if found else ""


def _lines(log: Path) -> list[str]:
    with contextlib.suppress(OSError):
        return log.read_text(encoding="utf-8", errors="replace").splitlines()
    return []
