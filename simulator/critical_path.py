"""What decides how long a step takes: the chain of activities, each of which waited for the one before, by name."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from simulator.step_problem import FITS, StepProblem
from simulator.step_records import LATE, Played
from topologies.link_map import LinkMap


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """A stretch of the critical path."""

    kind: str
    name: str
    rank: int
    """Pipeline rank; -1: all."""
    replica: int
    """A replica (dp index) that did it; -1: all together."""
    start_seconds: float
    seconds: float
    alone_seconds: float | None = None
    """Traffic: what it would have taken with its links to itself; None: compute."""
    link: str | None = None
    """Where traffic was held up: a link that was full; None: nowhere."""


def critical_path(played: Played, problem: StepProblem | None, network: LinkMap | None) -> tuple[Segment, ...]:
    """Walk from the end of a step back to its start; the seconds of the segments add up to the step."""
    found: list[Segment] = []
    times = [entry[0] for entry in played.record]
    begin = played.begin_seconds
    at, until = played.last, begin + played.step_seconds
    while at >= 0 and until > begin:
        one = played.activities[at]
        end = min(one.end_seconds, until)
        if until > end:
            found.append(_waiting(one.rank, one.unit, problem, max(end, begin), until))
        start = max(min(one.start_seconds, end), begin)
        if end > start:
            held = one.stream >= 0 and one.end_seconds - one.start_seconds > one.alone_seconds * (1 + LATE)
            link = None
            if held and problem is not None and network is not None:
                link = _full_link(played, times, problem, network, one.stream, start, end)
            found.append(
                Segment(
                    kind=one.kind,
                    name=one.name,
                    rank=one.rank,
                    replica=_replica(problem, one.unit),
                    start_seconds=start,
                    seconds=end - start,
                    alone_seconds=one.alone_seconds if one.stream >= 0 else None,
                    link=link,
                )
            )
        until, at = start, one.cause
    if until > begin:
        found.append(_waiting(-1, -1, problem, begin, until))
    return tuple(reversed(found))


def _waiting(rank: int, unit: int, problem: StepProblem | None, start: float, end: float) -> Segment:
    return Segment(
        kind="pp_bubble",
        name="waiting",
        rank=rank,
        replica=_replica(problem, unit),
        start_seconds=start,
        seconds=end - start,
    )


def _replica(problem: StepProblem | None, unit: int) -> int:
    if unit < 0:
        return -1
    return unit if problem is None else int(np.argmax(problem.unit_class == unit))


def by_kind(path: Sequence[Segment]) -> dict[str, float]:
    """Seconds of the path by kind, the longest first."""
    total: dict[str, float] = {}
    for one in path:
        total[one.kind] = total.get(one.kind, 0.0) + one.seconds
    return dict(sorted(total.items(), key=lambda item: -item[1]))


def _full_link(
    played: Played,
    times: list[float],
    problem: StepProblem,
    network: LinkMap,
    stream: int,
    start: float,
    end: float,
) -> str | None:
    """Name the link that held a stream back for the longest part of a time; None: none was full."""
    rows = len(problem.row_link)
    own = problem.links[stream][:-1]
    held: dict[int, float] = {}
    first = max(0, bisect_right(times, start) - 1)
    for k in range(first, len(times)):
        begins = max(times[k], start)
        stops = min(times[k + 1] if k + 1 < len(times) else end, end)
        if times[k] >= end:
            break
        _, keys, rates = played.record[k]
        if stream not in keys or stops <= begins:
            continue
        used = np.zeros(rows + len(problem.streams))
        for key, rate in zip(keys, rates, strict=True):
            assert key is not None
            used[problem.links[key]] += problem.loads[key] * rate
        tight = own[used[own] >= problem.capacities[own] * (1 - FITS)]
        for row in tight[:1]:
            held[int(row)] = held.get(int(row), 0.0) + stops - begins
    if not held:
        alone = own[problem.loads[stream][:-1] * problem.pace_bytes_per_second[stream] > problem.capacities[own]]
        if not len(alone):
            return None
        held = {int(alone[0]): 0.0}
    row = max(held, key=lambda one: held[one])
    more = int(problem.row_count[row]) - 1
    return network.name(int(problem.row_link[row])) + (f" and {more:,} like it" if more else "")
