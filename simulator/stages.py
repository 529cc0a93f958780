"""Which layers lie on which pipeline rank: the uniform rule, explicit stages, and tables of layer counts for arrays.

A table row is a rank's profile: layers of each column, and whether the embedding and the head lie there. A column is a
layer kind, or a layer kind whose forward is recomputed. Times are linear in the profile, so the slowest rank of every
layout is found by multiplying few profiles with the times of the columns.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from scenarios.layout import RECOMPUTES, SCHEDULES, Layout, Recompute, Schedule
from scenarios.model import ModelSpec
from simulator.arrays import Floats, Ints, LayoutArrays
from simulator.schedule import stage_rank

ONE_F_ONE_B = SCHEDULES.index("1f1b")
LETTERS: dict[str, Recompute] = {"f": "full", "s": "selective", "n": "none"}
"""The letters of ``Stage.recompute``."""


def stage_layers(num_layers: int, pp: int, vpp: int, tail_layers: int = 0) -> tuple[int, ...]:
    """Split layers over ``pp * vpp`` virtual stages, in model order: equal, the slots to spare taken from the ends.

    ``tail_layers`` slots are first kept free on the last stage, for what else it computes (multi-token prediction).

    >>> stage_layers(126, 16, 1)
    (7, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 7)
    """
    count = pp * vpp
    size = -(-(num_layers + tail_layers) // count)
    stages = [size] * count
    spare = size * count - num_layers
    tail = min(tail_layers, size, spare)
    stages[-1] -= tail
    spare -= tail
    inward = [end for i in range((count + 1) // 2) for end in dict.fromkeys((count - 1 - i, i))]
    if tail:
        inward = inward[1:] + inward[:1]
    while spare:
        for stage in inward:
            taken = min(1, spare, stages[stage])
            stages[stage] -= taken
            spare -= taken
    return tuple(stages)


def tail_layers(model: ModelSpec) -> int:
    """Slots that the last stage gives up: each prediction depth beyond the first token adds a layer and a head.

    Three of them, as the pipeline layouts of the DeepSeek-V3 recipes of Megatron-Bridge do (4, ..., 4, 1 + MTP + loss).
    """
    return 3 * model.mtp_layers


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """A layer kind, and whether its forward is recomputed (None: as the layout says)."""

    kind: str
    recompute: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Counts of layers of every column on every virtual stage of one pipeline, and the rank that holds each stage."""

    counts: Ints
    """Shape (stages, columns)."""
    ranks: Ints
    """Shape (stages,)."""
    mirrored: bool
    """Bidirectional DualPipe: a rank also holds the mirrored stage, which sees the other half of the micro-batches."""

    @property
    def pp(self) -> int:
        """Pipeline ranks."""
        return int(self.ranks.max()) + 1


@dataclass(frozen=True, slots=True, kw_only=True)
class StageTables:
    """Profiles of the ranks of every distinct pipeline, padded with zeros, and which pipeline each layout has."""

    columns: tuple[Column, ...]
    index: Ints
    """Shape (layouts,): row of the tables."""
    busy: Floats
    """Shape (pipelines, profiles, columns + 2): ranks that can be the slowest; the last two are embedding and head."""
    chunks: Floats
    """Shape (pipelines, profiles, 3, columns): layers in the first, the middle and the last chunk of ranks that can be
    the fullest."""
    ends: Floats
    """Shape (pipelines, profiles, 2): embedding and head on these ranks."""
    ranks: Floats
    """Shape (pipelines, profiles): their pipeline rank; -1 pads."""
    totals: Floats
    """Shape (columns,): layers of the whole model."""


@lru_cache(maxsize=4096)
def _uniform_placement(pattern: tuple[str, ...], tail: int, schedule: Schedule, pp: int, vpp: int) -> Placement:
    sizes = stage_layers(len(pattern), pp, vpp, tail)
    kinds = list(dict.fromkeys(pattern))
    column = np.array([kinds.index(name) for name in pattern])
    counts = np.zeros((pp * vpp, len(kinds)), dtype=np.int64)
    np.add.at(counts, (np.repeat(np.arange(pp * vpp), sizes), column), 1)
    return _placed(counts, schedule, pp, vpp)


def _placed(counts: Ints, schedule: Schedule, pp: int, vpp: int) -> Placement:
    ranks = np.array([stage_rank(schedule, pp, vpp, stage) for stage in range(pp * vpp)])
    return Placement(counts=counts, ranks=ranks, mirrored=schedule == "dualpipe" and vpp == 1 and pp > 1)


def uniform_columns(model: ModelSpec) -> tuple[Column, ...]:
    """The layer kinds in order of appearance, recompute as the layout says."""
    return tuple(Column(kind=kind) for kind in dict.fromkeys(model.pattern))


def uniform_tables(model: ModelSpec, layouts: LayoutArrays) -> StageTables:
    """Apply the uniform rule to every row."""
    key = (layouts.pp * (int(layouts.vpp.max()) + 1) + layouts.vpp) * len(SCHEDULES)
    key = key + np.where(layouts.pp > 1, layouts.schedule, ONE_F_ONE_B)
    _, first, index = np.unique(key, return_index=True, return_inverse=True)
    pattern, tail = model.pattern, tail_layers(model)
    placements = [
        _uniform_placement(pattern, tail, SCHEDULES[layouts.schedule[row]], int(layouts.pp[row]), int(layouts.vpp[row]))
        for row in first
    ]
    return _tables(placements, uniform_columns(model), index)


def explicit_columns(model: ModelSpec, layout: Layout) -> tuple[Column, ...]:
    """The columns of explicit stages: one for each kind and each recompute mode where layers differ in it."""
    if not any(stage.recompute_layers or stage.recompute for stage in layout.stages):
        return uniform_columns(model)
    used = set("".join(stage.modes(layout.recompute) for stage in layout.stages))
    return tuple(
        Column(kind=kind, recompute=RECOMPUTES.index(mode))
        for letter, mode in LETTERS.items()
        if letter in used
        for kind in dict.fromkeys(model.pattern)
    )


def explicit_placement(model: ModelSpec, layout: Layout) -> Placement:
    """Count the layers of the stages that a layout spells out.

    Raises:
        ValueError: the stages are not pp x vpp, or do not hold all layers.
    """
    if len(layout.stages) != layout.pp * layout.vpp:
        raise ValueError(f"{len(layout.stages)} stages are given for pp {layout.pp} x vpp {layout.vpp}")
    total = sum(stage.layers for stage in layout.stages)
    if total != model.num_layers:
        raise ValueError(f"the stages hold {total} layers, the model has {model.num_layers}")
    columns = explicit_columns(model, layout)
    counts = np.zeros((len(layout.stages), len(columns)), dtype=np.int64)
    layer = 0
    place = {(column.kind, column.recompute): index for index, column in enumerate(columns)}
    for row, stage in enumerate(layout.stages):
        for letter in stage.modes(layout.recompute):
            kind = model.pattern[layer]
            mode = RECOMPUTES.index(LETTERS[letter])
            counts[row, place.get((kind, mode), place.get((kind, None)))] += 1
            layer += 1
    return _placed(counts, layout.schedule, layout.pp, layout.vpp)


def placement(model: ModelSpec, layout: Layout) -> tuple[tuple[Column, ...], Placement]:
    """Place the layers of one layout: its explicit stages, or the uniform rule."""
    if layout.stages:
        return explicit_columns(model, layout), explicit_placement(model, layout)
    schedule = layout.schedule if layout.pp > 1 else "1f1b"
    return uniform_columns(model), _uniform_placement(
        model.pattern, tail_layers(model), schedule, layout.pp, layout.vpp
    )


def layout_tables(model: ModelSpec, layout: Layout) -> StageTables:
    """Tables of one layout."""
    columns, placed = placement(model, layout)
    return _tables([placed], columns, np.zeros(1, dtype=np.int64))


def rank_profiles(placed: Placement) -> Floats:
    """Work of every rank per micro-batch: shape (ranks, columns + 2)."""
    stages, columns = placed.counts.shape
    work = np.zeros((stages, columns + 2))
    work[:, :columns] = placed.counts
    work[0, columns] = 1.0
    work[-1, columns + 1] = 1.0
    profiles = np.zeros((placed.pp, columns + 2))
    np.add.at(profiles, placed.ranks, work)
    return (profiles + profiles[::-1]) / 2.0 if placed.mirrored else profiles


def rank_chunks(placed: Placement) -> tuple[Floats, Floats]:
    """Layers of every rank by chunk (ranks, 3, columns), and the ends on it (ranks, 2)."""
    stages, columns = placed.counts.shape
    chunks, ends = np.zeros((placed.pp, 3, columns)), np.zeros((placed.pp, 2))
    seen = np.zeros(placed.pp, dtype=np.int64)
    per_rank = stages // placed.pp
    for stage in range(stages):
        rank = placed.ranks[stage]
        place = 0 if seen[rank] == 0 else 2 if seen[rank] == per_rank - 1 else 1
        chunks[rank, place] += placed.counts[stage]
        seen[rank] += 1
    ends[placed.ranks[0], 0] = 1.0
    ends[placed.ranks[-1], 1] = 1.0
    if placed.mirrored:
        chunks[:, 2] = chunks[::-1, 0]
        ends = ends + ends[::-1]
    return chunks, ends


@lru_cache(maxsize=4096)
def _pruned(key: bytes, shape: tuple[int, int], ranks: bytes, mirrored: bool) -> tuple[Floats, Floats, Floats, Floats]:
    placed = Placement(
        counts=np.frombuffer(key, dtype=np.int64).reshape(shape),
        ranks=np.frombuffer(ranks, dtype=np.int64),
        mirrored=mirrored,
    )
    busy = _undominated(rank_profiles(placed))
    chunks, ends = rank_chunks(placed)
    rank = np.arange(placed.pp, dtype=np.float64)
    folded = placed.mirrored or (len(placed.ranks) == 2 * placed.pp and placed.ranks[-1] == 0)
    uneven = np.any(chunks[:, 0] != chunks[:, 2], axis=1)
    # where stages lie folded, a later rank holds more of its last chunk: it is not less full than an earlier one
    later = np.where(uneven & folded, rank, placed.pp)
    kept = _undominated(np.column_stack([chunks.reshape(placed.pp, -1), ends, -rank, later]))
    size = chunks[0].size
    return busy, kept[:, :size].reshape(len(kept), 3, -1), kept[:, size : size + 2], -kept[:, -2]


def _undominated(profiles: Floats) -> Floats:
    """Rows that no other row equals or exceeds in every entry."""
    kept: list[Floats] = []
    for row in sorted(np.unique(profiles, axis=0), key=lambda one: -float(one.sum())):
        if not any(np.all(other >= row) for other in kept):
            kept.append(row)
    return np.array(kept)


def _tables(placements: list[Placement], columns: tuple[Column, ...], index: Ints) -> StageTables:
    parts = [_pruned(p.counts.tobytes(), p.counts.shape, p.ranks.tobytes(), p.mirrored) for p in placements]
    return StageTables(
        columns=columns,
        index=index.reshape(-1),
        busy=_padded([part[0] for part in parts], 0.0),
        chunks=_padded([part[1] for part in parts], 0.0),
        ends=_padded([part[2] for part in parts], 0.0),
        ranks=_padded([part[3] for part in parts], -1.0),
        totals=placements[0].counts.sum(axis=0).astype(np.float64),
    )


def every_rank(columns: tuple[Column, ...], placed: Placement) -> StageTables:
    """Tables of one layout that keep all of its ranks, in order."""
    chunks, ends = rank_chunks(placed)
    return StageTables(
        columns=columns,
        index=np.zeros(1, dtype=np.int64),
        busy=rank_profiles(placed)[None],
        chunks=chunks[None],
        ends=ends[None],
        ranks=np.arange(placed.pp, dtype=np.float64)[None],
        totals=placed.counts.sum(axis=0).astype(np.float64),
    )


def _padded(tables: list[Floats], fill: float) -> Floats:
    size = max(len(table) for table in tables)
    padded = np.full((len(tables), size, *tables[0].shape[1:]), fill)
    for row, table in enumerate(tables):
        padded[row, : len(table)] = table
    return padded
