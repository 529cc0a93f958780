"""How long every op of a step keeps its rank busy, by part."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from simulator.longest_path import OpGraph, end_seconds, op_seconds
from simulator.schedule import Op
from simulator.step import StageCosts


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


def shard_seconds(graph: OpGraph, times: OpTimes, seconds: float, forward_share: float) -> tuple[float, ...]:
    """Spread the traffic of shards (FSDP) of one micro-batch and stage over its ops, in graph order.

    Args:
        graph: the ops.
        times: how long each may take for it.
        seconds: what it takes alone; what does not fit is left out.
        forward_share: part that belongs to the forward, which fetches once; the backward fetches again and reduces.
            What the backward cannot hold trails into the weight gradient, or is beside another micro-batch's forward.
    """
    index: dict[tuple[str, int, int], int] = {(op.kind, op.stage, op.microbatch): i for i, op in enumerate(graph.ops)}
    found = [0.0] * len(graph.ops)
    for (kind, stage, microbatch), i in index.items():
        if kind != "F":
            continue
        later = [index[name, stage, microbatch] for name in "BW" if (name, stage, microbatch) in index]
        if graph.ops[later[0] - 1].fused:  # its time is with the forward before it
            later[0] -= 1
        room = {one: times.work[one] + times.gather[one] - found[one] for one in (i, *later)}
        ahead = min(max(seconds * forward_share, seconds - sum(room[one] for one in later)), room[i])
        found[i] += ahead
        left = seconds - max(ahead, seconds * forward_share)
        for one in later:
            taken = min(left, room[one])
            found[one] += taken
            left -= taken
    return tuple(found)


class Anchor(NamedTuple):
    """Where in the work of a rank its gradients start."""

    op: int
    """-1: the start of the step."""
    after_seconds: float
    """After the start of that op."""
    seconds: float
    """What the gradients take alone; less than all where the step is shorter than what is hidden."""


def gradient_anchors(graph: OpGraph, times: OpTimes, seconds: float, exposed_seconds: float) -> dict[int, Anchor]:
    """Find, for every rank, where gradients must start to end ``exposed_seconds`` after its last op, undisturbed."""
    end = end_seconds(graph, [times.busy(i) for i in range(len(graph.ops))])
    found = {}
    for rank in sorted(set(graph.ranks)):
        own = [i for i, one in enumerate(graph.ranks) if one == rank]
        starts = max(0.0, end[own[-1]] - (seconds - exposed_seconds))
        begun = [i for i in own if end[i] - times.busy(i) <= starts]
        op = begun[-1] if begun else -1
        after = starts - (end[op] - times.busy(op) if op >= 0 else 0.0)
        found[rank] = Anchor(op, after, min(seconds, end[own[-1]] + exposed_seconds))
    return found


def op_label(op: Op) -> str:
    """Name an op.

    >>> op_label(Op("F", 3, 0))
    'F0 stage 3'
    """
    return f"{op.kind}{op.microbatch} stage {op.stage}"


def op_kind(graph: OpGraph, i: int) -> str:
    """Say what kind of span an op is; a fused pair counts as its forward."""
    op = graph.ops[i]
    if op.fused or op.kind == "F":
        return "forward"
    if op.kind == "W":
        return "backward_weight"
    return "backward_input" if graph.has_weight[i] else "backward"
