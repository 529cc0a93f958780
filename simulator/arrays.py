"""Many layouts side by side: one array per field, so that a whole space is priced in one go."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from scenarios.job import Job
from scenarios.layout import RECOMPUTES, SCHEDULES, SHARDINGS, Axis, ContextExchange, Layout, RecomputeModule

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]

DEGREES = ("tp", "cp", "pp", "vpp", "dp", "ep", "etp", "micro_batch_size")
"""The integer fields that a LayoutArrays shares with Layout."""

CHUNK_ROWS = 32_768
"""Rows of one pass over a large space: its arrays stay in the caches of a core."""

SHARED = ("rank_order", "recompute_modules", "dp_replicate", "cp_comm")
"""Fields that all rows of a LayoutArrays have in common."""

DEFAULT_RANK_ORDER: tuple[Axis, ...] = ("tp", "cp", "ep", "dp", "pp")


@dataclass(frozen=True, slots=True, kw_only=True)
class Distinct:
    """Rows of an array that are alike."""

    first: Ints
    """One row of each kind."""
    index: Ints
    """The kind of each row."""


def every_row(count: int) -> Distinct:
    """Take every row as a kind of its own."""
    return Distinct(first=np.arange(count), index=np.arange(count))


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutArrays:
    """Layouts as arrays of equal length, one row each; the stages are always split by the uniform rule.

    ``sharding``, ``schedule`` and ``recompute`` are indices into SHARDINGS, SCHEDULES and RECOMPUTES. All rows share
    ``rank_order``, ``recompute_modules``, ``dp_replicate`` and ``cp_comm``.
    """

    tp: Ints
    cp: Ints
    pp: Ints
    vpp: Ints
    dp: Ints
    ep: Ints
    etp: Ints
    micro_batch_size: Ints
    sequence_parallel: Bools
    sharding: Ints
    schedule: Ints
    recompute: Ints
    rank_order: tuple[Axis, ...] = DEFAULT_RANK_ORDER
    recompute_modules: tuple[RecomputeModule, ...] = ("core_attn",)
    dp_replicate: int = 1
    cp_comm: ContextExchange = "ring"

    @classmethod
    def of(cls, layouts: Sequence[Layout]) -> LayoutArrays:
        """Lay layouts side by side; their explicit stages are left behind.

        Raises:
            ValueError: no layouts, or layouts that differ in what the rows of an array share.
        """
        shared = {tuple(getattr(layout, name) for name in SHARED) for layout in layouts}
        if len(shared) != 1:
            raise ValueError(f"layouts of one array share their {', '.join(SHARED)}; found {len(shared)} combinations")
        columns: dict[str, Any] = {
            name: np.array([getattr(layout, name) for layout in layouts], dtype=np.int64) for name in DEGREES
        }
        return cls(
            **columns,
            sequence_parallel=np.array([layout.sequence_parallel for layout in layouts], dtype=np.bool_),
            sharding=np.array([SHARDINGS.index(layout.optimizer_sharding) for layout in layouts], dtype=np.int64),
            schedule=np.array([SCHEDULES.index(layout.schedule) for layout in layouts], dtype=np.int64),
            recompute=np.array([RECOMPUTES.index(layout.recompute) for layout in layouts], dtype=np.int64),
            **dict(zip(SHARED, next(iter(shared)), strict=True)),
        )

    def __len__(self) -> int:
        return len(self.tp)

    def row(self, index: int) -> Layout:
        """Return one row as a Layout."""
        degrees: dict[str, Any] = {name: int(getattr(self, name)[index]) for name in DEGREES}
        return Layout(
            **degrees,
            sequence_parallel=bool(self.sequence_parallel[index]),
            optimizer_sharding=SHARDINGS[self.sharding[index]],
            schedule=SCHEDULES[self.schedule[index]],
            recompute=RECOMPUTES[self.recompute[index]],
            **{name: getattr(self, name) for name in SHARED},
        )

    def take(self, rows: Ints | Bools | slice) -> LayoutArrays:
        """Return the rows that an index array, a mask or a slice selects."""
        columns = {one.name: getattr(self, one.name)[rows] for one in fields(self) if one.name not in SHARED}
        return replace(self, **columns)

    def alike(self) -> Distinct:
        """Find the rows that send the same: of equal degrees, micro-batch, sequence parallelism and sharding."""
        names = ("tp", "cp", "pp", "dp", "ep", "etp", "micro_batch_size", "sequence_parallel", "sharding")
        key, kinds = np.zeros(len(self), dtype=np.int64), 1
        for name in names:
            column = getattr(self, name).astype(np.int64)
            size = int(column.max()) + 1
            key, kinds = key * size + column, kinds * size
        if len(self) == 1 or kinds >= 2**63:
            return every_row(len(self))
        _, first, index = np.unique(key, return_index=True, return_inverse=True)
        return Distinct(first=first, index=index)

    @property
    def world_size(self) -> Ints:
        """GPUs that each layout uses."""
        return self.tp * self.cp * self.pp * self.dp

    def num_microbatches(self, job: Job) -> Ints:
        """Micro-batches that each replica runs per step.

        Raises:
            ValueError: the global batch does not divide in one of the rows.
        """
        per_round = self.dp * self.micro_batch_size
        count = job.global_batch_size // per_round
        wrong = np.flatnonzero((count * per_round != job.global_batch_size) | (count == 0))
        if len(wrong):
            row = int(wrong[0])
            raise ValueError(
                f"global batch {job.global_batch_size} is not a multiple of dp {self.dp[row]} x micro-batch "
                f"{self.micro_batch_size[row]} in row {row}"
            )
        return count
