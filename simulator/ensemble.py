"""Many runs of one setup with different luck: mean, quantiles and their confidence; parts add up to one ensemble."""

from __future__ import annotations

import importlib
import math
import os
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from typing import Any, Literal

import numpy as np

from simulator.outcome import RunOutcome
from simulator.power import energy_band_kwh
from simulator.run import simulate_run
from simulator.run_setup import RunSetup
from topologies.errors import MissingExtra

RUNS_WORTH_A_WORKER = 100
"""A worker process takes about as long to start as this many runs."""

Backend = Literal["processes", "ray"]


def simulate_runs(
    setup: RunSetup,
    runs: int,
    seed: int,
    jobs: int = 1,
    *,
    first_run: int = 0,
    backend: Backend = "processes",
    tell: Callable[[int], None] | None = None,
) -> tuple[RunOutcome, ...]:
    """Simulate ``runs`` runs on up to ``jobs`` processes; the result does not depend on ``jobs``.

    Args:
        setup: what is played.
        runs: how many.
        seed: of the ensemble.
        jobs: processes.
        first_run: number of the first run: parts with different numbers add up to one ensemble.
        backend: joblib's own processes, or a Ray cluster (extra ``ray``).
        tell: called with the number of runs that are done since the last call.

    Raises:
        ValueError: fewer than one run or process, or a negative seed or first run.
        MissingExtra: Ray is asked for and not installed.
    """
    if runs < 1 or jobs < 1 or seed < 0 or first_run < 0:
        raise ValueError(f"runs {runs} and jobs {jobs} must be at least 1, seed {seed} and first_run at least 0")
    workers = jobs if backend == "ray" else min(jobs, math.ceil(runs / RUNS_WORTH_A_WORKER))
    bounds = np.unique(np.linspace(0, runs, min(runs, 8 * workers) + 1).astype(int)).tolist()
    blocks = [range(first_run + first, first_run + last) for first, last in pairwise(bounds)]
    outcomes: list[RunOutcome] = []
    for block in _played(setup, seed, blocks, workers, backend):
        outcomes += block
        if tell is not None:
            tell(len(block))
    return tuple(outcomes)


def _played(
    setup: RunSetup, seed: int, blocks: list[range], workers: int, backend: Backend
) -> Iterable[list[RunOutcome]]:
    """The blocks in order, as they are done."""
    if workers == 1 and backend == "processes":
        yield from (_block(setup, seed, block) for block in blocks)
        return
    from joblib import Parallel, delayed, parallel_config

    if backend == "ray":
        try:
            importlib.import_module("ray.util.joblib").register_ray()
        except ImportError:
            raise MissingExtra("--backend ray", "ray") from None
    tasks = (delayed(_block)(setup, seed, block) for block in blocks)
    if backend == "ray":  # its back end returns no generator
        with parallel_config(backend="ray"):
            yield from Parallel(n_jobs=workers)(tasks)
    else:
        yield from Parallel(n_jobs=workers, return_as="generator")(tasks)


def _block(setup: RunSetup, seed: int, runs: range) -> list[RunOutcome]:
    return [simulate_run(setup, seed, run) for run in runs]


def available_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def quantile_interval(values: Sequence[float], share: float, confidence: float = 0.95) -> list[float] | None:
    """Confidence interval of a quantile by order statistics: the ranks between which it lies with that probability.

    The number of values below the quantile is binomial, whatever the distribution. None where there are too few
    values for such an interval (36 for the p90 at 95 %).
    """
    from scipy.special import bdtr

    ordered, count = sorted(values), len(values)
    reached = bdtr(np.arange(count + 1), count, share)  # no more than so many values lie below the quantile
    low, high = (int(np.searchsorted(reached, one)) for one in ((1 - confidence) / 2, (1 + confidence) / 2))
    high += 1
    below, above = float(reached[low - 1]) if low else 0.0, float(reached[high - 1])
    if low < 1 or high > count or above - below < confidence - 1e-12:
        return None
    return [ordered[low - 1], ordered[high - 1]]


def spread(values: Sequence[float]) -> dict[str, Any]:
    """Mean, p10, p50 and p90 with 95 % confidence intervals (None where there are too few values).

    ``ci95`` is that of the mean, by Student's t; those of the quantiles are order statistics.
    """
    sample = np.asarray(values, dtype=float)
    p10, p50, p90 = np.quantile(sample, (0.1, 0.5, 0.9)).tolist()
    interval = None
    if len(sample) > 1:
        from scipy.special import stdtrit

        half = float(stdtrit(len(sample) - 1, 0.975)) * float(sample.std(ddof=1)) / math.sqrt(len(sample))
        interval = [float(sample.mean()) - half, float(sample.mean()) + half]
    found: dict[str, Any] = {"mean": float(sample.mean()), "p10": p10, "p50": p50, "p90": p90, "ci95": interval}
    return found | {
        f"{name}_ci95": quantile_interval(values, share) for name, share in (("p10", 0.1), ("p50", 0.5), ("p90", 0.9))
    }


def ensemble_json(outcomes: Sequence[RunOutcome], seed: int, known: dict[str, Any]) -> dict[str, Any]:
    """The ensemble as plain data with the keys of the JSON contract.

    ``failures``, ``lost_seconds`` and the like are means per run. ``known`` holds what does not depend on luck:
    ``analytic`` (with the closed form's ``goodput``), ``rate_spread``, and what else is to be told. Closed form and
    simulation agree if they lie within one goodput point, the confidence interval of the mean allowed for.
    """

    def mean(values: Iterable[float]) -> float:
        listed = list(values)
        return sum(listed) / len(listed)

    def means(pick: Callable[[RunOutcome], dict[str, Any]]) -> dict[str, float]:
        return {name: mean(pick(outcome)[name] for outcome in outcomes) for name in pick(outcomes[0])}

    goodput = spread([outcome.goodput for outcome in outcomes])
    analytic = dict(known["analytic"])
    analytic["difference_points"] = 100 * (goodput["mean"] - analytic["goodput"])
    low, high = goodput["ci95"] or (goodput["mean"], goodput["mean"])
    analytic["agrees"] = low - 0.01 <= analytic["goodput"] <= high + 0.01
    content: dict[str, Any] = {
        "runs": len(outcomes),
        "completed_runs": sum(outcome.completed for outcome in outcomes),
        "seed": seed,
        "goodput": goodput,
        "wall_seconds": spread([outcome.wall_seconds for outcome in outcomes]),
        "useful_seconds": mean(outcome.useful_seconds for outcome in outcomes),
        "lost_seconds": means(lambda outcome: outcome.lost_seconds),
        "failures": means(lambda outcome: outcome.failures),
        "checkpoints": mean(outcome.checkpoints for outcome in outcomes),
        "skipped_saves": mean(outcome.skipped_saves for outcome in outcomes),
        "checkpoint_bytes": means(lambda outcome: outcome.checkpoint_bytes),
        "spares_used": spread([float(outcome.spares_used) for outcome in outcomes]),
        "tokens_per_second": spread([outcome.tokens / outcome.wall_seconds for outcome in outcomes]),
        "quantiles_include": _quantiles_include(known["rate_spread"]),
    }
    if any(outcome.energy_joules for outcome in outcomes):
        energy, tokens = mean(one.energy_joules for one in outcomes), mean(one.tokens for one in outcomes)
        content["energy_kwh"] = spread([outcome.energy_joules / 3.6e6 for outcome in outcomes])
        if "power" in known:
            lost = content["lost_seconds"]
            content["energy_kwh"]["band"] = list(energy_band_kwh(content["useful_seconds"], lost, known["power"]))
        content["tokens_per_joule"] = tokens / energy
        cost = mean(outcome.cost_usd for outcome in outcomes)
        content["cost_usd"] = spread([outcome.cost_usd for outcome in outcomes]) if cost else None
        content["tokens_per_usd"] = tokens / cost if cost else None
    return content | known | {"analytic": analytic}


def _quantiles_include(rate_spread: float) -> str:
    if rate_spread == 0:
        return "luck alone: the failure rates are taken as known exactly, so the quantiles are too narrow"
    return f"luck, and failure rates that are known to {100 * rate_spread:.0f} % (gamma, one factor a run)"
