"""Lower bounds of the step and of memory for whole arrays of layouts, whatever their stages and recompute.

They hold inside the trust region of ``StageProblem`` and are cheap: one pass of the closed form without recompute. Work
is shared evenly but in whole layers, and then the pipeline's own paths say how long that takes at least.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from planner.question import Question
from planner.rule import DUALPIPE, INTERLEAVED, ONE_F_ONE_B, ZB_H1, ZBV
from scenarios.layout import RECOMPUTES
from simulator.arrays import CHUNK_ROWS, LayoutArrays
from simulator.data_parallel import HIDDEN_BEHIND
from simulator.evaluation import Evaluation, evaluate
from simulator.layers import LayerTimes
from simulator.links import links
from simulator.memory import memory_parts
from simulator.parameters import shipped_parameters
from simulator.stages import StageTables, uniform_tables
from simulator.weights import rank_weights, weights_of

Floats = npt.NDArray[np.float64]
NONE, FULL = RECOMPUTES.index("none"), RECOMPUTES.index("full")


@dataclass(frozen=True, slots=True, kw_only=True)
class Floors:
    """What no choice of stages and recompute goes below."""

    step_seconds: Floats
    memory_bytes: Floats
    """Of the fullest rank."""
    full_recompute_bytes: Floats
    """Of the fullest rank with equal stages and full recompute: where this fits, something does."""


def floors(question: Question, layouts: LayoutArrays) -> Floors:
    """Bound every layout, a few thousand at a time."""
    parts = []
    for start in range(0, len(layouts), CHUNK_ROWS):
        rows = layouts.take(slice(start, start + CHUNK_ROWS)) if len(layouts) > CHUNK_ROWS else layouts
        parts.append(_floors(question, rows))
    if not parts:
        return Floors(step_seconds=np.empty(0), memory_bytes=np.empty(0), full_recompute_bytes=np.empty(0))
    joined = [np.concatenate(one) for one in zip(*parts, strict=True)]
    return Floors(step_seconds=joined[0], memory_bytes=joined[1], full_recompute_bytes=joined[2])


def _floors(question: Question, rows: LayoutArrays) -> tuple[Floats, Floats, Floats]:
    cluster, job = question.cluster, question.job
    parameters, tables = shipped_parameters(), uniform_tables(job.model, rows)
    plain = replace(rows, recompute=np.where(rows.recompute == FULL, NONE, rows.recompute))
    one = evaluate(cluster, job, plain, tables, parameters)
    dense, expert = _mean_shares(question, rows, tables)
    step = step_floor(question, rows, tables, one, np.zeros(len(rows)))
    again = memory_parts(cluster, job, replace(rows, recompute=np.full(len(rows), FULL)), tables, parameters)
    total = np.asarray(sum(part for name, part in again.items() if name != "in_flight_microbatches")).max(axis=1)
    static = sum(again[f"{name}_bytes"] for name in ("weights", "gradients", "optimizer"))
    least = np.asarray(static).max(axis=1) * np.minimum(dense, expert) + again["buffers_bytes"].min(axis=1)
    return step, least, total


def _mean_shares(question: Question, rows: LayoutArrays, tables: StageTables) -> tuple[Floats, Floats]:
    """Mean over ranks of the parameters outside and inside routed experts, over those of the heaviest rank."""
    model = question.job.model
    weights = weights_of(model)
    dense, expert, _ = rank_weights(weights, tables)
    all_expert = sum(weights.expert[kind] * count for kind, count in model.kind_counts.items()) + weights.head_expert
    all_dense = sum(weights.dense[kind] * count for kind, count in model.kind_counts.items())
    all_dense += weights.embedding + weights.head
    heaviest, heaviest_expert = dense.max(axis=1)[tables.index], expert.max(axis=1)[tables.index]
    pp = rows.pp.astype(np.float64)
    share = np.minimum(all_dense / pp / heaviest, 1.0)
    expert_share = np.minimum(all_expert / pp / np.maximum(heaviest_expert, 1.0), 1.0) if all_expert else share
    return share, expert_share


def step_floor(
    question: Question, rows: LayoutArrays, tables: StageTables, one: Evaluation, least_work: Floats
) -> Floats:
    """Bound the step from one pass without recompute.

    Args:
        question: job and cluster.
        rows: the layouts.
        tables: their stages by the uniform rule.
        one: the closed form of these.
        least_work: seconds per micro-batch (without jitter) that some rank works at least, if more is known than the
            even share.
    """
    software = one.rates.software
    share = np.minimum(*_mean_shares(question, rows, tables))
    m, pp, vpp = one.share.num_microbatches, rows.pp.astype(np.float64), rows.vpp.astype(np.float64)
    slow = one.straggler
    totals = [float(count) for count in tables.totals]
    layer = [times.total for times in one.times]
    ends = one.embedding + one.head_gemm + one.head_memory
    commonest = int(np.argmax(totals))
    piped = pp > 1
    host = np.where(piped, one.rates.fixed_seconds("pp_microbatch") / (2 * vpp), one.rates.fixed_seconds("microbatch"))
    host = np.where(piped, host, host / 2)
    send = np.where(piped, one.p2p * one.p2p_exposed, 0.0)
    whole = np.asarray(sum(count * time for count, time in zip(totals, layer, strict=True))) + ends
    turns = np.isin(rows.schedule, [ZBV, DUALPIPE]) & (vpp == 2)  # in a V the turn stays on its rank
    whole = whole + 2 * pp * vpp * host + (2 * pp * vpp - np.where(turns, 4, 2)) * send
    full = np.ceil(totals[commonest] / pp)
    passes = 2 * vpp * host + np.where(piped, np.where(turns, 2, 2 * vpp - 1), 0) * send
    even = full * layer[commonest] + passes
    slowest = np.maximum(whole / pp, np.maximum(even, least_work + passes))
    simple = m * slowest
    long, short = 2.0 * whole + (m - pp - 1) * slowest, np.maximum(simple, 2.0 * whole * m / (m + 1))
    ramp = _first_chunks(question, rows, totals[commonest], full) * layer[commonest]
    late = _late_weights(rows, one.times[commonest], totals[commonest], full)
    split = m * even + np.minimum(late, m * layer[commonest])
    pipeline = np.select(
        [~piped, (rows.schedule == ONE_F_ONE_B) & (vpp == 1), rows.schedule == INTERLEAVED, rows.schedule == ZB_H1],
        [simple, np.where(m > pp, long, short), np.maximum(simple, m * even + ramp), np.maximum(simple, split)],
        simple,
    )
    tail = _tail_floor(question, one, share, piped, slow, pipeline, m, software.exposed_fsdp)
    return np.asarray(slow * pipeline + tail)


def _first_chunks(question: Question, rows: LayoutArrays, total: float, full: Floats) -> Floats:
    """Layers that a rank with its full share waits for, before its first op, in an interleaved pipeline.

    No more ranks than there is room to spare hold less than the full share, so one of the last of them holds it. The
    ranks before that hold the rest, and of each no more than the other chunks' worth is in these. A rank that holds a
    layer more than the full share takes as much longer with every micro-batch.
    """
    others, micro = rows.vpp - 1, question.job.global_batch_size // (rows.dp * rows.micro_batch_size)
    high = np.ceil((question.num_layers + question.tail_layers) / (rows.pp * rows.vpp))
    first = rows.pp - 1 - np.maximum(rows.pp * full - total, 0)
    waits = [total - full * (rows.pp - rank) - rank * others * high for rank in (first, rows.pp - 1)]
    return np.asarray(np.where(first > 0, np.clip(np.minimum(*waits), 0.0, micro), 0.0))


def _late_weights(rows: LayoutArrays, layer: LayerTimes, total: float, full: Floats) -> Floats:
    """Seconds that a rank with its full share adds to its work in ZB-H1, or less than none.

    It waits for the forwards of the ranks before it, and their backwards follow its last one, before which it puts off
    as many weight gradients as its number says.
    """
    rank = rows.pp - 1 - np.maximum(rows.pp * full - total, 0)
    before = total - full * (rows.pp - rank)
    waits = before * (layer.total - layer.weight_gradient) - rank * full * layer.weight_gradient
    return np.asarray(np.where((rank > 0) & (layer.total >= 2 * layer.weight_gradient), waits, 0.0))


def _tail_floor(
    question: Question,
    one: Evaluation,
    share: Floats,
    piped: npt.NDArray[np.bool_],
    slow: Floats,
    pipeline: Floats,
    m: Floats,
    beside_share: float,
) -> Floats:
    """Traffic and update of the mean rank; the heaviest one has more. No rank works longer than pipeline / m."""
    data, software = one.data, one.rates.software
    if links(question.cluster, shipped_parameters()).points:  # measured: not linear in the size
        share = np.where(piped, 0.0, share)
    total = data.total * share
    exposed = software.exposed_dp * total
    if software.dp_overlap:
        exposed = np.maximum(exposed, total - HIDDEN_BEHIND * pipeline / m)
    exact = ~piped  # one rank holds everything: the closed form is the step without recompute
    fsdp = np.where(exact, data.fsdp, beside_share * share * data.fsdp)
    constant = one.rates.fixed_seconds("step") if one.rates.cpu else one.rates.parameters.step_constant.value
    update = (data.update - constant) * share + constant
    return np.asarray(slow * m * fsdp + exposed + update)
