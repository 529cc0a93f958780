"""The router of an MoE layer: which experts a token visits, with what weight, and what keeps their load even."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn

from runtime.layers import Linear
from scenarios.model import Moe

CORRECTION_STEP = 0.001
"""What the correction of an expert changes by in a step (DeepSeek-V3, arXiv 2412.19437, section 4.2)."""
GROUP_BEST = {"softmax": 1, "sigmoid": 2}
"""Experts whose scores make that of their group: DeepSeek-V2 takes the best, DeepSeek-V3 the two best."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Balance:
    """What the load-balance loss needs to know of the job."""

    coefficient: float = 0.0
    """Of the loss; 0: none."""
    global_batch_size: int = 1
    """Sequences of a step: the loss is their mean."""
    sequence_groups: tuple[dist.ProcessGroup, ...] = ()
    """Of ranks that share a sequence: their tokens are counted together."""


class Router(nn.Module):
    """Scores of all experts for each token, and the choice of the best."""

    correction: torch.Tensor | None
    """Added to the scores for the choice alone."""
    loads: list[torch.Tensor]
    """Tokens that chose each expert, by micro-batch, since the last correction."""

    def __init__(self, hidden_size: int, spec: Moe) -> None:
        super().__init__()
        self.spec, self.balance = spec, Balance()
        corrected = spec.router_bias and spec.score_function == "sigmoid"
        self.gate = Linear(hidden_size, spec.num_experts, bias=spec.router_bias and not corrected)
        self.register_buffer("correction", torch.zeros(spec.num_experts) if corrected else None)
        self.loads = []

    def forward(self, input: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Route tokens of shape (batch, seq, hidden), in fp32.

        Returns:
            Weights and experts of each token, both of shape (batch * seq, top_k).
        """
        spec = self.spec
        logits = self.gate(input.float())
        scores = logits.softmax(-1) if spec.score_function == "softmax" else logits.sigmoid()
        chosen = self._choose(scores.detach()).flatten(0, 1)
        if self.balance.coefficient > 0:
            loss = self._balance_loss(scores, chosen)
            scores = cast(torch.Tensor, _WithLoss.apply(scores, loss))  # type: ignore[no-untyped-call]
        weights = scores.flatten(0, 1).gather(1, chosen)
        if spec.route_norm:
            weights = weights / weights.sum(-1, keepdim=True)
        if self.correction is not None and torch._C._current_graph_task_id() == -1:  # not again in a backward pass
            self.loads.append(visitors(chosen, spec.num_experts))
        return weights * spec.route_scale, chosen

    def _choose(self, scores: torch.Tensor) -> torch.Tensor:
        spec = self.spec
        if self.correction is not None:
            scores = scores + self.correction
        if spec.limited_groups < spec.expert_groups:
            grouped = scores.unflatten(-1, (spec.expert_groups, -1))
            best = grouped.topk(min(GROUP_BEST[spec.score_function], grouped.shape[-1]), -1).values.sum(-1)
            allowed = torch.zeros_like(best, dtype=torch.bool).scatter(
                -1, best.topk(spec.limited_groups, -1).indices, True
            )
            scores = grouped.masked_fill(~allowed[..., None], float("-inf")).flatten(-2)
        return scores.topk(spec.top_k, -1).indices

    def _balance_loss(self, scores: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        """The part of this rank's tokens in the loss that is smallest where each sequence uses all experts evenly.

        DeepSeek-V3, arXiv 2412.19437, equations 17 to 20: the mean over sequences of the sum over experts of f P, with
        f the share of an expert in the choices times the number of experts, and P its mean share of the scores. Counted
        within each sequence it does not depend on how the batch is divided.
        """
        spec, batch = self.spec, scores.shape[0]
        counts = scores.new_zeros(batch, spec.num_experts)
        picks = chosen.view(batch, -1)
        counts.scatter_add_(1, picks, torch.ones_like(picks, dtype=counts.dtype))
        for group in self.balance.sequence_groups:
            dist.all_reduce(counts, group=group)
        length = counts.sum(1, keepdim=True) / spec.top_k
        frequency = counts * spec.num_experts / (spec.top_k * length)
        share = (scores / scores.sum(-1, keepdim=True)).sum(1) / length
        return self.balance.coefficient / self.balance.global_batch_size * (frequency * share).sum()


def visitors(chosen: torch.Tensor, num_experts: int) -> torch.Tensor:
    """Count the tokens that chose each expert."""
    choices = chosen.flatten()
    return torch.zeros(num_experts, dtype=torch.long, device=chosen.device).scatter_add_(
        0, choices, torch.ones_like(choices)
    )


class _WithLoss(torch.autograd.Function):
    """Let a loss have its gradient where a value is used, as if it were added to the loss of the training."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, loss: torch.Tensor) -> torch.Tensor:
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return gradients[0], gradients[0].new_ones(())


def correct(routers: list[Router], groups: tuple[dist.ProcessGroup, ...], num_microbatches: int) -> None:
    """Make experts with more than the mean load less likely to be chosen, and the others more (arXiv 2408.15664).

    Args:
        routers: of this rank, in the same order on every rank of a stage.
        groups: over which the load is summed.
        num_microbatches: of the step. A pipeline runs its first step once more before it, to learn its shapes.
    """
    routers = [router for router in routers if router.correction is not None]
    if not routers:
        return
    load = torch.stack([torch.stack(router.loads[-num_microbatches:]).sum(0) for router in routers]).float()
    for group in groups:
        dist.all_reduce(load, group=group)
    change = CORRECTION_STEP * (load.mean(1, keepdim=True) - load).sign()
    for router, step in zip(routers, change, strict=True):
        assert router.correction is not None
        router.correction += step
        router.loads.clear()
