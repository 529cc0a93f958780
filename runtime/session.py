"""What surrounds the training of a rank: signs of life, the journal, and the wish to stop."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from runtime.heartbeat import Heart
from runtime.journal import Journal

STOP_FILE = "stop"
"""The launcher leaves it in the directory of the job to ask for a save and an end."""
TERMINATED = 128 + signal.SIGTERM
GRACE_SECONDS = 25.0
"""After SIGTERM a rank that cannot finish its step ends by itself: torchrun would kill it after 30 s."""


@dataclass(slots=True, kw_only=True)
class Session:
    """Of one rank in one attempt."""

    directory: Path
    rank: int
    attempt: int
    tell: Callable[[str], None]
    """To the person who waits; only rank 0 is heard."""
    heart: Heart = field(init=False)
    journal: Journal | None = field(init=False)
    """Of rank 0."""
    signalled: bool = False
    """SIGTERM came."""

    def __post_init__(self) -> None:
        self.heart = Heart(self.directory, self.rank, self.attempt)
        self.journal = None
        if self.rank == 0:
            self.journal = Journal(self.directory / f"rank0.{self.attempt}.journal", self.attempt)

    def note(self, event: str, **details: object) -> None:
        """Write an event into the journal."""
        if self.journal is not None:
            self.journal.note(event, **details)

    def wants_to_stop(self) -> bool:
        """Tell whether this rank was asked to save and end."""
        return self.signalled or (self.directory / STOP_FILE).exists()

    @contextlib.contextmanager
    def saving_on_sigterm(self) -> Iterator[None]:
        """Take SIGTERM for the wish to save and end, for a while."""

        def leave_soon(*_: object) -> None:
            self.signalled = True
            threading.Thread(target=_end_later, daemon=True).start()

        before = signal.signal(signal.SIGTERM, leave_soon)
        try:
            yield
        finally:
            signal.signal(signal.SIGTERM, before)


def _end_later() -> None:
    time.sleep(GRACE_SECONDS)
    sys.stderr.write("no end of the step in sight after SIGTERM\n")
    os._exit(TERMINATED)
