"""What a run on a calibrated machine teaches about it: the residual goes to the fixed cost that it most likely is.

Each run implies a value of one cost: the one with which the prediction would have been right. The value that is used
lies between the calibrated one and the median of the implied ones, as far as the number of runs is worth
(``offsets.PRIOR_RUNS`` runs count for the calibration).
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass

from scenarios.job import Job
from scenarios.layout import Layout
from simulator.offsets import PRIOR_RUNS
from topologies.cluster import Cluster, Measured, Residual
from topologies.errors import InputError


@dataclass(frozen=True, slots=True, kw_only=True)
class Lesson:
    """How a run changed a profile."""

    cost: str
    before_seconds: float
    after_seconds: float
    runs: int
    """That are believed, this one included."""
    spread_seconds: float | None
    """Standard deviation of the values that the runs imply; None for fewer than two."""
    note: str = ""
    """Why nothing changed, where nothing did."""


def cost_of(layout: Layout) -> str:
    """Name the fixed cost that is least sure in a layout: that of its most intrusive wrapper.

    >>> cost_of(Layout(tp=2)), cost_of(Layout(dp=2, optimizer_sharding="zero3")), cost_of(Layout(dp=2))
    ('tp_layer', 'dp_layer', 'layer')
    """
    if layout.tp > 1:
        return "tp_sequence_layer" if layout.sequence_parallel else "tp_layer"
    if layout.dp > 1 and layout.optimizer_sharding in ("zero2", "zero3"):
        return "dp_layer"
    return "pp_microbatch" if layout.pp > 1 else "layer"


def times_in_a_step(cost: str, job: Job, layout: Layout) -> float:
    """How often the busiest rank pays a cost in a step."""
    microbatches = layout.num_microbatches(job)
    if cost == "pp_microbatch":
        return float(microbatches)
    ranks = [0] * layout.pp
    for index, stage in enumerate(layout.stages):
        ranks[index % layout.pp] += stage.layers
    return float(microbatches * (max(ranks) if layout.stages else -(-job.model.num_layers // layout.pp)))


def residual(
    cluster: Cluster,
    job: Job,
    layout: Layout,
    *,
    predicted_seconds: float,
    measured_seconds: float,
    plan_sha256: str,
    date: str,
    contended: bool,
) -> Residual:
    """Turn a predicted and a measured step into what they imply.

    ``cluster`` is the one that the prediction was made with, as the plan holds it.

    Raises:
        InputError: it holds no calibrated costs.
    """
    costs = _measured(cluster).host_seconds
    cost = cost_of(layout)
    if cost not in costs and cost == "tp_sequence_layer":
        cost = "tp_layer"  # which stands for both
    step_factor = job.stack.step_factor
    missing = (measured_seconds - predicted_seconds) / step_factor / cluster.oversubscribed_cores
    implied = costs.get(cost, 0.0) + missing / times_in_a_step(cost, job, layout)
    return Residual(
        cost=cost,
        implied_seconds=max(0.0, implied),
        predicted_seconds=predicted_seconds,
        measured_seconds=measured_seconds,
        layout=layout.label(),
        plan_sha256=plan_sha256,
        date=date,
        contended=contended,
    )


def learnt(cluster: Cluster, found: Residual) -> tuple[Cluster, Lesson]:
    """File a residual in a profile and move the cost that it speaks of.

    Raises:
        InputError: the profile holds no calibrated costs.
    """
    measured = _measured(cluster)
    now = measured.host_seconds.get(found.cost, 0.0)
    if any(_same(one, found) for one in measured.residuals):
        note = "this run was filed before"
        return cluster, Lesson(
            cost=found.cost, before_seconds=now, after_seconds=now, runs=0, spread_seconds=None, note=note
        )
    residuals = (*measured.residuals, found)
    believed = [one.implied_seconds for one in residuals if one.cost == found.cost and not one.contended]
    calibrated = measured.calibrated_seconds.get(found.cost, now)
    weight = len(believed) / (len(believed) + PRIOR_RUNS)
    after = calibrated + weight * (statistics.median(believed) - calibrated) if believed else now
    lesson = Lesson(
        cost=found.cost,
        before_seconds=now,
        after_seconds=after,
        runs=len(believed),
        spread_seconds=statistics.stdev(believed) if len(believed) > 1 else None,
        note="others used the cores while it ran: it is kept in the profile, and not believed"
        if found.contended
        else "",
    )
    moved = {"residuals": residuals} | (
        {
            "host_seconds": measured.host_seconds | {found.cost: after},
            "calibrated_seconds": measured.calibrated_seconds | {found.cost: calibrated},
        }
        if believed
        else {}
    )
    return cluster.model_copy(update={"measured": measured.model_copy(update=moved)}), lesson


def _measured(cluster: Cluster) -> Measured:
    if cluster.measured is None or not cluster.measured.host_seconds or cluster.gpu.architecture != "cpu":
        raise InputError(
            f"{cluster.name} holds no calibrated costs of software, so a residual has no place in it",
            hint="for other machines: headway calibrate --runs MEASUREMENT --plan PLAN",
            key="measured.host_seconds",
        )
    return cluster.measured


def _same(one: Residual, other: Residual) -> bool:
    return (one.plan_sha256, one.measured_seconds) == (other.plan_sha256, other.measured_seconds)
