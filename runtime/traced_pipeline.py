"""One rank of a pipeline on shapes alone: its stages run in the order of the schedule, neighbours only in name."""

from __future__ import annotations

import torch

from runtime.ledger import BUFFERS, Ledger
from runtime.parallelize import mark_microbatch
from runtime.pipeline import split_vocabulary
from runtime.request import TrainRequest
from runtime.transformer import Decoder, token_loss
from scenarios.job import Job
from scenarios.layout import Layout
from simulator.schedule import op_orders


def least_microbatches(layout: Layout, job: Job, pipeline_rank: int) -> tuple[int, int]:
    """Two numbers of micro-batches that tell about any: a small one, and one that fills the pipeline.

    With the second, as many micro-batches are alive on the rank as with all of them; the difference of the two is what
    each further one adds.
    """
    total = layout.num_microbatches(job)
    if layout.pp == 1:
        return 1, min(2, total)
    step = layout.pp if layout.vpp > 1 else 1
    most = _alive(layout, pipeline_rank, total)
    filling = next(count for count in range(step, total + 1, step) if _alive(layout, pipeline_rank, count) == most)
    few = min(2 * step, total)  # the only micro-batch of a step is unlike all others: the first and the last at once
    return few, min(total, max(filling, few) + step)  # one round more, in which gradients and all of them are alive


def _alive(layout: Layout, pipeline_rank: int, num_microbatches: int) -> int:
    alive = most = 0
    for op in op_orders(layout.schedule, layout.pp, layout.vpp, num_microbatches)[pipeline_rank]:
        alive += 1 if op.kind == "F" else -1
        most = max(most, alive)
    return most


def run_stages(
    ledger: Ledger,
    decoders: dict[int, Decoder],
    request: TrainRequest,
    pipeline_rank: int,
    num_microbatches: int,
    device: torch.device,
) -> None:
    """Forward and backward of some micro-batches on the stages of a rank, by index; sends and receives are counted."""
    layout, job = request.layout, request.job
    slots = layout.pp * layout.vpp
    order = op_orders(layout.schedule, layout.pp, layout.vpp, num_microbatches)[pipeline_rank]
    seen = dict.fromkeys(decoders, 0)
    waiting: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]] = {}
    tokens = torch.empty((layout.micro_batch_size, job.seq_length // layout.cp), dtype=torch.long, device=device)

    def crosses(operation: str, tensor: torch.Tensor) -> None:
        dtype = str(tensor.dtype).removeprefix("torch.")
        ledger.collectives[operation, "pp", dtype, tensor.numel() * tensor.element_size()] += 1

    for op in order:
        decoder, first, last = decoders[op.stage], op.stage == 0, op.stage == slots - 1
        if op.kind == "F":
            given = tokens if first else _received(ledger, decoder, request, device)
            if not first:
                crosses("recv", given)
            with split_vocabulary(layout):
                output = decoder(given)
                result = token_loss(output, tokens) if last else output
            if not last:
                crosses("send", result)
            waiting[op.stage, op.microbatch] = given, result
        else:
            given, result = waiting.pop((op.stage, op.microbatch))
            seen[op.stage] += 1
            mark_microbatch(decoder, layout, last=seen[op.stage] == num_microbatches)
            gradient = None
            if not last:
                gradient = torch.empty_like(result, requires_grad=False)
                ledger.book(gradient, BUFFERS)
                crosses("recv", gradient)
            with split_vocabulary(layout):
                torch.autograd.backward(result, gradient)
            if not first:
                assert given.grad is not None
                crosses("send", given.grad)
            del given, result, gradient


def _received(ledger: Ledger, decoder: Decoder, request: TrainRequest, device: torch.device) -> torch.Tensor:
    """Hidden states as the stage before sends them: with sequence parallelism a part of the sequence."""
    layout, job = request.layout, request.job
    length = job.seq_length // layout.cp // (layout.tp if layout.sequence_parallel else 1)
    shape = (layout.micro_batch_size, length, job.model.hidden_size)
    hidden = torch.empty(shape, dtype=decoder.dtype, device=device, requires_grad=True)
    ledger.book(hidden, BUFFERS)
    return hidden
