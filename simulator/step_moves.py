"""Streams under way in a step: through the shared links where they may be held up, by the clock where not."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Any

import numpy as np
import simpy

from simulator.network import Network
from simulator.step_problem import StepProblem
from simulator.step_records import Background
from simulator.step_traffic import Stream


class Moves:
    """The streams of a problem in a simpy environment."""

    def __init__(
        self,
        environment: simpy.Environment,
        problem: StepProblem | None,
        background: Sequence[Background],
        sharing: bool,
    ) -> None:
        """Start with nothing under way.

        Args:
            environment: whose clock runs.
            problem: streams on links; None: there are none, and all traffic takes what it takes alone.
            background: traffic that nobody waits for.
            sharing: False: each stream has its links to itself, and there is no background.
        """
        self.environment, self.problem = environment, problem
        self.sharing = sharing and problem is not None
        self.engine = Network(environment, np.zeros(0) if problem is None else problem.capacities, record=True)
        self.moved: list[tuple[int, float, float, float]] = []
        """What could not be held up: stream, start, end, bytes of a flow."""
        self.rounds = {one.name: 0 for one in background}
        """How often each background went through."""
        if self.sharing:
            for one in background:
                environment.process(self.behind(one))

    def move(self, stream: int, seconds: float) -> simpy.Event:
        """Start a stream for a time that it takes alone at its pace."""
        problem = self.problem
        assert problem is not None
        size = seconds * float(problem.pace_bytes_per_second[stream])
        if self.sharing and problem.live[stream]:
            return self.engine.transfer(problem.links[stream], size, problem.loads[stream], key=stream)
        takes = seconds * float(problem.alone_factor[stream])
        self.moved.append((stream, self.environment.now, self.environment.now + takes, size))
        return self.environment.timeout(takes)

    def stream(self, kind: str, number: int, rank: int, other: int = -1) -> int:
        """Return the number of a stream; -1: there is none on links."""
        return -1 if self.problem is None else self.problem.index.get(Stream(kind, number, rank, other), -1)

    def in_time(self, stream: int, seconds: float, end: float) -> bool:
        """Whether nothing can hold a stream up; then it is written down, and needs no events."""
        problem = self.problem
        assert problem is not None
        if problem.alone_factor[stream] > 1 or (self.sharing and problem.live[stream]):
            return False
        size = seconds * float(problem.pace_bytes_per_second[stream])
        self.moved.append((stream, end - seconds, end, size))
        return True

    def together(self, kind: str, rank: int, seconds: float) -> Generator[simpy.Event, Any, int]:
        """Run all groups of a rank for a time that each takes alone; returns the slowest of them (-1: none)."""
        streams = () if self.problem is None else self.problem.at_once.get((kind, rank), ())
        if not streams:
            yield self.environment.timeout(seconds)
            return -1
        done: dict[int, float] = {}
        events = [self.move(stream, seconds) for stream in streams]
        for event, stream in zip(events, streams, strict=True):
            mark(event, stream, done, self.environment)
        yield self.environment.all_of(events)
        return max(streams, key=lambda one: done[one])

    def behind(self, one: Background) -> Generator[simpy.Event, Any, None]:
        """Traffic of others."""
        problem = self.problem
        assert problem is not None
        while True:
            yield self.environment.all_of(
                [
                    self.engine.transfer(problem.links[stream], size, problem.loads[stream], key=stream)
                    for stream, size in zip(one.streams, one.size_bytes, strict=True)
                ]
            )
            self.rounds[one.name] += 1
            if not one.again:
                return


def mark(event: simpy.Event, name: int, done: dict[int, float], environment: simpy.Environment) -> None:
    """Write down when an event comes."""
    if event.processed:
        done[name] = float(environment.now)
    else:
        event.callbacks.append(lambda _: done.__setitem__(name, float(environment.now)))
