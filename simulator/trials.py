"""The closed form of many rows under many sets of parameter values: one pass of arrays for each row."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from pydantic import BaseModel

from simulator.arrays import Floats, LayoutArrays
from simulator.evaluation import evaluate
from simulator.parameters import Parameter, Parameters
from simulator.published_cases import Case
from simulator.stages import StageTables, layout_tables


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """One row, prepared: everything that no parameter changes."""

    case: Case
    layouts: LayoutArrays
    tables: StageTables


def prepare(known: Sequence[Case]) -> list[Subject]:
    """Lay out what no parameter changes, once."""
    return [
        Subject(case=case, layouts=LayoutArrays.of([case.layout]), tables=layout_tables(case.job.model, case.layout))
        for case in known
    ]


def predicted(subjects: Sequence[Subject], base: Parameters, values: Mapping[str, Floats]) -> Floats:
    """Step seconds of every row under every set of values: shape (rows, sets).

    ``values`` maps dotted names to one value for each set; all other parameters are those of ``base``.
    """
    count = len(next(iter(values.values())))
    moved = with_arrays(base, values)
    same = np.zeros(count, dtype=np.int64)
    steps = []
    for one in subjects:
        layouts, tables = one.layouts.take(same), replace(one.tables, index=same)
        steps.append(evaluate(one.case.cluster, one.case.job, layouts, tables, moved).step.total_seconds)
    return np.array(steps)


def with_arrays(base: Parameters, values: Mapping[str, Floats]) -> Parameters:
    """Return parameters whose values are arrays, for the closed form only: nothing is checked."""
    content: dict[str, Any] = {name: getattr(base, name) for name in Parameters.model_fields}
    for name, array in values.items():
        *path, last = name.split(".")
        place = content
        for part in path:
            place[part] = dict(place[part])
            place = place[part]
        place[last] = _with_array(place[last], array)
    return base.model_copy(update=content)


def _with_array(parameter: BaseModel, array: Floats) -> Parameter:
    copied = parameter.model_copy(update={"value": array})
    assert isinstance(copied, Parameter)
    return copied
