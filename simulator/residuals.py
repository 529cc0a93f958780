"""What a run on a calibrated machine teaches about it: each part of the residual goes where the run says it arose.

A run tells the seconds of its phases, of its collectives and of its matrix products. What each of them differs from the
prediction implies a value of one cost: the one with which that part would have been right. The value that is used lies
between the calibrated one and the median of the implied ones, as far as the number of runs is worth
(``offsets.PRIOR_RUNS`` runs count for the calibration).
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field

from scenarios.job import Job
from scenarios.layout import Layout
from simulator.offsets import PRIOR_RUNS
from simulator.phases import phase_seconds
from simulator.step import predict_step
from topologies.cluster import Cluster, Measured, Residual
from topologies.errors import InputError

FACTORS = ("products", "collectives", "update")
"""Costs that are seconds for each calibrated second; 1 where nothing was learnt."""
SMALL = 0.01
"""Parts of a residual below this share of the step are no news."""
NUDGE = 1e-3
"""By which a cost is changed to see what it does to a step, in seconds or as a share."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """What a run measured, per step; parts that it did not tell are left out or None."""

    step_seconds: float
    phases_seconds: dict[str, float] = field(default_factory=dict)
    collective_seconds: float | None = None
    """Inside collectives, waiting included."""
    product_seconds: float | None = None
    """Inside matrix products and attention."""


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


def seconds_per_unit(cluster: Cluster, job: Job, layout: Layout, cost: str) -> float:
    """How much longer a step is for each second, or each unit of a factor, that a cost has more."""
    costs = _measured(cluster).host_seconds
    more = costs | {cost: _known(cluster, cost) + NUDGE}
    changed = cluster.model_copy(update={"measured": _measured(cluster).model_copy(update={"host_seconds": more})})
    steps = [predict_step(one, job, layout) for one in (changed, cluster)]
    bubble = 0.0 if cost not in FACTORS else steps[0].pp_bubble_seconds - steps[1].pp_bubble_seconds
    return (steps[0].total_seconds - steps[1].total_seconds - bubble) / NUDGE


def parts(cluster: Cluster, job: Job, layout: Layout, seen: Seen, predicted_seconds: float) -> dict[str, float]:
    """Divide what a step took beyond its prediction between the costs that it speaks of; seconds, with sign."""
    found: dict[str, float] = {}
    rest = seen.step_seconds - predicted_seconds
    sharding = layout.optimizer_sharding
    reduced_apart = layout.dp * layout.cp > 1 and sharding in ("none", "zero1")
    phases = seen.phases_seconds
    if {"gradient_reduction", "optimizer"} <= phases.keys():
        breakdown = predict_step(cluster, job, layout).breakdown_seconds
        late = {name: phases[name] - phase_seconds(breakdown, layout, name) for name in phases}
        if reduced_apart and sharding == "zero1":  # which gathers weights in its update
            found["shard_gigabyte"] = late["gradient_reduction"] + late["optimizer"]
        else:
            found["update"] = late["optimizer"]
        if reduced_apart and sharding == "none":
            found["flat_gigabyte"] = late["gradient_reduction"]
    if seen.collective_seconds is not None and layout.pp == 1:  # stages wait for each other in theirs
        expected = _known(cluster, "collectives") * seconds_per_unit(cluster, job, layout, "collectives")
        if expected > 0:
            found["collectives"] = seen.collective_seconds - expected
            inside = layout.tp * layout.cp * layout.ep > 1 or not reduced_apart
            joined = {"none": "flat_gigabyte", "zero1": "shard_gigabyte"}.get(sharding)
            if not inside and joined in found:
                found[joined] -= found["collectives"]
    if seen.product_seconds is not None:
        expected = _known(cluster, "products") * seconds_per_unit(cluster, job, layout, "products")
        found["products"] = seen.product_seconds - expected
    wrapper = cost_of(layout)
    if wrapper == "tp_sequence_layer" and wrapper not in _measured(cluster).host_seconds:
        wrapper = "tp_layer"  # which stands for both
    return found | {wrapper: rest - sum(found.values())}


def residuals(
    cluster: Cluster,
    job: Job,
    layout: Layout,
    seen: Seen,
    *,
    predicted_seconds: float,
    plan_sha256: str,
    date: str,
    contended: bool,
) -> tuple[Residual, ...]:
    """Turn a predicted and a measured step into what they imply, the largest part first.

    ``cluster`` is the one that the prediction was made with, as the plan holds it.

    Raises:
        InputError: it holds no calibrated costs.
    """
    told = sorted(parts(cluster, job, layout, seen, predicted_seconds).items(), key=lambda one: -abs(one[1]))
    news = [one for one in told if abs(one[1]) >= SMALL * seen.step_seconds] or told[:1]
    found = []
    for cost, missing in news:
        per_unit = seconds_per_unit(cluster, job, layout, cost)
        if per_unit <= 0:
            continue
        implied = _known(cluster, cost) + missing / job.stack.step_factor / per_unit
        found.append(
            Residual(
                cost=cost,
                implied_seconds=max(0.0, implied),
                predicted_seconds=predicted_seconds,
                measured_seconds=seen.step_seconds,
                layout=layout.label(),
                plan_sha256=plan_sha256,
                date=date,
                contended=contended,
            )
        )
    return tuple(found)


def learnt(cluster: Cluster, found: Residual) -> tuple[Cluster, Lesson]:
    """File a residual in a profile and move the cost that it speaks of.

    Raises:
        InputError: the profile holds no calibrated costs.
    """
    measured = _measured(cluster)
    now = _known(cluster, found.cost)
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


def _known(cluster: Cluster, cost: str) -> float:
    return _measured(cluster).host_seconds.get(cost, 1.0 if cost in FACTORS else 0.0)


def _same(one: Residual, other: Residual) -> bool:
    return (one.cost, one.plan_sha256, one.measured_seconds) == (other.cost, other.plan_sha256, other.measured_seconds)
