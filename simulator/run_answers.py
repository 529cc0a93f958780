"""What whole runs say: an ensemble, one run over time, goodput against the interval, the plan confirmed or not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from simulator.ensemble import Backend, ensemble_json, spread
from simulator.run import simulate_run
from simulator.whole_runs import WholeRun, known, play, whole_run

INTERVAL_FACTORS = (0.25, 0.5, 0.7, 1.0, 1.4, 2.0, 4.0, 8.0)
"""Intervals that a curve shows, in those of the policy."""
LEAST_CURVE_RUNS = 12
CONFIRMING_RUNS = 24
"""At known rates one run of a large job has a standard deviation of 0.4 points: their mean is known to 0.2."""
MOST_CONFIRMED_SECONDS = 60 * 86400.0
"""Useful seconds of a run that are played at most: goodput is a rate, and a longer run is made of such stretches."""
MOST_CONFIRMED_SAVES = 2000
"""Saves of a run whose transfers are played one by one: all runs together still hold months of a large job."""


def answer(
    run: WholeRun,
    runs: int,
    seed: int,
    jobs: int = 1,
    *,
    backend: Backend = "processes",
    tell: Callable[[int], None] | None = None,
) -> dict[str, Any]:
    """Play an ensemble and return it as plain data, see ``ensemble_json``."""
    return ensemble_json(play(run, runs, seed, jobs, backend=backend, tell=tell), seed, known(run))


def confirmation(run: WholeRun, runs: int = CONFIRMING_RUNS, seed: int = 0) -> dict[str, Any]:
    """Play a planned run and say whether its mean goodput agrees with the closed form that chose it.

    Both at the mean of the failure rates; ``uncertain_goodput`` is the mean where rates are only known as well as the
    scenario says, on the same luck. ``agrees``: within one goodput point, the confidence interval of the mean allowed
    for; ``because`` says what the closed form leaves out where the difference is larger than a point. Of a long run a
    stretch is played: ``work_seconds`` of ``whole_work_seconds``.
    """
    whole, run = run.setup, _stretch(run)
    content = answer(_at_mean_rates(run), runs, seed)
    analytic = content["analytic"]
    uncertain = [outcome.goodput for outcome in play(run, runs, seed, 1)]
    return {
        "runs": runs,
        "seed": seed,
        "work_seconds": run.setup.work_seconds,
        "whole_work_seconds": whole.work_seconds,
        "saves": run.setup.num_steps // run.setup.interval_steps,
        "goodput": content["goodput"]["mean"],
        "ci95": content["goodput"]["ci95"],
        "analytic": analytic["goodput"],
        "difference_points": analytic["difference_points"],
        "agrees": analytic["agrees"],
        "because": [] if abs(analytic["difference_points"]) <= 1 else analytic["leaves_out"],
        "rate_spread": run.setup.faults.rate_spread,
        "uncertain_goodput": sum(uncertain) / runs,
    }


def _stretch(run: WholeRun) -> WholeRun:
    setup = run.setup
    steps = [setup.num_steps, max(1, round(MOST_CONFIRMED_SECONDS / setup.step_seconds))]
    if setup.played is not None:
        steps.append(MOST_CONFIRMED_SAVES * setup.interval_steps)
    return replace(run, setup=replace(setup, num_steps=min(steps)))


def _at_mean_rates(run: WholeRun) -> WholeRun:
    faults = run.setup.faults.model_copy(update={"rate_spread": 0.0})
    scenario = run.scenario.model_copy(update={"faults": faults})
    return replace(run, scenario=scenario, setup=replace(run.setup, faults=faults))


def interval_curve(run: WholeRun, runs: int, seed: int, jobs: int = 1) -> list[dict[str, Any]]:
    """Closed form and simulated goodput at intervals around that of the policy, on the same failures.

    Failures come at the mean of their rates in all runs, as in the closed form.

    Returns:
        a row an interval, with the keys of a row of ``headway sweep``; none where each step is saved.
    """
    policy, rows = run.policy, []
    if policy.mode == "every-step":
        return []
    scenario = _at_mean_rates(run).scenario
    most = max(1, run.setup.num_steps // 4)
    steps = sorted({min(most, max(1, round(factor * policy.interval_steps))) for factor in INTERVAL_FACTORS})
    for interval_steps in steps:
        other = whole_run(
            scenario,
            run.layout,
            run.setup.step_seconds,
            step=run.step,
            mode=policy.mode,
            interval_steps=interval_steps,
        )
        outcomes = play(other, max(LEAST_CURVE_RUNS, runs), seed, jobs)
        rows.append(
            {
                "checkpoint_interval_seconds": other.policy.interval_seconds,
                "goodput": other.setup.expected_goodput(),
                "simulated_goodput": spread([outcome.goodput for outcome in outcomes]),
            }
        )
    return rows


def timeline(run: WholeRun, seed: int, number: int = 0) -> dict[str, Any]:
    """What one of the runs did when: ``spans`` of start, end, what was done and tokens per second."""
    played = simulate_run(run.setup, seed, number, record=True)
    tokens = run.setup.interval_steps * run.setup.tokens_per_step
    spans = [
        [
            span.start_seconds,
            span.end_seconds,
            span.doing,
            span.work * tokens / (span.end_seconds - span.start_seconds),
        ]
        for span in played.spans
    ]
    return {
        "run": number,
        "goodput": played.goodput,
        "wall_seconds": played.wall_seconds,
        "tokens": played.tokens,
        "spans": spans,
    }
