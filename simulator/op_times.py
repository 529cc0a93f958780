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
