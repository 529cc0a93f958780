"""Tiers of checkpoints: what a save there costs, which failures it outlives, and what a tier holds at each moment.

Positions are counted in intervals of work. A save that was begun is complete after the drain of its tier; a failure
forgets those that are not. Saves on regular places are kept as ranges, those that are played one by one as a list.
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
    copies: int = 1
    """Times that a save is written for it: each site of an archive."""


class RegularSaves:
    """A tier that takes every n-th save and completes it after a fixed drain: nothing is kept but ends of ranges."""

    __slots__ = ("_base", "_drain", "_every", "_keep", "ended", "ranges", "special", "started")

    def __init__(self, tier: SaveTier) -> None:
        self._every, self._drain, self._keep = tier.every, tier.drain_seconds, tier.keep
        self.started, self.ended = -1, 0.0
        """Newest save that was begun since the last restore, and when its stall ended."""
        self.ranges: list[tuple[int, int]] = [(0, 0)]
        """First and last of each row of complete saves before the last restore."""
        self.special = EMPTY
        """A complete save off the regular places; the next regular one takes its place."""
        self._base = 0.0
        """Position of the last restore."""

    def complete(self, now: float) -> int:
        """Newest regular save since the last restore that is complete; -1 without one.

        The save before the newest is complete, since a drain is no longer than the period of its tier.
        """
        started = self.started
        if started < 0 or self.ended + self._drain <= now:
            return started
        before = started - self._every
        return before if before > self._base else -1

    def newest(self, now: float, limit: float) -> float:
        """Newest save not after ``limit`` among those that are kept; EMPTY without one."""
        every, kept = self._every, self._keep
        newest = self.complete(now)
        if newest >= 0:
            if newest <= limit:
                return newest
            first = self._first()
            top = math.floor(limit / every) * every
            if top >= first and (newest - top) // every < kept:
                return top
            kept -= (newest - first) // every + 1
        elif EMPTY < self.special <= limit:
            return self.special
        for low, high in reversed(self.ranges):
            if kept <= 0:
                break
            top = high if high <= limit else math.floor(limit / every) * every
            if top >= low and (high - top) // every < kept:
                return top
            kept -= (high - low) // every + 1
        return EMPTY

    def _first(self) -> int:
        """The first regular save after the last restore."""
        return int(self._base // self._every + 1) * self._every

    def _fold(self, now: float) -> None:
        """Move the complete saves since the last restore into the list of ranges, and drop what is not kept."""
        newest, ranges, every = self.complete(now), self.ranges, self._every
        self.started = -1
        if newest >= 0:
            first = self._first()
            if ranges and ranges[-1][1] + every == first:
                ranges[-1] = (ranges[-1][0], newest)
            else:
                ranges.append((first, newest))
            self.special = EMPTY
        elif len(ranges) <= 1:
            return
        kept, place = self._keep, len(ranges)
        while place and kept > 0:
            place -= 1
            low, high = ranges[place]
            count = (high - low) // every + 1
            if count > kept:
                ranges[place] = (high - (kept - 1) * every, high)
            kept -= count
        del ranges[:place]

    def back_to(self, position: float, now: float) -> None:
        """A failure that this tier outlives: what is newer, or not complete, is forgotten."""
        self._fold(now)
        if self.special > position:
            self.special = EMPTY
        ranges = self.ranges
        if ranges and ranges[-1][1] > position:
            top = math.floor(position / self._every) * self._every
            self.ranges = [(low, min(high, top)) for low, high in ranges if low <= top]
        self._base = position

    def lose(self, position: float) -> None:
        """A failure that this tier does not outlive."""
        self.started, self.ranges, self.special, self._base = -1, [], EMPTY, position

    def save_here(self, position: float, now: float) -> None:
        """A complete save of this very position."""
        self._fold(now)
        self.special = self._base = position


class PlayedSaves:
    """A tier whose saves are complete when their transfer says so: those that are kept, one by one."""

    __slots__ = ("_keep", "saves", "special")

    def __init__(self, tier: SaveTier) -> None:
        self._keep = tier.keep
        self.saves = [0.0]
        self.special = EMPTY

    def add(self, position: float) -> None:
        """A save is complete; one off the regular places goes with the first that is newer."""
        if position >= self.special:
            self.special = EMPTY
        self.saves.append(position)
        del self.saves[: -self._keep]

    def newest(self, now: float, limit: float) -> float:
        """Newest save not after ``limit``; EMPTY without one."""
        special = self.special if self.special <= limit else EMPTY
        return max(special, next((one for one in reversed(self.saves) if one <= limit), EMPTY))

    def back_to(self, position: float, now: float) -> None:
        """A failure that this tier outlives."""
        self.saves = [one for one in self.saves if one <= position]
        if self.special > position:
            self.special = EMPTY

    def lose(self, position: float) -> None:
        """A failure that this tier does not outlive."""
        self.saves, self.special = [], EMPTY

    def save_here(self, position: float, now: float) -> None:
        """A complete save of this very position."""
        self.special = position
