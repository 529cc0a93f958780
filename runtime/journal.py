"""What happened in a job, event by event, as lines of JSON that survive whoever wrote them."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

Event = dict[str, Any]
"""At least ``event`` (what), ``time`` (seconds since the epoch) and ``attempt``."""


class Journal:
    """Appends events to a file; one writer a file."""

    def __init__(self, file: Path, attempt: int) -> None:
        self.file, self.attempt = file, attempt

    def note(self, event: str, **details: Any) -> Event:
        """Write an event; ``time`` is now unless it is given."""
        entry = {"event": event, "time": time.time(), "attempt": self.attempt} | details
        with self.file.open("a", encoding="utf-8") as stream:
            stream.write(json.dumps(entry) + "\n")
        return entry


def read_journals(directory: Path) -> list[Event]:
    """Read all events of a job in the order in which they happened; a line that was cut off is left out."""
    events: list[Event] = []
    for file in sorted(directory.glob("*.journal")):
        for line in file.read_text(encoding="utf-8").splitlines():
            try:
                events.append(json.loads(line))
            except ValueError:
                continue
    return sorted(events, key=lambda event: float(event["time"]))
