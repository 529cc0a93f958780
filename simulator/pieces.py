"""A layout as sums: what a layer of each kind and recompute mode adds to a virtual stage, in seconds and in bytes.

The planner chooses stages with these numbers. They are those of ``stage_costs``, ``data_parallel`` and ``memory_use``,
found by asking the same formulas for one layer at a time.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from scenarios.job import Job
from scenarios.layout import RECOMPUTES, Layout, Recompute
from simulator.activations import activation_bytes
from simulator.arrays import Floats, LayoutArrays
from simulator.data_parallel import HIDDEN_BEHIND, data_parallel
from simulator.evaluation import Evaluation, evaluate
from simulator.keeping import keeping_of
from simulator.layers import shares
from simulator.links import links
from simulator.memory import copied_bytes, memory_parts
from simulator.parameters import Parameters, shipped_parameters
from simulator.stages import Column, StageTables
from simulator.traffic import axes_of, ranks_of
from simulator.weights import columns_weights, weights_of
from topologies.cluster import Cluster


@dataclass(frozen=True, slots=True, kw_only=True)
class Linear:
    """``constant + dense x d + expert x e`` of a rank with so many parameters outside and inside routed experts."""

    constant: float
    dense: float
    expert: float

    def __call__(self, dense: float, expert: float) -> float:
        """Value for so many parameters, before any split over ranks."""
        return self.constant + self.dense * dense + self.expert * expert


@dataclass(frozen=True, slots=True, kw_only=True)
class Tail:
    """What follows the pipeline or runs beside it, by the parameters of the heaviest rank."""

    reduce: Linear
    """Reduction of gradients and gather of weights once per step, before overlap."""
    exposed_share: float
    hidden_share: float
    """Share of the slowest rank's micro-batch behind which reduction hides; infinite: nothing but the share counts."""
    update: Linear
    each: Linear
    """Gathers and reductions of every micro-batch (zero2, zero3), before overlap."""
    beside_share: float
    """What remains of them beside compute that is longer."""
    exact: bool
    """False: measured collectives, which are not linear in their size; the forms above are then lower bounds."""

    def after(self, dense: float, expert: float, microbatch: float) -> float:
        """Exposed seconds after the pipeline, where the slowest rank takes ``microbatch`` seconds for one."""
        total = self.reduce(dense, expert)
        hidden = total - self.hidden_share * microbatch if np.isfinite(self.hidden_share) else 0.0
        return max(self.exposed_share * total, hidden) + self.update(dense, expert)

    def beside(self, dense: float, expert: float, microbatch: float) -> float:
        """Exposed seconds of every micro-batch."""
        each = self.each(dense, expert)
        return max(self.beside_share * each, each - (1.0 - self.beside_share) * microbatch)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pieces:
    """One layout. Seconds are of one micro-batch with the straggler factor, unless they say otherwise; bytes of a rank.

    Arrays have one entry per column (a layer kind under a recompute mode). Bytes of activations hold their share of
    the allocator's fragmentation.
    """

    columns: tuple[Column, ...]
    forward: Floats
    backward: Floats
    weight: Floats
    first: tuple[float, float]
    """Forward and backward of the embedding."""
    last: tuple[float, float, float]
    """Forward, backward and weight gradient of the head."""
    send: float
    """What the sender of a result waits for."""
    host: float
    """What the software of a pipeline adds to each pass."""
    per_microbatch: float
    """What a rank without a pipeline adds to each micro-batch."""
    straggler: float
    """Factor that the other seconds hold."""
    loaded: float
    """Added to the slowest rank's work where reductions hide behind it; without the straggler factor."""
    num_microbatches: int
    tail: Tail
    dense: Floats
    expert: Floats
    """Parameters of a layer, outside and inside routed experts, before any split."""
    first_dense: float
    last_dense: float
    last_expert: float
    tied_copy: float
    """Parameters of the output matrix on a last rank that does not hold the embedding."""
    held: Floats
    saved: Floats
    """Kept per layer and live micro-batch."""
    again: Floats
    """What the backward of such a layer needs for a moment; of a rank's layers the largest counts."""
    first_bytes: float
    last_bytes: float
    both_bytes: float
    """Of a rank with both ends."""
    base_bytes: float
    """On every rank."""
    capacity_bytes: float


def pieces(
    cluster: Cluster,
    job: Job,
    layout: Layout,
    modes: tuple[Recompute, ...] = ("full", "none"),
    *,
    parameters: Parameters | None = None,
) -> Pieces:
    """Take one layout apart.

    Args:
        cluster: where it runs.
        job: what is trained.
        layout: degrees, schedule and sharding; its stages and recompute do not matter.
        modes: recompute modes that layers may have; the last one is that of prediction layers beside the head.
        parameters: of the simulator; default: the shipped ones.

    Raises:
        InputError: the GPU lacks the job's precision.
        ValueError: the global batch does not divide.
    """
    parameters = parameters or shipped_parameters()
    kinds = tuple(dict.fromkeys(job.model.pattern))
    columns = tuple(Column(kind=kind, recompute=RECOMPUTES.index(mode)) for mode in modes for kind in kinds)
    row = LayoutArrays.of([layout])
    one = evaluate(cluster, job, row, _table(columns, np.ones((1, len(columns))), np.ones((1, 2))), parameters)
    slow, weights = float(one.straggler[0]), weights_of(job.model)
    dense, expert = columns_weights(weights, columns)
    embedding, head_gemm, head = (float(part[0]) for part in (one.embedding, one.head_gemm, one.head_memory))
    head += head_gemm
    piped = layout.pp > 1
    host = one.rates.fixed_seconds("pp_microbatch") / (2 * layout.vpp) if piped else 0.0
    sent = float(one.p2p[0] * one.p2p_exposed[0]) if piped else 0.0
    fixed = one.rates.fixed_seconds("microbatch")
    memory = _memory(cluster, job, row, columns, parameters)
    bytes_of = {name: float(memory[name]) for name in ("first_bytes", "last_bytes", "both_bytes", "base_bytes")}

    def seconds(name: str) -> Floats:
        return slow * np.array([float(getattr(times, name)[0]) for times in one.times])

    return Pieces(
        columns=columns,
        forward=seconds("forward_seconds"),
        backward=seconds("backward_seconds"),
        weight=seconds("weight_gradient"),
        first=(slow * 0.4 * embedding, slow * 0.6 * embedding),
        last=(slow * head / 3.0, slow * head * (2.0 / 3.0), slow * head_gemm / 3.0),
        send=slow * sent,
        host=slow * host,
        per_microbatch=0.0 if piped else slow * fixed,
        straggler=slow,
        loaded=fixed + 2 * layout.vpp * (host + sent),
        num_microbatches=layout.num_microbatches(job),
        tail=_tail(cluster, job, row, columns, one, parameters),
        dense=dense,
        expert=expert,
        first_dense=weights.embedding,
        last_dense=weights.head,
        last_expert=weights.head_expert,
        tied_copy=weights.tied_copy,
        held=np.asarray(memory["held"]),
        saved=np.asarray(memory["saved"]),
        again=np.asarray(memory["again"]),
        capacity_bytes=cluster.gpu.usable_memory_bytes,
        **bytes_of,
    )


def _table(columns: tuple[Column, ...], layers: Floats, ends: Floats) -> StageTables:
    """One pipeline per row whose only rank, the first one, holds so many layers of each column in its first chunk."""
    rows = len(layers)
    chunks = np.zeros((rows, 1, 3, len(columns)))
    chunks[:, 0, 0] = layers
    return StageTables(
        columns=columns,
        index=np.arange(rows),
        busy=np.concatenate([layers, ends], axis=1)[:, None],
        chunks=chunks,
        ends=ends[:, None],
        ranks=np.zeros((rows, 1)),
        totals=layers[0],
    )


def _repeated(row: LayoutArrays, count: int) -> LayoutArrays:
    return row.take(np.zeros(count, dtype=np.int64))


def _tail(
    cluster: Cluster,
    job: Job,
    row: LayoutArrays,
    columns: tuple[Column, ...],
    one: Evaluation,
    parameters: Parameters,
) -> Tail:
    """Ask for an empty rank, one with the embedding alone and one with a layer of the largest experts."""
    weights, software = weights_of(job.model), one.rates.software
    dense, expert = columns_weights(weights, columns)
    largest = int(np.argmax(expert))
    layers, ends = np.zeros((3, len(columns))), np.zeros((3, 2))
    ends[1, 0], layers[2, largest] = 1.0, 1.0
    rows = _repeated(row, 3)
    ranks = ranks_of(rows)
    axes, share = axes_of(links(cluster, parameters), rows, ranks), shares(job, rows, ranks)
    found = data_parallel(one.rates, axes, job, rows, share, _table(columns, layers, ends), np.zeros(3))

    def linear(values: Floats) -> Linear:
        constant = float(values[0])
        by_dense = (float(values[1]) - constant) / weights.embedding
        rest = float(values[2]) - constant - by_dense * dense[largest]
        return Linear(constant=constant, dense=by_dense, expert=rest / expert[largest] if expert[largest] > 0 else 0.0)

    return Tail(
        reduce=linear(found.total),
        exposed_share=software.exposed_dp,
        hidden_share=HIDDEN_BEHIND if software.dp_overlap else np.inf,
        update=linear(found.update),
        each=linear(found.fsdp),
        beside_share=1.0 if one.rates.cpu else software.exposed_fsdp,
        exact=not axes.net.points,
    )


def _memory(
    cluster: Cluster, job: Job, row: LayoutArrays, columns: tuple[Column, ...], parameters: Parameters
) -> dict[str, Floats | float]:
    """Bytes by part: of an empty rank, of the ends, and of one layer of each column."""
    count = len(columns)
    layers = np.concatenate([np.zeros((4, count)), np.eye(count), np.ones((1, count))])
    ends = np.zeros((5 + count, 2))
    ends[1, 0] = ends[2, 1] = ends[3] = ends[-1] = 1.0
    rows = _repeated(row, 5 + count)
    parts = memory_parts(cluster, job, rows, _table(columns, layers, ends), parameters)
    static = (parts["weights_bytes"] + parts["gradients_bytes"] + parts["optimizer_bytes"])[:, 0]
    held = np.asarray(static[4:-1] - static[0])
    factor = 1.0 + parameters.fragmentation.value
    share = shares(job, rows.take(slice(0, 1)), ranks_of(rows.take(slice(0, 1))))
    kept = [
        activation_bytes(job, job.model.layer_kinds[column.kind], share, np.full(1, column.recompute))
        for column in columns
    ]
    again = np.array([float(one[0]) for _, one in kept])
    total = np.asarray(sum(part for name, part in parts.items() if name != "in_flight_microbatches"))[:, 0]
    buffers = parts["buffers_bytes"][:, 0]
    widest = float(buffers[-1] - buffers[3])  # of the layers' buffers the largest counts, on every rank
    if keeping_of(job).frees_gradients:  # copies of weights are activations; the loss is beside no layer's backward
        dense, expert = columns_weights(weights_of(job.model), columns)
        local = dense / share.ranks.tp[0] + expert / (share.ranks.ep * share.ranks.etp)[0]
        held = held + factor * copied_bytes(job, row.sharding)[0] * local
        total[:4] -= factor * np.minimum(parts["logits_bytes"][:4, 0], float(again.min()) + widest)
    base = float(total[0])
    return {
        "held": held,
        "saved": factor * np.array([float(saved[0]) for saved, _ in kept]),
        "again": factor * again,
        "first_bytes": float(total[1]) - base,
        "last_bytes": float(total[2]) - base,
        "both_bytes": float(total[3]) - base,
        "base_bytes": base + factor * widest,
    }
