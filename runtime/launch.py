"""Start a job on this machine, watch it, and leave nothing behind: no process, no half-written file."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from runtime.follow import Follower
from runtime.journal import Event, read_journals
from runtime.request import RESULT_FILE, Request, TrainRequest, write_request
from runtime.session import STOP_FILE, TERMINATED
from runtime.watch import Watch, is_alive, lost_a_peer, newest_attempt, read_failures
from runtime.worker import PROGRESS
from topologies.errors import MissingExtra, RunFailed

GRACE_SECONDS = 5.0
"""How long processes may take to end before they are killed."""
POLL_SECONDS = 0.05
SAVE_SECONDS = 120.0
"""How long a job that was asked to stop may take to finish its step and save."""


def require_torch(feature: str) -> None:
    """Refuse early where torch is not installed.

    Raises:
        MissingExtra: with the pip line.
    """
    if importlib.util.find_spec("torch") is None:
        raise MissingExtra(feature, "runtime")


def launch_command(world_size: int, directory: Path, max_restarts: int = 0) -> list[str]:
    """The torchrun command line of a job on this machine; torchrun and the worker come from this environment."""
    scripts = Path(sys.executable).parent
    return [
        str(scripts / "torchrun"),
        "--nnodes=1",
        f"--nproc-per-node={world_size}",
        "--rdzv-backend=c10d",
        "--rdzv-endpoint=127.0.0.1:0",
        "--local-addr=127.0.0.1",
        f"--max-restarts={max_restarts}",
        "--monitor-interval=0.1",
        "--no-python",
        str(scripts / "headway-worker"),
        str(directory),
    ]


def launch_environment() -> dict[str, str]:
    """What is set for the processes of a job, on top of the environment of this one."""
    settings = {
        "OMP_NUM_THREADS": "1",  # one thread a rank: OpenMP barriers on busy cores wait a scheduler quantum
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",  # a restarted gloo job must not read the addresses of dead ranks
        "PYTHONUNBUFFERED": "1",
        # glibc: keep freed activations instead of giving them back and faulting them in again (10 % of a TP step)
        "MALLOC_MMAP_THRESHOLD_": str(2**25),
        "MALLOC_TRIM_THRESHOLD_": str(2**30),
        "MALLOC_TOP_PAD_": str(2**26),
    }
    if sys.platform == "linux" and "GLOO_SOCKET_IFNAME" not in os.environ:
        settings["GLOO_SOCKET_IFNAME"] = "lo"
    return settings


def launch(
    request: Request, *, timeout_seconds: float = 1800.0, on_progress: Callable[[str], None] | None = None
) -> dict[str, Any]:
    """Run a job on this machine and return the result that rank 0 left; arguments and errors as in ``run_job``."""
    return run_job(request, timeout_seconds=timeout_seconds, on_progress=on_progress)[0]


def run_job(
    request: Request,
    *,
    timeout_seconds: float = 1800.0,
    on_progress: Callable[[str], None] | None = None,
    on_event: Callable[[Event], None] | None = None,
) -> tuple[dict[str, Any], list[Event]]:
    """Run a job on this machine, through failures if it may restart.

    Args:
        request: what the workers do; its ``launcher_pid`` is set here.
        timeout_seconds: after this the job is ended.
        on_progress: receives each line of progress.
        on_event: receives each event of the journals as it comes.

    Returns:
        The result that rank 0 left, and what happened.

    Raises:
        RunFailed: a rank failed (with its traceback), or the time was up.
        SystemExit: SIGTERM came; a job with checkpoints has saved.
        MissingExtra: torch is not installed.
    """
    require_torch("running a job")
    tell = on_progress or (lambda _: None)
    training = request if isinstance(request, TrainRequest) else None
    saves = training is not None and training.checkpoint is not None
    with tempfile.TemporaryDirectory(prefix="headway-") as folder, sigterm_stops(at_once=not saves) as stop:
        directory = Path(folder)
        write_request(request.model_copy(update={"launcher_pid": os.getpid()}), directory)
        process = subprocess.Popen(
            launch_command(request.world_size, directory, training.max_restarts if training else 0),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            env=os.environ | launch_environment(),
            start_new_session=True,
        )
        tail: deque[str] = deque(maxlen=60)
        reader = threading.Thread(target=_read, args=(process, tail, on_progress), daemon=True)
        reader.start()
        watch = None if training is None else watch_of(training, directory, tell)
        follower = Follower(directory, on_event or (lambda _: None))
        try:
            _wait(process, directory, timeout_seconds, watch, stop, follower)
        finally:
            end_job(process, directory)
            reader.join(GRACE_SECONDS)
        if stop.is_set():
            raise SystemExit(TERMINATED)
        hopeless = watch.hopeless if watch is not None else ""
        return _result(process.returncode, request.world_size, directory, tail, hopeless), read_journals(directory)


def watch_of(request: TrainRequest, directory: Path, tell: Callable[[str], None]) -> Watch:
    """The supervisor of a training."""
    return Watch(
        directory,
        heartbeat_timeout_seconds=request.heartbeat_timeout_seconds,
        progress_timeout_seconds=request.progress_timeout_seconds,
        tell=tell,
    )


def _read(process: subprocess.Popen[str], tail: deque[str], on_progress: Callable[[str], None] | None) -> None:
    assert process.stdout is not None
    with process.stdout as lines:
        for line in lines:
            if not line.startswith(PROGRESS):
                tail.append(line.rstrip())
            elif on_progress is not None:
                on_progress(line.removeprefix(PROGRESS).rstrip())


def _wait(
    process: subprocess.Popen[str],
    directory: Path,
    timeout_seconds: float,
    watch: Watch | None,
    stop: threading.Event,
    follower: Follower,
) -> None:
    deadline = time.monotonic() + timeout_seconds
    asked: float | None = None
    while process.poll() is None:
        if stop.is_set() and asked is None:
            asked = time.monotonic()
            (directory / STOP_FILE).touch()
        if asked is not None and time.monotonic() > asked + SAVE_SECONDS:
            return
        if watch is not None:
            watch.look()
            if watch.hopeless:
                return
        if time.monotonic() > deadline:
            raise RunFailed(
                f"the job did not finish within {timeout_seconds:g} s and was ended; give more time with --timeout"
            )
        follower.look()
        time.sleep(POLL_SECONDS)
    follower.look()


def end_job(process: subprocess.Popen[str], directory: Path) -> None:
    """End the torchrun agent and every worker that is still there, first with SIGTERM, then with SIGKILL."""
    if process.poll() is None:
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(GRACE_SECONDS)
    for pid in _workers(directory):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _workers(directory: Path) -> list[int]:
    """Process ids of the job's workers that still run."""
    pids = [int(file.read_text(encoding="utf-8")) for file in directory.glob("rank*.pid")]
    return [pid for pid in pids if is_alive(pid, directory)]


def _result(returncode: int, world_size: int, directory: Path, tail: deque[str], hopeless: str) -> dict[str, Any]:
    attempt = newest_attempt(directory)
    failures = read_failures(directory, attempt)
    result = directory / RESULT_FILE
    if returncode == 0 and not failures and result.exists():
        content: dict[str, Any] = json.loads(result.read_text(encoding="utf-8"))
        return content
    after = f" (attempt {attempt + 1}{'; ' + hopeless if hopeless else ''})" if attempt > 0 else ""
    started = {int(file.name.split(".")[0].removeprefix("rank")) for file in directory.glob(f"rank*.{attempt}.pid")}
    silent = sorted(started - {failure["rank"] for failure in failures})
    own = [failure for failure in failures if not lost_a_peer(failure)]
    if own:
        first = min(own, key=lambda failure: float(failure["time"]))
        if first["final"]:
            raise RunFailed(first["message"])
        raise RunFailed(f"rank {first['rank']} of {world_size} failed{after}:\n{first['traceback'].rstrip()}")
    if silent and failures:
        names = ", ".join(map(str, silent))
        raise RunFailed(f"rank {names} of {world_size} died without a traceback{after} (killed, or out of memory)")
    if failures:
        first = min(failures, key=lambda failure: float(failure["time"]))
        raise RunFailed(f"rank {first['rank']} of {world_size} failed{after}:\n{first['traceback'].rstrip()}")
    said = "\n".join(tail)
    raise RunFailed(
        f"the job ended with exit code {returncode}{after} and without a traceback; its last words:\n{said}"
    )


@contextlib.contextmanager
def sigterm_stops(*, at_once: bool) -> Iterator[threading.Event]:
    """Turn SIGTERM into an event for a while, the second one (or the first, ``at_once``) into SystemExit(143)."""
    asked = threading.Event()

    def leave(*_: object) -> None:
        if at_once or asked.is_set():
            raise SystemExit(TERMINATED)
        asked.set()

    if threading.current_thread() is not threading.main_thread():
        yield asked
        return
    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield asked
    finally:
        signal.signal(signal.SIGTERM, before)
