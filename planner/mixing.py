"""Replicas of different speed in one step: how many of each kind, and how many micro-batches each of them runs.

For a given step time a replica of some template manages so many micro-batches; the most sequences that the pools can
hold is an integer knapsack, and bisection over the step time finds the fastest step that holds the global batch. Where
the knapsack's optimum stays below the batch, no choice of replicas is that fast.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from planner.ilp import Program, solve

TOLERANCE = 2e-4
"""Relative width of the bisection's last interval: the gap that is told."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Template:
    """One way to build replicas. A step of one of them takes ``fixed + per_microbatch x micro-batches`` seconds."""

    name: str
    nodes: tuple[int, ...]
    """Of each pool, for ``replicas`` of them (several share a node where they are smaller)."""
    replicas: int
    fixed_seconds: float
    microbatch_seconds: float
    micro_batch_size: int
    least: int = 1
    """Micro-batches below which stages would idle all the time."""

    def microbatches(self, seconds: float) -> int:
        """Micro-batches that one replica finishes in a step of so many seconds; 0 where it is too short for any."""
        count = math.floor((seconds - self.fixed_seconds) / self.microbatch_seconds * (1 + 1e-12) + 1e-9)
        return count if count >= self.least else 0

    def seconds(self, microbatches: int) -> float:
        """A step of one replica."""
        return self.fixed_seconds + microbatches * self.microbatch_seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """Replicas of one template that run the same number of micro-batches."""

    template: Template
    replicas: int
    microbatches: int

    @property
    def sequences(self) -> int:
        """Of all of them in a step."""
        return self.replicas * self.microbatches * self.template.micro_batch_size


@dataclass(frozen=True, slots=True, kw_only=True)
class Mix:
    """The fastest step: its replicas hold the global batch exactly."""

    shares: tuple[Share, ...]
    seconds: float
    """Of the slowest replica."""
    bound_seconds: float
    """No choice from these templates is faster."""
    programs: int

    @property
    def gap(self) -> float:
        """Seconds over bound less 1."""
        return self.seconds / self.bound_seconds - 1


def fastest_mix(templates: Sequence[Template], pools: tuple[int, ...], batch: int) -> Mix | None:
    """Find the fastest step by bisection over knapsacks; None where the pools hold no replica at all.

    Args:
        templates: what replicas may look like.
        pools: nodes of each kind.
        batch: sequences of a step, which the micro-batch sizes must be able to make up.
    """
    usable = [one for one in templates if all(need <= held for need, held in zip(one.nodes, pools, strict=True))]
    if not usable:
        return None
    low, high = 0.0, max(one.seconds(max(batch // one.micro_batch_size + 1, one.least)) for one in usable)
    best, programs = _held(usable, pools, batch, high), 1
    while high - low > TOLERANCE * high or best is None:
        middle = (low + high) / 2
        found = _held(usable, pools, batch, middle)
        programs += 1
        if found is None:
            low = middle
        else:
            best, high = found, min(middle, max(one.template.seconds(one.microbatches) for one in found))
        if high <= low * (1 + 1e-12):
            break
    if best is None:
        return None
    seconds = max(one.template.seconds(one.microbatches) for one in best)
    return Mix(shares=tuple(best), seconds=seconds, bound_seconds=min(low, seconds), programs=programs)


def holds(templates: Sequence[Template], pools: tuple[int, ...], batch: int, seconds: float) -> bool:
    """Whether some replicas run the whole batch in so many seconds."""
    usable = [one for one in templates if all(need <= held for need, held in zip(one.nodes, pools, strict=True))]
    return _held(usable, pools, batch, seconds) is not None


def _held(templates: list[Template], pools: tuple[int, ...], batch: int, seconds: float) -> list[Share] | None:
    """Replicas that run the whole batch in so many seconds; None where none do."""
    able = [(one, one.microbatches(seconds)) for one in templates]
    able = [(one, count) for one, count in able if count > 0]
    if not able:
        return None
    capacity = np.array([one.replicas * one.micro_batch_size * count for one, count in able], dtype=np.float64)
    needs = np.array([one.nodes for one, _ in able], dtype=np.float64)
    most = [min(held // need for need, held in zip(one.nodes, pools, strict=True) if need) for one, _ in able]
    program = Program(
        costs=-capacity,
        low=np.zeros(len(able)),
        high=np.array(most, dtype=np.float64),
        integer=np.ones(len(able), bool),
    )
    for pool, held in enumerate(pools):
        program.add(needs[:, pool], right=float(held))
    found = solve(program, gap=1e-9)
    if found.values is None or -found.objective < batch - 0.5:
        return None
    counts = [round(float(value)) for value in found.values]
    shares = [
        Share(template=one, replicas=count * one.replicas, microbatches=each)
        for (one, each), count in zip(able, counts, strict=True)
        if count
    ]
    return _exactly(shares, batch)


def _exactly(shares: list[Share], batch: int) -> list[Share] | None:
    """Take away until the shares hold the batch and no more: idle replicas first where there are too many of them."""
    slowest_first = sorted(
        shares, key=lambda one: (one.template.micro_batch_size, one.template.microbatch_seconds), reverse=True
    )
    least = sum(one.replicas * one.template.least * one.template.micro_batch_size for one in slowest_first)
    result: list[Share] = []
    surplus = sum(one.sequences for one in shares) - batch
    for share in slowest_first:
        size, fewest = share.template.micro_batch_size, share.template.least
        each = share.microbatches * size
        idle = min(max(math.ceil((least - batch) / (fewest * size)), 0), share.replicas, surplus // each)
        least, surplus, working = least - idle * fewest * size, surplus - idle * each, share.replicas - idle
        if working == 0:
            continue
        gone = min(surplus // size, working * (share.microbatches - fewest))
        surplus -= gone * size
        less, rest = divmod(gone, working)
        parts = ((working - rest, share.microbatches - less), (rest, share.microbatches - less - 1))
        result += [
            Share(template=share.template, replicas=count, microbatches=number) for count, number in parts if count
        ]
    return result if surplus == 0 and result else None
