"""Blocks of a job into scalable units: few data-parallel rings over an uplink, pipeline neighbours under one switch.

A block is what one pipeline stage of one replica needs (more replicas where expert groups reach over nodes), a unit the
nodes below one switch level. Candidates of an aligned greedy are counted exactly; the relaxation over patterns of a
unit (how many stages it touches) bounds every arrangement there is.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from planner.ilp import Program, solve

Ints = npt.NDArray[np.int64]

MOST_NODES = 200
"""Branch-and-bound nodes for the bound, which holds however early the solver stops."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Blocks:
    """What is to be arranged."""

    stages: int
    per_stage: int
    """Blocks of one stage: its data-parallel ring runs over them."""
    ring_bytes: float
    """Over one edge of a stage's ring in a step."""
    neighbour_bytes: float
    """Between the blocks of one replica in two adjacent stages in a step."""
    around_bytes: float = 0.0
    """The same from the last stage back to the first, where stages hold several chunks in turn."""

    @property
    def count(self) -> int:
        """All blocks."""
        return self.stages * self.per_stage


def uplink_bytes(blocks: Blocks, units: Ints) -> float:
    """Bytes of a step that leave a unit and enter another, one direction, for blocks on units.

    Args:
        blocks: what was arranged.
        units: unit of each block, shape (stages, per_stage). A ring over several units crosses as many edges, however
            it is ordered inside them.
    """
    touched = np.array([len(np.unique(row)) for row in units])
    crossings = int(np.where(touched > 1, touched, 0).sum())
    apart = int((units[1:] != units[:-1]).sum())
    around = int((units[-1] != units[0]).sum())
    return blocks.ring_bytes * crossings + blocks.neighbour_bytes * apart + blocks.around_bytes * around


def in_rank_order(blocks: Blocks, capacities: Ints) -> Ints:
    """Blocks on units as ranks count: stage after stage, unit after unit."""
    return np.repeat(np.arange(len(capacities)), capacities)[: blocks.count].reshape(blocks.stages, blocks.per_stage)


def best_arrangement(blocks: Blocks, capacities: Ints) -> Ints:
    """The cheapest of rank order and all aligned greedy arrangements: the unit of each block.

    Args:
        blocks: what to arrange.
        capacities: healthy blocks that each unit can hold; together at least as many as there are blocks.
    """
    candidates = [in_rank_order(blocks, capacities), *_aligned(blocks, capacities)]
    return min(candidates, key=lambda units: uplink_bytes(blocks, units))


def _aligned(blocks: Blocks, capacities: Ints) -> Iterator[Ints]:
    """Groups of 1, 2, 3 ... adjacent stages that share units, whole ones while there are blocks to spare."""
    by_size = np.argsort(-capacities, kind="stable")
    for order in (np.arange(len(capacities)), by_size, by_size[::-1]):
        for together in range(1, blocks.stages + 1):
            for whole_units in (False, True):
                yield _filled(blocks, capacities, order, together, whole_units=whole_units)
    for together in range(1, blocks.stages + 1):
        yield _whole_first(blocks, capacities, together)


def _whole_first(blocks: Blocks, capacities: Ints, together: int) -> Ints:
    """Put whole groups of stages into units that hold them, and the other groups into what is left, largest first."""
    result = np.zeros((blocks.stages, blocks.per_stage), dtype=np.int64)
    free, rest = capacities.copy(), []
    for first in range(0, blocks.stages, together):
        stages = np.arange(first, min(first + together, blocks.stages))
        need = len(stages) * blocks.per_stage
        fitting = np.flatnonzero(free >= need)
        if len(fitting):
            unit = fitting[np.argmin(free[fitting])]
            result[stages] = unit
            free[unit] -= need
        else:
            rest.append(stages)
    for stages in rest:
        column = [(int(stage), place) for place in range(blocks.per_stage) for stage in stages]
        for stage, place in column:
            unit = int(np.argmax(free)) if place == 0 or free[unit] == 0 else unit
            result[stage, place] = unit
            free[unit] -= 1
    return result


def _filled(blocks: Blocks, capacities: Ints, order: Ints, together: int, *, whole_units: bool) -> Ints:
    """Fill units in order with columns of ``together`` stages.

    A remainder of a unit too small for a column is left as spares while there are enough; with ``whole_units`` so is
    the rest of the last unit of a group of stages.
    """
    result = np.zeros((blocks.stages, blocks.per_stage), dtype=np.int64)
    spare, place = int(capacities.sum()) - blocks.count, 0
    free = int(capacities[order[0]])

    def next_unit() -> None:
        nonlocal place, free
        place += 1
        free = int(capacities[order[place]])

    for first in range(0, blocks.stages, together):
        stages = range(first, min(first + together, blocks.stages))
        if whole_units and first and 0 < free < capacities[order[place]] and free <= spare:
            spare -= free
            next_unit()
        for column in range(blocks.per_stage):
            if 0 < free < len(stages) and free <= spare:
                spare -= free
                free = 0
            for stage in stages:
                while free == 0:
                    next_unit()
                result[stage, column] = order[place]
                free -= 1
    return result


def least_bytes(blocks: Blocks, capacities: Ints) -> float:
    """No arrangement sends fewer bytes over uplinks: an integer program over patterns of a unit, and its dual bound.

    A pattern says how many whole stages a unit holds and how many parts of others. Each part ends one edge of a ring;
    whole stages end none. A unit with n blocks of k stages keeps at most n (k - 1) / k neighbours together: weigh
    ``w_i <= n_i`` by (k - i)/k and ``w_i <= n_(i+1)`` by i/k. What goes around is left out, and which parts meet in a
    unit is left open, so the program bounds every arrangement and need not describe one.
    """
    patterns = _patterns(blocks, capacities)
    scale = max(blocks.ring_bytes, blocks.neighbour_bytes, 1.0)  # a solver wants numbers near 1
    ring, near, whole_stage = blocks.ring_bytes / scale, blocks.neighbour_bytes / scale, blocks.per_stage
    size, whole, parts = (np.array(column, dtype=np.float64) for column in zip(*patterns, strict=True))
    together = (whole + parts - 1) / (whole + parts)
    held = np.minimum(size - whole * whole_stage, parts * whole_stage)
    sizes, counts = np.unique(capacities[capacities > 0], return_counts=True)
    limit = counts[np.searchsorted(sizes, size)].astype(np.float64)
    width, none = len(patterns), np.zeros(len(patterns))
    # columns: units of each pattern, blocks of parts in them, stages that lie in parts
    program = Program(
        costs=np.concatenate([ring * parts - near * together * whole * whole_stage, -near * together, [0.0]]),
        low=np.zeros(2 * width + 1),
        high=np.concatenate([limit, held * limit, [float(blocks.stages)]]),
        integer=np.concatenate([np.ones(width, dtype=bool), np.zeros(width, dtype=bool), [True]]),
        constant=near * whole_stage * (blocks.stages - 1),
    )
    for one, count in zip(sizes, counts, strict=True):
        program.add(np.concatenate([np.where(size == one, 1.0, 0.0), none, [0.0]]), right=float(count))
    for position in range(width):
        row = np.zeros(2 * width + 1)
        row[position], row[width + position] = -held[position], 1.0
        program.add(row, right=0.0)
    program.add(np.concatenate([whole, none, [1.0]]), left=float(blocks.stages), right=float(blocks.stages))
    program.add(np.concatenate([none, np.ones(width), [-float(whole_stage)]]), left=0.0, right=0.0)
    fewest = int(np.searchsorted(np.cumsum(np.sort(capacities)[::-1]), whole_stage) + 1)
    program.add(np.concatenate([parts, none, [-float(max(2, fewest))]]), left=0.0)
    return max(scale * solve(program, nodes=MOST_NODES, chain=("HiGHS",)).bound, 0.0)


def _patterns(blocks: Blocks, capacities: Ints) -> list[tuple[int, int, int]]:
    """Size of a unit, whole stages in it, parts of others."""
    return [
        (int(size), whole, parts)
        for size in np.unique(capacities[capacities > 0])
        for whole in range(min(int(size) // blocks.per_stage, blocks.stages) + 1)
        for parts in range(blocks.stages - whole + 1)
        if whole + parts > 0 and (parts == 0 or size > whole * blocks.per_stage)
    ]
