"""The first screen of a report: what to do, what it brings, and how sure that is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from planner.plan import Plan
from reports.comparison import Comparison
from reports.tables import energy, number, parameters, percent, seconds, size, tokens, usd, watts

JOULES_PER_KWH, SECONDS_PER_DAY = 3.6e6, 86400.0


def answer(plan: Plan, comparisons: Sequence[Comparison]) -> dict[str, Any]:
    """Everything that the head of the report says, as texts."""
    predicted, layout, cluster = plan.predicted, plan.layout, plan.scenario.cluster
    idle = cluster.num_gpus - layout.world_size
    return {
        "params": parameters(plan.scenario.model.num_params),
        "label": layout.label(),
        "gpus": f"{layout.world_size:,} GPUs ({cluster.gpu.name}{f'; {idle:,} more stay idle' if idle else ''})",
        "step": seconds(predicted["step_seconds"]),
        "low": seconds(predicted["step_seconds_low"]),
        "high": seconds(predicted["step_seconds_high"]),
        "tiles": [tile(plan) for tile in (_step, _mfu, _throughput, _memory, _time, _goodput, _cost, _energy)],
        "verdicts": [verdict(comparison) for comparison in comparisons],
        "assumptions": list(predicted.get("basis") or ())[:3],
    }


def verdict(comparison: Comparison) -> str:
    """One sentence: measured beside predicted."""
    error = comparison.error["step_seconds"] or 0.0
    side = "above" if error > 0 else "below"
    inside = "inside" if comparison.within_band else "outside"
    text = (
        f"measured {seconds(comparison.measured['step_seconds'])} a step: the prediction is "
        f"{percent(abs(error))} {side} that, and the measurement lies {inside} the 80 % band"
    )
    return "; ".join([text, *comparison.notes])


Tile = tuple[str, str, str]
"""Label, value, note."""


def _step(plan: Plan) -> Tile:
    job, predicted = plan.scenario.job, plan.predicted
    band = f"80 % band {seconds(predicted['step_seconds_low'])} to {seconds(predicted['step_seconds_high'])}"
    return "Step time", seconds(predicted["step_seconds"]), f"{band}; {tokens(job.tokens_per_step)} a step"


def _mfu(plan: Plan) -> Tile:
    predicted, job, gpu = plan.predicted, plan.scenario.job, plan.scenario.cluster.gpu
    peak = gpu.peak(job.precision)
    if predicted["mfu"] is None or peak is None:
        return "MFU", "unknown", f"no {job.precision} peak known for this GPU"
    reached, dense = predicted["tflops_per_gpu"], peak / 1e12
    return "MFU", percent(predicted["mfu"]), f"{number(reached)} of {number(dense)} TFLOP/s per GPU, {job.precision}"


def _throughput(plan: Plan) -> Tile:
    each = plan.predicted["tokens_per_second_per_gpu"]
    value, unit = tokens(each * plan.layout.world_size).split(" ", 1)
    scale = unit.removesuffix("tokens").strip()
    return "Throughput", f"{value} {scale}".strip(), f"tokens/s; {number(each)} tokens/s per GPU"


def _time(plan: Plan) -> Tile:
    days, target = plan.predicted.get("days"), plan.scenario.job.target_tokens
    if not days or not target:
        return "Training time", "not asked", "the scenario has no target_tokens"
    low, middle, high = (seconds(days[point] * SECONDS_PER_DAY) for point in ("p10", "p50", "p90"))
    return "Training time", middle, f"median; p10 {low}, p90 {high}; {tokens(target)}"


def _goodput(plan: Plan) -> Tile:
    goodput, interval = plan.predicted.get("goodput"), plan.checkpoint.get("interval_seconds")
    every = f"checkpoint every {seconds(interval)}" if interval else "no checkpoints"
    if goodput is None:
        return "Goodput", "unknown", every
    return "Goodput", percent(goodput), f"of the wall time is progress; {every}"


def _cost(plan: Plan) -> Tile:
    cost, target = plan.predicted.get("cost_usd"), plan.scenario.job.target_tokens
    if not cost or not target:
        return "Cost", "not asked", "needs target_tokens and a price book"
    return "Cost", usd(cost), f"{usd(cost / target * 1e12)} per T tokens; prices: {plan.scenario.prices.name}"


def _energy(plan: Plan) -> Tile:
    kwh, days = plan.predicted.get("energy_kwh"), plan.predicted.get("days")
    if not kwh or not days:
        return "Energy", "not asked", "needs target_tokens and the power of the nodes"
    mean = kwh * JOULES_PER_KWH / (days["p50"] * SECONDS_PER_DAY)
    return "Energy", energy(kwh), f"{watts(mean)} on average"


def _memory(plan: Plan) -> Tile:
    memory = plan.predicted["memory_bytes"]
    left = memory["capacity"] - memory["peak"]
    free = f"{size(left)} free" if left >= 0 else f"{size(-left)} too much"
    return "Peak memory", size(memory["peak"]), f"of {size(memory['capacity'])} usable per GPU; {free}"
