"""Where the wall time of a job went: the journal's events as a RunOutcome, in the simulator's words for causes."""

from __future__ import annotations

import statistics
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from runtime.journal import Event
from simulator.outcome import RunOutcome, RunSpan, plain

CAUSES = ("rework", "checkpoint", "detection", "restart", "load", "degraded")
"""rework: steps that were lost and done again, and the step in which a failure struck; detection: from the last sign of
life until the failure was noticed; restart: from there until training went on, without the load; degraded: what single
steps took beyond SLOW times the median step."""
SLOW = 1.5


@dataclass(slots=True)
class _Books:
    """What is booked while the events are read; every second from first to last is booked once."""

    lost: dict[str, float] = field(default_factory=lambda: dict.fromkeys(CAUSES, 0.0))
    kept: list[float] = field(default_factory=list)
    spans: list[RunSpan] = field(default_factory=list)
    first: float = 0.0
    cursor: float | None = None
    """Up to here everything is booked."""

    def book(self, until: float, cause: str) -> None:
        """Book the time since the last booking."""
        assert self.cursor is not None
        until = max(until, self.cursor)
        seconds = until - self.cursor
        if cause == "training":
            self.kept.append(seconds)
        else:
            self.lost[cause] += seconds
        if seconds > 0:
            before = self.spans[-1] if self.spans else None
            start = self.cursor - self.first
            if before is not None and before.doing == cause:
                start = self.spans.pop().start_seconds
            self.spans.append(RunSpan(start, until - self.first, cause, 0.0))
        self.cursor = until


def outcome_of(events: list[Event], *, tokens_per_step: int, seed: int) -> RunOutcome:
    """Book the time of a job from the moment its training began to the end of its last event.

    Args:
        events: of the journal, in order.
        tokens_per_step: of an optimizer step.
        seed: of the job.

    Returns:
        Lost and useful seconds add up to the wall time. The start of the first attempt is no part of it, as in the
        simulator.
    """
    last_run = {event["step"]: index for index, event in enumerate(events) if event["event"] == "step"}
    books = _Books()
    failures = Counter(str(event["cause"]) for event in events if event["event"] in ("failure", "rollback"))
    begun = {event["attempt"] for event in events if event["event"] == "begin"}
    for index, event in enumerate(events):
        kind, now = event["event"], float(event["time"])
        if books.cursor is None:
            if kind == "begin":
                books.first = books.cursor = now
            continue
        if kind == "step":
            books.book(now, "training" if last_run[event["step"]] == index else "rework")
        elif kind == "save":
            books.book(now, "checkpoint")
        elif kind == "failure" and event["attempt"] in begun:
            books.book(min(float(event["last_beat"]), now), "rework")
            books.book(now, "detection")
        elif kind == "rollback":
            books.book(now - event["seconds"], "rework")
            books.book(now, "load")
        elif kind == "begin":
            books.book(now - event["load_seconds"], "restart")
            books.book(now, "load")
        elif kind == "end":
            books.book(now, "checkpoint")  # the wait for the last save
    limit = SLOW * statistics.median(books.kept) if books.kept else 0.0
    books.lost["degraded"] = sum(max(0.0, seconds - limit) for seconds in books.kept)
    saved = [event for event in events if event["event"] == "saved" and event["error"] is None]
    return RunOutcome(
        source="measured",
        seed=seed,
        wall_seconds=(books.cursor or books.first) - books.first,
        useful_seconds=sum(books.kept) - books.lost["degraded"],
        tokens=float(len(books.kept) * tokens_per_step),
        lost_seconds=books.lost,
        failures=dict(failures),
        checkpoints=len(saved),
        checkpoint_bytes={"checkpoint directory": float(sum(event["bytes"] for event in saved))} if saved else {},
        spans=tuple(books.spans),
    )


def told(outcome: RunOutcome, events: list[Event]) -> dict[str, Any]:
    """Plain data for the measurement: the outcome, and what happened in words."""
    content = plain(outcome) | {"goodput": outcome.goodput, "spans": [list(span) for span in outcome.spans]}
    begins = [event for event in events if event["event"] == "begin"]
    content["attempts"] = len({event["attempt"] for event in begins})
    content["resumed_from_steps"] = [event["step"] for event in begins]
    content["saves"] = [
        {key: event[key] for key in ("step", "stall_seconds", "seconds", "bytes", "error")}
        for event in events
        if event["event"] == "saved"
    ]
    content["incidents"] = [
        {key: value for key, value in event.items() if key != "last_beat"}
        for event in events
        if event["event"] in ("failure", "rollback", "straggler")
    ]
    return content
