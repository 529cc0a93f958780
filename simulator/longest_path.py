"""The step as a longest path: op orders and data dependencies make a graph, durations make its makespan.

The same answer as the event-driven step of ``simulator.training`` where transfers do not share links, without events.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from simulator.schedule import Op, Orders


@dataclass(frozen=True, slots=True, kw_only=True)
class OpGraph:
    """The ops of all ranks with what each waits for."""

    ops: tuple[Op, ...]
    ranks: tuple[int, ...]
    """Pipeline rank of each op."""
    previous: tuple[int, ...]
    """The op before it on the same rank; -1: none."""
    inputs: tuple[tuple[int, ...], ...]
    """Ops whose results it needs: one, or two for a fused pair."""
    has_weight: tuple[bool, ...]
    """For a B: its weight gradient is an op of its own."""
    topological: tuple[int, ...]
    num_stages: int


@lru_cache(maxsize=64)
def op_graph(orders: Orders) -> OpGraph:
    """Join op orders by their data dependencies.

    F needs the F of the stage before, B the B of the stage after (the last stage: its own F), W its B.

    Raises:
        ValueError: an op is missing or listed twice, or the ranks would wait for each other for ever.
    """
    ops = tuple(op for order in orders for op in order)
    ranks = tuple(rank for rank, order in enumerate(orders) for _ in order)
    previous = tuple(i - 1 if i and ranks[i - 1] == ranks[i] else -1 for i in range(len(ops)))
    index: dict[tuple[str, int, int], int] = {(op.kind, op.stage, op.microbatch): i for i, op in enumerate(ops)}
    if len(index) != len(ops):
        raise ValueError("an op is listed twice")
    num_stages = 1 + max(op.stage for op in ops)
    microbatches = {op.microbatch for op in ops}
    for kind in ("F", "B"):
        if sum(op.kind == kind for op in ops) != num_stages * len(microbatches):
            raise ValueError(f"not every micro-batch has one {kind} on every stage")

    def source(op: Op) -> tuple[int, ...]:
        if op.kind == "F":
            key = ("F", op.stage - 1, op.microbatch)
        elif op.kind == "W" or op.stage < num_stages - 1:
            key = ("B", op.stage + (op.kind == "B"), op.microbatch)
        else:
            key = ("F", op.stage, op.microbatch)
        return (index[key],) if key[1] >= 0 else ()

    inputs = tuple(source(op) + (source(ops[i + 1]) if op.fused else ()) for i, op in enumerate(ops))
    return OpGraph(
        ops=ops,
        ranks=ranks,
        previous=previous,
        inputs=inputs,
        has_weight=tuple(op.kind == "B" and ("W", op.stage, op.microbatch) in index for op in ops),
        topological=_topological(len(orders), ranks, inputs),
        num_stages=num_stages,
    )


def _topological(num_ranks: int, ranks: tuple[int, ...], inputs: tuple[tuple[int, ...], ...]) -> tuple[int, ...]:
    """Let every rank run until it waits; a round without progress is a deadlock."""
    first = [ranks.index(rank) for rank in range(num_ranks)] + [len(ranks)]
    at, done, found = first[:-1], [False] * len(ranks), list[int]()
    while len(found) < len(ranks):
        before = len(found)
        for rank in range(num_ranks):
            while at[rank] < first[rank + 1] and all(done[i] for i in inputs[at[rank]]):
                done[at[rank]] = True
                found.append(at[rank])
                at[rank] += 1
        if len(found) == before:
            raise ValueError(f"the op orders deadlock: {len(ranks) - before} ops wait for each other")
    return tuple(found)


def op_seconds(
    graph: OpGraph, forward: Sequence[float], backward: Sequence[float], weight: Sequence[float] | None = None
) -> list[float]:
    """Return the duration of every op, in graph order.

    ``forward``, ``backward`` (the whole of it) and ``weight`` (its part that is the weight gradient; default: half) are
    seconds per virtual stage and micro-batch. A fused pair is charged to its F: no gain from overlap is assumed.
    """
    parts = [0.5 * seconds for seconds in backward] if weight is None else weight
    seconds = []
    for i, op in enumerate(graph.ops):
        if op.kind == "F":
            seconds.append(forward[op.stage] + (backward[graph.ops[i + 1].stage] if op.fused else 0.0))
        elif op.kind == "W":
            seconds.append(parts[op.stage])
        elif i and graph.ops[i - 1].fused:
            seconds.append(0.0)
        else:
            seconds.append(backward[op.stage] - (parts[op.stage] if graph.has_weight[i] else 0.0))
    return seconds


def end_seconds(graph: OpGraph, seconds: Sequence[float], hop: float | Sequence[float] = 0.0) -> list[float]:
    """Return when each op ends: ``end = max(end before on the rank, end of inputs + hop) + duration``.

    ``hop`` is the transfer time between ranks, one value or one per stage boundary (boundary s: stage s to s + 1).
    """
    hops = [hop] * graph.num_stages if isinstance(hop, int | float) else hop
    end = [0.0] * (len(graph.ops) + 1)  # the last entry answers for previous = -1
    for i in graph.topological:
        start = end[graph.previous[i]]
        for j in graph.inputs[i]:
            ready = end[j]
            if graph.ranks[j] != graph.ranks[i]:
                ready += hops[boundary(graph.ops[j])]
            start = max(start, ready)
        end[i] = start + seconds[i]
    return end[:-1]


def busiest_span(graph: OpGraph, seconds: Sequence[float], ends: Sequence[float]) -> float:
    """Return the longest time from the first to the last op of one rank.

    What a step takes where ranks go on to the next one without waiting for each other, as ZB-H2 does (Qi et al. 2024,
    section 4: the optimizer's check is made afterwards).
    """
    last = {rank: i for i, rank in enumerate(graph.ranks)}
    first = {rank: i for i, rank in reversed(list(enumerate(graph.ranks)))}
    return max(ends[last[rank]] - ends[first[rank]] + seconds[first[rank]] for rank in last)


def boundary(sender: Op) -> int:
    """Return the stage boundary that the result of an op crosses."""
    return sender.stage if sender.kind == "F" else sender.stage - 1


def makespan(
    orders: Orders,
    forward: Sequence[float],
    backward: Sequence[float],
    hop: float | Sequence[float] = 0.0,
    weight: Sequence[float] | None = None,
) -> float:
    """Return the seconds from the first to the last op of a pipeline, see ``op_seconds`` and ``end_seconds``."""
    graph = op_graph(orders)
    return max(end_seconds(graph, op_seconds(graph, forward, backward, weight), hop))
