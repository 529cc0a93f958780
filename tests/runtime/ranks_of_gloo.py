"""Run a function in a few gloo ranks on this machine, for tests.

Ranks are forked from a server that has imported torch once: a new world starts in a moment.
"""

from __future__ import annotations

import multiprocessing
import queue
import socket
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from typing import Any

Outcome = dict[str, Any]
CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["runtime.train", "runtime.schedules"])


def in_ranks(
    world_size: int, work: Callable[[Any], Any], cases: dict[str, Any], timeout_seconds: float = 150
) -> Outcome:
    """Call ``work(case)`` for every case in turn in all of ``world_size`` ranks; return what rank 0 got.

    Raises:
        AssertionError: a rank failed (with its traceback) or the time was up.
    """
    results: Any = CONTEXT.Queue()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    ranks = [
        CONTEXT.Process(target=_rank, args=(rank, world_size, port, work, cases, results), daemon=True)
        for rank in range(world_size)
    ]
    for process in ranks:
        process.start()
    found: Outcome = {}
    deadline = time.monotonic() + timeout_seconds
    try:
        while len(found) < len(cases):
            assert time.monotonic() < deadline, f"no answer in time; done: {list(found)}"
            try:
                name, value, failure = results.get(timeout=0.5)
            except queue.Empty:
                assert any(process.is_alive() for process in ranks), "all ranks ended without an answer"
                continue
            assert failure is None, f"case {name}:\n{failure}"
            found[name] = value
    finally:
        for process in ranks:
            process.join(0 if len(found) < len(cases) else 5)
            if process.is_alive():
                process.kill()
                process.join()
    return found


def _rank(
    rank: int, world_size: int, port: int, work: Callable[[Any], Any], cases: dict[str, Any], results: Any
) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"tcp://127.0.0.1:{port}",
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=60),
    )
    for name, case in cases.items():
        try:
            value = work(case)
        except Exception:
            results.put((name, None, traceback.format_exc()))
            time.sleep(5)  # let the queue be flushed before the group is torn down
            return
        if rank == 0:
            results.put((name, value, None))
        dist.barrier()
    dist.destroy_process_group()
