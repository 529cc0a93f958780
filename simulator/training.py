"""One training step, event by event: a process per pipeline rank runs its ops and waits for its neighbours.

It equals the closed form of ``simulator.step`` where that form's assumptions hold (equal stages), and is exact where
stages differ. Ranks of one tensor- or data-parallel group do the same and are played once.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import simpy

from scenarios.job import Job
from scenarios.layout import Layout
from simulator.longest_path import OpGraph, boundary, busiest_span, end_seconds, op_graph, op_seconds
from simulator.outcome import Span, StepTime, StepTimeline
from simulator.schedule import Op, op_orders
from simulator.step import StageCosts, predict_step, stage_costs
from topologies.cluster import Cluster

COMMUNICATION = ("tp_comm", "cp_comm", "ep_comm")
"""Exposed traffic inside an op, drawn at its end in this order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlay:
    """A step that was played, and where the time of its busiest rank went."""

    timeline: StepTimeline
    breakdown_seconds: dict[str, float]
    """The parts of ``StepTime`` by name; they add up to the step. Its bubble is the wait of the busiest rank."""
    predicted: StepTime
    """The closed form of the same step."""

    @property
    def mfu(self) -> float | None:
        """Model FLOP utilisation at the played step time; None: the peak is unknown."""
        if self.predicted.mfu is None:
            return None
        return self.predicted.mfu * self.predicted.total_seconds / self.timeline.step_seconds


def play_step(cluster: Cluster, job: Job, layout: Layout) -> StepTimeline:
    """Play one optimizer step.

    Raises:
        ValueError: the global batch does not divide, or the schedule does not exist for these degrees.
        InputError: the GPU lacks the job's precision.
    """
    return explained_step(cluster, job, layout).timeline


def explained_step(cluster: Cluster, job: Job, layout: Layout) -> StepPlay:
    """Play one optimizer step and say where its time went."""
    graph, times, costs, shares, predicted = _prepared(cluster, job, layout)
    timeline = play(graph, times, costs, shares, together=layout.schedule != "zb-h2")
    return StepPlay(
        timeline=timeline,
        breakdown_seconds=_breakdown(graph, times, costs, shares, timeline.step_seconds),
        predicted=predicted,
    )


def longest_step(cluster: Cluster, job: Job, layout: Layout) -> tuple[dict[str, float], StepTime]:
    """Return the breakdown of ``explained_step`` without events, as a longest path, and the closed form.

    Raises:
        ValueError: the global batch does not divide, or the schedule does not exist for these degrees.
        InputError: the GPU lacks the job's precision.
    """
    graph, times, costs, shares, predicted = _prepared(cluster, job, layout)
    seconds = [times.busy(i) for i in range(len(graph.ops))]
    ends = end_seconds(graph, seconds)
    pipeline = busiest_span(graph, seconds, ends) if layout.schedule == "zb-h2" else max(ends)
    step_seconds = pipeline + costs.dp_exposed_seconds + costs.optimizer_seconds
    return _breakdown(graph, times, costs, shares, step_seconds), predicted


def _prepared(
    cluster: Cluster, job: Job, layout: Layout
) -> tuple[OpGraph, OpTimes, StageCosts, dict[str, float], StepTime]:
    costs, predicted = stage_costs(cluster, job, layout), predict_step(cluster, job, layout)
    graph = op_graph(op_orders(layout.schedule, layout.pp, layout.vpp, layout.num_microbatches(job)))
    count = layout.num_microbatches(job) * 2 * layout.vpp
    host = predicted.pp_comm_seconds / count - costs.p2p_seconds * costs.p2p_exposed_share
    times = op_times(graph, costs, host if host * count > 1e-9 else 0.0)
    inside = predicted.compute_seconds + sum(getattr(predicted, f"{name}_seconds") for name in COMMUNICATION)
    shares = {name: getattr(predicted, f"{name}_seconds") / inside for name in COMMUNICATION}
    return graph, times, costs, shares, predicted


@dataclass(frozen=True, slots=True, kw_only=True)
class OpTimes:
    """Seconds of every op, in graph order; a rank is busy with the parts one after the other."""

    work: tuple[float, ...]
    """Compute with the exposed traffic inside it."""
    gather: tuple[float, ...]
    """Gathers and reductions of sharded weights (FSDP) that compute does not hide."""
    send: tuple[float, ...]
    """The part of sending the result that the sender waits for; 0 where nobody else needs it."""
    host: tuple[float, ...]
    """What the software of a pipeline adds to every pass; counted as pipeline communication."""

    def busy(self, i: int) -> float:
        """All of one op."""
        return self.work[i] + self.gather[i] + self.send[i] + self.host[i]


def op_times(graph: OpGraph, costs: StageCosts, host_seconds: float = 0.0) -> OpTimes:
    """Turn the costs of stages into those of ops; ``host_seconds`` is what a pipeline adds to each forward or backward.

    The straggler factor stretches everything: in a synchronous step all wait for the slowest. The sender of an
    activation or gradient is held up for the exposed share of the transfer; the rest is hidden, as in the closed form.
    """
    slow = costs.straggler_factor
    work = op_seconds(graph, costs.forward_seconds, costs.backward_seconds, costs.weight_gradient_seconds)
    crossing = {j for i in range(len(graph.ops)) for j in graph.inputs[i] if graph.ranks[j] != graph.ranks[i]}
    passes = 2 * graph.num_stages / len(set(graph.ranks))
    held = costs.p2p_seconds * costs.p2p_exposed_share
    return OpTimes(
        work=tuple(slow * seconds for seconds in work),
        gather=tuple(slow * costs.fsdp_seconds / passes if op.kind != "W" else 0.0 for op in graph.ops),
        send=tuple(slow * held if i in crossing else 0.0 for i in range(len(graph.ops))),
        host=tuple(slow * host_seconds if op.kind != "W" else 0.0 for op in graph.ops),
    )


def play(
    graph: OpGraph, times: OpTimes, costs: StageCosts, shares: dict[str, float], *, together: bool = True
) -> StepTimeline:
    """Run the ranks of a pipeline as processes until the optimizer of the last one is done.

    Args:
        graph: the ops and what each waits for.
        times: seconds of each op.
        costs: data-parallel traffic and optimizer.
        shares: part of an op's work that is exposed traffic, by kind; for the spans only.
        together: no rank updates before the last has its gradients; False: each by itself (``busiest_span``).
    """
    environment = simpy.Environment()
    arrived = [environment.event() for _ in graph.ops]
    ranks = sorted(set(graph.ranks))
    mine = {rank: [i for i, one in enumerate(graph.ranks) if one == rank] for rank in ranks}
    spans: list[Span] = []
    begun: dict[int, float] = {}
    lasted: list[float] = []

    def pipeline_rank(rank: int) -> Generator[simpy.Event, Any, None]:
        for i in mine[rank]:
            for j in graph.inputs[i]:
                if graph.ranks[j] != rank:
                    yield arrived[j]
            start = environment.now
            begun.setdefault(rank, start)
            yield environment.timeout(times.busy(i))
            arrived[i].succeed()
            spans.extend(_op_spans(graph, times, costs, shares, i, start))
        hidden = max(0.0, min(costs.dp_seconds - costs.dp_exposed_seconds, environment.now))
        start = environment.now - hidden
        if costs.dp_exposed_seconds > 0:
            yield environment.timeout(costs.dp_exposed_seconds)
        if costs.dp_seconds > 0:
            spans.append(
                Span(
                    rank=rank,
                    stream="communication",
                    name="gradient reduction and weight gather",
                    kind="dp_comm",
                    start_seconds=start,
                    duration_seconds=environment.now - start,
                    bytes=costs.dp_bytes,
                    group="dp",
                )
            )
        if not together:
            start = environment.now
            yield environment.timeout(costs.optimizer_seconds)
            lasted.append(environment.now - begun[rank])
            if costs.optimizer_seconds > 0:
                spans.append(_compute_span(rank, "optimizer", "optimizer", start, costs.optimizer_seconds))

    def optimizer() -> Generator[simpy.Event, Any, None]:
        # the gradient norm spans all ranks, so none updates before the last has its gradients
        yield environment.all_of([environment.process(pipeline_rank(rank)) for rank in ranks])
        if not together:
            return
        start = environment.now
        yield environment.timeout(costs.optimizer_seconds)
        if costs.optimizer_seconds > 0:
            spans.extend(
                _compute_span(rank, "optimizer", "optimizer", start, costs.optimizer_seconds) for rank in ranks
            )

    environment.run(until=environment.process(optimizer()))
    ordered = sorted(spans, key=lambda span: (span.rank, span.start_seconds, span.stream, -span.duration_seconds))
    return StepTimeline(spans=tuple(ordered), step_seconds=environment.now if together else max(lasted))


def _op_spans(
    graph: OpGraph, times: OpTimes, costs: StageCosts, shares: dict[str, float], i: int, start: float
) -> Iterator[Span]:
    """The work of an op, the traffic inside it and what it sends; a fused pair is drawn F before B."""
    op, rank, end = graph.ops[i], graph.ranks[i], start + times.work[i]
    if times.work[i] > 0:
        yield from _work_spans(graph, costs, i, start, times.work[i])
    at = end - sum(shares.values()) * times.work[i]
    for kind, share in shares.items():
        seconds = share * times.work[i]
        if seconds > 0 and op.kind != "W":
            yield Span(
                rank=rank,
                stream="communication",
                name=f"{kind.removesuffix('_comm').upper()} in {_label(op)}",
                kind=kind,
                start_seconds=at,
                duration_seconds=seconds,
                group=kind.removesuffix("_comm"),
            )
            at += seconds
    if times.gather[i] > 0:
        yield Span(
            rank=rank,
            stream="communication",
            name=f"weight shards for {_label(op)}",
            kind="dp_comm",
            start_seconds=end,
            duration_seconds=times.gather[i],
            group="dp",
        )
    if times.send[i] > 0:
        neighbour = boundary(op) + (1 if op.kind == "F" else 0)
        yield Span(
            rank=rank,
            stream="communication",
            name=f"send {_label(op)} to stage {neighbour}",
            kind="p2p",
            start_seconds=end + times.gather[i],
            duration_seconds=times.send[i],
            bytes=costs.p2p_bytes,
            group="pp",
        )


def _work_spans(graph: OpGraph, costs: StageCosts, i: int, start: float, seconds: float) -> Iterator[Span]:
    op, rank = graph.ops[i], graph.ranks[i]
    if not op.fused:
        kinds = {"F": "forward", "B": "backward_input" if graph.has_weight[i] else "backward", "W": "backward_weight"}
        yield _compute_span(rank, _label(op), kinds[op.kind], start, seconds)
        return
    forward = costs.forward_seconds[op.stage] * costs.straggler_factor
    yield _compute_span(rank, f"{_label(op)} (overlapped)", "forward", start, forward)
    partner = graph.ops[i + 1]
    yield _compute_span(rank, f"{_label(partner)} (overlapped)", "backward", start + forward, seconds - forward)


def _compute_span(rank: int, name: str, kind: str, start: float, seconds: float) -> Span:
    return Span(rank=rank, stream="compute", name=name, kind=kind, start_seconds=start, duration_seconds=seconds)


def _label(op: Op) -> str:
    return f"{op.kind}{op.microbatch} stage {op.stage}"


def _breakdown(
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
