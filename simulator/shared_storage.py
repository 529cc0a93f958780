"""A storage that several jobs share, as events: saves, restores and data loading divide it max-min fairly.

Each transfer uses a share of the storage's time: its rate over the rate of the storage in its direction. A copy to the
archive uses the time of both. Rates change only where a transfer starts or ends.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import simpy

from simulator.calls import call_after
from simulator.fair_shares import crossing_shares, shared_rates

MAIN, ARCHIVE = "main", "archive"
"""The storage of saves, and the one that archived saves are copied to."""


@dataclass(slots=True)
class _Transfer:
    left: float
    """Seconds at a share of 1; infinite: a stream that goes on."""
    cap: float
    rate: float
    """Bytes per second at a share of 1."""
    loads: dict[str, float]
    """Share of a storage's time at a share of 1."""
    done: Callable[[], None] | None
    read: bool
    share: float = 0.0


class SharedStorage:
    """Transfers under way on one storage, and on the archive behind it where there is one."""

    def __init__(
        self,
        environment: simpy.Environment,
        write_bytes_per_second: float,
        read_bytes_per_second: float,
        *,
        archive_bytes_per_second: tuple[float, float] | None = None,
        reads_first: bool = False,
        capacity: float = 1.0,
        changed: Callable[[], None] | None = None,
    ) -> None:
        """Start with no transfer.

        Args:
            environment: where events are scheduled.
            write_bytes_per_second: of the whole storage.
            read_bytes_per_second: of the whole storage.
            archive_bytes_per_second: writing to and reading from a second storage.
            reads_first: reads before writes, instead of equal rights.
            capacity: share of the storage's time that is there for transfers.
            changed: called after the rates changed, but not by ``stream`` itself.
        """
        self.environment = environment
        self.rates = {MAIN: {False: write_bytes_per_second, True: read_bytes_per_second}}
        if archive_bytes_per_second is not None:
            self.rates[ARCHIVE] = dict(zip((False, True), archive_bytes_per_second, strict=True))
        self.reads_first, self.capacity, self.changed = reads_first, capacity, changed
        self.transfers: dict[Hashable, _Transfer] = {}
        self._settled, self._epoch = 0.0, 0

    def start(
        self,
        key: Hashable,
        size_bytes: float,
        cap_bytes_per_second: float,
        done: Callable[[], None],
        *,
        read: bool,
        store: str = MAIN,
    ) -> None:
        """Begin to move some bytes; ``done`` is called at the end. One transfer a key."""
        rate = self.rates[store][read]
        self._add(key, size_bytes, cap_bytes_per_second, rate, {store: 1.0}, done, read=read)

    def copy(self, key: Hashable, size_bytes: float, done: Callable[[], None]) -> None:
        """Begin to copy some bytes to the archive."""
        from_rate, to_rate = self.rates[MAIN][True], self.rates[ARCHIVE][False]
        rate = min(from_rate, to_rate)
        self._add(key, size_bytes, rate, rate, {MAIN: rate / from_rate, ARCHIVE: rate / to_rate}, done, read=True)

    def _add(
        self,
        key: Hashable,
        size_bytes: float,
        cap_bytes_per_second: float,
        rate: float,
        loads: dict[str, float],
        done: Callable[[], None] | None,
        *,
        read: bool,
    ) -> None:
        self._settle()
        cap = min(1.0, cap_bytes_per_second / rate)
        self.transfers[key] = _Transfer(size_bytes / rate, cap, rate, loads, done, read)
        self._divide()

    def stop(self, key: Hashable) -> None:
        """Give a transfer up, if there is one."""
        if key in self.transfers:
            self._settle()
            del self.transfers[key]
            self._divide()

    def stream(self, key: Hashable, cap_bytes_per_second: float, store: str = MAIN) -> float:
        """Read on and on with this cap (0: no more); return the rate in bytes per second."""
        rate = self.rates[store][True]
        cap = min(1.0, cap_bytes_per_second / rate)
        now = self.transfers.get(key)
        if (now.cap if now else 0.0) != cap:
            tell, self.changed = self.changed, None
            if not cap:
                self.stop(key)
            elif now is None:
                self._add(key, math.inf, cap_bytes_per_second, rate, {store: 1.0}, None, read=True)
            else:
                self._settle()
                now.cap = cap
                self._divide()
            self.changed = tell
        return self.rate(key)

    def rate(self, key: Hashable) -> float:
        """Bytes per second of a transfer; 0 without one."""
        one = self.transfers.get(key)
        return one.share * one.rate if one else 0.0

    def left(self, key: Hashable) -> float:
        """Bytes of a transfer that are still to be moved; 0 without one."""
        one = self.transfers.get(key)
        if one is None:
            return 0.0
        return max(0.0, one.left - one.share * (self.environment.now - self._settled)) * one.rate

    def _settle(self) -> None:
        passed = self.environment.now - self._settled
        self._settled = self.environment.now
        for one in self.transfers.values():
            one.left -= one.share * passed

    def _divide(self) -> None:
        """New shares, and the next end."""
        flows = list(self.transfers.values())
        groups = [[one for one in flows if one.read is kind] for kind in (True, False)] if self.reads_first else [flows]
        left = dict.fromkeys(self.rates, self.capacity)
        for group in groups:
            if len(left) == 1:
                shares = shared_rates([one.cap for one in group], left[MAIN])
            else:
                shares = crossing_shares([one.cap for one in group], [one.loads for one in group], left)
            for one, share in zip(group, shares, strict=True):
                one.share = share
                for store, load in one.loads.items():
                    left[store] = max(0.0, left[store] - share * load)
        self._epoch += 1
        ends = [(one.left / one.share, key) for key, one in self.transfers.items() if one.share > 0]
        seconds, key = min(ends, key=lambda end: end[0], default=(math.inf, None))
        if math.isfinite(seconds):
            call_after(self.environment, max(0.0, seconds), self._end, (self._epoch, key))
        if self.changed is not None:
            self.changed()

    def _end(self, which: tuple[int, Hashable]) -> None:
        epoch, key = which
        if epoch != self._epoch:
            return
        self._settle()
        done = self.transfers.pop(key).done
        if done is not None:
            done()  # first, so that what hears of the new rates knows it already
        self._divide()


@dataclass(frozen=True, slots=True, kw_only=True)
class Sharer:
    """A job that saves to a shared storage again and again, and reads after its failures."""

    save_bytes: float
    every_seconds: float
    cap_bytes_per_second: float
    """Of all its nodes together."""
    mtbf_seconds: float = math.inf
    in_phase: bool = False
    """Its first save comes one period after the start, instead of anywhere in it."""


class OtherJobs:
    """Other jobs on the storage: a save is left out while the last one drains; a failure stops it and reads."""

    def __init__(self, storage: SharedStorage, jobs: tuple[Sharer, ...], random: np.random.Generator) -> None:
        self.storage, self.jobs, self.random = storage, jobs, random
        self.took: dict[tuple[int, bool], tuple[int, float]] = {}
        """Number and seconds of the restores (True) and saves by job."""
        self.begun, self.skipped = [0] * len(jobs), [0] * len(jobs)
        for index, job in enumerate(jobs):
            first = job.every_seconds if job.in_phase else float(random.uniform(0, job.every_seconds))
            call_after(storage.environment, first, self._save, index)
            if math.isfinite(job.mtbf_seconds):
                call_after(storage.environment, float(random.exponential(job.mtbf_seconds)), self._fail, index)

    def _save(self, index: int) -> None:
        job, busy = self.jobs[index], self.storage.transfers
        self.begun[index] += 1
        if (index, "write") in busy or (index, "read") in busy:
            self.skipped[index] += 1
        else:
            self._move(index, read=False)
        call_after(self.storage.environment, job.every_seconds, self._save, index)

    def _fail(self, index: int) -> None:
        self.restore(index)
        again = float(self.random.exponential(self.jobs[index].mtbf_seconds))
        call_after(self.storage.environment, again, self._fail, index)

    def restore(self, index: int) -> None:
        """A job gives its save up, if it makes one, and reads the last one."""
        self.storage.stop((index, "write"))
        self._move(index, read=True)

    def _move(self, index: int, *, read: bool) -> None:
        job, began = self.jobs[index], self.storage.environment.now

        def done() -> None:
            count, total = self.took.get((index, read), (0, 0.0))
            self.took[index, read] = (count + 1, total + self.storage.environment.now - began)

        self.storage.start(
            (index, "read" if read else "write"), job.save_bytes, job.cap_bytes_per_second, done, read=read
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Sharing:
    """What a job sees of a storage that it shares: mean seconds, alone and beside the others."""

    write_alone_seconds: float
    write_seconds: float
    read_alone_seconds: float
    read_seconds: float
    skipped_share: float
    """Saves that were left out because the last one was not yet complete."""


@lru_cache(maxsize=64)
def play_storage(
    jobs: tuple[Sharer, ...],
    write_bytes_per_second: float,
    read_bytes_per_second: float,
    *,
    seconds: float = 20 * 86400.0,
    seed: int = 0,
    reads_first: bool = False,
    busy_share: float = 0.0,
) -> tuple[Sharing, ...]:
    """Play saves and restores of several jobs as flows that share one storage max-min fairly.

    Args:
        jobs: who saves, how often.
        write_bytes_per_second: of the whole storage.
        read_bytes_per_second: of the whole storage.
        seconds: simulated time.
        seed: of phases and failures.
        reads_first: restores before saves.
        busy_share: of the storage's time that other traffic (data loading) always takes.
    """
    environment = simpy.Environment()
    rate = {False: write_bytes_per_second, True: read_bytes_per_second}
    storage = SharedStorage(environment, rate[False], rate[True], reads_first=reads_first, capacity=1.0 - busy_share)
    played = OtherJobs(storage, jobs, np.random.default_rng(seed))
    environment.run(until=seconds)

    def mean(index: int, *, read: bool) -> tuple[float, float]:
        alone = jobs[index].save_bytes / min(rate[read], jobs[index].cap_bytes_per_second)
        count, total = played.took.get((index, read), (0, 0.0))
        return alone, total / count if count else alone

    found = []
    for index in range(len(jobs)):
        write, read = mean(index, read=False), mean(index, read=True)
        found.append(
            Sharing(
                write_alone_seconds=write[0],
                write_seconds=write[1],
                read_alone_seconds=read[0],
                read_seconds=read[1],
                skipped_share=played.skipped[index] / max(1, played.begun[index]),
            )
        )
    return tuple(found)
