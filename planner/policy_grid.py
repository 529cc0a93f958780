"""The grid of checkpoint policies: every way to save, every interval, every multiple, by the exact closed forms.

For one job this is an argmin, no integer program: all points are priced in a few array operations, around the best one
the grid is made finer, down to single steps.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from scenarios.layout import Layout
from scenarios.operations import Checkpointing, CheckpointMode
from scenarios.scenario import Scenario
from simulator.checkpoint_policy import Candidate, SaveCosts
from simulator.checkpoints import save_costs, snapshot_stall, usual_storage
from simulator.expected import failure_slowdowns
from simulator.failures import Source
from simulator.goodput_theory import optimum_interval
from simulator.storage import known_storage
from simulator.tiers import SURVIVES, SaveTier
from topologies.cluster import Storage

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

INTERVALS, MULTIPLES = 80, 60
"""Points of the first grid; each finer one has as many between the neighbours of the best point."""
MOST_MULTIPLE = 2_000
FINER = 4
AROUND = 24.0
"""The first grid reaches from the optimum of the nearest tier over this factor to that times this factor."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """A mode and the storages that take the saves, with what they cost."""

    mode: CheckpointMode
    costs: SaveCosts
    stall: float
    """Of every save."""
    first: SaveTier
    second: SaveTier | None

    @property
    def label(self) -> str:
        """In words: ``async to peer memory and Tectonic``."""
        return f"{self.mode} to {' and '.join(tier.name for tier in (self.first, self.second) if tier is not None)}"

    @property
    def drains(self) -> tuple[float, float]:
        """From the end of the stall until a save is complete, in the nearest and in the farther tier."""
        return self.first.drain_seconds, 0.0 if self.second is None else self.second.drain_seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One point of the grid."""

    way: Way
    steps: int
    every: int
    """Saves to the first tier per save to the second; 1 without one."""
    stall: float
    """With the wait for a save that is not yet complete."""
    slowdown: float

    def candidate(self, goodput: float) -> Candidate:
        """The same for ``spelled_out``."""
        every = 0 if self.way.second is None else self.every
        return Candidate(mode=self.way.mode, steps=self.steps, every=every, stall=self.stall, goodput=goodput)


def ways(scenario: Scenario, layout: Layout, found: tuple[Source, ...], step_seconds: float) -> Iterator[Way]:
    """Every allowed way to save: modes, and a near storage (peer memory, local disks) before the far one or not."""
    cluster, wish = scenario.cluster, scenario.checkpoint
    far = usual_storage(cluster, scenario.job, layout, wish)[1]
    assert far is not None
    fars = [far] if far.per_node else [one for one in known_storage(cluster, wish) if not one.per_node]
    nodes = layout.world_size / cluster.node.gpus_per_node
    nears = [one for one in known_storage(cluster, wish) if one.per_node] if not far.per_node and nodes > 1 else []
    if wish.peer_memory is not None:
        nears = [one for one in nears if (one.kind == "peer-memory") == wish.peer_memory]
    for place in fars:
        for near in (None, *nears):
            costs = save_costs(
                cluster,
                scenario.job,
                layout,
                scenario.faults,
                found,
                step_seconds,
                wish,
                near,
                place,
                interval=wish.interval_seconds,
            )
            if near is None:
                if wish.mode in (None, "sync"):
                    yield _way("sync", costs, costs.writes[1])
                if wish.mode in (None, "async") and not wish.peer_memory:
                    yield _way("async", costs, snapshot_stall(costs))
            elif wish.mode in (None, "async") and costs.rates[0] > 0:
                yield _way("async", costs, snapshot_stall(costs))


def _way(mode: CheckpointMode, costs: SaveCosts, stall: float) -> Way:
    def tier(storage: Storage, place: int) -> SaveTier:
        return SaveTier(
            name=storage.name,
            every=1,
            stall_seconds=0.0,
            drain_seconds=0.0 if mode == "sync" else costs.writes[place],
            load_seconds=costs.loads[place],
            survives=SURVIVES[storage.kind],
        )

    assert costs.far is not None
    far = tier(costs.far, 1)
    first, second = (far, None) if costs.near is None else (tier(costs.near, 0), far)
    return Way(mode=mode, costs=costs, stall=stall, first=first, second=second)


def table(scenario: Scenario, found: tuple[Source, ...], way: Way, steps: Ints, every: Ints) -> tuple[Floats, Floats]:
    """Wall over useful seconds and the stall with its wait, both of shape (multiples, intervals).

    Infinite where a save to the second tier would start before the last one is complete.
    """
    tau: Floats = steps[None, :].astype(np.float64) * way.costs.step_seconds
    multiples: Floats = every[:, None].astype(np.float64)
    near_drain, far_drain = way.drains
    stall = np.maximum(way.stall, near_drain - tau) + 0.0 * multiples  # the next save waits for the last
    slow = failure_slowdowns(scenario.faults, found, way.first, way.second, tau, multiples, stall)
    complete = multiples * (tau + stall) >= far_drain * (1 - 1e-12)
    return np.where(complete, slow, np.inf), stall


def best_point(scenario: Scenario, found: tuple[Source, ...], way: Way) -> tuple[Point, int]:
    """The best interval and multiple of one way, and how many points were priced."""
    wish = scenario.checkpoint
    steps, every = _first_grid(way, wish)
    best, priced = _best_of(scenario, found, way, steps, every), 0
    for _ in range(FINER):
        priced += len(steps) * len(every)
        steps, every = _between(steps, best.steps, INTERVALS), _between(every, best.every, MULTIPLES)
        finer = _best_of(scenario, found, way, steps, every)
        best = finer if finer.slowdown <= best.slowdown else best
    return best, priced


def _best_of(scenario: Scenario, found: tuple[Source, ...], way: Way, steps: Ints, every: Ints) -> Point:
    slow, stall = table(scenario, found, way, steps, every)
    row, column = np.unravel_index(int(np.argmin(slow)), slow.shape)
    return Point(
        way=way,
        steps=int(steps[column]),
        every=int(every[row]),
        stall=float(stall[row, column]),
        slowdown=float(slow[row, column]),
    )


def _first_grid(way: Way, wish: Checkpointing) -> tuple[Ints, Ints]:
    step, (near_drain, far_drain) = way.costs.step_seconds, way.drains
    if wish.interval_seconds is not None:
        steps = np.array([max(1, round(wish.interval_seconds / step))])
    else:
        optimum = optimum_interval(max(way.stall, 1e-6), way.costs.mtbf)
        least = max(1.0, math.ceil(max(near_drain - way.stall, 0.0) / step - 1e-9))
        most = max(optimum * AROUND, optimum * math.sqrt(AROUND) + far_drain) / step + 2
        low = max(least, optimum / AROUND / step)
        steps = np.unique(np.geomspace(low, max(most, low + 2), INTERVALS).round().astype(np.int64))
        steps = steps[steps >= least]
    if way.second is None:
        return steps, np.array([1])
    if wish.file_system_every is not None:
        least = 1 if len(steps) > 1 else math.ceil(far_drain / (float(steps[0]) * step + way.stall) * (1 - 1e-12))
        return steps, np.array([max(wish.file_system_every, least)])
    reach = max(MOST_MULTIPLE, math.ceil(2 * far_drain / (float(steps[0]) * step + way.stall)))
    return steps, np.unique(np.geomspace(1, reach, MULTIPLES).round().astype(np.int64))


def _between(values: Ints, best: int, count: int) -> Ints:
    """Whole numbers between the neighbours of the best value, evenly."""
    if len(values) < 2:
        return values
    place = int(np.argmin(np.abs(values - best)))
    low, high = int(values[max(place - 1, 0)]), int(values[min(place + 1, len(values) - 1)])
    return np.unique(np.linspace(low, high, min(count, high - low + 1)).round().astype(np.int64))
