"""What a virtual stage may hold: how many layers of every run of the model, and which of them recompute.

A run is a maximal sequence of equal layers; a mix says how many layers of each kind recompute, and how.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, cached_property

import numpy as np
import numpy.typing as npt

from scenarios.layout import RECOMPUTES, Recompute, Stage
from simulator.pieces import Pieces

Floats = npt.NDArray[np.float64]
MODES: tuple[Recompute, ...] = ("full", "selective", "none")
"""In the order in which the layers of a stage take them."""

MAX_MIXES = 600
"""Mixes of one stage that are looked at; more are thinned evenly, and the certificate says so."""
MAX_PRODUCT = 20_000
"""Combinations of the mixes of several layer kinds before they are thinned."""
MOST_PAIRED = 1_000
"""Mixes that are compared in one array of pairs."""


@dataclass(frozen=True, slots=True)
class Run:
    """Equal layers in a row."""

    kind: str
    layers: int


def runs_of(pattern: tuple[str, ...]) -> tuple[Run, ...]:
    """Run-length code of a model's layers.

    >>> runs_of(("a", "a", "b"))
    (Run(kind='a', layers=2), Run(kind='b', layers=1))
    """
    found: list[Run] = []
    for kind in pattern:
        if found and found[-1].kind == kind:
            found[-1] = Run(kind, found[-1].layers + 1)
        else:
            found.append(Run(kind, 1))
    return tuple(found)


def windows(runs: tuple[Run, ...], low: int, high: int) -> list[tuple[int, ...]]:
    """Every number of layers of each run that a stage of ``low`` to ``high`` consecutive layers can hold."""
    ends = np.cumsum([run.layers for run in runs])
    starts = ends - [run.layers for run in runs]
    found = {
        tuple(int(one) for one in np.clip(np.minimum(start + count, ends) - np.maximum(start, starts), 0, None))
        for start in range(int(ends[-1]) + 1)
        for count in range(low, high + 1)
        if start + count <= ends[-1]
    }
    return sorted(found)


@dataclass(frozen=True, kw_only=True)
class Mixes:
    """Ways to recompute the layers of one window, one row each; seconds without embedding and head."""

    layers: Floats
    """Shape (mixes, columns of the pieces)."""
    forward: Floats
    backward: Floats
    weight: Floats
    saved: Floats
    again: Floats
    held: float
    dense: float
    expert: float
    thinned: bool

    @cached_property
    def slower(self) -> npt.NDArray[np.bool_]:
        """Shape (mixes, mixes): whether the first one's work leaves no reason, but memory, for the second one."""
        return undercut(np.column_stack([self.forward, self.backward - self.weight, self.weight]))

    def take(self, rows: npt.NDArray[np.int64]) -> Mixes:
        """Return some of the rows."""
        names = ("layers", "forward", "backward", "weight", "saved", "again")
        parts = {name: getattr(self, name)[rows] for name in names}
        return Mixes(**parts, held=self.held, dense=self.dense, expert=self.expert, thinned=self.thinned)


class Contents:
    """All mixes of all windows of one layout, computed once each."""

    def __init__(self, pieces: Pieces, runs: tuple[Run, ...]) -> None:
        self.pieces, self.runs = pieces, runs
        self.mixes = cache(self._mixes)
        self.thinned = False

    def _mixes(self, window: tuple[int, ...]) -> Mixes:
        pieces = self.pieces
        counts: dict[str, int] = {}
        for run, count in zip(self.runs, window, strict=True):
            counts[run.kind] = counts.get(run.kind, 0) + count
        layers, thinned = np.zeros((1, len(pieces.columns))), False
        for kind, count in counts.items():
            places = [i for i, column in enumerate(pieces.columns) if column.kind == kind]
            splits = np.array(_splits(count, len(places)), dtype=np.float64)
            own = np.zeros((len(splits), len(pieces.columns)))
            own[:, places] = splits
            own, fewer = self._thinned(own, MAX_PRODUCT // len(layers))
            layers = (layers[:, None] + own[None]).reshape(-1, len(pieces.columns))
            layers, least = self._thinned(layers, MAX_MIXES)
            thinned = thinned or fewer or least
        self.thinned = self.thinned or thinned
        whole = layers[0] if len(layers) else np.zeros(len(pieces.columns))
        return Mixes(
            layers=layers,
            forward=layers @ pieces.forward,
            backward=layers @ pieces.backward,
            weight=layers @ pieces.weight,
            saved=layers @ pieces.saved,
            again=np.where(layers > 0, pieces.again, 0.0).max(axis=1, initial=0.0),
            held=float(whole @ pieces.held),
            dense=float(whole @ pieces.dense),
            expert=float(whole @ pieces.expert),
            thinned=thinned,
        )

    def _thinned(self, layers: Floats, most: int) -> tuple[Floats, bool]:
        """Drop mixes than which another is as good in time and memory, and of the rest what is beyond the limit."""
        pieces = self.pieces
        again = np.where(layers > 0, pieces.again, 0.0).max(axis=1, initial=0.0)
        work = np.column_stack([layers @ pieces.forward, layers @ (pieces.backward - pieces.weight)])
        kept = layers[undominated(np.column_stack([work, layers @ pieces.weight, layers @ pieces.saved, again]))]
        if len(kept) <= most:
            return kept, False
        order = np.argsort(kept @ pieces.backward, kind="stable")
        return kept[order[np.unique(np.linspace(0, len(kept) - 1, most).astype(int))]], True


def undominated(points: Floats) -> npt.NDArray[np.int64]:
    """Rows that no other row equals or undercuts in every entry; of equal rows the first."""
    if len(points) <= MOST_PAIRED:
        return np.flatnonzero(~undercut(points).any(axis=0))
    tolerance = _tolerance(points)
    kept: list[int] = []
    for row in np.lexsort(points.T[::-1]):
        if not kept or not np.any(np.all(points[kept] <= points[row] + tolerance, axis=1)):
            kept.append(int(row))
    return np.array(sorted(kept), dtype=np.int64)


def undercut(points: Floats) -> npt.NDArray[np.bool_]:
    """Whether the first row equals or undercuts the second one in every entry; of equal rows the first does."""
    place = np.empty(len(points), dtype=np.int64)
    place[np.lexsort(points.T[::-1])] = np.arange(len(points))
    below = np.all(points[:, None] <= points[None] + _tolerance(points), axis=2)
    return np.asarray(below & (place[:, None] < place[None]))


def _tolerance(points: Floats) -> Floats:
    return np.asarray(1e-12 * np.abs(points).max(axis=0, initial=0.0))


def _splits(total: int, parts: int) -> list[tuple[int, ...]]:
    if parts == 1:
        return [(total,)]
    return [(first, *rest) for first in range(total + 1) for rest in _splits(total - first, parts - 1)]


def stage(pattern: tuple[str, ...], pieces: Pieces, layers: Floats, recompute: Recompute) -> Stage:
    """Spell out a stage that holds the layers of ``pattern``, so many of each column of the pieces.

    Within a kind the first layers recompute fully, the next selectively.
    """
    left: dict[tuple[str, Recompute], int] = {
        (column.kind, RECOMPUTES[column.recompute or 0]): round(float(count))
        for column, count in zip(pieces.columns, layers, strict=True)
    }
    letters = ""
    for kind in pattern:
        mode = next(mode for mode in MODES if left.get((kind, mode), 0) > 0)
        left[kind, mode] -= 1
        letters += mode[0]
    plain = Stage(layers=len(letters), recompute_layers=letters.count("f"))
    return plain if plain.modes(recompute) == letters else plain.model_copy(update={"recompute": letters})
