"""The supervisor of a job on this machine: it names the rank that died or hangs, and kills the one that hangs.

torchrun then ends the others and starts the next attempt; a stopped process would keep it waiting for 30 s.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from runtime.heartbeat import Beat, read_beats
from runtime.journal import Journal

LOOK_SECONDS = 0.1
STOPPED = ("T", "t")
BUSY = 3.0
"""A process that is not stopped, but writes no sign of life, may only wait for a core: so many times the patience."""
START_SECONDS = 60.0
"""More patience while a rank imports torch and meets the others."""
WATCH_JOURNAL = "watch.journal"
PEER_LOST = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Connection refused",
    "Broken pipe",
    "Timed out waiting",
)
"""What gloo says on the ranks whose partner is gone."""


class Watch:
    """Looks at the signs of life of the newest attempt."""

    def __init__(
        self,
        directory: Path,
        *,
        heartbeat_timeout_seconds: float,
        progress_timeout_seconds: float,
        tell: Callable[[str], None],
        node: str | None = None,
        first_attempt: int = 0,
    ) -> None:
        self.directory, self.tell, self.node = directory, tell, node
        """``node``: only its ranks are judged, because processes are seen from their own node alone; None: all."""
        self.heartbeat_timeout, self.progress_timeout = heartbeat_timeout_seconds, progress_timeout_seconds
        self.looked = 0.0
        self.attempt = self.first_attempt = first_attempt
        """Ranks of earlier ones are gone, and were judged by another supervisor."""
        self.noticed: set[int] = set()
        """Attempts whose failure was told."""
        self.hopeless = ""
        """Why another attempt would be in vain."""
        self.before: tuple[object, ...] | None = None
        """How the attempt before failed."""
        self.progressed: dict[int, tuple[int, float]] = {}
        """By rank: marks, and since when."""

    def look(self) -> None:
        """Look once, if the last look was long enough ago."""
        now = time.time()
        if now - self.looked < LOOK_SECONDS:
            return
        paused = self.looked > 0 and now - self.looked > self.heartbeat_timeout / 2
        self.looked = now
        attempt = newest_attempt(self.directory)
        if attempt != self.attempt:
            self.attempt, self.progressed = attempt, {}
        if attempt < self.first_attempt or attempt in self.noticed:
            return
        if paused:  # this process itself was stopped: the beats tell nothing
            return
        every = read_beats(self.directory, attempt)
        beats = [beat for beat in every if self.node in (None, beat.host)]
        for beat in beats:
            if not is_alive(beat.pid, self.directory) and not is_done(self.directory, beat):
                self._died(beat, beats)
                return
        for beat in beats:
            if now - beat.time > self._patience(beat) and not is_done(self.directory, beat):
                self._kill(beat, "hang", f"shows no sign of life for {now - beat.time:.1f} s")
                return
        self._look_for_laggard(every, now)

    def _patience(self, beat: Beat) -> float:
        """Seconds of silence that are too many: more for a process that may run, still more while it starts."""
        if state_of(beat.pid) in STOPPED:
            return self.heartbeat_timeout
        return BUSY * self.heartbeat_timeout + (START_SECONDS if beat.marks == 0 else 0.0)

    def _look_for_laggard(self, beats: list[Beat], now: float) -> None:
        for beat in beats:
            marks, since = self.progressed.get(beat.rank, (-1, now))
            self.progressed[beat.rank] = (beat.marks, since if marks == beat.marks else now)
        if len(beats) < 2:
            return
        behind = min(beats, key=lambda beat: beat.marks)
        alone = all(beat.marks > behind.marks for beat in beats if beat is not behind)
        waited = now - max(since for _, since in self.progressed.values())
        if alone and waited > self.progress_timeout and self.node in (None, behind.host):
            self._kill(behind, "hang", f"lives, but is behind all others for {waited:.1f} s")

    def _died(self, beat: Beat, beats: list[Beat]) -> None:
        """Name the rank that was first; those that only lost a partner are not to blame."""
        time.sleep(LOOK_SECONDS)  # the others write why they failed
        gone = [one for one in beats if not is_alive(one.pid, self.directory) and not is_done(self.directory, one)]
        failures = {one["rank"]: one for one in read_failures(self.directory, self.attempt)}
        guilty = [one for one in gone if one.rank not in failures or not lost_a_peer(failures[one.rank])]
        first = min(guilty or gone or [beat], key=lambda one: one.time)
        if first.rank not in failures:
            self._note(first, "killed", "died without a word")
            return
        failure = failures[first.rank]
        first = replace(first, step=int(failure["step"]))
        same = (first.rank, first.step, failure["error"])
        if failure["final"]:
            self.hopeless = str(failure["message"])
        elif same == self.before:
            self.hopeless = "the same failure in the same step as the attempt before: it is not tried again"
        self.before = same
        self._note(first, str(failure["cause"]), "failed")

    def _kill(self, beat: Beat, cause: str, words: str) -> None:
        with contextlib.suppress(ProcessLookupError):
            if is_alive(beat.pid, self.directory):
                os.kill(beat.pid, signal.SIGKILL)
        self._note(beat, cause, f"{words}; killed it")

    def _note(self, beat: Beat, cause: str, words: str) -> None:
        self.noticed.add(self.attempt)
        file = WATCH_JOURNAL if self.node is None else f"watch-{self.node}.journal"
        Journal(self.directory / file, self.attempt).note(
            "failure", rank=beat.rank, host=beat.host, cause=cause, step=beat.step, last_beat=beat.time, words=words
        )
        self.tell(f"rank {beat.rank} on {beat.host} {words} (in step {beat.step + 1})")


def newest_attempt(directory: Path) -> int:
    """Number of the attempt that started last; 0 before any."""
    return max((int(file.name.split(".")[1]) for file in directory.glob("rank*.*.pid")), default=0)


def is_done(directory: Path, beat: Beat) -> bool:
    """Tell whether a rank came to its proper end."""
    return done_file(directory, beat.rank, beat.attempt).exists()


def done_file(directory: Path, rank: int, attempt: int) -> Path:
    """What a rank leaves at its proper end."""
    return directory / f"rank{rank}.{attempt}.done"


def state_of(pid: int) -> str:
    """Letter of the state of a process, as in proc(5); empty where there is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rsplit(")", 1)[1].split()[0]
    except OSError:
        return ""


def is_alive(pid: int, directory: Path) -> bool:
    """Tell whether a process is a worker of this job and not dead; the directory in its command line proves it."""
    try:
        if str(directory).encode() not in Path(f"/proc/{pid}/cmdline").read_bytes():
            return False
    except OSError:
        return False
    return state_of(pid) not in ("", "Z", "X")


def read_failures(directory: Path, attempt: int | None = None) -> list[dict[str, Any]]:
    """Read why ranks failed, in one attempt or in the newest that has failures."""
    every = [json.loads(file.read_text(encoding="utf-8")) for file in directory.glob("rank*.failure")]
    if attempt is None:
        attempt = max((int(one["attempt"]) for one in every), default=0)
    return [one for one in every if one["attempt"] == attempt]


def lost_a_peer(failure: dict[str, Any]) -> bool:
    """Tell whether a rank failed only because another one was gone."""
    return any(word in failure["error"] for word in PEER_LOST)
