"""The supervisor of the ranks of one node of a cluster, started beside torchrun: ``headway-worker --watch DIRECTORY``.

A rank that hangs is named and killed; torchrun then fails, the scheduler ends the step on all nodes and starts the job
again. Ranks that die need no supervisor: torchrun sees them.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

from runtime.environment import node_name
from runtime.request import TrainRequest, read_request
from runtime.watch import LOOK_SECONDS, Watch


def watch_node(directory: Path, tell: Callable[[str], None]) -> None:
    """Watch the ranks of this node until the process that started this one is gone.

    Raises:
        InputError: the request of the job cannot be read.
    """
    request = read_request(directory)
    if not isinstance(request, TrainRequest):
        return
    watch = Watch(
        directory,
        heartbeat_timeout_seconds=request.heartbeat_timeout_seconds,
        progress_timeout_seconds=request.progress_timeout_seconds,
        tell=tell,
        node=node_name(),
        first_attempt=int(os.environ.get("SLURM_RESTART_COUNT", "0")),
    )
    parent = os.getppid()
    while os.getppid() == parent:
        watch.look()
        time.sleep(LOOK_SECONDS)
