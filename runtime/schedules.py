"""A pipeline: torch's schedules drive the stages of a rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleDualPipeV,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)
from torch.distributed.pipelining._backward import stage_backward

from runtime.mesh import Meshes
from runtime.parallelize import mark_microbatch
from runtime.pipeline import StepRunner, split_vocabulary
from runtime.support import SPLIT_SCHEDULES
from runtime.transformer import Decoder, token_loss
from scenarios.layout import Layout

ONE_STAGE: dict[str, Callable[..., Any]] = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}
SEVERAL_STAGES: dict[str, Callable[..., Any]] = {
    "interleaved": ScheduleInterleaved1F1B,
    "zb-h1": ScheduleInterleavedZeroBubble,
    "zbv": ScheduleZBVZeroBubble,
    "dualpipev": ScheduleDualPipeV,
}
"""torch's schedules by the layout's name or the order of its V; the second kind takes a list of stages, even of one."""


class Stage(PipelineStage):
    """A stage that reduces the gradients of every micro-batch, so that a rank holds its shards only.

    torch's own keeps whole weights and whole gradients from the first micro-batch to the last. It still does where a
    schedule splits the backward pass.
    """

    layout: Layout
    submod: nn.Module

    def backward_maybe_with_nosync(
        self, backward_type: str, bwd_kwargs: dict[str, Any], last_backward: bool = False
    ) -> Any:
        """Run one backward pass of the stage."""
        if not self._reduces_each():
            return super().backward_maybe_with_nosync(backward_type, bwd_kwargs, last_backward)
        mark_microbatch(self.submod, self.layout, last=last_backward)
        return stage_backward(*(bwd_kwargs[part] for part in ("stage_output", "output_grads", "input_values"))), None

    def perform_reduce_grad(self, grad_scale_factor: int) -> None:
        """Reduce what was not reduced yet."""
        if not self._reduces_each():
            super().perform_reduce_grad(grad_scale_factor)

    def _reduces_each(self) -> bool:
        return isinstance(self.submod, FSDPModule) and self.layout.schedule not in SPLIT_SCHEDULES


class ScheduleRunner(StepRunner):
    """A pipeline: torch's schedule sends activations and gradients between the stages."""

    def __init__(
        self,
        decoders: list[Decoder],
        indices: tuple[int, ...],
        layout: Layout,
        meshes: Meshes,
        num_microbatches: int,
        order: str,
    ) -> None:
        slots = layout.pp * layout.vpp
        self.layout, self.decoders, self.device = layout, decoders, meshes.device
        self.first, self.last = 0 in indices, slots - 1 in indices
        stages: list[Any] = [
            Stage(decoder, index, slots, meshes.device, group=meshes.pp.get_group())
            for decoder, index in zip(decoders, indices, strict=True)
        ]
        for stage in stages:
            stage.layout = layout
        share = 1 / (num_microbatches * layout.dp * layout.cp)

        def loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
            return share * token_loss(logits, targets)

        one = order in ONE_STAGE
        kind = ONE_STAGE[order] if one else SEVERAL_STAGES[order]
        self.schedule = kind(stages[0] if one else stages, num_microbatches, loss_fn=loss, scale_grads=False)

    def forward_backward(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Run the schedule once."""
        losses: list[torch.Tensor] = []
        arguments = (inputs,) if self.first else ()
        with split_vocabulary(self.layout):
            if self.last:
                self.schedule.step(*arguments, target=targets, losses=losses)
            else:
                self.schedule.step(*arguments)
        return torch.stack([loss.detach() for loss in losses]).sum() if losses else torch.zeros((), device=self.device)
