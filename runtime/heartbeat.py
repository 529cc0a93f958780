"""Signs of life of a rank: a thread writes the time and how far the rank has come into a file, a few times a second.

A stopped process writes nothing; a rank that waits for others goes on writing. So a supervisor can tell the two apart.
"""

from __future__ import annotations

import json
import os
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from runtime.environment import node_name
from topologies.document import write_atomically
from topologies.errors import InputError

INTERVAL_SECONDS = 0.25


@dataclass(frozen=True, slots=True)
class Beat:
    """One sign of life."""

    rank: int
    attempt: int
    pid: int
    host: str
    time: float
    """Seconds since the epoch."""
    step: int
    """The step it is in."""
    marks: int
    """Stretches of work that it finished since it started; ranks of one job finish the same ones."""


class Heart:
    """Beats in a thread until the process ends."""

    def __init__(self, directory: Path, rank: int, attempt: int) -> None:
        self.file = beat_file(directory, rank, attempt)
        self.rank, self.attempt = rank, attempt
        self.step, self.marks = -1, 0
        self.host = node_name()

    def start(self) -> None:
        """Begin to beat."""
        self._beat()
        threading.Thread(target=self._go_on, name="heartbeat", daemon=True).start()

    def mark(self, step: int) -> None:
        """Note that a stretch of work of a step is finished."""
        self.step = step
        self.marks += 1

    def _go_on(self) -> None:
        while True:
            time.sleep(INTERVAL_SECONDS)
            self._beat()

    def _beat(self) -> None:
        beat = Beat(self.rank, self.attempt, os.getpid(), self.host, time.time(), self.step, self.marks)
        try:
            write_atomically(self.file, json.dumps(asdict(beat)))
        except InputError:  # the directory is gone or full: the supervisor will see a silent rank
            return


def beat_file(directory: Path, rank: int, attempt: int) -> Path:
    """Where a rank leaves its signs of life."""
    return directory / f"rank{rank}.{attempt}.beat"


def read_beats(directory: Path, attempt: int) -> list[Beat]:
    """Read the newest sign of life of each rank of an attempt."""
    beats = []
    for file in directory.glob(f"rank*.{attempt}.beat"):
        try:
            beats.append(Beat(**json.loads(file.read_text(encoding="utf-8"))))
        except (OSError, ValueError):  # just being replaced
            continue
    return sorted(beats, key=lambda beat: beat.rank)
