"""Which processes belong to a running ``headway run``, whatever session or group they are in (Linux)."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time
from pathlib import Path


def start(*arguments: str) -> subprocess.Popen[str]:
    """Start headway as its user does."""
    return subprocess.Popen(
        [str(Path(sys.executable).parent / "headway"), *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def descendants(pid: int) -> dict[int, str]:
    """Process ids below ``pid``, with their command lines."""
    parents: dict[int, int] = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            with contextlib.suppress(OSError):
                stat = (folder / "stat").read_text()
                parents[int(folder.name)] = int(stat.rsplit(")", 1)[1].split()[1])
    found: dict[int, str] = {}
    frontier = [pid]
    while frontier:
        above = frontier.pop()
        for child, parent in parents.items():
            if parent == above and child not in found:
                found[child] = command_line(child)
                frontier.append(child)
    return found


def command_line(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    except OSError:
        return ""


def still_running(processes: dict[int, str]) -> list[str]:
    """Those of the processes that are alive (not zombies) under the same command line."""
    alive = []
    for pid, line in processes.items():
        if line and command_line(pid) == line:
            alive.append(line)
    return alive


def wait_for_workers(job: subprocess.Popen[str], count: int, seconds: float = 60) -> dict[int, str]:
    """Wait until the workers run and the first step was told; return all processes of the job."""
    assert job.stderr is not None
    deadline = time.monotonic() + seconds
    for line in job.stderr:
        assert time.monotonic() < deadline, "the job did not start"
        if "step 1/" in line:
            break
    processes = descendants(job.pid)
    workers = [line for line in processes.values() if "headway-worker" in line and "torchrun" not in line]
    assert len(workers) == count, processes
    return processes


def wait_until_gone(processes: dict[int, str], seconds: float = 10) -> list[str]:
    """Give processes some time to end; return those that do not."""
    deadline = time.monotonic() + seconds
    while (alive := still_running(processes)) and time.monotonic() < deadline:
        time.sleep(0.1)
    return alive
