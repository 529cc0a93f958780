"""A fluid network inside simpy: transfers share links max-min fairly, and links may change while bytes are on the way.

All arrivals and departures of one instant cost one solve: the first of them schedules a settle event that comes after
every ordinary event of that instant. Then one wake-up is scheduled for the next departure; a wake-up that was
overtaken is stale and ignored, because simpy cannot cancel events. The state is flat arrays, never an object per flow.

Transfers of equal links and loads can carry a ``key``; the rates of a set of keys that returns are looked up.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import simpy

from simulator.maxmin import link_rates, max_min_rates
from topologies.link_map import Floats, Ints
from topologies.routes import Routes

SETTLE = 9
"""Priority of settling: after all that simpy does in the same instant (0 urgent, 1 normal)."""
MEMO_KEYS, MEMO_SETS = 256, 4096
"""Largest set of keyed transfers that is looked up, and how many sets are kept."""
ROUNDING = 1e-12


@dataclass(frozen=True, slots=True, kw_only=True)
class Counters:
    """What the engine did."""

    transfers: int
    solves: int
    looked_up: int
    """Solves that were saved because the same keyed transfers were under way before."""


class Network:
    """Links of given capacities in a simpy environment."""

    def __init__(
        self, environment: simpy.Environment, capacities: Floats, *, window: float = 0.0, record: bool = False
    ) -> None:
        """Start without transfers.

        Args:
            environment: whose clock runs.
            capacities: (links,) bytes per second.
            window: transfers that would end within this share of the present time end now. 0 is exact; 0.01 needs
                about a tenth of the solves for thousands of unlike transfers and is early by half of it or less.
            record: keep all rates in time.
        """
        self.environment = environment
        self.capacities = np.asarray(capacities, np.float64)
        self.carried_bytes = np.zeros(len(self.capacities))
        """Bytes that each link has carried up to the last change; follow from the ``record`` where there is one."""
        self._window = window
        self._links = np.zeros(0, np.int64)
        self._loads = np.zeros(0)
        self._counts = np.zeros(0, np.int64)
        self._left = np.zeros(0)
        self._rates = np.zeros(0)
        self._events: list[simpy.Event] = []
        self._keys: list[int | None] = []
        self._arrivals: list[tuple[Ints, Floats, float, simpy.Event, int | None]] = []
        self._last = float(environment.now)
        self._marked = False
        self._version = 0
        self._memo: dict[tuple[int, ...], dict[int, float]] = {}
        self._transfers = self._solves = self._looked_up = 0
        self.record: list[tuple[float, tuple[int | None, ...], Floats]] | None = [] if record else None
        """After each change: when, the keys of what is under way, and their rates; None: not asked for."""

    @property
    def counters(self) -> Counters:
        """Transfers, solves and solves saved so far."""
        return Counters(transfers=self._transfers, solves=self._solves, looked_up=self._looked_up)

    @property
    def link_rates(self) -> Floats:
        """Bytes per second on each link now."""
        return link_rates(len(self.capacities), self._routes(), self._rates)

    def transfer(
        self, links: Ints | Sequence[int], size_bytes: float, loads: Floats | None = None, key: int | None = None
    ) -> simpy.Event:
        """Start a transfer; the event succeeds when its last byte has left.

        Args:
            links: what it crosses.
            size_bytes: amount; nothing, or no links, is done at once.
            loads: bytes on each link per byte of the transfer; None: one.
            key: names this set of links and loads, for looking rates up (and in the ``record``).
        """
        event = self.environment.event()
        self._transfers += 1
        if size_bytes <= 0 or len(links) == 0:
            return event.succeed()
        load = np.ones(len(links)) if loads is None else np.asarray(loads, np.float64)
        self._arrivals.append((np.asarray(links, np.int64), load, float(size_bytes), event, key))
        self._mark()
        return event

    def transfer_all(self, flows: Routes, size_bytes: Floats, keys: Sequence[int] | None = None) -> simpy.Event:
        """Start many transfers; the event succeeds when the last of them has ended."""
        return self.environment.all_of(
            [
                self.transfer(
                    flows.links[flows.starts[k] : flows.starts[k + 1]],
                    float(size_bytes[k]),
                    flows.loads[flows.starts[k] : flows.starts[k + 1]],
                    None if keys is None else keys[k],
                )
                for k in range(len(size_bytes))
            ]
        )

    def reroute(self, event: simpy.Event, links: Ints | Sequence[int], loads: Floats) -> None:
        """Move what is left of a transfer that is under way to other links, now.

        Raises:
            ValueError: the transfer has ended or has not been settled yet.
        """
        if event not in self._events:
            raise ValueError("only a transfer that is under way can be moved")
        self._advance()
        k = self._events.index(event)
        start = int(self._counts[:k].sum())
        end = start + int(self._counts[k])
        self._links = np.concatenate([self._links[:start], np.asarray(links, np.int64), self._links[end:]])
        self._loads = np.concatenate([self._loads[:start], np.asarray(loads, np.float64), self._loads[end:]])
        self._counts[k] = len(links)
        self._keys[k] = None
        self._mark()

    def change(self, capacities: Floats) -> None:
        """Give links new capacities now (0: dead); what was sent stays sent."""
        self._advance()
        self.capacities = np.asarray(capacities, np.float64)
        self._memo.clear()
        self._mark()

    def _routes(self) -> Routes:
        starts = np.concatenate([[0], np.cumsum(self._counts)]).astype(np.int64)
        return Routes(starts=starts, links=self._links, loads=self._loads)

    def _schedule(self, call: Callable[[simpy.Event], None], delay: float = 0.0, priority: int = 1) -> None:
        event = simpy.Event(self.environment)
        event._ok, event._value = True, None
        event.callbacks.append(call)
        self.environment.schedule(event, priority=priority, delay=delay)  # type: ignore[arg-type]

    def _mark(self) -> None:
        if not self._marked:
            self._marked = True
            self._schedule(self._settle, priority=SETTLE)

    def _advance(self) -> None:
        elapsed = self.environment.now - self._last
        if elapsed > 0 and len(self._left):
            self._left -= self._rates * elapsed
            if self.record is None:
                self.carried_bytes += self.link_rates * elapsed
        self._last = float(self.environment.now)

    def _settle(self, _: simpy.Event) -> None:
        self._marked = False
        self._advance()
        if self._arrivals:
            links, loads, sizes, events, keys = zip(*self._arrivals, strict=True)
            self._arrivals = []
            self._links = np.concatenate([self._links, *links])
            self._loads = np.concatenate([self._loads, *loads])
            self._counts = np.concatenate([self._counts, [len(one) for one in links]])
            self._left = np.concatenate([self._left, sizes])
            self._events.extend(events)
            self._keys.extend(keys)
        self._version += 1
        self._rates = self._solve() if self._events else np.zeros(0)
        if self.record is not None:
            self.record.append((float(self.environment.now), tuple(self._keys), self._rates))
        if not self._events:
            return
        with np.errstate(divide="ignore"):
            next_end = float((self._left / self._rates).min())
        if np.isfinite(next_end):
            version = self._version
            self._schedule(lambda _: self._wake(version), delay=max(next_end, 0.0))

    def _solve(self) -> Floats:
        named = [key for key in self._keys if key is not None] if len(self._keys) <= MEMO_KEYS else []
        if len(named) < len(self._keys):
            self._solves += 1
            return max_min_rates(self.capacities, self._routes())
        key = tuple(sorted(named))
        known = self._memo.get(key)
        if known is not None:
            self._looked_up += 1
            return np.array([known[one] for one in named])
        rates = max_min_rates(self.capacities, self._routes())
        self._solves += 1
        if len(self._memo) < MEMO_SETS:
            self._memo[key] = dict(zip(named, rates.tolist(), strict=True))
        return rates

    def _wake(self, version: int) -> None:
        if version != self._version:
            return
        self._advance()
        now = float(self.environment.now)
        with np.errstate(divide="ignore"):
            left = self._left / self._rates
        slack = ROUNDING * max(1.0, now) + self._window * now
        done = left <= max(float(left.min()), 0.0) + slack
        for k in np.flatnonzero(done):
            self._events[k].succeed()
        stay = ~done
        entries = np.repeat(stay, self._counts)
        self._links, self._loads = self._links[entries], self._loads[entries]
        self._counts, self._left, self._rates = self._counts[stay], self._left[stay], self._rates[stay]
        kept = np.flatnonzero(stay)
        self._events = [self._events[k] for k in kept]
        self._keys = [self._keys[k] for k in kept]
        self._mark()
