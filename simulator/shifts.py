"""What a few measured runs of a stack bring: predictions of published runs, shifted by others of the same stack.

The published counterpart of ``headway calibrate --runs``: some rows of a source, GPU, precision and kind of model play
the user's measured runs, the rest is predicted with the offset that they give.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from simulator.arrays import Floats
from simulator.offsets import shrunk_offset
from simulator.validation import Prediction

LEAST_ROWS = 6
"""Rows that a group needs to play both parts."""
DRAWS = 40
"""Random choices of the runs for each group."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shifted:
    """Errors of the rows that were not chosen, before and after."""

    runs: int
    """Measured runs that the offset rests on."""
    groups: int
    median_ape_before: float
    mape_before: float
    median_ape: float
    mape: float
    mape_at_face_value: float
    """If the offset were believed whole."""


def shifted(predictions: Sequence[Prediction], runs: int, seed: int = 0) -> Shifted:
    """Draw ``runs`` rows of every large enough group and predict the others with the offset of these.

    Raises:
        ValueError: no group has enough rows.
    """
    groups = _groups(predictions)
    if not groups:
        raise ValueError(f"no group of one source, GPU, precision and kind has {LEAST_ROWS} rows")
    generator = np.random.default_rng(seed)
    before, after, believed = [], [], []
    for times in groups:
        for _ in range(DRAWS):
            order = generator.permutation(len(times))
            chosen, rest = times[order[:runs]], times[order[runs:]]
            offset = shrunk_offset(chosen[:, 0].tolist(), chosen[:, 1].tolist())
            ratio = rest[:, 0] / rest[:, 1]
            before.append(np.abs(ratio - 1.0))
            after.append(np.abs(ratio * offset.factor - 1.0))
            believed.append(np.abs(ratio * offset.at_face_value - 1.0))
    old, new, whole = (np.concatenate(one) for one in (before, after, believed))
    return Shifted(
        runs=runs,
        groups=len(groups),
        median_ape_before=float(np.median(old)),
        mape_before=float(old.mean()),
        median_ape=float(np.median(new)),
        mape=float(new.mean()),
        mape_at_face_value=float(whole.mean()),
    )


def _groups(predictions: Sequence[Prediction]) -> list[Floats]:
    """Predicted and measured seconds, shape (rows, 2), of every group of at least ``LEAST_ROWS`` rows."""
    groups: dict[tuple[object, ...], list[tuple[float, float]]] = defaultdict(list)
    for one in predictions:
        run = one.case.run
        key = (run.source_group, run.hardware.get("gpu"), run.precision.get("dtype"), run.task, run.kind)
        groups[key].append((one.seconds, one.case.measured_seconds))
    return [np.array(times) for times in groups.values() if len(times) >= LEAST_ROWS]
