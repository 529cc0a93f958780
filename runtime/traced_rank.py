"""One rank of a job of any size, run on shapes alone: no weights, no GPU, no other rank.

Started as a process of its own, because torch's fake process group stays with the process: a request arrives on stdin,
the trace leaves on stdout, both JSON.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore

from runtime.ledger import GRADIENTS, OPTIMIZER, PURPOSES, WEIGHTS, Ledger
from runtime.mesh import Meshes, build_meshes
from runtime.optimizer import ReplicaOptimizer, build_optimizer
from runtime.parallelize import parallelize
from runtime.pipeline import MicrobatchRunner
from runtime.ranks import shares
from runtime.request import TrainRequest
from runtime.train import DTYPES
from runtime.transformer import Decoder
from scenarios.job import Job
from scenarios.model import ModelSpec

DEVICE = torch.device("cpu")
"""A CPU build of torch knows no other device; on shapes alone only the choice of kernels depends on it."""


def main() -> None:
    """Trace what stdin asks for."""
    asked = json.load(sys.stdin)
    request = TrainRequest.model_validate(asked["request"])
    sys.stdout.write(json.dumps(trace(request, asked["depths"])))


def trace(request: TrainRequest, depths: list[int]) -> list[dict[str, Any]]:
    """Trace rank 0 of a job for models of each depth.

    Returns:
        Per depth: ``peaks`` by moment and purpose, ``collectives`` with their count in a step of one micro-batch and
        of two, and the bytes of ``state`` that stay between steps.
    """
    torch.set_num_threads(1)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=request.world_size)
    try:
        meshes = build_meshes(request.layout, DEVICE, tied_embeddings=request.job.model.tied_embeddings)
        assert meshes is not None
        return [trace_depth(request, meshes, depth) for depth in depths]
    finally:
        dist.destroy_process_group()


def trace_depth(request: TrainRequest, meshes: Meshes, depth: int) -> dict[str, Any]:
    """Run a step of one micro-batch, which fills torch's caches, and then the step that counts."""
    job, layout = shortened(request.job, depth), request.layout
    with torch.device("meta"):
        decoder = Decoder(
            job.model,
            shares(job.model, layout)[0],
            recompute_core=layout.recompute == "selective",
            dtype=DTYPES[job.precision],
        )
    parallelize(decoder, layout, meshes)
    counted = min(2, layout.num_microbatches(job))
    axes = {getattr(meshes, axis).get_group().group_name: axis for axis in ("pp", "dp", "tp")}
    with FakeTensorMode(allow_non_fake_inputs=True):
        decoder.to_empty(device=DEVICE)
        decoder.tie()
        optimizer = build_optimizer([decoder], layout, meshes, request.learning_rate)
        ledgers = [Ledger(axes), Ledger(axes)]
        for ledger, num_microbatches in zip(ledgers, (1, counted), strict=True):
            step(ledger, decoder, optimizer, request, num_microbatches)
    first, last = ledgers
    return {
        "depth": depth,
        "peaks": {moment: {name: peak[name] for name in PURPOSES} for moment, peak in last.peaks.items()},
        "state": {name: last.held[name] for name in (WEIGHTS, OPTIMIZER)}
        | {GRADIENTS: last.peaks["reduced"][GRADIENTS]},
        "collectives": [
            [*key, first.collectives[key], last.collectives[key]] for key in {**first.collectives, **last.collectives}
        ],
        "num_microbatches": counted,
    }


def shortened(job: Job, depth: int) -> Job:
    """The job with the first so many layers of its model."""
    model = ModelSpec.model_validate(job.model.model_dump() | {"pattern": job.model.pattern[:depth]})
    return job.model_copy(update={"model": model})


def step(
    ledger: Ledger, decoder: Decoder, optimizer: ReplicaOptimizer, request: TrainRequest, num_microbatches: int
) -> None:
    """One optimizer step under the ledger; its moments are forward, head, each layer's backward, reduced and update."""
    parameters, layout = list(decoder.parameters()), request.layout
    inner: torch.optim.Optimizer = optimizer.inner  # type: ignore[attr-defined]
    shape = (num_microbatches * layout.micro_batch_size, request.job.seq_length)
    tokens, targets = (torch.empty(shape, dtype=torch.long, device=DEVICE) for _ in range(2))
    for parameter in parameters:
        ledger.book(parameter, WEIGHTS)
    for tensor in optimizer_state(inner):
        ledger.book(tensor, OPTIMIZER)
    hooks = [p.register_post_accumulate_grad_hook(book_gradient(ledger)) for p in parameters]
    hooks += [layer.register_forward_hook(mark_backward(ledger, int(name))) for name, layer in decoder.layers.items()]
    hooks.append(decoder.register_forward_pre_hook(lambda *_: setattr(ledger, "moment", "forward")))
    with ledger.watching():
        MicrobatchRunner(decoder, layout, num_microbatches).forward_backward(tokens, targets)
        for parameter in parameters:
            book_gradient(ledger)(parameter)
        ledger.moment = "update"
        optimizer.reduce_gradients()
        for group in inner.param_groups:
            for parameter in (*parameters, *group["params"]):
                book_gradient(ledger)(parameter)
        ledger.peaks["reduced"] = ledger.held.copy()
        optimizer.update()
        for tensor in optimizer_state(inner):
            ledger.book(tensor, OPTIMIZER)
        optimizer.clear()
    for hook in hooks:
        hook.remove()


def book_gradient(ledger: Ledger) -> Callable[[torch.Tensor], None]:
    """Return a hook that books the gradient of a parameter."""

    def hook(parameter: torch.Tensor) -> None:
        if parameter.grad is not None:
            ledger.book(parameter.grad, GRADIENTS)

    return hook


def mark_backward(ledger: Ledger, layer: int) -> Callable[..., None]:
    """Return a hook on a layer's forward that marks when its backward begins, and what is held after its forward."""

    def begin(_: torch.Tensor) -> None:
        ledger.moment = f"layer {layer}"

    def hook(_: torch.nn.Module, inputs: Any, output: torch.Tensor) -> None:
        if output.requires_grad and torch._C._current_graph_task_id() == -1:
            output.register_hook(begin)
            ledger.peaks["kept"] = ledger.held.copy()

    return hook


def optimizer_state(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """The tensors that an optimizer keeps."""
    return [value for state in optimizer.state.values() for value in state.values() if isinstance(value, torch.Tensor)]


if __name__ == "__main__":
    main()
