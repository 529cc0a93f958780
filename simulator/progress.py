"""Where a run stands between two events, by arithmetic: saves made, and the current cycle.

A position is ``(saves, cycle)``: base saves made so far, and wall seconds into the current cycle of work and stalls. A
cycle is one interval of work and the stalls of the tiers that its save feeds. Each tier takes every n-th save; the
multiples are nested, so that any number of cycles is a few divisions. Positions are counted in intervals.
"""

from __future__ import annotations

import math
from collections.abc import Container

from simulator.tiers import EMPTY, PlayedSaves, RegularSaves, SaveTier


class Progress:
    """The arithmetic of one run. Times are wall seconds, positions are in intervals of work."""

    __slots__ = (
        "_awaited", "_extra", "_levels", "_periods", "_regular", "_upper", "cycle", "end_stall", "end_work", "held",
        "interval", "last", "saves", "speed", "target", "tiers",
    )  # fmt: skip

    def __init__(
        self, interval_seconds: float, tiers: tuple[SaveTier, ...], work_seconds: float, *, played: Container[int] = ()
    ) -> None:
        """Start at zero, where every tier holds the start.

        Args:
            interval_seconds: useful seconds between base saves.
            tiers: from near to far.
            work_seconds: useful seconds of the run; may be infinite.
            played: indices of tiers whose saves are complete when their transfer is, which is told from outside.

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
        self._awaited = math.inf
        self._periods: list[float] = []
        self.set_speed(1.0)
        self.held: list[RegularSaves | PlayedSaves] = []
        self._regular: list[tuple[int, RegularSaves]] = []
        for index, tier in enumerate(tiers):
            if index in played:
                self.held.append(PlayedSaves(tier))
                continue
            period = self._periods[self._levels.index(tier.every)]
            if tier.drain_seconds > period * (1 + 1e-9):
                raise ValueError(f"{tier.name} drains {tier.drain_seconds} s, longer than its period of {period} s")
            self._regular.append((tier.every, RegularSaves(tier)))
            self.held.append(self._regular[-1][1])

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

    def advance(self, seconds: float, now: float, arrives: int | None = None) -> None:
        """Let training run for some wall seconds until ``now``, to the save at which it ``arrives`` if known."""
        before, cycle = self.saves, self.cycle + seconds
        if arrives is not None:
            self.saves, self.cycle = arrives, 0.0
        else:
            period = self._periods[0]
            if self._upper and (before + 1) % self._upper[0][0] == 0:
                for level, extra in self._upper:
                    if (before + 1) % level:
                        break
                    period += extra
            if cycle < period or before >= self.last:
                self.cycle = cycle
                return
            self._count(cycle)
            if self.saves >= self._awaited:  # by a rounding error: somebody waits for this save and will call
                self.saves = int(self._awaited) - 1
                self.cycle = self.span(self.saves, self.saves + 1)
        saves = self.saves
        ended = now - self.cycle
        for every, held in self._regular:
            save = saves - saves % every
            if save > before:
                held.started = save
                held.ended = ended if save == saves else ended - self.span(save, saves)

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

    def seconds_to_save(self, every: int) -> tuple[float, int]:
        """Wall seconds at this speed to the end of the stall of the next ``every``-th save, and its number.

        It is reached by an ``advance`` that ``arrives`` there, and by no other.
        """
        self._awaited = save = (self.saves // every + 1) * every
        return self.span(self.saves, save) - self.cycle, save

    # ---- saves and failures

    def newest_save(self, loss: int, now: float, limit: float = math.inf) -> tuple[float, int] | None:
        """Position and tier of the newest save not after ``limit`` in a tier that survives; None without one.

        Of equal ones the one that loads quickest.
        """
        best, place = EMPTY, -1
        for index, tier in enumerate(self.tiers):
            if loss not in tier.survives:
                continue
            found = self.held[index].newest(now, limit)
            if found > best or (found == best > EMPTY and tier.load_seconds < self.tiers[place].load_seconds):
                best, place = found, index
        return (best, place) if place >= 0 else None

    def restore(self, position: float, loss: int, now: float) -> None:
        """Go back to a position; tiers that do not survive are empty, the others forget what is newer."""
        for tier, held in zip(self.tiers, self.held, strict=True):
            if loss in tier.survives:
                held.back_to(position, now)
            else:
                held.lose(position)
        self._stand(position)

    def save_here(self, now: float) -> None:
        """Put a complete save of this very position into every tier (a planned stop)."""
        position = self.position()
        for held in self.held:
            held.save_here(position, now)
        self._stand(position)

    def _stand(self, position: float) -> None:
        self.saves = int(position)
        self.cycle = (position - self.saves) * self.interval / self.speed
