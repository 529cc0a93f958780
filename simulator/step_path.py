"""One training step as the longest path through its ops: what events would say, without playing them.

Traffic has its links to itself. It equals the closed form of ``simulator.step`` where that form's assumptions hold
(equal stages), and is exact where stages differ.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from scenarios.job import Job
from scenarios.layout import Layout
from simulator.longest_path import OpGraph, busiest_span, end_seconds, op_graph
from simulator.op_times import OpTimes, op_times
from simulator.outcome import StepTime
from simulator.schedule import op_orders
from simulator.step import StageCosts, predict_step, stage_costs
from simulator.step_volumes import INNER
from topologies.cluster import Cluster


def longest_step(cluster: Cluster, job: Job, layout: Layout) -> tuple[dict[str, float], StepTime]:
    """Return the breakdown of ``explained_step`` without events, as a longest path, and the closed form.

    Raises:
        ValueError: the global batch does not divide, or the schedule does not exist for these degrees.
        InputError: the GPU lacks the job's precision.
    """
    graph, times, costs, shares, predicted = prepared_step(cluster, job, layout)
    step_seconds = longest_seconds(graph, times, costs, together=together(layout))
    return breakdown(graph, times, costs, shares, step_seconds), predicted


def together(layout: Layout) -> bool:
    """Whether no rank updates before the last has its gradients; ranks of ZB-H2 do not wait for each other."""
    return layout.schedule != "zb-h2"


def longest_seconds(graph: OpGraph, times: OpTimes, costs: StageCosts, *, together: bool) -> float:
    """Return what a step takes as a longest path, gradients and optimizer included."""
    seconds = [times.busy(i) for i in range(len(graph.ops))]
    ends = end_seconds(graph, seconds)
    pipeline = max(ends) if together else busiest_span(graph, seconds, ends)
    return pipeline + costs.dp_exposed_seconds + costs.optimizer_seconds


def prepared_step(
    cluster: Cluster, job: Job, layout: Layout, *, jitter: bool = True
) -> tuple[OpGraph, OpTimes, StageCosts, dict[str, float], StepTime]:
    """Return the ops with their times, the costs of stages, the share of each traffic inside ops, the closed form.

    Without ``jitter`` ops take their time and no longer: its mean effect is left out.
    """
    costs, predicted = stage_costs(cluster, job, layout), predict_step(cluster, job, layout)
    if not jitter:
        costs = replace(costs, straggler_factor=1.0)
    graph = op_graph(op_orders(layout.schedule, layout.pp, layout.vpp, layout.num_microbatches(job)))
    count = layout.num_microbatches(job) * 2 * layout.vpp
    host = predicted.pp_comm_seconds / count - costs.p2p_seconds * costs.p2p_exposed_share
    times = op_times(graph, costs, host if host * count > 1e-9 else 0.0)
    inside = predicted.compute_seconds + sum(getattr(predicted, f"{name}_seconds") for name in INNER)
    shares = {name: getattr(predicted, f"{name}_seconds") / inside for name in INNER}
    return graph, times, costs, shares, predicted


def breakdown(
    graph: OpGraph, times: OpTimes, costs: StageCosts, shares: dict[str, float], step_seconds: float
) -> dict[str, float]:
    """Split the step as its busiest rank sees it; the straggler's part is what its factor adds to the pipeline."""
    busy = _by_rank(graph, [times.busy(i) for i in range(len(graph.ops))])
    rank = max(busy, key=lambda one: busy[one])
    slow = costs.straggler_factor
    parts = (times.work, times.gather, times.send, times.host)
    work, gather, send, host = (_by_rank(graph, part)[rank] / slow for part in parts)
    after = costs.dp_exposed_seconds + costs.optimizer_seconds
    pipeline = step_seconds - after
    return {
        "compute": work * (1 - sum(shares.values())),
        **{kind: work * share for kind, share in shares.items()},
        "pp_bubble": pipeline / slow - work - gather - send - host,
        "pp_comm": send + host,
        "dp_comm": gather + costs.dp_exposed_seconds,
        "optimizer": costs.optimizer_seconds,
        "straggler": pipeline * (1 - 1 / slow),
    }


def _by_rank(graph: OpGraph, seconds: Sequence[float]) -> dict[int, float]:
    total: dict[int, float] = {}
    for rank, part in zip(graph.ranks, seconds, strict=True):
        total[rank] = total.get(rank, 0.0) + part
    return total
