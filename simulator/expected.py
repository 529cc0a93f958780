"""The expected goodput of a whole run in closed form: what the planner searches with and the simulation confirms.

A product of planned stops, spares, failures with saves, and stragglers: exact in each factor for exponential failures,
close in the product (within 0.5 points at 16,384 GPUs, 1.1 at 100,000).
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from scenarios.faults import Faults
from simulator.failures import Source
from simulator.goodput_theory import (
    Floats,
    not_waiting_share,
    slowdowns,
    straggler_loss,
    two_level_slowdown,
    waiting_jobs,
)
from simulator.nodes import idle_replicas
from simulator.tiers import PROCESS, SaveTier


def expected_run_goodput(
    faults: Faults,
    found: tuple[Source, ...],
    tiers: tuple[SaveTier, ...],
    interval_seconds: float,
    num_nodes: int,
    replica_nodes: int,
) -> float:
    """Useful share of the wall time in the long run.

    Args:
        faults: how the job comes back, and what slows or stops it on purpose.
        found: what fails.
        tiers: of the checkpoints, from near to far; the third and further ones are left out.
        interval_seconds: useful seconds between saves.
        num_nodes: of the job.
        replica_nodes: of one model replica.
    """
    found = with_recurrences(faults, found)
    slow = failure_slowdown(faults, found, tiers, interval_seconds)
    return float(run_goodput(faults, found, slow, manned_share(faults, found, num_nodes, replica_nodes), num_nodes))


def run_goodput(
    faults: Faults, found: tuple[Source, ...], slow: Floats | float, manned: Floats | float, num_nodes: int
) -> Floats:
    """The product over arrays: of slowdowns by failures and saves, and of shares of the time for which there are nodes.

    Poisoned work and stragglers come off it.
    """
    planned = faults.maintenance.takes_seconds / faults.maintenance.every_seconds if faults.maintenance else 0.0
    poisoned = sum(one.rate_per_second * one.poisoned_seconds for one in found)
    share = max(0.0, 1 - planned) * np.asarray(manned) / np.asarray(slow, np.float64)  # x / inf is 0
    return np.maximum(0.0, share - poisoned - _straggling_share(faults, num_nodes))


def with_recurrences(faults: Faults, found: tuple[Source, ...]) -> tuple[Source, ...]:
    """Rates that count what fails again: after a wrong diagnosis, or with a node whose repair mended nothing."""
    unmended = faults.failed_repairs if faults.spares is not None else 0.0
    again = 1 / ((1 - faults.wrong_diagnoses) * (1 - unmended))
    return tuple(
        replace(one, rate_per_second=again * one.rate_per_second) if one.lost_nodes and not one.notice_seconds else one
        for one in found
    )


def failure_slowdown(
    faults: Faults, found: tuple[Source, ...], tiers: tuple[SaveTier, ...], interval_seconds: float
) -> float:
    """Wall over useful seconds with failures and saves alone, by the one- or two-level form."""
    if sum(one.rate_per_second for one in found) == 0:
        return 1 + sum(tier.stall_seconds / (interval_seconds * tier.every) for tier in tiers)
    first = tiers[0]
    second = tiers[1] if len(tiers) >= 2 and _beyond(found, first, interval_seconds) else None
    stall = first.stall_seconds if second else sum(tier.stall_seconds for tier in tiers if tier.every == first.every)
    every = second.every // first.every if second else 1
    return float(failure_slowdowns(faults, found, first, second, interval_seconds * first.every, every, stall))


def _beyond(found: tuple[Source, ...], tier: SaveTier, interval_seconds: float) -> bool:
    """Whether some failure needs more than a tier: it does not outlive it, or keeps no save from before the poison."""
    reach = (tier.keep - 2) * tier.every * interval_seconds
    return any(one.loss not in tier.survives or one.poisoned_seconds > reach for one in found)


def failure_slowdowns(
    faults: Faults,
    found: tuple[Source, ...],
    first: SaveTier,
    second: SaveTier | None,
    interval: Floats | float,
    every: Floats | float,
    stall: Floats | float,
) -> Floats:
    """The same over arrays of intervals and of saves to the first tier per save to the second; there are failures.

    What is manual or an outage stops the clock, so it adds to the restart without being hit by failures.

    Args:
        faults: how the job comes back.
        found: what fails.
        first: tier of every save; its own stall and multiple are not looked at.
        second: a farther tier; None: all failures go back to the first.
        interval: useful seconds between saves to the first tier.
        every: saves to the first tier per save to the second.
        stall: of a save to the first tier.
    """
    rate = sum(one.rate_per_second for one in found)
    stopped = rate * (faults.manual.share * faults.manual.takes_seconds if faults.manual else 0.0)
    stopped += sum(one.rate_per_second * one.outage_seconds for one in found)
    back = come_back_seconds(faults, found)

    def ready(tier: SaveTier) -> float:
        return back + tier.load_seconds + tier.drain_seconds

    if faults.elastic is not None and faults.elastic.keeps_state:
        return (1 + stall / np.asarray(interval)) * math.exp(back * rate) + stopped
    near = near_rate(found, first)
    if second is not None and rate > near:
        stalls = (stall, second.stall_seconds)
        exact = two_level_slowdown(interval, every, stalls, (near, rate - near), (ready(first), ready(second)))
    else:
        exact = slowdowns(interval, stall, 1 / rate, back + first.load_seconds, first.drain_seconds)
    if faults.clock == "operating":
        exact = exact * (1 + back * rate) / math.exp(back * rate)
    return exact + stopped


def near_rate(found: tuple[Source, ...], tier: SaveTier) -> float:
    """Failures per second after which the saves of a tier are still there and still good."""
    return sum(one.rate_per_second for one in found if one.loss in tier.survives and one.poisoned_seconds == 0)


def come_back_seconds(faults: Faults, found: tuple[Source, ...]) -> float:
    """Mean time from a failure to reading the checkpoint, without people, outages and waiting."""
    full, total = sum(faults.phases_seconds.values()), 0.0
    for one in found:
        restart = full
        if faults.elastic is not None and faults.elastic.keeps_state:
            restart = faults.elastic.reconfigure_seconds
        elif one.loss == PROCESS and faults.in_job_restart_seconds is not None:
            restart = faults.in_job_restart_seconds
        elif 0 < one.lost_nodes <= faults.standbys:
            restart = faults.standby_restart_seconds
        total += one.rate_per_second * (one.detection_seconds + faults.diagnosis_seconds + restart)
    return total / sum(one.rate_per_second for one in found)


def _straggling_share(faults: Faults, num_nodes: int) -> float:
    one = faults.stragglers
    if one is None:
        return 0.0
    found = math.inf if one.found_seconds is None else one.found_seconds
    restart = sum(faults.phases_seconds.values())
    return straggler_loss(one.rate_per_second * num_nodes, one.speed, one.lasts_seconds, found, restart)


def manned_share(faults: Faults, found: tuple[Source, ...], num_nodes: int, replica_nodes: int) -> float:
    """Share of the time (or, elastic, of the replicas) for which there are nodes."""
    broken = [one for one in found if math.isfinite(one.repair_seconds) and one.lost_nodes]
    losses = sum(one.rate_per_second * one.lost_nodes for one in broken)
    if faults.spares is None or losses == 0:
        return 1.0
    in_repair = sum(
        one.rate_per_second * one.lost_nodes * (one.repair_seconds + one.detection_seconds) for one in broken
    )
    spares = faults.spares + faults.standbys
    if faults.elastic is None:
        if not faults.spares_shared_with:
            return not_waiting_share(spares, losses, in_repair / losses)
        of_all = 1 + sum(faults.spares_shared_with) / num_nodes
        waiting = waiting_jobs(spares, 1 + len(faults.spares_shared_with), losses * of_all, in_repair / losses)
        return max(0.0, 1 - waiting / of_all)
    from scipy.stats import poisson

    replicas, lost = num_nodes / replica_nodes, 0.0
    for down in range(spares + 1, int(poisson.ppf(1 - 1e-9, in_repair)) + 2):
        idle = idle_replicas(faults, down - spares, replicas, replica_nodes)
        lost += float(poisson.pmf(down, in_repair)) * min(1.0, idle / replicas)
    return 1 - lost
