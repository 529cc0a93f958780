"""The journals of a job while they are being written: each event once, as it comes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from runtime.journal import Event


class Follower:
    """Hands on new events of all journals in a folder."""

    def __init__(self, directory: Path, on_event: Callable[[Event], None]) -> None:
        self.directory, self.on_event = directory, on_event
        self._read: dict[Path, int] = {}
        """Bytes of each journal that were handed on."""

    def look(self) -> None:
        """Read what was written since the last look; a line that is not complete yet waits."""
        fresh: list[Event] = []
        for file in sorted(self.directory.glob("*.journal")):
            start = self._read.get(file, 0)
            with file.open("rb") as stream:
                stream.seek(start)
                lines, _, _ = stream.read().rpartition(b"\n")
            self._read[file] = start + len(lines) + bool(lines)
            for line in lines.splitlines():
                try:
                    fresh.append(json.loads(line))
                except ValueError:
                    continue
        for event in sorted(fresh, key=lambda one: float(one["time"])):
            self.on_event(event)
