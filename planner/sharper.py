"""Sharper bounds of a few thousand layouts: how many layers every rank can hold, and what they must recompute.

The commonest layer kind alone is shared out over the ranks, each with its own live micro-batches; memory that the rest
of the model needs is left out, so that what does not fit here fits nowhere.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import numpy.typing as npt

from planner.bounds import FULL, NONE, step_floor
from planner.question import Question
from planner.rule import DUALPIPE, ZBV
from scenarios.layout import RECOMPUTES
from simulator.activations import activation_bytes
from simulator.arrays import LayoutArrays
from simulator.evaluation import evaluate
from simulator.layers import shares
from simulator.live import live_microbatches
from simulator.memory import memory_parts
from simulator.parameters import shipped_parameters
from simulator.stages import StageTables, uniform_columns, uniform_tables
from simulator.traffic import ranks_of

Floats = npt.NDArray[np.float64]
SELECTIVE = RECOMPUTES.index("selective")

HALVINGS = 24
"""Of the interval in which the slowest rank's time lies."""
MAX_CELLS = 4_000_000
"""Rows times ranks of one pass."""


def sharpened(question: Question, layouts: LayoutArrays) -> Floats:
    """Lower bounds of the step with memory in them; infinite where not even full recompute fits."""
    found = np.zeros(len(layouts))
    for pp in np.unique(layouts.pp):
        rows = np.flatnonzero(layouts.pp == pp)
        for start in range(0, len(rows), max(MAX_CELLS // int(pp), 1)):
            part = rows[start : start + max(MAX_CELLS // int(pp), 1)]
            found[part] = _of_one_depth(question, layouts.take(part), int(pp))
    return found


def _of_one_depth(question: Question, rows: LayoutArrays, pp: int) -> Floats:
    job, parameters = question.job, shipped_parameters()
    model = job.model
    kind = max(model.kind_counts, key=lambda one: model.kind_counts[one])
    place = [column.kind for column in uniform_columns(model)].index(kind)
    total = float(model.kind_counts[kind])
    tables = uniform_tables(model, rows)
    plain = replace(rows, recompute=np.where(rows.recompute == FULL, NONE, rows.recompute))
    again = replace(rows, recompute=np.full(len(rows), FULL))
    one = evaluate(question.cluster, job, plain, tables, parameters)
    layer = one.times[place].total
    factor = 1.0 + parameters.fragmentation.value
    share = shares(job, rows, ranks_of(rows))
    kept, moment = activation_bytes(job, model.layer_kinds[kind], share, plain.recompute)
    least, _ = activation_bytes(job, model.layer_kinds[kind], share, again.recompute)
    most_seconds, per_byte = layer, np.full(len(rows), np.inf)
    for mode in (FULL, SELECTIVE):  # the cheapest way to save a byte bounds every mix
        other = replace(rows, recompute=np.full(len(rows), mode))
        spared_bytes = kept - activation_bytes(job, model.layer_kinds[kind], share, other.recompute)[0]
        total_seconds = evaluate(question.cluster, job, other, tables, parameters).times[place].total
        most_seconds = np.maximum(most_seconds, total_seconds)
        cost = np.maximum(total_seconds - layer, 0.0) / np.maximum(spared_bytes, 1.0)
        per_byte = np.minimum(per_byte, np.where(spared_bytes > 0, cost, np.inf))
    held, base = _one_layer(question, rows, place)
    room = (question.cluster.gpu.usable_memory_bytes - factor * moment)[:, None] - _on_ranks(rows, pp, base)

    ranks = np.broadcast_to(np.arange(pp, dtype=np.float64), (len(rows), pp))
    first, middle, last = live_microbatches(rows, ranks, one.share.num_microbatches)
    vpp, high = rows.vpp[:, None], np.ceil((model.num_layers + question.tail_layers) / (pp * rows.vpp))[:, None]
    passes = np.where(vpp == 1, first, first + middle * np.maximum(vpp - 2, 0) + last)
    # chunks hold no more than the even split: what a rank holds less than that, its longest-lived chunk holds less
    spared = high * (passes - vpp * first) * (vpp > 1)
    need = held[:, None] + factor * first * kept[:, None]
    extra = np.where(np.isfinite(per_byte), per_byte, 0.0)[:, None] / (factor * first)
    offset = room - factor * spared * kept[:, None]
    lean = held[:, None] + factor * first * least[:, None]
    most = np.floor(np.clip((room - factor * spared * least[:, None]) / np.maximum(lean, 1.0), 0, total) + 1e-9)
    most = np.where(vpp > 1, np.minimum(most, vpp * high), most)

    ends = _on_ranks(rows, pp, np.stack([0.0 * layer, one.embedding, one.head_gemm + one.head_memory], axis=1))

    def layers(seconds: Floats) -> Floats:
        """Layers of every rank that works no longer than so, embedding and head included."""
        left = seconds[:, None] - ends
        quick = left / layer[:, None]
        slow = (left + extra * offset) / (layer[:, None] + extra * need)
        held_now = np.where(quick * need <= offset, quick, np.minimum(quick, slow))
        return np.asarray(np.floor(np.clip(np.minimum(held_now, most), 0, None) + 1e-9).sum(axis=1))

    low, top = np.zeros(len(rows)), total * most_seconds + ends.max(axis=1)
    fits = most.sum(axis=1) >= total
    for _ in range(HALVINGS):
        middle_time = 0.5 * (low + top)
        enough = layers(middle_time) >= total
        low, top = np.where(enough, low, middle_time), np.where(enough, middle_time, top)
    return np.where(fits, step_floor(question, rows, tables, one, low), np.inf)


def _on_ranks(rows: LayoutArrays, pp: int, base: Floats) -> Floats:
    """What every rank has, what embedding and head add, as (rows, pp); the last stage of a V lies on rank 0."""
    folded = np.isin(rows.schedule, [ZBV, DUALPIPE]) & (rows.vpp == 2)
    found = np.repeat(base[:, :1], pp, axis=1)
    found[:, 0] += base[:, 1]
    found[np.arange(len(rows)), np.where(folded, 0, pp - 1)] += base[:, 2]
    return found


def _one_layer(question: Question, rows: LayoutArrays, place: int) -> tuple[Floats, Floats]:
    """Bytes of weights, gradients and optimizer of one layer on a rank, and of what is there beside layers.

    That has three columns: what each rank holds anyway, what the embedding adds, what the head adds.
    """
    model, parameters = question.job.model, shipped_parameters()
    columns = uniform_columns(model)
    chunks, ends = np.zeros((1, 3, 3, len(columns))), np.zeros((1, 3, 2))
    chunks[0, :, 0, place] = 1.0
    ends[0, 1, 0] = ends[0, 2, 1] = 1.0
    table = StageTables(
        columns=columns,
        index=np.zeros(len(rows), dtype=np.int64),
        busy=np.zeros((1, 1, len(columns) + 2)),
        chunks=chunks,
        ends=ends,
        ranks=np.zeros((1, 3)),
        totals=np.zeros(len(columns)),
    )
    parts = memory_parts(question.cluster, question.job, rows, table, parameters)
    static = parts["weights_bytes"] + parts["gradients_bytes"] + parts["optimizer_bytes"]
    factor = parameters.fragmentation.value
    others = parts["buffers_bytes"] + parts["reserve_bytes"] - factor * parts["activations_bytes"]
    more = static - static[:, :1]
    return static[:, 0], np.stack([others[:, 0], more[:, 1], more[:, 2]], axis=1)
