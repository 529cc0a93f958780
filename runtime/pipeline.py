"""Forward and backward of one step on one rank: micro-batch by micro-batch, or driven by a pipeline schedule."""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import AbstractContextManager, nullcontext

import torch
import torch.distributed as dist
from torch.distributed.tensor.parallel import loss_parallel

from runtime.layers import local
from runtime.mesh import Meshes
from runtime.optimizer import settle
from runtime.parallelize import mark_microbatch
from runtime.request import TrainRequest
from runtime.transformer import Decoder, token_loss
from scenarios.layout import Layout


class StepRunner(ABC):
    """Runs all micro-batches of a step forward and backward on this rank's stages."""

    @abstractmethod
    def forward_backward(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Accumulate gradients of this replica's part of the mean loss over the global batch.

        Returns:
            That part: the parts of all replicas add up to the mean. 0 where the last stage is elsewhere.
        """


class MicrobatchRunner(StepRunner):
    """No pipeline: each micro-batch forward, then backward."""

    def __init__(self, decoder: Decoder, layout: Layout, num_microbatches: int) -> None:
        self.decoder, self.layout, self.num_microbatches = decoder, layout, num_microbatches

    def forward_backward(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Accumulate over the micro-batches."""
        count, share = self.num_microbatches, 1 / (self.num_microbatches * self.layout.dp * self.layout.cp)
        total = torch.zeros((), device=inputs.device)
        for index, (tokens, wanted) in enumerate(zip(inputs.chunk(count), targets.chunk(count), strict=True)):
            mark_microbatch(self.decoder, self.layout, last=index == count - 1)
            with split_vocabulary(self.layout):
                loss = share * token_loss(self.decoder(tokens), wanted)
                loss.backward()
            total += loss.detach()
        return total


def split_vocabulary(layout: Layout) -> AbstractContextManager[None]:
    """Compute the loss on split logits where tensor parallelism splits the vocabulary."""
    return loss_parallel() if layout.tp > 1 else nullcontext()


def build_runner(
    decoders: list[Decoder], indices: tuple[int, ...], request: TrainRequest, meshes: Meshes
) -> StepRunner:
    """Choose by the layout."""
    layout, num_microbatches = request.layout, request.layout.num_microbatches(request.job)
    if layout.pp == 1:
        return MicrobatchRunner(decoders[0], layout, num_microbatches)
    from runtime.schedules import ScheduleRunner  # torch's pipelining imports its compiler: half a second of a start

    order = request.recipe.v_order if layout.schedule == "zbv" else layout.schedule
    return ScheduleRunner(decoders, indices, layout, meshes, num_microbatches, order)


def sum_tied_gradients(decoders: list[Decoder], meshes: Meshes) -> None:
    """Add the gradients of the two copies of a tied embedding: on the first and on the last stage."""
    if not decoders[0].tied:
        return
    ends = [end for decoder in decoders for end in (decoder.embedding, decoder.head) if end is not None]
    gradients = []
    for weight in dict.fromkeys(end.weight for end in ends):
        settle(weight)
        assert weight.grad is not None
        gradients.append(local(weight.grad))
    if meshes.tied_embedding_group is not None:
        for gradient in gradients:
            dist.all_reduce(gradient, group=meshes.tied_embedding_group)
    elif len(gradients) == 2:  # both stages are on this rank
        gradients[0] += gradients[1]
        gradients[1].copy_(gradients[0])
