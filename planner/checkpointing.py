"""How a layout is operated: checkpoint policy and number of spares, chosen for the scenario's objective.

Goodput is (share of the time with enough nodes) / (slowdown by failures and saves) less what is lost whatever one does.
So for any number of spares the best policy is the one of least slowdown, and the grid over policies and spares is a
product: it is searched as one, and the numbers of its neighbours are told.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from planner.policy_grid import Floats, Point, Way, best_point, table, ways
from planner.upkeep import upkeep, value
from scenarios.layout import Layout
from scenarios.scenario import Scenario
from simulator.checkpoint_policy import CheckpointPolicy, spelled_out
from simulator.checkpoints import choose_interval, usual_storage
from simulator.expected import manned_share, run_goodput, with_recurrences
from simulator.failures import Source, sources
from simulator.goodput_theory import erlang_blocking, spares_needed
from topologies.units import format_quantity

SURE = 1 - 1e-5
"""More spares than suffice with this probability are not looked at."""
RATES = 60
"""Equally likely failure rates over which the number of spares is judged, where the faults know them roughly."""
WORTH_A_SPARE = 5e-4
"""Where idle spares cost nothing (time, goodput) the fewest are taken that lose at most this share of the time."""
CUSTOMARY_SECONDS = (600.0, 1200.0, 1800.0)
"""Common advice: every 10 to 30 minutes. Told beside the choice."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """Policy, spares, and what the neighbours in the grid would cost."""

    policy: CheckpointPolicy
    spares: int | None
    """Idle nodes; None: the faults take none, or name no repair time, so that none are needed."""
    spares_reason: str
    goodput: float
    neighbours: list[dict[str, Any]]
    priced: int
    """Points of the grid."""

    @property
    def expected_goodput(self) -> float:
        """Useful share of the wall time."""
        return self.goodput

    def as_json(self) -> dict[str, Any]:
        """The plan's ``checkpoint``: the policy with the spares and the neighbours."""
        more = {"spares": self.spares, "spares_reason": self.spares_reason}
        told = {"expected_goodput": self.goodput, "neighbours": self.neighbours, "points": self.priced}
        return self.policy.as_json() | told | more


@dataclass(frozen=True, slots=True)
class _Asked:
    """One layout with its failures, and what its shares and objective depend on."""

    scenario: Scenario
    layout: Layout
    found: tuple[Source, ...]
    step_seconds: float
    nodes: int

    def goodput(self, slowdown: Floats | float, manned: Floats | float) -> Floats:
        return run_goodput(self.scenario.faults, self.found, slowdown, manned, self.nodes)

    def manned(self, spares: int | None, factor: float = 1.0) -> float:
        """Share of the time with enough nodes, where all failure rates are multiplied by a factor."""
        faults = self.scenario.faults.model_copy(update={"spares": spares})
        per_node = self.scenario.cluster.node.gpus_per_node
        replica = math.ceil(self.layout.world_size / self.layout.dp / per_node)
        found = tuple(replace(one, rate_per_second=factor * one.rate_per_second) for one in self.found)
        return manned_share(faults, found, self.nodes, replica)

    def value(self, goodput: Floats | float, spares: npt.NDArray[np.int64] | int) -> Floats:
        kept = upkeep(self.scenario, self.layout.world_size, self.nodes, spares)
        return value(self.scenario.objective, self.step_seconds, goodput, kept)


def operation(scenario: Scenario, layout: Layout, step_seconds: float) -> Operation:
    """Choose checkpoint policy and spares of one layout.

    Args:
        scenario: faults, storage, objective; what its ``checkpoint`` and ``faults.spares`` fix is kept.
        layout: complete.
        step_seconds: of an undisturbed step.
    """
    cluster, faults = scenario.cluster, scenario.faults
    nodes = math.ceil(layout.world_size / cluster.node.gpus_per_node)
    found = with_recurrences(faults, sources(faults, layout.world_size, nodes))
    asked = _Asked(scenario, layout, found, step_seconds, nodes)
    far = usual_storage(cluster, scenario.job, layout, scenario.checkpoint)[1]
    failing = sum(one.rate_per_second for one in asked.found) > 0
    if far is None or not failing or scenario.checkpoint.mode == "every-step":
        return _as_is_usual(asked)
    points, priced = [], 0
    for way in ways(scenario, layout, asked.found, step_seconds):
        point, count = best_point(scenario, asked.found, way)
        points.append(point)
        priced += count
    best = min(points, key=lambda one: one.slowdown)
    spares, reason, shares = _spares(asked, best.slowdown)
    manned = asked.manned(spares)
    goodput = float(asked.goodput(best.slowdown, manned))
    pinned = scenario.checkpoint.interval_seconds is not None
    policy = spelled_out(
        cluster, best.way.costs, best.candidate(goodput), asked.found, scenario.checkpoint, pinned=pinned
    )
    return Operation(
        policy=replace(policy, expected_goodput=goodput),
        spares=spares,
        spares_reason=reason,
        goodput=goodput,
        neighbours=_neighbours(asked, best, points, spares, manned, shares),
        priced=priced * max(len(shares), 1),
    )


def _as_is_usual(asked: _Asked) -> Operation:
    """Without failures or storage there is nothing to weigh; a save at each step leaves no interval to choose."""
    scenario = asked.scenario
    policy = choose_interval(
        scenario.cluster,
        scenario.job,
        asked.layout,
        scenario.faults.model_copy(update={"spares": None}),
        asked.step_seconds,
        wish=scenario.checkpoint,
    )
    spares, reason, _ = _spares(asked, 1 / policy.expected_goodput if policy.expected_goodput > 0 else math.inf)
    goodput = policy.expected_goodput * asked.manned(spares)
    return Operation(
        policy=replace(policy, expected_goodput=goodput),
        spares=spares,
        spares_reason=reason,
        goodput=goodput,
        neighbours=[],
        priced=0,
    )


def _spares(asked: _Asked, slowdown: float) -> tuple[int | None, str, dict[int, float]]:
    """Spares, why, and the share of the time with enough nodes for every number that was looked at."""
    scenario, faults = asked.scenario, asked.scenario.faults
    broken = [one for one in asked.found if math.isfinite(one.repair_seconds) and one.lost_nodes]
    away = sum(one.rate_per_second * one.lost_nodes * (one.repair_seconds + one.detection_seconds) for one in broken)
    if faults.spares is not None:
        return faults.spares, "as the faults say", {faults.spares: asked.manned(faults.spares)}
    if away == 0:
        return None, "no failure takes a node away for a known time", {}
    factors = rate_factors(faults.rate_spread)
    most = spares_needed(1.0, away * float(factors.max()), SURE)
    if scenario.spare_nodes == "inside":
        idle = scenario.cluster.num_nodes - asked.nodes
        reason = f"the {idle} nodes that the job leaves idle; {away:.3g} nodes are in repair on average"
        return idle, reason, {idle: asked.manned(idle)}
    counts = np.arange(most + 1)
    shares = _shares(asked, away, factors, most)
    goodput = asked.goodput(slowdown, np.array(list(shares.values())))
    values = asked.value(goodput, counts)
    if scenario.objective in ("time", "goodput"):
        enough = np.flatnonzero(np.array(list(shares.values())) >= 1 - WORTH_A_SPARE)
        chosen = int(enough[0]) if len(enough) else most
        rule = f"the fewest that keep the job from waiting more than {100 * WORTH_A_SPARE:g} % of the time"
    else:
        chosen = int(np.argmin(values))
        rule = f"least {scenario.objective} with idle spares counted"
    spread = f", rates known to {faults.rate_spread:.0%}" if faults.rate_spread else ""
    return chosen, f"{rule}; {away:.3g} nodes are in repair on average{spread}", shares


def rate_factors(spread: float) -> Floats:
    """Equally likely factors on all failure rates: the middles of equal parts of a gamma distribution of mean 1."""
    if spread == 0:
        return np.ones(1)
    from scipy.special import gammaincinv  # half a second of imports with scipy.stats, and few scenarios need it

    middles = gammaincinv(spread**-2, (np.arange(RATES) + 0.5) / RATES)
    return np.asarray(middles / middles.mean())


def _shares(asked: _Asked, away: float, factors: Floats, most: int) -> dict[int, float]:
    """Share of the time with enough nodes for each number of spares, over the rates that may turn out."""
    faults = asked.scenario.faults
    if faults.elastic is None:
        blocked = erlang_blocking(most + 1 + faults.standbys, away * factors)
        return {count: 1 - float(np.mean(blocked[count + 1 + faults.standbys])) for count in range(most + 1)}
    some = factors[:: max(1, len(factors) // 6)]
    return {count: float(np.mean([asked.manned(count, one) for one in some])) for count in range(most + 1)}


def _neighbours(
    asked: _Asked, best: Point, points: list[Point], spares: int | None, manned: float, shares: dict[int, float]
) -> list[dict[str, Any]]:
    """What changing one thing would do: goodput, and the objective relative to the choice."""
    count = spares or 0
    chosen = float(asked.value(asked.goodput(best.slowdown, manned), count))

    def told(change: str, slowdown: float, share: float, idle: int, **more: Any) -> dict[str, Any]:
        goodput = float(asked.goodput(slowdown, share))
        worse = float(asked.value(goodput, idle)) / chosen - 1 if chosen > 0 and goodput > 0 else None
        return {"change": change, "goodput": goodput, "objective_change": worse, **more}

    found = []
    step = best.way.costs.step_seconds
    for seconds in (best.steps * step / 2, best.steps * step * 2, *CUSTOMARY_SECONDS):
        steps = max(1, round(seconds / step))
        slow = _at(asked, best.way, steps)
        if steps != best.steps and math.isfinite(slow):
            words = f"an interval of {format_quantity(steps * step, 'seconds')}"
            found.append(told(words, slow, manned, count, interval_seconds=steps * step))
    for point in points:
        if point is not best:
            words = f"{point.way.label} every {format_quantity(point.steps * step, 'seconds')}"
            found.append(told(words, point.slowdown, manned, count, interval_seconds=point.steps * step))
    if count in shares:
        chosen = float(asked.value(asked.goodput(best.slowdown, shares[count]), count))  # over the same rates
    others = [one for one in (count // 2, count - 1, count + 1, 2 * count) if one in shares and one != count]
    return found + [told(f"{one} spares", best.slowdown, shares[one], one, spares=one) for one in dict.fromkeys(others)]


def _at(asked: _Asked, way: Way, steps: int) -> float:
    """The least slowdown at an interval, with the multiple that suits it."""
    every = np.unique(np.geomspace(1, 4000, 200).round().astype(np.int64)) if way.second is not None else np.array([1])
    return float(table(asked.scenario, asked.found, way, np.array([steps]), every)[0].min())
