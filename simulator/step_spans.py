"""What was played as spans for a picture: a lane of compute and lanes of traffic for every pipeline rank."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from simulator.longest_path import OpGraph
from simulator.op_times import OpTimes, op_kind, op_label
from simulator.outcome import Span
from simulator.step import StageCosts
from simulator.step_records import Activity, Played

LATE_KINDS = ("tp_comm", "cp_comm", "ep_comm")


def step_spans(
    graph: OpGraph,
    times: Sequence[OpTimes],
    costs: StageCosts,
    shares: dict[str, float],
    played: Played,
    shown: Sequence[int] = (0,),
) -> tuple[Span, ...]:
    """Return the spans of some classes of units, in the order of ranks and starts.

    Args:
        graph: the ops.
        times: of each class.
        costs: of stages.
        shares: part of an op's work that is exposed traffic, by kind.
        played: what happened.
        shown: classes of units; the first is drawn as the ranks 0, 1, ..., the next as the ranks after them.
    """
    ranks = sorted(set(graph.ranks))
    spans: list[Span] = []
    for place, number in enumerate(shown):
        for one in played.activities:
            if one.unit not in (-1, number):
                continue
            on = [one.rank] if one.rank >= 0 else ranks
            for rank in on:
                drawn = place * len(ranks) + rank
                if one.op >= 0 and one.kind not in ("p2p", "dp_comm", *LATE_KINDS):
                    spans += _op_spans(graph, times[number], costs, shares, one, drawn)
                elif one.op >= 0 or one.kind == "dp_comm":
                    spans.append(_traffic_span(costs, one, drawn, exposed=one.op < 0))
                else:
                    spans.append(
                        _compute_span(drawn, one.name, one.kind, one.start_seconds, one.end_seconds - one.start_seconds)
                    )
    spans = [span for span in spans if span.duration_seconds > 0]
    return tuple(sorted(spans, key=lambda span: (span.rank, span.start_seconds, span.stream, -span.duration_seconds)))


def _op_spans(
    graph: OpGraph, times: OpTimes, costs: StageCosts, shares: dict[str, float], one: Activity, rank: int
) -> Iterator[Span]:
    """The work of an op and the traffic inside it; a fused pair is drawn F before B."""
    i, start = one.op, one.start_seconds
    op, work = graph.ops[i], times.work[i]
    if work > 0:
        yield from _work_spans(graph, costs, i, start, work, rank)
    at = start + work * (1 - sum(shares.values()))
    for kind, share in shares.items():
        seconds = share * work
        if seconds > 0 and op.kind != "W":
            axis = kind.removesuffix("_comm")
            yield Span(
                rank=rank,
                stream="communication",
                name=f"{axis.upper()} in {op_label(op)}",
                kind=kind,
                start_seconds=at,
                duration_seconds=seconds,
                group=axis,
            )
            at += seconds
    if times.gather[i] > 0:
        yield Span(
            rank=rank,
            stream="communication",
            name=f"weight shards for {op_label(op)}",
            kind="dp_comm",
            start_seconds=start + work,
            duration_seconds=times.gather[i],
            group="dp",
        )


def _work_spans(graph: OpGraph, costs: StageCosts, i: int, start: float, seconds: float, rank: int) -> Iterator[Span]:
    op = graph.ops[i]
    if not op.fused:
        yield _compute_span(rank, op_label(op), op_kind(graph, i), start, seconds)
        return
    partner = graph.ops[i + 1]
    both = costs.forward_seconds[op.stage] + costs.backward_seconds[partner.stage]
    forward = seconds * costs.forward_seconds[op.stage] / both
    yield _compute_span(rank, f"{op_label(op)} (overlapped)", "forward", start, forward)
    yield _compute_span(rank, f"{op_label(partner)} (overlapped)", "backward", start + forward, seconds - forward)


def _compute_span(rank: int, name: str, kind: str, start: float, seconds: float) -> Span:
    return Span(rank=rank, stream="compute", name=name, kind=kind, start_seconds=start, duration_seconds=seconds)


def _traffic_span(costs: StageCosts, one: Activity, rank: int, *, exposed: bool) -> Span:
    moved = {"p2p": costs.p2p_bytes, "dp_comm": costs.dp_bytes if exposed else 0.0}
    group = {"p2p": "pp"}.get(one.kind, one.kind.removesuffix("_comm"))
    return Span(
        rank=rank,
        stream="communication",
        name=one.name,
        kind=one.kind,
        start_seconds=one.start_seconds,
        duration_seconds=one.end_seconds - one.start_seconds,
        bytes=moved.get(one.kind, 0.0),
        group=group,
    )
