"""A checkpoint policy spelled out: the tiers with what each costs, the archive, what is kept, and why."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from scenarios.operations import Checkpointing, CheckpointMode
from simulator.failures import Source
from simulator.goodput_theory import optimum_interval, two_level_optimum
from simulator.outcome import plain
from simulator.tiers import SURVIVES, SaveTier
from topologies.cluster import Cluster, Storage
from topologies.units import format_quantity

CUSTOMARY_INTERVAL_SECONDS = 1800.0
"""Where no failure rate or no storage is given, so that no optimum exists; large runs save every 10 to 40 minutes."""
EVERYTHING = 1_000_000
NO_STORAGE = SaveTier(
    name="free",
    every=1,
    stall_seconds=0.0,
    drain_seconds=0.0,
    load_seconds=0.0,
    survives=SURVIVES["object-store"],
)


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointPolicy:
    """How often a run saves, where to, and what that costs."""

    interval_steps: int
    interval_seconds: float
    mode: CheckpointMode
    tiers: tuple[str, ...]
    """Names of the storage, from near to far; empty: the cluster states none, and saves are taken to be free."""
    levels: tuple[SaveTier, ...]
    """The same with what each costs; the stall includes the wait for a save that is not yet complete."""
    bytes: float
    """Of one save."""
    write_seconds: float
    """Of a save to the farthest tier of the run (without the archive)."""
    stall_seconds: float
    """Of every save."""
    drain_seconds: float
    """Of an asynchronous save to that tier; 0 for a synchronous one."""
    load_seconds: float
    """From that tier."""
    keep: int
    """Complete saves that stay there: one to fall back to if the newest is damaged, and what a rollback needs."""
    expected_goodput: float
    optimum_interval_seconds: float | None
    """Of the exact model; None: no failures, no optimum."""
    reason: str

    def as_json(self) -> dict[str, Any]:
        """Plain data with the keys of the plan's ``checkpoint``."""
        levels = [plain(level) | {"survives": sorted(level.survives)} for level in self.levels]
        return plain(self) | {"tiers": list(self.tiers), "levels": levels}


def policy_of(checkpoint: Mapping[str, Any]) -> CheckpointPolicy | None:
    """Read back the ``checkpoint`` of a plan; None where it does not hold a whole policy (an older plan)."""
    try:
        parts = {one.name: checkpoint[one.name] for one in fields(CheckpointPolicy)}
        levels = tuple(
            SaveTier(
                **{one.name: level[one.name] for one in fields(SaveTier)} | {"survives": frozenset(level["survives"])}
            )
            for level in parts["levels"]
        )
    except (KeyError, TypeError):
        return None
    return CheckpointPolicy(**parts | {"levels": levels, "tiers": tuple(parts["tiers"])})


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveCosts:
    """What the choice rests on."""

    size: float
    near: Storage | None
    """A peer's memory, where it may come before the far storage."""
    far: Storage | None
    snapshot: float
    writes: tuple[float, float]
    loads: tuple[float, float]
    archive_load: float
    """Seconds to read a save from the object store, if there is one behind the far storage."""
    rates: tuple[float, float]
    """Failures that the near storage outlives, and those that need the far one."""
    back: float
    """From a failure to the reading of the checkpoint."""
    step_seconds: float

    @property
    def mtbf(self) -> float:
        """Mean time between failures of the job; infinite without failures."""
        return 1 / sum(self.rates) if sum(self.rates) > 0 else math.inf


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """One way to save, with its best interval."""

    mode: CheckpointMode
    steps: int
    every: int
    """Saves per save to the far storage; 0: there is one storage only."""
    stall: float
    goodput: float


def spelled_out(
    cluster: Cluster,
    costs: SaveCosts,
    best: Candidate,
    found: tuple[Source, ...],
    wish: Checkpointing,
    *,
    pinned: bool,
) -> CheckpointPolicy:
    """Spell out the tiers of the chosen candidate, the archive and what is kept."""
    interval = best.steps * costs.step_seconds
    period = interval + best.stall
    far, drain = costs.far, 0.0 if best.mode == "sync" else costs.writes[1]
    poisoned = max((one.poisoned_seconds for one in found), default=0.0)
    keep = wish.keep or max(2, math.ceil(poisoned / (interval * max(best.every, 1))) + 2)  # poisoned is work, not time
    if far is not None and far.capacity_bytes:
        keep = max(2, min(keep, int(far.capacity_bytes / costs.size)))
    levels: list[SaveTier] = []
    if best.every and costs.near is not None:
        levels.append(_tier(costs.near, 1, best.stall, costs.writes[0], costs.loads[0], 2))
    every = max(best.every, 1)
    if far is None:
        levels.append(NO_STORAGE)
    else:
        levels.append(_tier(far, every, 0.0 if best.every else best.stall, drain, costs.loads[1], keep))
        levels += _archive(cluster, costs, far, wish, every, period, drain, poisoned=poisoned > 0)
    optimum = None
    if far is not None and math.isfinite(costs.mtbf):
        optimum = optimum_interval(best.stall, costs.mtbf) if not best.every else interval
        if best.every and pinned:
            rates = (costs.rates[0], max(costs.rates[1], 1e-6 * costs.rates[0]))
            back = (costs.back + costs.loads[0], costs.back + costs.loads[1])
            optimum = two_level_optimum((best.stall, 0.0), rates, back, costs.writes)[0]
    return CheckpointPolicy(
        interval_steps=best.steps,
        interval_seconds=interval,
        mode=best.mode,
        tiers=tuple(level.name for level in levels) if far is not None else (),
        levels=tuple(levels),
        bytes=costs.size,
        write_seconds=costs.writes[1],
        stall_seconds=best.stall,
        drain_seconds=drain,
        load_seconds=costs.loads[1],
        keep=keep,
        expected_goodput=best.goodput,
        optimum_interval_seconds=optimum,
        reason=_reason(costs, best, drain, optimum, pinned=pinned),
    )


def archive_place(cluster: Cluster, far: Storage) -> Storage:
    """The object store, or without one the far storage itself."""
    return next((one for one in cluster.storage if one.kind == "object-store"), far)


def _archive(
    cluster: Cluster,
    costs: SaveCosts,
    far: Storage,
    wish: Checkpointing,
    every: int,
    period: float,
    drain: float,
    *,
    poisoned: bool,
) -> list[SaveTier]:
    """Saves that stay, at one or several sites, in the object store; without one, in the far storage where need be.

    Keeping the last few alone is not enough where work can be poisoned: two rollbacks in a row may go past the oldest.
    """
    place, away = archive_place(cluster, far), wish.replicas - 1
    if far.per_node or (place is far and not poisoned and not away):
        return []
    name, kept, copied = place.name, EVERYTHING, 0.0
    load = costs.archive_load
    if place is far:
        name, load = f"{far.name} (archive)", costs.loads[1]
        if far.capacity_bytes:
            kept = max(2, int(0.9 * far.capacity_bytes / costs.size))
    else:
        copied = costs.size / min(far.read_bytes_per_second, place.write_bytes_per_second)
    between = min(place.read_bytes_per_second, wish.site_bytes_per_second or math.inf)
    write = drain + copied + away * costs.size / between
    multiple = max(math.ceil(write / period / every), round(wish.archive_every_seconds / period / every), 1)
    tier = _tier(place, every * multiple, 0.0, write, load, kept)
    survives = SURVIVES["object-store"] if away else tier.survives
    return [replace(tier, name=name, survives=survives, copies=away + (place is not far))]


def _tier(storage: Storage, every: int, stall: float, drain: float, load: float, keep: int) -> SaveTier:
    return SaveTier(
        name=storage.name,
        every=every,
        stall_seconds=stall,
        drain_seconds=drain,
        load_seconds=load,
        survives=SURVIVES[storage.kind],
        keep=keep,
    )


def _reason(costs: SaveCosts, best: Candidate, drain: float, optimum: float | None, *, pinned: bool) -> str:
    def told(seconds: float) -> str:
        return format_quantity(seconds, "seconds")

    if costs.far is None:
        price = "the cluster states no storage, so saves are taken to be free"
    else:
        place = costs.far.name
        if best.every and costs.near is not None:
            which = "each" if best.every == 1 else f"each {best.every}."
            place = f"{costs.near.name}, {which} also to {place}"
        price = f"saves to {place}, stall {told(best.stall)}" + (f", complete {told(drain)} later" if drain else "")
    if pinned or best.mode == "every-step":
        return f"interval as asked for; {price}"
    back = costs.back + costs.loads[0 if best.every else 1]
    if optimum is None:
        unknown = "failure rate" if math.isinf(costs.mtbf) else "cost of a save"
        rule = f"no {unknown} is given, so the interval is the customary {told(CUSTOMARY_INTERVAL_SECONDS)}"
        wanted = CUSTOMARY_INTERVAL_SECONDS
    else:
        rule = f"exact optimum {told(optimum)} for a failure every {told(costs.mtbf)} and {told(back)} to come back"
        wanted = optimum
    if not best.every and wanted < drain - best.stall:
        rule += f", stretched to {told(drain - best.stall)} because a save must be complete before the next"
    return f"{rule}; {price}"
