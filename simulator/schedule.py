"""Pipeline schedules written down op by op: what each pipeline rank runs, in which order.

An op is the forward (F), the backward (B) or the split-off weight gradient (W) of one micro-batch on one virtual stage.
A B without a W of its own is the whole backward. Everything else follows from the orders: makespan, bubble, live
micro-batches.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Literal, NamedTuple

from scenarios.layout import Schedule

OpKind = Literal["F", "B", "W"]


class Op(NamedTuple):
    """One piece of work of one pipeline rank."""

    kind: OpKind
    stage: int
    """Virtual stage in model order."""
    microbatch: int
    fused: bool = False
    """This F overlaps with the B after it (DualPipe): both start when both inputs are there, and end together."""


Orders = tuple[tuple[Op, ...], ...]
"""The ops of each pipeline rank, in order."""


def schedule_complaint(schedule: Schedule, pp: int, vpp: int, num_microbatches: int) -> str | None:
    """Say which rule of the schedule these degrees break, or None.

    Sources of the rules: Narayanan et al. 2021 (interleaved), Qi et al. 2024 (zero bubble, V placement), DeepSeek-V3
    report, section 3.2.1 (DualPipe; with two chunks per rank its half, DualPipeV).
    """
    chunks = {"gpipe": (1,), "1f1b": (1,), "zb-h1": (1,), "zb-h2": (1,), "zbv": (2,), "dualpipe": (1, 2)}
    if min(pp, vpp, num_microbatches) < 1:
        return f"pp {pp}, vpp {vpp} and num_microbatches {num_microbatches} must be at least 1"
    if schedule in chunks and vpp not in chunks[schedule]:
        return f"schedule {schedule} has vpp {' or '.join(map(str, chunks[schedule]))}, not {vpp}"
    if schedule == "interleaved" and vpp > 1 and num_microbatches % pp:
        return f"schedule interleaved needs num_microbatches in multiples of pp {pp}, not {num_microbatches}"
    if schedule == "zb-h2" and num_microbatches < 2 * pp - 1:
        return f"schedule zb-h2 needs num_microbatches of at least 2 x pp - 1 = {2 * pp - 1}, not {num_microbatches}"
    if schedule == "dualpipe" and vpp == 1 and (pp % 2 or num_microbatches % 2):
        return f"schedule dualpipe with vpp 1 needs an even pp and even num_microbatches, not {pp}, {num_microbatches}"
    if schedule == "dualpipe" and num_microbatches < 2 * pp:
        return f"schedule dualpipe needs num_microbatches of at least 2 x pp = {2 * pp}, not {num_microbatches}"
    return None


@lru_cache(maxsize=64)
def op_orders(schedule: Schedule, pp: int, vpp: int, num_microbatches: int) -> Orders:
    """Return the ops of every pipeline rank in the order in which it runs them.

    With dualpipe and vpp 1 the first half of the micro-batches enters at rank 0 and the second half at the last rank,
    where the stages lie mirrored; every rank then holds two stages.

    Raises:
        ValueError: the schedule does not exist for these degrees.
    """
    complaint = schedule_complaint(schedule, pp, vpp, num_microbatches)
    if complaint is not None:
        raise ValueError(complaint)
    m = num_microbatches
    if schedule == "gpipe":
        orders = [_gpipe(rank, m) for rank in range(pp)]
    elif schedule == "zb-h1":
        orders = [_zb_h1(rank, pp, m) for rank in range(pp)]
    elif schedule == "zb-h2":
        orders = _zb_h2(pp, m)
    elif schedule == "zbv":
        orders = [_zbv(rank, pp, m) for rank in range(pp)]
    elif schedule == "dualpipe" and vpp == 1:
        orders = [_dualpipe(rank, pp, m) for rank in range(pp)]
    elif schedule == "dualpipe":
        orders = [_dualpipe_v(rank, pp, m) for rank in range(pp)]
    elif vpp == 1:
        orders = [_one_forward_one_backward(rank, pp, m) for rank in range(pp)]
    else:
        orders = [_interleaved(rank, pp, vpp, m) for rank in range(pp)]
    return tuple(tuple(order) for order in orders)


def stage_rank(schedule: Schedule, pp: int, vpp: int, stage: int) -> int:
    """Return the pipeline rank of a virtual stage: round robin, or a V for zbv and dualpipe with two chunks.

    With dualpipe and vpp 1 this is the place of the first half of the micro-batches; the other half is mirrored.
    """
    if stage >= pp and (schedule == "zbv" or (schedule == "dualpipe" and vpp == 2)):
        return 2 * pp - 1 - stage
    return stage % pp


def _gpipe(rank: int, m: int) -> list[Op]:
    """All forwards, then all backwards (Huang et al. 2019), the last micro-batch first."""
    return [Op("F", rank, i) for i in range(m)] + [Op("B", rank, i) for i in reversed(range(m))]


def _one_forward_one_backward(rank: int, pp: int, m: int) -> list[Op]:
    """PipeDream-flush (Narayanan et al. 2021): pp - rank - 1 forwards ahead, then one forward and one backward."""
    ahead = min(pp - rank - 1, m)
    order = [Op("F", rank, i) for i in range(ahead)]
    for i in range(m - ahead):
        order += [Op("F", rank, ahead + i), Op("B", rank, i)]
    return order + [Op("B", rank, i) for i in range(m - ahead, m)]


def _interleaved(rank: int, pp: int, vpp: int, m: int) -> list[Op]:
    """Megatron-LM's interleaved 1F1B (Narayanan et al. 2021): pp micro-batches per chunk, chunk after chunk."""
    total = m * vpp
    ahead = min(2 * (pp - rank - 1) + (vpp - 1) * pp, total)

    def op(kind: OpKind, position: int) -> Op:
        group, inside = divmod(position, pp * vpp)
        chunk = inside // pp if kind == "F" else vpp - 1 - inside // pp
        return Op(kind, chunk * pp + rank, group * pp + inside % pp)

    order = [op("F", position) for position in range(ahead)]
    for position in range(total - ahead):
        order += [op("F", ahead + position), op("B", position)]
    return order + [op("B", position) for position in range(total - ahead, total)]


def _zb_h1(rank: int, pp: int, m: int) -> list[Op]:
    """ZB-H1 (Qi et al. 2024): 1F1B whose weight gradients come ``rank`` micro-batches late and fill the cool-down."""
    order: list[Op] = []
    weights = 0
    for op in _one_forward_one_backward(rank, pp, m):
        order.append(op)
        steady = op.microbatch < m - min(pp - rank - 1, m)
        if op.kind == "B" and (op.microbatch >= rank or not steady) and weights <= op.microbatch:
            order.append(Op("W", rank, weights))
            weights += 1
    return order + [Op("W", rank, i) for i in range(weights, m)]


def _zb_h2(pp: int, m: int) -> list[list[Op]]:
    """ZB-H2 (Qi et al. 2024): ``2 (pp - rank) - 1`` forwards ahead, and weight gradients where a rank would wait.

    Found by letting all ranks run with F = B = W: an input gradient first, then a forward, then a weight gradient, with
    at most ``2 pp - 1`` micro-batches alive. Then no rank is ever idle between its first op and its last.
    """
    orders: list[list[Op]] = [[] for _ in range(pp)]
    done = [dict.fromkeys("FBW", 0) for _ in range(pp)]
    forward, backward = [m, *[0] * (pp - 1)], [0] * pp  # inputs that have arrived

    def choice(rank: int) -> OpKind | None:
        f, b, w = done[rank].values()
        if b < backward[rank]:
            return "B"
        if f < forward[rank] and f - b < 2 * (pp - rank) - 1 and f - w < 2 * pp - 1:
            return "F"
        return "W" if w < b else None

    while any(one["W"] < m for one in done):
        chosen = [choice(rank) for rank in range(pp)]
        for rank, kind in enumerate(chosen):
            if kind is None:
                continue
            orders[rank].append(Op(kind, rank, done[rank][kind]))
            done[rank][kind] += 1
            if kind == "F" and rank < pp - 1:
                forward[rank + 1] += 1
            elif kind == "F":
                backward[rank] += 1
            elif kind == "B" and rank:
                backward[rank - 1] += 1
    return orders


def _zbv(rank: int, pp: int, m: int) -> list[Op]:
    """ZB-V (Qi et al. 2024, controllable memory): chunks ``rank`` and ``2 pp - 1 - rank``, no bubble if F = B = W.

    The order is closed for m >= 2 pp - 1; fewer micro-batches run the same order with the others left out.
    """
    full = max(m, 2 * pp - 1)
    stages = (rank, 2 * pp - 1 - rank)
    done = {f"{kind}{chunk}": 0 for kind in "FBW" for chunk in (0, 1)}
    order: list[Op] = []

    def run(*names: str) -> None:
        for name in names:
            kind: OpKind = "F" if name[0] == "F" else "B" if name[0] == "B" else "W"
            order.append(Op(kind, stages[int(name[1])], done[name]))
            done[name] += 1

    run(*["F0"] * (2 * (pp - rank) - 1))
    run(*["F1", "F0"] * rank)
    run(*["F1", "B1", "W1"] * (pp - rank))
    while done["F1"] < full:
        if done["F0"] < full:
            run("F0")
        run("B0", "W0", "F1", "B1", "W1")
    run(*["B0", "B1"] * rank)
    run(*["B0", "W0"] * (pp - rank))
    run(*["W1"] * (full - done["W1"]), *["W0"] * (full - done["W0"]))
    return [op for op in order if op.microbatch < m]


def _dualpipe(rank: int, pp: int, m: int) -> list[Op]:
    """Bidirectional DualPipe: the ranks of the second half see the micro-batches that enter at their end first."""
    distance, mirrored = min(rank, pp - 1 - rank), rank >= pp // 2

    def placed(kind: OpKind, phase: int, count: int, fused: bool) -> Op:
        backwards = (phase == 1) != mirrored
        return Op(kind, pp - 1 - rank if backwards else rank, count + (m // 2 if backwards else 0), fused)

    return [placed(*step) for step in _dualpipe_steps(pp // 2, distance, m // 2)]


def _dualpipe_v(rank: int, pp: int, m: int) -> list[Op]:
    """DualPipeV: DualPipe cut in half; the second phase is the way back through the chunks 2 pp - 1 - rank."""
    stages = (rank, 2 * pp - 1 - rank)
    return [Op(kind, stages[phase], count, fused) for kind, phase, count, fused in _dualpipe_steps(pp, rank, m)]


def _dualpipe_steps(half: int, distance: int, per_phase: int) -> list[tuple[OpKind, int, int, bool]]:
    """The eight steps of DualPipe on the rank ``distance`` hops from its end; (kind, phase, count, fused with next)."""
    steps: list[tuple[OpKind, int, int, bool]] = []
    forwards, backwards = [0, 0], [0, 0]
    weights: deque[tuple[int, int]] = deque()
    inner = half - distance - 1

    def forward(phase: int, fused: bool = False) -> None:
        steps.append(("F", phase, forwards[phase], fused))
        forwards[phase] += 1

    def backward(phase: int, split: bool = False) -> None:
        steps.append(("B", phase, backwards[phase], False))
        if split:
            weights.append((phase, backwards[phase]))
        backwards[phase] += 1

    def weight() -> None:
        steps.append(("W", *weights.popleft(), False))

    def pair(forward_phase: int) -> None:
        forward(forward_phase, fused=True)
        backward(1 - forward_phase)

    for _ in range(2 * inner):  # 1
        forward(0)
    for _ in range(distance + 1):  # 2
        forward(0)
        forward(1)
    for _ in range(inner):  # 3
        backward(1, split=True)
        weight()
        forward(1)
    for i in range(per_phase - 2 * half + distance + 1):  # 4
        if i == 0 and inner == 0:  # on the innermost rank this backward waits for this very forward
            forward(0)
            backward(1)
        else:
            pair(0)
        pair(1)
    for _ in range(inner):  # 5
        backward(1)
        pair(1)
    for i in range(2 * (distance + 1)):  # 6: the second half of these backwards leaves its weight gradients for later
        backward(1 - i % 2, split=i > distance)
    for _ in range(inner):  # 7
        weight()
        backward(0, split=True)
    while weights:  # 8
        weight()
    return steps


def live_vectors(order: Sequence[Op], release: Literal["B", "W"] = "B") -> tuple[tuple[int, ...], ...]:
    """Return every Pareto-maximal count of live micro-batches per chunk that one rank reaches.

    An activation lives from its F to the end of its B, or of its W where ``release`` is W and the schedule splits.
    Chunks are the rank's virtual stages in model order.
    """
    stages = sorted({op.stage for op in order})
    chunk = {stage: i for i, stage in enumerate(stages)}
    split = {(op.stage, op.microbatch) for op in order if op.kind == "W"} if release == "W" else set()
    live = [0] * len(stages)
    seen: set[tuple[int, ...]] = set()
    for op in order:
        if op.kind == "F":
            live[chunk[op.stage]] += 1
            seen.add(tuple(live))
        elif op.kind == ("W" if (op.stage, op.microbatch) in split else "B"):
            live[chunk[op.stage]] -= 1
    return tuple(sorted(_pareto_maximal(seen), reverse=True))


@lru_cache(maxsize=256)
def chunk_vectors(
    schedule: Schedule, pp: int, vpp: int, num_microbatches: int
) -> tuple[tuple[tuple[int, ...], ...], ...]:
    """Return ``live_vectors`` of every rank, activations kept for weight gradients included.

    A long step lives like one of 4 pp micro-batches.

    Raises:
        ValueError: the schedule does not exist for these degrees.
    """
    complaint = schedule_complaint(schedule, pp, vpp, num_microbatches)
    if complaint is not None:
        raise ValueError(complaint)
    orders = op_orders(schedule, pp, vpp, min(num_microbatches, 4 * pp))
    return tuple(live_vectors(order, "W") for order in orders)


def in_flight(
    schedule: Schedule, pp: int, vpp: int, num_microbatches: int, release: Literal["B", "W"] = "B"
) -> tuple[tuple[int, ...], ...]:
    """Return, for each pipeline rank, its live micro-batches per chunk when their sum is largest.

    >>> in_flight("1f1b", pp=4, vpp=1, num_microbatches=8)
    ((4,), (3,), (2,), (1,))
    """
    orders = op_orders(schedule, pp, vpp, num_microbatches)
    return tuple(max(live_vectors(order, release), key=sum) for order in orders)


def _pareto_maximal(vectors: Iterable[tuple[int, ...]]) -> list[tuple[int, ...]]:
    kept: list[tuple[int, ...]] = []
    for vector in sorted(vectors, key=sum, reverse=True):
        if not any(all(a <= b for a, b in zip(vector, other, strict=True)) for other in kept):
            kept.append(vector)
    return kept
