"""Fitting the free parameters to published runs: a robust maximum a posteriori fit inside physical ranges.

Residual of a row: the log of predicted over measured; rows of a large source count less each (n^-1/4), outliers count
linearly (soft L1), and every parameter is pulled to what was known before. A whole Jacobian costs one pass over the
rows, because the closed form takes arrays: one row of arrays for each parameter that is moved a little.
"""

from __future__ import annotations

import io
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import Field
from ruamel.yaml import YAML
from scipy.optimize import least_squares

from simulator.arrays import Bools, Floats
from simulator.confidence import evidence_key
from simulator.parameters import SHIPPED, BytesParameter, Parameter, Parameters, SecondsParameter, shipped_parameters
from simulator.published import PublishedRun
from simulator.published_cases import Case, cases
from simulator.trials import Subject, predicted, prepare
from topologies.document import Document, FileDocument, load
from topologies.errors import InputError
from topologies.units import parse_quantity

PRIORS = Path(__file__).parent / "priors.yaml"

ROW_SPREAD = 0.1
"""Error of a row that counts as one standard deviation."""
SOFT_FROM = 0.7
"""Standard deviations from which a residual counts linearly."""
SOURCE_WEIGHT = -0.25
"""Power of the number of rows of a source that weighs each of them."""
STEP = 1e-4
"""Difference of the numeric derivatives, in standard deviations of the prior."""

FROM_BOUNDS = 0.1
"""A fit starts at least so far inside the ranges (standard deviations of the prior), where steps are not cut short."""
CHORD_STEPS = 3
"""Steps of the fits that leave a source out."""


class Prior(Document):
    """What was known about a parameter before the fit."""

    prior: float | str
    """A number, or a quantity with its unit."""
    spread: float = Field(gt=0)
    reason: str = Field(min_length=1)

    @property
    def value(self) -> float:
        """In SI units."""
        if isinstance(self.prior, float):
            return self.prior
        dimension = "seconds" if self.prior.rstrip().endswith("s") else "bytes"
        return parse_quantity(self.prior, dimension)


class Priors(FileDocument):
    """The free parameters, by dotted name."""

    free: dict[str, Prior] = Field(min_length=1)


@cache
def shipped_priors() -> Priors:
    """Return the priors that headway ships."""
    return load(PRIORS, Priors)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """Fitted parameters."""

    parameters: Parameters
    values: dict[str, float]
    """Of the free parameters, in SI units."""
    rows: int
    """That it rests on."""
    sources: int
    errors: Floats
    """Predicted over measured less one, of every row that was given (also those that a fit leaves out)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """Rows, and the free parameters as x: standard deviations of the log from the prior."""

    subjects: list[Subject]
    sources: tuple[str, ...]
    """Of each row."""
    measured: Floats
    """Log of seconds."""
    base: Parameters
    names: tuple[str, ...]
    centre: Floats
    spread: Floats
    low: Floats
    high: Floats

    def weights(self, rows: Bools) -> Floats:
        """How much each of the chosen rows counts."""
        counts = Counter(source for source, chosen in zip(self.sources, rows, strict=True) if chosen)
        chosen = [source for source, taken in zip(self.sources, rows, strict=True) if taken]
        return np.array([counts[source] ** SOURCE_WEIGHT for source in chosen]) / ROW_SPREAD

    def logs(self, points: Floats) -> Floats:
        """Log of predicted over measured: shape (rows, points), for points of shape (points, parameters)."""
        values = np.exp(self.centre + self.spread * points)
        times = predicted(self.subjects, self.base, {name: values[:, i] for i, name in enumerate(self.names)})
        return np.asarray(np.log(times) - self.measured[:, None])

    def slopes(self, x: Floats) -> tuple[Floats, Floats]:
        """Logs at x, and their derivatives: shapes (rows,) and (rows, parameters)."""
        logs = self.logs(np.vstack([x, x + STEP * np.eye(len(x))]))
        return logs[:, 0], (logs[:, 1:] - logs[:, :1]) / STEP

    def fit(self, x: Floats, rows: Bools, errors: Floats) -> Fit:
        """Wrap up a solution."""
        known = dict(self.base.items())
        values = {
            name: min(max(float(value), known[name].low), known[name].high)
            for name, value in zip(self.names, np.exp(self.centre + self.spread * x), strict=True)
        }
        sources = {source for source, chosen in zip(self.sources, rows, strict=True) if chosen}
        evidence = Counter(
            evidence_key(one.case.cluster, one.case.job)
            for one, chosen in zip(self.subjects, rows, strict=True)
            if chosen
        )
        evidence.update(
            f"on {one.case.cluster.gpu.name}" for one, chosen in zip(self.subjects, rows, strict=True) if chosen
        )
        return Fit(
            parameters=self.base.with_values(values).model_copy(update={"evidence": dict(evidence)}),
            values=values,
            rows=int(rows.sum()),
            sources=len(sources),
            errors=errors,
        )


def fit_published(
    runs: Sequence[PublishedRun], *, parameters: Parameters | None = None, priors: Priors | None = None
) -> Fit:
    """Fit the free parameters to the counted rows of published runs.

    Args:
        runs: rows; those that are not counted or cannot be predicted are left out.
        parameters: gives the ranges and all that is not free; default: the shipped ones.
        priors: the free parameters, where the fit starts; default: the shipped ones.

    Raises:
        InputError: no row can be used.
    """
    known, _ = cases([run for run in runs if run.counted])
    return fit_cases(known, parameters=parameters, priors=priors)


def fit_cases(known: Sequence[Case], *, parameters: Parameters | None = None, priors: Priors | None = None) -> Fit:
    """Fit to rows that are already translated; see ``fit_published``."""
    problem = _problem(known, parameters, priors)
    rows = np.ones(len(known), dtype=np.bool_)
    x, logs, _ = _solution(problem, rows)
    return problem.fit(x, rows, np.expm1(logs))


def fit_without_each_source(
    known: Sequence[Case], *, parameters: Parameters | None = None, priors: Priors | None = None
) -> dict[str, Fit]:
    """Fit once for each source, to the rows of all others.

    Each fit starts where the fit to all rows ended and keeps its derivatives; residuals are exact. All fits take their
    steps together, in one pass over the rows.
    """
    problem = _problem(known, parameters, priors)
    everything = np.ones(len(known), dtype=np.bool_)
    x, logs, jacobian = _solution(problem, everything)
    names = sorted(set(problem.sources))
    kept = [np.array([source != name for source in problem.sources]) for name in names]
    points, at = np.tile(x, (len(names), 1)), np.tile(logs[:, None], (1, len(names)))
    for _ in range(CHORD_STEPS):
        points = np.array(
            [_linear(problem, rows, at[:, i], jacobian, points[i]) for i, rows in enumerate(kept) if rows.any()]
        )
        at = problem.logs(points)
    return {
        name: problem.fit(points[i], rows, np.expm1(at[:, i]))
        for i, (name, rows) in enumerate(zip(names, kept, strict=True))
    }


def _problem(known: Sequence[Case], parameters: Parameters | None, priors: Priors | None) -> Problem:
    if not known:
        raise InputError("no row can be used for a fit", hint="give published runs with complete configurations")
    base, free = parameters or shipped_parameters(), (priors or shipped_priors()).free
    ranges, names = dict(base.items()), tuple(free)
    unknown = next((name for name in names if name not in ranges), None)
    if unknown is not None:
        raise InputError(f"{unknown!r} is not a parameter", key="free")
    centre = np.log([free[name].value for name in names])
    spread = np.array([free[name].spread for name in names])
    low, high = ((np.log([getattr(ranges[n], end) for n in names]) - centre) / spread for end in ("low", "high"))
    return Problem(
        subjects=prepare(known),
        sources=tuple(case.run.source_group for case in known),
        measured=np.log([case.measured_seconds for case in known]),
        base=base,
        names=names,
        centre=centre,
        spread=spread,
        low=low,
        high=high,
    )


def _solution(problem: Problem, rows: Bools) -> tuple[Floats, Floats, Floats]:
    """Solve for x; also the logs and their derivatives there."""
    weights = problem.weights(rows)
    latest: dict[bytes, tuple[Floats, Floats]] = {}

    def at(x: Floats) -> tuple[Floats, Floats]:
        key = x.tobytes()
        if key not in latest:
            latest.clear()
            latest[key] = problem.slopes(x)
        return latest[key]

    x = _least_squares(
        problem,
        lambda x: np.concatenate([weights * at(x)[0][rows], x]),
        lambda x: np.vstack([weights[:, None] * at(x)[1][rows], np.eye(len(x))]),
        np.zeros(len(problem.names)),
    )
    return x, *at(x)


def _linear(problem: Problem, rows: Bools, logs: Floats, jacobian: Floats, around: Floats) -> Floats:
    """Solve for x with the logs taken as linear around a point."""
    weights = problem.weights(rows)
    slopes, here = weights[:, None] * jacobian[rows], weights * logs[rows]
    rigid = np.vstack([slopes, np.eye(len(around))])
    return _least_squares(problem, lambda x: np.concatenate([here + slopes @ (x - around), x]), lambda x: rigid, around)


def _least_squares(
    problem: Problem, residuals: Callable[[Floats], Floats], jacobian: Callable[[Floats], Floats], start: Floats
) -> Floats:
    margin = np.minimum(FROM_BOUNDS, FROM_BOUNDS * (problem.high - problem.low))
    found = least_squares(
        residuals,
        np.clip(start, problem.low + margin, problem.high - margin),
        jac=jacobian,
        bounds=(problem.low, problem.high),
        loss="soft_l1",
        f_scale=SOFT_FROM,
        xtol=1e-5,
        ftol=1e-6,
        max_nfev=60,
    )
    return np.asarray(found.x)


def fit_json(fit: Fit, priors: Priors | None = None) -> dict[str, Any]:
    """Return a fit as plain data: each free parameter with its range and its prior, in SI units."""
    known, free = dict(fit.parameters.items()), (priors or shipped_priors()).free
    absolute = np.abs(fit.errors)
    return {
        "rows": fit.rows,
        "sources": fit.sources,
        "parameters": {
            name: {
                "value": value,
                "low": known[name].low,
                "high": known[name].high,
                "prior": free[name].value,
                "spread": free[name].spread,
                "reason": free[name].reason,
            }
            for name, value in fit.values.items()
        },
        "summary": {"mape": float(absolute.mean()), "median_ape": float(np.median(absolute))},
    }


def parameters_text(fit: Fit, base: Path = SHIPPED) -> str:
    """Return a parameters file with the fitted values in place of those of ``base``, comments and ranges kept."""
    yaml = YAML(typ="rt")
    yaml.width = 4096
    yaml.preserve_quotes = True
    content = yaml.load(base.read_text(encoding="utf-8"))
    known = dict(fit.parameters.items())
    content["evidence"] = dict(sorted(fit.parameters.evidence.items()))
    for name in fit.values:
        *path, last = name.split(".")
        place = content
        for part in path:
            place = place[part]
        place[last]["value"] = _written(known[name])
    stream = io.StringIO()
    yaml.dump(content, stream)
    return stream.getvalue()


def _written(parameter: Parameter) -> float | str:
    """Three digits, with the unit that the file wants."""
    value = float(f"{parameter.value:.3g}")
    if isinstance(parameter, SecondsParameter):
        return f"{float(f'{1e3 * value:.3g}'):g} ms"
    return f"{value / 2**20:.3g} MiB" if isinstance(parameter, BytesParameter) else value
