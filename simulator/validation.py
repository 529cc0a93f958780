"""How far predictions are from published, measured runs: errors, a baseline to beat, and the ranking of layouts."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from simulator.arrays import Floats
from simulator.compute import rates
from simulator.confidence import band_name
from simulator.parameters import Parameters, shipped_parameters
from simulator.published import PublishedRun
from simulator.published_cases import Case, Skipped, cases
from simulator.step import predict_step

PAIR_DIFFERENCE = 0.01
"""Layouts whose measured steps differ by less are not put in order."""
LEAST_LAYOUTS = 3
"""Layouts that make a group worth ranking."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """One row: what was predicted, and what was measured."""

    case: Case
    seconds: float
    low_seconds: float
    high_seconds: float
    basis: tuple[str, ...]
    band: str = ""
    """Kind of run that the band is that of."""

    @property
    def error(self) -> float:
        """Predicted over measured, less one."""
        return self.seconds / self.case.measured_seconds - 1.0

    @property
    def within_band(self) -> bool:
        """The measured step lies in the 80 % band."""
        return self.low_seconds <= self.case.measured_seconds <= self.high_seconds

    def as_json(self) -> dict[str, Any]:
        """Plain data with stable keys."""
        run = self.case.run
        return {
            "id": run.id,
            "source": run.source_group,
            "predicted_step_seconds": self.seconds,
            "measured_step_seconds": self.case.measured_seconds,
            "error": self.error,
            "step_seconds_low": self.low_seconds,
            "step_seconds_high": self.high_seconds,
            "within_band": self.within_band,
            "band": self.band,
            "counted": run.counted,
            "gpu": run.hardware.get("gpu"),
            "gpus": run.hardware.get("gpus"),
            "precision": run.precision.get("dtype"),
            "kind": run.kind,
            "task": run.task,
            "layout": self.case.layout.label(),
            "assumptions": list(self.case.assumptions),
            "stack": self.case.job.stack.model_dump(exclude_none=True),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """Errors of a set of rows; ``bias`` is the signed median."""

    n: int
    mape: float
    median_ape: float
    p90_ape: float
    bias: float
    within_band: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RankedGroup:
    """Layouts of one job on one cluster, measured by one source."""

    name: str
    layouts: int
    regret: float
    """Measured step of the layout that is predicted to be best, over the best measured, less one."""
    pairs: int
    ordered: int
    """Pairs that the prediction puts in the measured order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranking:
    """All groups with at least three layouts."""

    groups: tuple[RankedGroup, ...]

    @property
    def pairs_ordered(self) -> float | None:
        """Share of the pairs of all groups; None without pairs."""
        pairs = sum(group.pairs for group in self.groups)
        return sum(group.ordered for group in self.groups) / pairs if pairs else None

    @property
    def mean_regret(self) -> float | None:
        """Mean over the groups."""
        return float(np.mean([group.regret for group in self.groups])) if self.groups else None

    @property
    def worst_regret(self) -> float | None:
        """Largest of the groups."""
        return max((group.regret for group in self.groups), default=None)

    def as_json(self) -> dict[str, Any]:
        """Plain data with stable keys."""
        each = [
            {
                "name": group.name,
                "layouts": group.layouts,
                "regret": group.regret,
                "pairs": group.pairs,
                "pairs_ordered": group.ordered / group.pairs if group.pairs else None,
            }
            for group in self.groups
        ]
        return {
            "groups": len(self.groups),
            "regret": {"mean": self.mean_regret, "worst": self.worst_regret},
            "pairs": sum(group.pairs for group in self.groups),
            "pairs_ordered": self.pairs_ordered,
            "each": each,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Validation:
    """Everything that a validation found."""

    predictions: tuple[Prediction, ...]
    skipped: tuple[Skipped, ...]
    left_out: bool
    """Each source was predicted by parameters that were fitted without it."""

    @property
    def counted(self) -> tuple[Prediction, ...]:
        """The rows that enter summaries: confidence A or B, one row per configuration, a credible MFU."""
        return tuple(one for one in self.predictions if one.case.run.counted)

    def by(self, key: Callable[[PublishedRun], str]) -> dict[str, Summary]:
        """Summaries of the counted rows by a property, the largest group first."""
        return self._grouped(lambda one: key(one.case.run))

    def _grouped(self, key: Callable[[Prediction], str]) -> dict[str, Summary]:
        groups: dict[str, list[Prediction]] = defaultdict(list)
        for one in self.counted:
            groups[key(one)].append(one)
        return {name: summarise(groups[name]) for name in sorted(groups, key=lambda name: -len(groups[name]))}

    def as_json(self) -> dict[str, Any]:
        """Plain data with stable keys; errors are ratios."""
        counted = self.counted
        constant = np.abs(baseline_errors([one.case for one in counted]))
        total = len(self.predictions) + len(self.skipped)
        trusted = [one.run for one in self.skipped if one.run.confidence in (None, "A", "B")]
        summary = plain(summarise(counted)) | {
            "constant_mfu_mape": _mean(constant),
            "constant_mfu_median_ape": _median(constant),
            "leave_one_source_out": self.left_out,
            "rows_read": total,
            "skipped": len(self.skipped),
            "skipped_of_confidence_a_b": len(trusted),
        }
        return {
            "rows": [one.as_json() for one in self.predictions],
            "skipped": [
                {
                    "id": one.run.id,
                    "source": one.run.source_group,
                    "confidence": one.run.confidence,
                    "reason": one.reason,
                }
                for one in self.skipped
            ],
            "summary": summary,
            "by_source": _plain_all(self.by(lambda run: run.source_group)),
            "by_gpu": _plain_all(self.by(lambda run: str(run.hardware.get("gpu")))),
            "by_precision": _plain_all(self.by(lambda run: str(run.precision.get("dtype")))),
            "by_kind": _plain_all(self.by(lambda run: run.kind)),
            "by_task": _plain_all(self.by(lambda run: run.task)),
            "by_band": _plain_all(self._grouped(lambda one: one.band)),
            "ranking": rank(counted).as_json(),
        }


def validate(
    runs: Sequence[PublishedRun],
    *,
    parameters: Parameters | None = None,
    parameters_by_source: Mapping[str, Parameters] | None = None,
) -> Validation:
    """Predict every row that can be predicted, from model, hardware, layout, precision and declared stack alone.

    ``parameters_by_source`` gives the parameters for the rows of a source (those fitted without it).
    """
    known, skipped = cases(runs)
    predictions = []
    for case in known:
        own = (parameters_by_source or {}).get(case.run.source_group, parameters)
        step = predict_step(case.cluster, case.job, case.layout, parameters=own)
        predictions.append(
            Prediction(
                case=case,
                seconds=step.total_seconds,
                low_seconds=step.low_seconds,
                high_seconds=step.high_seconds,
                basis=step.basis,
                band=band_name(
                    case.cluster,
                    case.job,
                    rates(case.cluster, case.job, own or shipped_parameters()),
                    step.total_seconds,
                ),
            )
        )
    return Validation(predictions=tuple(predictions), skipped=tuple(skipped), left_out=parameters_by_source is not None)


def summarise(predictions: Sequence[Prediction]) -> Summary:
    """Errors of some rows."""
    errors = np.array([one.error for one in predictions])
    inside = np.array([one.within_band for one in predictions])
    absolute = np.abs(errors)
    return Summary(
        n=len(errors),
        mape=_mean(absolute),
        median_ape=_median(absolute),
        p90_ape=float(np.quantile(absolute, 0.9)) if len(errors) else float("nan"),
        bias=_median(errors),
        within_band=_mean(inside),
    )


def baseline_errors(known: Sequence[Case]) -> Floats:
    """Errors of the constant-MFU baseline: each row gets the median MFU of the other sources' rows of its kind.

    Kind: GPU, precision and task; where no other source has it, precision and task; then all.
    """
    mfu = np.array([measured_mfu(case) for case in known])
    errors = np.full(len(known), np.nan)
    for index, case in enumerate(known):
        run = case.run
        others = [other.run.source_group != run.source_group for other in known]
        for key in (_gpu_kind, _precision_kind, lambda _: None):
            same = [out and key(other.run) == key(run) for other, out in zip(known, others, strict=True)]
            if any(same):
                errors[index] = mfu[index] / np.median(mfu[np.array(same)]) - 1.0
                break
    return np.asarray(errors[~np.isnan(errors)])


def measured_mfu(case: Case) -> float:
    """Model FLOP utilisation that a row reached; LoRA computes no weight gradients: two thirds of the FLOPs."""
    flops = case.job.model.flops_per_token(case.job.seq_length) * case.job.tokens_per_step
    share = 2.0 / 3.0 if case.job.tuning == "lora" else 1.0
    peak = case.cluster.gpu.peak(case.job.precision) or float("nan")
    return share * flops / (case.measured_seconds * case.layout.world_size * peak)


def rank(predictions: Sequence[Prediction]) -> Ranking:
    """Order the layouts of every group: same source, model, sequence, GPUs, precision, batch and task."""
    groups: dict[tuple[str, ...], list[Prediction]] = defaultdict(list)
    for one in predictions:
        run, job = one.case.run, one.case.job
        key = (
            run.source_group,
            job.model.name,
            str(job.model.num_layers),
            f"{job.seq_length} tokens",
            f"{run.hardware.get('gpus')} {run.hardware.get('gpu')}",
            str(run.precision.get("dtype")),
            f"batch {job.global_batch_size}",
            run.task,
        )
        groups[key].append(one)
    ranked = [_ranked(", ".join(key), group) for key, group in groups.items() if len(group) >= LEAST_LAYOUTS]
    return Ranking(groups=tuple(ranked))


def _ranked(name: str, group: Sequence[Prediction]) -> RankedGroup:
    measured = [one.case.measured_seconds for one in group]
    best = min(group, key=lambda one: one.seconds)
    pairs = [
        (one, other)
        for one, other in itertools.combinations(group, 2)
        if abs(np.log(one.case.measured_seconds / other.case.measured_seconds)) > np.log(1 + PAIR_DIFFERENCE)
    ]
    ordered = sum(
        (one.seconds - other.seconds) * (one.case.measured_seconds - other.case.measured_seconds) > 0
        for one, other in pairs
    )
    return RankedGroup(
        name=name,
        layouts=len(group),
        regret=best.case.measured_seconds / min(measured) - 1.0,
        pairs=len(pairs),
        ordered=ordered,
    )


def _gpu_kind(run: PublishedRun) -> Any:
    return run.hardware.get("gpu"), run.precision.get("dtype"), run.task


def _precision_kind(run: PublishedRun) -> Any:
    return run.precision.get("dtype"), run.task


def plain(summary: Summary) -> dict[str, Any]:
    """Return a summary as plain data."""
    return {name: getattr(summary, name) for name in Summary.__slots__}


def _plain_all(summaries: Mapping[str, Summary]) -> dict[str, Any]:
    return {name: plain(summary) for name, summary in summaries.items()}


def _mean(values: Floats) -> float:
    return float(np.mean(values)) if len(values) else float("nan")


def _median(values: Floats) -> float:
    return float(np.median(values)) if len(values) else float("nan")
