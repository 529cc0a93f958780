"""The books of a run: every second of wall time is useful, or lost to one cause."""

from __future__ import annotations

import math
from dataclasses import replace

from simulator.outcome import RunSpan
from simulator.progress import Progress
from simulator.run_setup import RunSetup

Phases = tuple[tuple[str, float], ...]
"""What happens one after the other while the job does not train, with seconds."""

CAUSES = (
    "rework", "checkpoint", "detection", "diagnosis", "manual", "outage", "waiting", "restart", "load", "maintenance",
    "degraded", "data",
)  # fmt: skip
"""Where wall time is lost; the phases of a restart and lasting reasons for slow steps are further ones."""


class Books:
    """Training is booked between ``enter`` and ``leave``, everything else between ``begin`` and ``close``."""

    __slots__ = (
        "_allowed", "_began_position", "_began_saves", "_began_stalled", "_setup", "lost", "operated", "plan",
        "progress", "saves", "since", "spans",
    )  # fmt: skip

    def __init__(self, setup: RunSetup, *, record: bool) -> None:
        self._setup = setup
        tiers, played = setup.tiers, setup.played
        if played is not None and played.stops:  # the stall is as long as the transfer takes
            tiers = tuple(
                replace(tier, stall_seconds=0.0) if index == played.tier else tier for index, tier in enumerate(tiers)
            )
        self.progress = Progress(
            setup.interval_seconds, tiers, setup.work_seconds, played=() if played is None else played.tiers
        )
        self.lost = dict.fromkeys((*CAUSES, *setup.faults.phases_seconds, *setup.slow), 0.0)
        self.saves = [0] * len(setup.tiers)
        self.operated = 0.0
        """Seconds of training so far."""
        self.plan: Phases = ()
        self.since = 0.0
        self.spans: list[RunSpan] | None = [] if record else None
        self._began_position = self._began_stalled = 0.0
        self._began_saves, self._allowed = 0, 1.0

    def enter(self, now: float, speed: float, allowed: float = 1.0) -> float:
        """Training goes on at a speed, of which the data path allows a share; return the seconds to its end."""
        progress = self.progress
        progress.set_speed(speed * allowed)
        self._allowed = allowed
        self.since = now
        self._began_stalled = progress.stalled()
        self._began_position = progress.position()
        self._began_saves = progress.saves
        return progress.seconds_left()

    def leave(self, now: float, arrives: int | None = None) -> None:
        """Book the training since ``enter``, to the save at which it ``arrives``: stalls, and what was too slow."""
        progress, seconds = self.progress, now - self.since
        progress.advance(seconds, now, arrives)
        self.operated += seconds
        stalled = progress.stalled() - self._began_stalled
        work = (progress.position() - self._began_position) * progress.interval
        left = seconds - stalled
        self.lost["checkpoint"] += stalled
        speed = 1.0
        for cause, of_cause in self._setup.slow.items():
            self.lost[cause] += left * speed * (1 - of_cause)
            speed *= of_cause
        if self._allowed < 1:
            self.lost["data"] += work / self._allowed - work
            work /= self._allowed
        self.lost["degraded"] += left * speed - work
        self._count_saves(progress.saves)
        if self.spans is not None and seconds > 0:
            full = progress.speed >= self._setup.lasting_speed * (1 - 1e-12)
            doing = "training" if full else "training slowly"
            self.spans.append(RunSpan(self.since, now, doing, self._allowed * work / progress.interval))
        self.plan, self.since = (), now

    def _count_saves(self, saves: int) -> None:
        for index, tier in enumerate(self._setup.tiers):
            self.saves[index] += saves // tier.every - self._began_saves // tier.every
        self._began_saves = saves

    def skip(self, index: int | None) -> None:
        """A save to this tier that was counted is left out."""
        if index is not None:
            self.saves[index] -= 1

    def finish(self) -> None:
        """The last save, which the clock may have missed by a rounding error or which ends a shorter interval."""
        self._count_saves(math.ceil(self.progress.target - 1e-9))

    def begin(self, now: float, phases: Phases) -> None:
        """The job stops training."""
        self.plan, self.since = phases, now

    def close(self, now: float) -> None:
        """Book a time without training, phase by phase up to now."""
        left, start = now - self.since, self.since
        for cause, seconds in self.plan:
            spent = min(left, seconds)
            self.lost[cause] += spent
            left -= spent
            if self.spans is not None and spent > 0:
                self.spans.append(RunSpan(start, start + spent, cause, 0.0))
                start += spent
        self.plan, self.since = (), now
