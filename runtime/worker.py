"""Entry point of one rank, started by torchrun as ``headway-worker DIRECTORY``.

It reads the request in the directory, does its part, and leaves there: its process id at the start, signs of life, the
traceback if it fails, and on rank 0 a journal and the result. Progress goes to stdout, in lines that begin with
PROGRESS.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import threading
import time
import traceback
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import Any

from runtime.node_watch import watch_node
from runtime.request import RESULT_FILE, CalibrateRequest, HealthRequest, Request, read_request
from runtime.session import TERMINATED, Session
from runtime.watch import done_file
from topologies.document import to_json, write_atomically
from topologies.errors import HeadwayError

PROGRESS = "headway: "
"""Start of a line that is meant for the person who waits."""


RESTARTS = ("TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT")
"""How often torchrun has started the ranks again, and how often Slurm has started the whole job again."""


def main() -> None:
    """Run one rank; exit 1 with the traceback left in the directory if it fails."""
    if sys.argv[1:2] == ["--watch"] and len(sys.argv) == 3:
        watch_node(Path(sys.argv[2]), say)
        return
    if len(sys.argv) != 2 or not {"RANK", "WORLD_SIZE", "LOCAL_RANK"} <= os.environ.keys():
        sys.stderr.write("headway-worker is started by 'headway run'; it is not meant to be called by hand\n")
        sys.exit(2)
    rank = int(os.environ["RANK"])
    attempt = sum(int(os.environ.get(name, "0")) for name in RESTARTS)
    session = Session(directory=Path(sys.argv[1]), rank=rank, attempt=attempt, tell=tell)
    end_with_parent()
    write_atomically(session.directory / f"rank{rank}.{attempt}.pid", str(os.getpid()))
    try:
        request = read_request(session.directory)
        if request.launcher_pid:
            threading.Thread(target=_watch, args=(request.launcher_pid,), daemon=True).start()
        result = work(request, session)
        if rank == 0:
            write_atomically(session.directory / RESULT_FILE, to_json(result))
        done_file(session.directory, rank, attempt).touch()
    except Exception as error:
        failure = {
            "rank": rank,
            "attempt": attempt,
            "time": time.time(),
            "step": session.heart.step,
            "cause": getattr(error, "cause", "exception"),
            "error": repr(error),
            "message": str(error),
            "final": isinstance(error, HeadwayError),
            "traceback": traceback.format_exc(),
        }
        write_atomically(session.directory / f"rank{rank}.{attempt}.failure", json.dumps(failure))
        os._exit(1)  # not sys.exit: it would wait for a save in the background, which waits for the others
    sys.stdout.flush()
    os._exit(TERMINATED if session.signalled else 0)  # not sys.exit: threads of torch may abort while they are joined


def work(request: Request, session: Session) -> dict[str, Any]:
    """Join the process group, do what is asked, leave the group."""
    import torch
    import torch.distributed as dist

    session.heart.start()
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.set_num_threads(1)  # more threads than free cores make every OpenMP barrier wait for the scheduler
    on_gpu = not isinstance(request, CalibrateRequest) and request.device == "cuda"
    device = torch.device("cuda", local_rank) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    backend = "cpu:gloo,cuda:nccl" if on_gpu else "gloo"
    dist.init_process_group(backend, timeout=timedelta(seconds=request.timeout_seconds))
    try:
        if isinstance(request, CalibrateRequest):
            from runtime.bench import measure

            return measure(request, tell)
        if isinstance(request, HealthRequest):
            from runtime.health.probe import examine

            return examine(request, device, tell)
        from runtime.train import train

        return asdict(train(request, device, session))
    finally:
        if sys.exc_info()[0] is None:
            dist.barrier()
            dist.destroy_process_group()


def tell(text: str) -> None:
    """Say something to the person who waits; only rank 0 speaks."""
    if os.environ["RANK"] == "0":
        say(text)


def say(text: str) -> None:
    """Write a line of progress."""
    sys.stdout.write(f"{PROGRESS}{text}\n")
    sys.stdout.flush()


def end_with_parent() -> None:
    """Ask the kernel to kill this process when the torchrun agent dies (Linux)."""
    if sys.platform == "linux":
        set_parent_death_signal = 1
        ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGKILL)


def _watch(launcher_pid: int) -> None:
    while True:
        try:
            os.kill(launcher_pid, 0)
        except ProcessLookupError:
            os._exit(1)
        except PermissionError:
            return
        time.sleep(0.5)


if __name__ == "__main__":
    main()
