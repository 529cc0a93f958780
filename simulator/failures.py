"""When components break: one independent stream of failures per component, merged in time, each with its marks.

Each stream has a random generator of its own, named by the component, so that a new failure source leaves the others
as they were, and two policies that are compared see the same failures. A failure carries its own luck (how long its
detection and repair take, whether a person is needed ...) as uniform numbers, drawn row by row: a longer run has the
failures of a shorter one as its beginning.
"""

from __future__ import annotations

import heapq
import math
import zlib
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from operator import itemgetter
from typing import NamedTuple, Protocol

import numpy as np

from scenarios.failure_traces import FailureTrace
from scenarios.faults import Failure, Faults
from simulator.tiers import FILE_SYSTEM, NODE, NODES, PROCESS

MARKS = 5
MOST_ROWS = 4096
"""Failures drawn at once, so that memory stays flat however long a run is."""


class FailureEvent(NamedTuple):
    """A failure of a source, with its luck: uniform numbers between 0 and 1."""

    time_seconds: float
    source: int
    detection: float
    repair: float
    manual: float
    corrupt: float
    lemon: float
    nodes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """Failures of one kind, for a whole job."""

    component: str
    rate_per_second: float
    lost_nodes: int
    detection_seconds: float
    repair_seconds: float
    poisoned_seconds: float = 0.0
    loses_file_system: bool = False
    outage_seconds: float = 0.0
    notice_seconds: float = 0.0
    burst_share: float = 0.0
    burst_seconds: float = 0.0
    shape: float = 1.0
    age_seconds: float = 0.0
    units: int = 1
    """Nodes with a life of their own, where the life is not exponential."""
    lemon: bool = False
    """The failures of the lemons among the nodes; they get fewer as lemons are retired."""
    counted: float = 1.0
    """Share of the drawn failures that count at the start: those of the nodes that are not lemons, beside lemons."""
    trace: FailureTrace | None = None
    copies: float = 1.0
    """Size of the job over that of the recorded fleet."""

    @property
    def drawn_rate(self) -> float:
        """Failures per second that are drawn."""
        return self.rate_per_second / self.counted

    @property
    def loss(self) -> int:
        """What a failure takes away, as the tiers count it."""
        if self.loses_file_system:
            return FILE_SYSTEM
        return PROCESS if self.lost_nodes == 0 else NODE if self.lost_nodes == 1 else NODES


def sources(faults: Faults, num_gpus: int, num_nodes: int) -> tuple[Source, ...]:
    """Return the failure sources of a job; what never fails is left out."""
    found: list[Source] = []
    for failure in faults.failures:
        rate = failure.rate_per_second * failure.count(num_gpus, num_nodes)
        if rate > 0:
            found += _with_lemons(_source(failure, faults, rate, num_nodes), faults)
    if faults.trace is not None:
        trace = faults.trace
        found.append(
            Source(
                component=trace.name,
                rate_per_second=trace.rate_per_second(num_gpus, num_nodes),
                lost_nodes=1,
                detection_seconds=faults.detection_seconds,
                repair_seconds=math.inf if trace.kind == "capacity" else faults.repair_seconds,
                notice_seconds=trace.notice_seconds,
                trace=trace,
                copies=trace.scale(num_gpus, num_nodes),
            )
        )
    return tuple(found)


def _source(failure: Failure, faults: Faults, rate: float, num_nodes: int) -> Source:
    def own(value: float | None, common: float) -> float:
        return common if value is None else value

    return Source(
        component=failure.component,
        rate_per_second=rate,
        lost_nodes=min(failure.lost_nodes, num_nodes),
        detection_seconds=own(failure.detection_seconds, faults.detection_seconds),
        repair_seconds=own(failure.repair_seconds, faults.repair_seconds),
        poisoned_seconds=failure.poisoned_seconds,
        loses_file_system=failure.loses_file_system,
        outage_seconds=failure.outage_seconds,
        notice_seconds=failure.notice_seconds,
        burst_share=failure.burst_share,
        burst_seconds=failure.burst_seconds,
        shape=failure.weibull_shape,
        age_seconds=failure.age_seconds,
        units=num_nodes if failure.weibull_shape != 1 else 1,
    )


def _with_lemons(source: Source, faults: Faults) -> list[Source]:
    """Split the failures of single nodes into those of lemons and of the others; the sum at the start stays."""
    lemons = faults.lemons
    if lemons is None or not lemons.retired or source.lost_nodes != 1 or source.shape != 1:
        return [source]
    of_lemons = lemons.share * lemons.factor / (lemons.share * lemons.factor + 1 - lemons.share)
    rate = source.rate_per_second
    return [
        replace(source, rate_per_second=(1 - of_lemons) * rate, counted=1 - lemons.share),
        replace(source, rate_per_second=of_lemons * rate, lemon=True),
    ]


def failure_rates(faults: Faults, num_gpus: int, num_nodes: int) -> dict[str, float]:
    """Return the failures per second of a whole job by component; components that never fail are left out."""
    rates: Counter[str] = Counter()
    for source in sources(faults, num_gpus, num_nodes):
        rates[source.component] += source.rate_per_second  # type: ignore[assignment]
    return dict(rates)


def rate_factor(spread: float, seed: int, run: int) -> float:
    """What all rates of one run are multiplied by: gamma with mean 1 and this standard deviation."""
    if spread == 0:
        return 1.0
    return max(1e-6, float(generator("rates", seed, run).gamma(1 / spread**2, spread**2)))


def failure_events(
    found: Sequence[Source], seed: int, run: int = 0, *, factor: float = 1.0, window_seconds: float = math.inf
) -> Iterator[FailureEvent]:
    """Yield failures in time order, without end unless they are all from a record of capacity.

    Args:
        found: the sources of the job.
        seed: of the ensemble.
        run: index of the run in the ensemble.
        factor: on all rates.
        window_seconds: how much time is drawn at once; it changes nothing but the speed.
    """
    if not found:
        return
    seen: Counter[str] = Counter()
    streams: list[_Stream] = []
    for index, source in enumerate(found):
        name = f"{source.component}{' lemon' if source.lemon else ''}"
        random = generator(name, seed, run, seen[name])
        seen[name] += 1
        if source.trace is not None:
            streams.append(_Replay(index, source, random))
        elif source.shape != 1:
            streams.append(_Lives(index, source, factor, random))
        else:
            streams.append(_Poisson(index, source, factor, random))
    total = factor * sum(source.drawn_rate for source in found)
    window = max(min(window_seconds, MOST_ROWS / total), 1 / total)  # the first failure may be far away
    end = 0.0
    while True:
        end += window
        batch = [event for stream in streams for event in stream.until(end)]
        batch.sort()
        yield from batch
        if all(isinstance(stream, _Replay) and stream.exhausted for stream in streams):
            return  # recorded capacity stays what it was at the end


def generator(name: str, seed: int, run: int, copy: int = 0) -> np.random.Generator:
    """The random numbers of one named part of one run, which depend on nothing else."""
    key = (run, zlib.crc32(name.encode())) if copy == 0 else (run, zlib.crc32(name.encode()), copy)
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence(entropy=seed, spawn_key=key)))


class _Stream(Protocol):
    def until(self, end: float) -> list[FailureEvent]:
        """Failures before ``end`` that were not handed out yet."""


class _Poisson:
    """Superposed exponential failures; with bursts, gaps are a mixture of a short and a long exponential."""

    def __init__(self, index: int, source: Source, factor: float, random: np.random.Generator) -> None:
        self.index, self.source, self.random = index, source, random
        self.rate = source.drawn_rate * factor
        self.now = 0.0
        self.waiting: list[FailureEvent] = []
        share = source.burst_share
        self.short = min(source.burst_seconds, 1 / self.rate)
        self.long = (1 / self.rate - share * self.short) / (1 - share)

    def until(self, end: float) -> list[FailureEvent]:
        while self.now < end:
            expected = (end - self.now) * self.rate
            rows = min(MOST_ROWS, int(expected + 3 * math.sqrt(expected)) + 2)
            burst = self.source.burst_share > 0
            luck = self.random.random((rows, 1 + MARKS + burst))
            gaps = -np.log1p(-luck[:, 0])
            gaps *= np.where(luck[:, -1] < self.source.burst_share, self.short, self.long) if burst else self.long
            gaps[0] += self.now  # summed in this order, rows drawn in two parts give the same times to the last bit
            times = np.cumsum(gaps)
            self.now = float(times[-1])
            index, lost = self.index, self.source.lost_nodes
            self.waiting += [
                FailureEvent._make((time, index, *marks, lost))
                for time, marks in zip(times.tolist(), luck[:, 1 : 1 + MARKS].tolist(), strict=True)
            ]
        return _taken(self, end)


class _Lives:
    """A Weibull life for each node; a failed node is replaced by a new one. All first ends in one call."""

    def __init__(self, index: int, source: Source, factor: float, random: np.random.Generator) -> None:
        self.index, self.source, self.random = index, source, random
        mean = source.units / (source.rate_per_second * factor)
        self.shape = source.shape
        self.scale = mean / math.gamma(1 + 1 / self.shape)
        age = source.age_seconds
        hazard = (age / self.scale) ** self.shape + random.exponential(size=source.units)
        self.ends = (self.scale * hazard ** (1 / self.shape) - age).tolist()
        heapq.heapify(self.ends)

    def until(self, end: float) -> list[FailureEvent]:
        found: list[FailureEvent] = []
        while self.ends[0] < end:
            luck = self.random.random(1 + MARKS).tolist()
            life = self.scale * (-math.log1p(-luck[0])) ** (1 / self.shape)
            now = heapq.heapreplace(self.ends, self.ends[0] + max(life, 1e-9))
            found.append(FailureEvent._make((now, self.index, *luck[1:], self.source.lost_nodes)))
        return found


class _Replay:
    """Recorded events from some point of the record on, around and around; thinned or laid over itself by size."""

    def __init__(self, index: int, source: Source, random: np.random.Generator) -> None:
        assert source.trace is not None
        self.index, self.trace, self.random = index, source.trace, random
        self.waiting: list[FailureEvent] = []
        whole, part = divmod(source.copies, 1.0)
        shares = [1.0] * int(whole) + ([part] if part > 1e-12 else [])
        fixed = self.trace.offset_seconds
        if fixed is None and self.trace.kind == "capacity":
            fixed = 0.0  # levels only make sense from the start
        starts = [float(random.random()) * self.trace.span_seconds if fixed is None else fixed for _ in shares]
        self.layers = list(zip(starts, shares, strict=True))
        self.rounds = 0
        self.now = 0.0

    @property
    def exhausted(self) -> bool:
        return self.trace.kind == "capacity" and self.rounds > 0 and not self.waiting

    def until(self, end: float) -> list[FailureEvent]:
        trace, times = self.trace, np.asarray(self.trace.times_seconds)
        once = trace.kind == "capacity"
        while self.now < end and not (once and self.rounds):
            for start, share in self.layers:
                shifted = times - start
                late = shifted < 0  # before the start: comes at the end of the circle
                circle = np.where(late, shifted + trace.span_seconds, shifted)
                order = np.flatnonzero(~late) if once else np.argsort(circle)
                luck = self.random.random((len(order), 1 + MARKS))
                for place, marks in zip(order.tolist(), luck.tolist(), strict=True):
                    if marks[0] < share:
                        nodes = trace.nodes[place] if trace.nodes else 1
                        time = float(circle[place]) + self.rounds * trace.span_seconds
                        self.waiting.append(FailureEvent._make((time, self.index, *marks[1:], nodes)))
            self.waiting.sort()
            self.rounds += 1
            self.now = self.rounds * trace.span_seconds
        return _taken(self, end)


def _taken(stream: _Poisson | _Replay, end: float) -> list[FailureEvent]:
    """Take the events before ``end`` out of those that wait."""
    waiting = stream.waiting
    place = bisect_left(waiting, end, key=itemgetter(0))
    stream.waiting = waiting[place:]
    return waiting[:place]
