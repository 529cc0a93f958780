"""The closed form itself, over arrays of layouts: from the time of a layer to the exposed parts of a step.

The story: time a layer of each kind, put layers on pipeline ranks, find the slowest rank, run the micro-batches through
the pipeline, add what data parallelism and the optimizer do not hide.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np

from scenarios.job import Job
from simulator.arrays import Floats, LayoutArrays
from simulator.bubbles import SPLITTING, Passes, split_bubble
from simulator.compute import Rates, embedding_seconds, gemm_seconds, head_seconds, rates
from simulator.data_parallel import DataParallel, data_parallel
from simulator.layers import LayerTimes, Shares, layer_times, shares
from simulator.links import links
from simulator.outcome import BREAKDOWN
from simulator.parameters import Parameters
from simulator.stages import StageTables
from simulator.traffic import axes_of, p2p_seconds, ranks_of
from simulator.weights import weights_of
from topologies.cluster import Cluster


@dataclass(frozen=True, slots=True, kw_only=True)
class StepArrays:
    """Exposed seconds of one step, one entry per layout; the names and their meaning are those of StepTime."""

    compute_seconds: Floats
    tp_comm_seconds: Floats
    cp_comm_seconds: Floats
    ep_comm_seconds: Floats
    pp_bubble_seconds: Floats
    pp_comm_seconds: Floats
    dp_comm_seconds: Floats
    optimizer_seconds: Floats
    straggler_seconds: Floats

    @property
    def total_seconds(self) -> Floats:
        """The whole step."""
        return np.asarray(sum(getattr(self, f"{name}_seconds") for name in BREAKDOWN))


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """Everything that one pass computed."""

    step: StepArrays
    rates: Rates
    share: Shares
    times: tuple[LayerTimes, ...]
    slowest: Floats
    """Shape (layouts, columns + 2): profile of the slowest rank."""
    head_gemm: Floats
    head_memory: Floats
    embedding: Floats
    p2p: Floats
    p2p_exposed: Floats
    """Share of it that is waited for."""
    boundary_bytes: Floats
    data: DataParallel
    straggler: Floats
    """Factor on the pipeline."""
    microbatch_host: float
    """Fixed seconds of the software per micro-batch."""

    def compute_parts(self) -> dict[str, float]:
        """Compute of the slowest rank of the first layout by cause; adds up to ``compute_seconds``."""
        counts, times = self.slowest[0], self.times

        def summed(name: str) -> float:
            return float(sum(count * getattr(one, name)[0] for count, one in zip(counts, times, strict=False)))

        head = float(counts[-1] * (self.head_gemm[0] + self.head_memory[0]) + counts[-2] * self.embedding[0])
        parts = {
            "gemm": summed("gemm") + summed("gemm_backward"),
            "attention": summed("attention_forward") + summed("attention_backward"),
            "memory_bound": 3.0 * summed("memory") + summed("cast") + summed("accumulate"),
            "recompute": summed("recompute"),
            "head": head,
            "host": summed("host") + self.microbatch_host,
        }
        return {name: seconds * float(self.share.num_microbatches[0]) for name, seconds in parts.items()}


def evaluate(
    cluster: Cluster, job: Job, layouts: LayoutArrays, tables: StageTables, parameters: Parameters
) -> Evaluation:
    """Run the closed form over all rows."""
    model, ranks = job.model, ranks_of(layouts)
    rate, axes, weight = (
        rates(cluster, job, parameters),
        axes_of(links(cluster, parameters), layouts, ranks),
        weights_of(model),
    )
    share = shares(job, layouts, ranks)
    software, micro = rate.software, share.num_microbatches

    times = tuple(
        layer_times(
            rate,
            axes,
            job,
            model.layer_kinds[column.kind],
            weight.dense[column.kind],
            weight.expert[column.kind],
            share,
            layouts.recompute if column.recompute is None else np.full(len(layouts), column.recompute),
            layouts.recompute_modules,
            layouts.cp_comm,
        )
        for column in tables.columns
    )
    embedding, head_gemm, head_memory = _end_seconds(rate, job, share, times[-1])
    columns = [*(one.total for one in times), embedding, head_gemm + head_memory]
    slowest, microbatch = slowest_rank(tables, columns)
    microbatch = microbatch + rate.fixed_seconds("microbatch")
    whole = np.asarray(sum(count * time for count, time in zip((*tables.totals, 1.0, 1.0), columns, strict=True)))

    sent = share.tokens / ranks.tp if software.split_boundary else share.norm_tokens
    boundary = rate.element_bytes * sent * model.hidden_size
    p2p = p2p_seconds(axes, boundary)
    p2p_exposed = np.where(ranks.vpp > 1, software.exposed_pp_interleaved, software.exposed_pp)
    p2p_comm = np.where(ranks.pp > 1, p2p_exposed * 2.0 * ranks.vpp * p2p + rate.fixed_seconds("pp_microbatch"), 0.0)
    loaded = microbatch + p2p_comm
    data = data_parallel(rate, axes, job, layouts, share, tables, loaded)
    sent = p2p_comm + data.fsdp  # every pass that fills or drains the pipeline waits for them as well
    ramp = np.maximum(whole - microbatch + sent * (ranks.pp - 1), 0.0) / ranks.vpp
    bubble = np.where(ranks.pp > 1, ramp, 0.0)
    splitting = layouts.schedule >= SPLITTING
    if splitting.any():
        every = np.broadcast_to([*tables.totals, 1.0, 1.0], slowest.shape)
        all_ranks, own = (_passes(counts, times, embedding, head_gemm, head_memory) for counts in (every, slowest))
        work, more = all_ranks.each(layouts, own, sent / (2.0 * ranks.vpp))
        bubble = np.where(splitting, split_bubble(layouts, micro, work, more), bubble)

    jitter = 0.0 if rate.cpu else parameters.jitter.value
    straggler = jitter * np.log2(np.maximum(layouts.world_size / 8.0, 1.0))

    def on_slowest(name: str) -> Floats:
        return np.asarray(sum(slowest[:, i] * getattr(one, name) for i, one in enumerate(times)))

    tp_comm, cp_comm, ep_comm = on_slowest("tp_comm"), on_slowest("cp_comm"), on_slowest("ep_comm")
    step = StepArrays(
        compute_seconds=micro * (microbatch - tp_comm - cp_comm - ep_comm),
        tp_comm_seconds=micro * tp_comm,
        cp_comm_seconds=micro * cp_comm,
        ep_comm_seconds=micro * ep_comm,
        pp_bubble_seconds=bubble,
        pp_comm_seconds=micro * p2p_comm,
        dp_comm_seconds=micro * data.fsdp + data.exposed,
        optimizer_seconds=data.update,
        straggler_seconds=straggler * (micro * (loaded + data.fsdp) + bubble),
    )
    result = Evaluation(
        step=step,
        rates=rate,
        share=share,
        times=times,
        slowest=slowest,
        head_gemm=head_gemm,
        head_memory=head_memory,
        embedding=embedding,
        p2p=p2p,
        p2p_exposed=p2p_exposed,
        boundary_bytes=boundary,
        data=data,
        straggler=1.0 + straggler,
        microbatch_host=rate.fixed_seconds("microbatch"),
    )
    return result if job.stack.step_factor == 1.0 else _slowed(result, job.stack.step_factor)


def _slowed(result: Evaluation, factor: float) -> Evaluation:
    """Multiply every second by what measured runs of the stack say; shares, bytes and weights stay."""

    def times(record: Any) -> Any:
        names = (one.name for one in fields(record) if not one.name.endswith(("_bytes", "_weights", "_width")))
        return replace(record, **{name: getattr(record, name) * factor for name in names})

    return replace(
        result,
        step=times(result.step),
        times=tuple(times(one) for one in result.times),
        data=times(result.data),
        head_gemm=result.head_gemm * factor,
        head_memory=result.head_memory * factor,
        embedding=result.embedding * factor,
        p2p=result.p2p * factor,
        microbatch_host=result.microbatch_host * factor,
    )


def slowest_rank(tables: StageTables, columns: list[Floats]) -> tuple[Floats, Floats]:
    """Profile (layouts, columns + 2) and time per micro-batch (layouts,) of the slowest rank of every layout."""
    busy = tables.busy[tables.index]
    by_rank = np.zeros(busy.shape[:2])
    for i, time in enumerate(columns):
        by_rank += busy[:, :, i] * time[:, None]
    which = np.argmax(by_rank, axis=1)
    rows = np.arange(len(which))
    return busy[rows, which], by_rank[rows, which]


def _passes(
    counts: Floats, times: tuple[LayerTimes, ...], embedding: Floats, head_gemm: Floats, head_memory: Floats
) -> Passes:
    """Sum the passes of a profile, ends as in ``stage_costs``; counts have shape (layouts, columns + 2)."""

    def summed(name: str) -> Floats:
        return np.asarray(sum(counts[:, i] * getattr(one, name) for i, one in enumerate(times)))

    embeddings, heads = counts[:, -2] * embedding, counts[:, -1] * (head_gemm + head_memory)
    weight = summed("weight_gradient") + counts[:, -1] * head_gemm / 3.0
    return Passes(
        summed("forward_seconds") + 0.4 * embeddings + heads / 3.0,
        summed("total") - summed("forward_seconds") + 0.6 * embeddings + heads * (2.0 / 3.0) - weight,
        weight,
    )


def _end_seconds(rate: Rates, job: Job, share: Shares, last: LayerTimes) -> tuple[Floats, Floats, Floats]:
    """Embedding, and GEMM and memory time of the head; each prediction depth adds a layer, a projection and a head."""
    model, tp = job.model, share.ranks.tp
    embedding = embedding_seconds(rate, share.norm_tokens, model.hidden_size)
    gemm, memory = head_seconds(rate, share.tokens, model.vocab_size / tp, model.hidden_size, share.norm_tokens, tp > 1)
    if model.mtp_layers:
        projection = 3.0 * gemm_seconds(rate.gemm, share.tokens, model.hidden_size / tp, 2.0 * model.hidden_size)
        memory = memory * (1.0 + model.mtp_layers) + model.mtp_layers * (last.total + projection)
        gemm = gemm * (1.0 + model.mtp_layers)
    return embedding, gemm, memory
