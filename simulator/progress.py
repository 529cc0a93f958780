"""Where a run stands between two events, by arithmetic: saves made, the current cycle, what each tier holds.

A position is ``(saves, cycle)``: base saves made so far, and wall seconds into the current cycle of work and stalls. A
cycle is one interval of work and the stalls of the tiers that its save feeds. Each tier takes every n-th save; the
multiples are nested, so that any number of cycles is a few divisions. Positions are counted in intervals.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

PROCESS, NODE, NODES, FILE_SYSTEM = range(4)
"""What a failure takes away: only processes, one node, several nodes, the shared file system."""

SURVIVES = {
    "local-nvme": frozenset({PROCESS, FILE_SYSTEM}),
    "peer-memory": frozenset({PROCESS, NODE, FILE_SYSTEM}),
    "parallel-file-system": frozenset({PROCESS, NODE, NODES}),
    "object-store": frozenset({PROCESS, NODE, NODES, FILE_SYSTEM}),
}
"""Failures that the saves of a storage outlive. A local disk leaves with its node, and a shard is missing."""

EMPTY = -1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveTier:
    """A place that takes every n-th save."""

    name: str
    every: int
    stall_seconds: float
    """What a save to this tier adds to the stall of training."""
    drain_seconds: float
    """From the end of the stall until the save is complete."""
    load_seconds: float
    survives: frozenset[int]
    keep: int = 2
    """Newest complete saves that stay; an older one is gone."""


class Progress:
    """The arithmetic of one run. Times are wall seconds, positions are in intervals of work."""

    __slots__ = (
        "_base", "_ended", "_extra", "_levels", "_periods", "_ranges", "_special", "_started", "_upper", "cycle",
        "end_stall", "end_work", "interval", "last", "saves", "speed", "target", "tiers",
    )  # fmt: skip

    def __init__(self, interval_seconds: float, tiers: tuple[SaveTier, ...], work_seconds: float) -> None:
        """Start at zero with empty tiers.

        Raises:
            ValueError: multiples that are not nested, or a drain that is longer than its tier's period.
        """
        self.interval, self.tiers = interval_seconds, tiers
        self._levels = sorted({1, *(tier.every for tier in tiers)})
        if any(above % below for below, above in zip(self._levels, self._levels[1:], strict=False)):
            raise ValueError(f"multiples {self._levels} are not nested: each must divide the next")
        self._extra = [sum(tier.stall_seconds for tier in tiers if tier.every == level) for level in self._levels]
        self._upper = list(zip(self._levels[1:], self._extra[1:], strict=True))
        self.target = work_seconds / interval_seconds
        self.last = math.inf if math.isinf(self.target) else math.floor(self.target * (1 + 1e-12))
        left = 0.0 if math.isinf(self.target) else work_seconds - self.last * interval_seconds
        self.end_work = left if left > 1e-9 * interval_seconds else 0.0
        self.end_stall = sum(self._extra) if self.end_work else 0.0
        self.saves, self.cycle, self.speed = 0, 0.0, 1.0
        self._periods: list[float] = []
        self.set_speed(1.0)
        for tier in tiers:
            period = self._periods[self._levels.index(tier.every)]
            if tier.drain_seconds > period * (1 + 1e-9):
                raise ValueError(f"{tier.name} drains {tier.drain_seconds} s, longer than its period of {period} s")
        count = len(tiers)
        self._started, self._ended = [-1] * count, [0.0] * count
        """Newest save that was begun since the last restore, and when its stall ended."""
        self._ranges: list[list[tuple[int, int]]] = [[(0, 0)] for _ in tiers]
        """First and last of each row of complete saves before the last restore."""
        self._special = [EMPTY] * count
        """A complete save off the regular places; the next regular one takes its place."""
        self._base = 0.0
        """Position of the last restore."""

    # ---- moving on

    def set_speed(self, speed: float) -> None:
        """Go on at another speed; work and stall of the current cycle stay what they are."""
        work, stall = self._cycle_parts()
        self.speed = speed
        self.cycle = work / speed + stall
        period, below = self.interval / speed + self._extra[0], 1
        self._periods = [period]
        for level, extra in self._upper:
            period = level // below * period + extra
            below = level
            self._periods.append(period)

    def advance(self, seconds: float, now: float) -> None:
        """Let training run for some wall seconds until ``now``."""
        before, cycle = self.saves, self.cycle + seconds
        period = self._periods[0]
        if len(self._levels) > 1 and (before + 1) % self._levels[1] == 0:
            for level, extra in self._upper:
                if (before + 1) % level:
                    break
                period += extra
        if cycle < period or before >= self.last:
            self.cycle = cycle
            return
        self._count(cycle)
        for index, tier in enumerate(self.tiers):
            save = self.saves - self.saves % tier.every
            if save > before:
                self._started[index] = save
                self._ended[index] = now - self.cycle - self.span(save, self.saves)

    def _count(self, cycle: float) -> None:
        """Split wall seconds since the newest save into whole cycles and a rest: largest periods first."""
        levels, periods = self._levels, self._periods
        top = levels[-1]
        save = self.saves - self.saves % top
        left = cycle + self.span(save, self.saves)
        whole = int(left // periods[-1])
        left -= whole * periods[-1]
        save += whole * top
        for index in range(len(levels) - 2, -1, -1):
            whole = min(int(left // periods[index]), levels[index + 1] // levels[index] - 1)
            left -= whole * periods[index]
            save += whole * levels[index]
        if save > self.last:  # the rest of the run is shorter than an interval
            left += self.span(int(self.last), save)
            save = int(self.last)
        self.saves, self.cycle = save, left

    def span(self, first: int, last: int) -> float:
        """Wall seconds from the end of one save to the end of a later one at this speed."""
        seconds = (last - first) * self._periods[0]
        for level, extra in self._upper:
            seconds += extra * (last // level - first // level)
        return seconds

    def _cycle_parts(self) -> tuple[float, float]:
        """Useful seconds and stalled seconds of the current cycle."""
        work = self.interval if self.saves < self.last else self.end_work
        done = min(self.cycle * self.speed, work)
        return done, max(0.0, self.cycle - work / self.speed)

    def position(self) -> float:
        """Work done, in intervals."""
        return self.saves + self._cycle_parts()[0] / self.interval

    def stalled(self) -> float:
        """Wall seconds of stalls from the start to here, had nothing ever failed; take differences."""
        seconds = self._cycle_parts()[1] + self._extra[0] * self.saves
        for level, extra in self._upper:
            seconds += extra * (self.saves // level)
        return seconds

    def seconds_left(self) -> float:
        """Wall seconds to the end of the work and its save at this speed; infinite without an end."""
        if math.isinf(self.target):
            return math.inf
        left = self.span(self.saves, int(self.last)) - self.cycle + self.end_work / self.speed + self.end_stall
        return max(0.0, left)

    # ---- what the tiers hold

    def durable(self, index: int, now: float) -> float:
        """Position of a tier's newest complete save; EMPTY without one."""
        grid = self._complete(index, now)
        if grid > EMPTY:
            return float(grid)
        if self._special[index] > EMPTY:
            return self._special[index]
        return float(self._ranges[index][-1][1]) if self._ranges[index] else EMPTY

    def _complete(self, index: int, now: float) -> int:
        """Newest regular save since the last restore that is complete; -1 without one.

        The save before the newest is complete, since a drain is no longer than the period of its tier.
        """
        started = self._started[index]
        if started < 0:
            return -1
        tier = self.tiers[index]
        if self._ended[index] + tier.drain_seconds <= now:
            return started
        before = started - tier.every
        return before if before > self._base else -1

    def newest_save(self, loss: int, now: float, limit: float = math.inf) -> tuple[float, float] | None:
        """Position and load seconds of the newest save not after ``limit`` in a tier that survives; None without."""
        best: tuple[float, float] | None = None
        for index, tier in enumerate(self.tiers):
            if loss not in tier.survives:
                continue
            found = self._held(index, now, limit)
            if found > EMPTY and (
                best is None or found > best[0] or (found == best[0] and tier.load_seconds < best[1])
            ):
                best = (found, tier.load_seconds)
        return best

    def _held(self, index: int, now: float, limit: float) -> float:
        """Newest save of a tier not after ``limit`` among those that are kept."""
        tier, kept = self.tiers[index], self.tiers[index].keep
        every = tier.every
        newest = self._complete(index, now)
        if newest >= 0:
            if newest <= limit:
                return float(newest)
            first = self._first(index)
            top = math.floor(limit / every) * every
            if top >= first and (newest - top) // every < kept:
                return float(top)
            kept -= (newest - first) // every + 1
        elif EMPTY < self._special[index] <= limit:
            return self._special[index]
        for low, high in reversed(self._ranges[index]):
            if kept <= 0:
                break
            top = high if high <= limit else math.floor(limit / every) * every
            if top >= low and (high - top) // every < kept:
                return float(top)
            kept -= (high - low) // every + 1
        return EMPTY

    def _first(self, index: int) -> int:
        """The first regular save of a tier after the last restore."""
        every = self.tiers[index].every
        return int(self._base // every + 1) * every

    def _fold(self, index: int, now: float) -> None:
        """Move the complete saves since the last restore into the list of ranges, and drop what is not kept."""
        newest, ranges, every = self._complete(index, now), self._ranges[index], self.tiers[index].every
        if newest >= 0:
            first = self._first(index)
            if ranges and ranges[-1][1] + every == first:
                ranges[-1] = (ranges[-1][0], newest)
            else:
                ranges.append((first, newest))
            self._special[index] = EMPTY
        if len(ranges) <= 1 and newest < 0:
            self._started[index] = -1
            return
        kept, held = self.tiers[index].keep, []
        for low, high in reversed(ranges):
            if kept <= 0:
                break
            held.append((max(low, high - (kept - 1) * every), high))
            kept -= (high - low) // every + 1
        self._ranges[index] = held[::-1]
        self._started[index] = -1

    def restore(self, position: float, loss: int, now: float) -> None:
        """Go back to a position; tiers that do not survive are empty, the others forget what is newer."""
        for index, tier in enumerate(self.tiers):
            self._fold(index, now)
            if loss not in tier.survives:
                self._ranges[index], self._special[index] = [], EMPTY
                continue
            if self._special[index] > position:
                self._special[index] = EMPTY
            top = math.floor(position / tier.every) * tier.every
            self._ranges[index] = [(low, min(high, top)) for low, high in self._ranges[index] if low <= top]
        self._stand(position)

    def save_here(self, now: float) -> None:
        """Put a complete save of this very position into every tier (a planned stop)."""
        position = self.position()
        for index in range(len(self.tiers)):
            self._fold(index, now)
            self._special[index] = position
        self._stand(position)

    def _stand(self, position: float) -> None:
        self._base = position
        self.saves = int(position)
        self.cycle = (position - self.saves) * self.interval / self.speed
