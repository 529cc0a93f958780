"""One rank of a job of any size, run on shapes alone: no weights, no GPU, no other rank.

Started as a process of its own, because torch's fake process group stays with the process: a request arrives on stdin,
the trace leaves on stdout, both JSON.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore

from runtime.experts import MixtureOfExperts
from runtime.initial import allocate, sketch_decoder
from runtime.ledger import ACTIVATIONS, GRADIENTS, OPTIMIZER, PURPOSES, WEIGHTS, Ledger
from runtime.mesh import Meshes
from runtime.optimizer import ReplicaOptimizer, build_optimizer
from runtime.parallelize import parallelize
from runtime.pipeline import MicrobatchRunner
from runtime.ranks import StageShare, rank_at, shares, stages_of
from runtime.request import TrainRequest
from runtime.traced_pipeline import least_microbatches, run_stages
from runtime.train import DTYPES, meshes_of
from runtime.transformer import Decoder

DEVICE = torch.device("cpu")
"""A CPU build of torch knows no other device; on shapes alone only the choice of kernels depends on it."""


def main() -> None:
    """Trace what stdin asks for."""
    asked = json.load(sys.stdin)
    request = TrainRequest.model_validate(asked["request"])
    sys.stdout.write(json.dumps(trace(request, asked["depths"], asked["pipeline_rank"])))


def trace(request: TrainRequest, depths: list[int], pipeline_rank: int = 0) -> list[dict[str, Any]]:
    """Trace the first rank of a pipeline rank, with so many layers in each of its stages; 0: with all.

    Returns:
        Per depth: ``peaks`` by moment and purpose, ``collectives`` with their count in a step of so many
        ``num_microbatches`` (two numbers), and the bytes of ``state`` that stay between steps.
    """
    torch.set_num_threads(1)
    rank = rank_at(request.layout, pp=pipeline_rank)
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=request.world_size)
    try:
        meshes = meshes_of(request, DEVICE)
        assert meshes is not None
        return [trace_depth(request, meshes, depth, pipeline_rank) for depth in depths]
    finally:
        dist.destroy_process_group()


def trace_depth(request: TrainRequest, meshes: Meshes, depth: int, pipeline_rank: int) -> dict[str, Any]:
    """Run a step of few micro-batches, which fills torch's caches, and then the step that counts."""
    job, layout = request.job, request.layout
    held = shares(job.model, layout)
    decoders = {
        index: sketch_decoder(
            job.model,
            shortened(held[index], depth),
            dtype=DTYPES[job.precision],
            recompute_modules=layout.recompute_modules,
        )
        for index in stages_of(layout, pipeline_rank)
    }
    for decoder in decoders.values():
        parallelize(decoder, layout, meshes)
        route_evenly(decoder)
    counts = least_microbatches(layout, job, pipeline_rank)
    exchange = None if meshes.exchange is None else meshes.exchange.group_name
    with FakeTensorMode(allow_non_fake_inputs=True):
        for decoder in decoders.values():
            allocate(decoder, DEVICE)
        optimizer = build_optimizer(decoders.values(), layout, meshes, request.recipe.learning_rate)
        ledgers = [Ledger(meshes.named_groups(), exchange) for _ in counts]
        for ledger, num_microbatches in zip(ledgers, counts, strict=True):
            step(ledger, decoders, optimizer, request, pipeline_rank, num_microbatches)
    last = ledgers[-1]
    few, many = (ledger.all_collectives() for ledger in ledgers)
    return {
        "depth": depth or max(share.last - share.first for share in held),
        "peaks": {moment: {name: peak[name] for name in PURPOSES} for moment, peak in last.peaks.items()},
        "state": {name: last.held[name] for name in (WEIGHTS, OPTIMIZER)}
        | {GRADIENTS: last.peaks["accumulated"][GRADIENTS]},
        "collectives": [[*key, few[key], many[key]] for key in {**few, **many}],
        "num_microbatches": counts,
    }


def route_evenly(decoder: Decoder) -> None:
    """Let every expert get an equal part of the tokens, because only weights know who gets more."""
    for block in decoder.blocks():
        if isinstance(block.mlp, MixtureOfExperts):
            block.mlp.experts.lengths = evenly
            block.mlp.experts.one_kernel = decoder.dtype == torch.bfloat16
            if block.mlp.exchange is not None:
                block.mlp.exchange = replace(block.mlp.exchange, lengths=evenly)


def evenly(counts: torch.Tensor, total: int) -> list[Any]:
    """Divide a total into as many numbers as each row of the counts has.

    >>> evenly(torch.empty(2, 3), 7)
    [[3, 2, 2], [3, 2, 2]]
    """
    *rows, parts = counts.shape
    each = [total // parts + (place < total % parts) for place in range(parts)]
    return [each] * rows[0] if rows else each


def shortened(share: StageShare, depth: int) -> StageShare:
    """A stage with its first so many layers; 0: all."""
    if not depth:
        return share
    last = min(share.last, share.first + depth)
    return replace(share, last=last, modes=share.modes[: last - share.first])


def step(
    ledger: Ledger,
    decoders: dict[int, Decoder],
    optimizer: ReplicaOptimizer,
    request: TrainRequest,
    pipeline_rank: int,
    num_microbatches: int,
) -> None:
    """One optimizer step under the ledger; its moments are forward, head, each layer's backward, and update.

    In a pipeline, where the backward of one micro-batch meets others that are still alive, all layers' backward is one
    moment.
    """
    parameters = [parameter for decoder in decoders.values() for parameter in decoder.parameters()]
    inner = optimizer.inner
    for parameter in parameters:
        ledger.book(parameter, WEIGHTS)
    for tensor in optimizer_state(inner):
        ledger.book(tensor, OPTIMIZER)
    piped = request.layout.pp > 1
    hooks = [p.register_post_accumulate_grad_hook(book_gradient(ledger)) for p in parameters]
    for decoder in decoders.values():
        for place, layer in enumerate(decoder.layers.values()):
            hooks.append(layer.register_forward_hook(mark_backward(ledger, "backward" if piped else f"layer {place}")))
        hooks.append(decoder.register_forward_pre_hook(lambda *_: setattr(ledger, "moment", "forward")))
    with ledger.watching():
        if piped:
            run_stages(ledger, decoders, request, pipeline_rank, num_microbatches, DEVICE)
        else:
            _run_whole(next(iter(decoders.values())), request, num_microbatches)
        for parameter in parameters:
            book_gradient(ledger)(parameter)
        ledger.peaks["accumulated"] = ledger.held.copy()
        ledger.moment = "update"
        optimizer.reduce_gradients()
        for group in inner.param_groups:
            for parameter in (*parameters, *group["params"]):
                book_gradient(ledger)(parameter)
        optimizer.update()
        for tensor in optimizer_state(inner):
            ledger.book(tensor, OPTIMIZER)
        optimizer.clear()
    for hook in hooks:
        hook.remove()


def _run_whole(decoder: Decoder, request: TrainRequest, num_microbatches: int) -> None:
    shape = (num_microbatches * request.layout.micro_batch_size, request.job.seq_length // request.layout.cp)
    tokens, targets = (torch.empty(shape, dtype=torch.long, device=DEVICE) for _ in range(2))
    MicrobatchRunner(decoder, request.layout, num_microbatches).forward_backward(tokens, targets)


def book_gradient(ledger: Ledger) -> Callable[[torch.Tensor], None]:
    """Return a hook that books the gradient of a parameter."""

    def hook(parameter: torch.Tensor) -> None:
        if parameter.grad is not None:
            ledger.book(parameter.grad, GRADIENTS)

    return hook


def mark_backward(ledger: Ledger, moment: str) -> Callable[..., None]:
    """Return a hook on a layer's forward that marks when its backward begins, and what is kept at most after it."""

    def begin(_: torch.Tensor) -> None:
        ledger.moment = moment

    def hook(_: torch.nn.Module, inputs: Any, output: torch.Tensor) -> None:
        if output.requires_grad and torch._C._current_graph_task_id() == -1:
            output.register_hook(begin)
            if ledger.held[ACTIVATIONS] >= ledger.peaks.get("kept", Counter())[ACTIVATIONS]:
                ledger.peaks["kept"] = ledger.held.copy()

    return hook


def optimizer_state(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """The tensors that an optimizer keeps."""
    return [value for state in optimizer.state.values() for value in state.values() if isinstance(value, torch.Tensor)]


if __name__ == "__main__":
    main()
