"""A mixture of experts: tokens go to the ranks that hold their experts, through them, and back."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.nn import functional

from runtime.collectives import exchange
from runtime.layers import FeedForward, Linear, activated, cast_again
from runtime.routing import Router, visitors
from scenarios.model import Mlp, Moe

Lengths = Callable[[torch.Tensor, int], list[Any]]
"""Turns counts of rows into numbers, each row of which adds up to a total on average."""


def numbers(counts: torch.Tensor, total: int) -> list[Any]:
    """The counts as they are, whatever they add up to."""
    return counts.tolist()


class Experts(nn.Module):
    """All routed experts of a layer, stacked; under expert parallelism those of this rank, or slices of them."""

    def __init__(self, hidden_size: int, spec: Moe) -> None:
        super().__init__()
        count, width = spec.num_experts, spec.ffn_hidden_size
        self.up = nn.Parameter(torch.empty(count, width, hidden_size))
        self.gate = nn.Parameter(torch.empty(count, width, hidden_size)) if spec.gated else None
        self.down = nn.Parameter(torch.empty(count, hidden_size, width))
        self.up_bias = nn.Parameter(torch.zeros(count, width)) if spec.bias else None
        self.gate_bias = nn.Parameter(torch.zeros(count, width)) if spec.bias and spec.gated else None
        self.down_bias = nn.Parameter(torch.zeros(count, hidden_size)) if spec.bias else None
        self.slices = 1
        """Ranks that share each expert (etp): they give parts of a sum."""
        self.one_kernel = False
        """One kernel for all experts, whatever the device is; a GPU takes it in bf16."""
        self.lengths: Lengths = numbers

    def forward(self, rows: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        """Transform tokens.

        Args:
            rows: of shape (tokens, hidden), in the order of the experts that they visit.
            counts: tokens of each expert of this rank.
        """
        if self.one_kernel or (rows.is_cuda and rows.dtype == torch.bfloat16):
            return self.grouped(rows, counts)
        parts = [self.up, self.gate, self.down, self.up_bias, self.gate_bias, self.down_bias]
        weights = [None] * len(counts)
        ups, gates, downs, up_biases, gate_biases, down_biases = (
            weights if part is None else here(part).to(rows.dtype).unbind() for part in parts
        )
        done = []
        for index, some in enumerate(rows.split(self.lengths(counts, len(rows)))):
            up = functional.linear(some, cast(torch.Tensor, ups[index]), up_biases[index])
            wide = gates[index]
            gate = None if wide is None else functional.linear(some, wide, gate_biases[index])
            out = functional.linear(activated(up, gate), cast(torch.Tensor, downs[index]))
            bias = down_biases[index]
            done.append(out if bias is None else out + bias / self.slices)
        return torch.cat(done)

    def grouped(self, rows: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        """The same with one kernel for the matrices of all experts."""
        ends = counts.cumsum(0).to(torch.int32)

        def linear(
            input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, share: int = 1
        ) -> torch.Tensor:
            local, used = here(weight), here(weight).to(input.dtype)
            with cast_again(local, used):
                out = functional.grouped_mm(input, used.transpose(-1, -2), offs=ends)
            if bias is None:
                return out
            return out + here(bias).to(out.dtype).repeat_interleave(counts, 0, output_size=len(out)) / share

        gate = None if self.gate is None else linear(rows, self.gate, self.gate_bias)
        return linear(activated(linear(rows, self.up, self.up_bias), gate), self.down, self.down_bias, self.slices)


def here(parameter: torch.Tensor) -> torch.Tensor:
    """The part of the experts' parameter that is on this rank; what the slices of an expert share gets partial sums."""
    if not isinstance(parameter, DTensor):
        return parameter
    summed = [one if isinstance(one, Shard) else Partial() for one in parameter.placements]
    return parameter.to_local(grad_placements=summed)


@dataclass(frozen=True, slots=True)
class Exchange:
    """How tokens reach the ranks of their experts: ``ep`` groups of experts, each sliced over ``etp`` ranks."""

    group: dist.ProcessGroup
    ep: int
    etp: int
    lengths: Lengths = numbers

    def visit(self, experts: Experts, rows: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        """Send rows, in the order of the experts, to all slices of these; return the sums of what comes back."""
        sent = counts.view(self.ep, 1, -1).expand(-1, self.etp, -1).flatten(0, 1).contiguous()
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=self.group)
        to, come = self.lengths(torch.stack([sent.sum(1), received.sum(1)]), len(rows) * self.etp)
        copies = self._copies(to, rows.device)
        arrived = exchange(rows if copies is None else rows[copies], self.group, sent=to, received=come)
        local = sent.shape[1]
        expert = torch.arange(local, device=rows.device).repeat(len(to))
        expert = expert.repeat_interleave(received.flatten(), output_size=sum(come))
        order = expert.argsort(stable=True)
        done = experts(arrived[order], received.sum(0))
        returned = exchange(done[order.argsort()], self.group, sent=come, received=to)
        return returned if copies is None else torch.zeros_like(rows).index_add(0, copies, returned)

    def _copies(self, to: list[int], device: torch.device) -> torch.Tensor | None:
        """Which row goes where: every group of experts has its rows once for each slice."""
        if self.etp == 1:
            return None
        lengths = to[:: self.etp]
        parts = torch.arange(sum(lengths), device=device).split(lengths)
        return torch.cat([part for part in parts for _ in range(self.etp)])


class MixtureOfExperts(nn.Module):
    """Router, routed experts and shared experts."""

    def __init__(self, hidden_size: int, spec: Moe) -> None:
        super().__init__()
        self.spec = spec
        self.router = Router(hidden_size, spec)
        self.experts = Experts(hidden_size, spec)
        self.shared = self.shared_gate = None
        if spec.shared_ffn_hidden_size:
            shape = Mlp(ffn_hidden_size=spec.shared_ffn_hidden_size, gated=spec.gated, bias=spec.bias)
            self.shared = FeedForward(hidden_size, shape)
            self.shared_gate = Linear(hidden_size, 1, bias=False) if spec.shared_gate else None
        self.exchange: Exchange | None = None
        """None: this rank holds all experts."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Transform tokens; shape (batch, seq, hidden). All tokens of this rank are its own: no other has them too."""
        tokens = input.flatten(0, 1)
        weights, experts = self.router(input)
        order = experts.flatten().argsort(stable=True)
        counts = visitors(experts, self.spec.num_experts)
        rows = tokens[order // self.spec.top_k]
        if self.spec.score_before_experts:
            rows = rows * weights.flatten()[order, None].to(rows.dtype)
        visit = self.experts if self.exchange is None else self._send
        done = visit(rows, counts)[order.argsort()].unflatten(0, (-1, self.spec.top_k))
        mixed = done if self.spec.score_before_experts else done * weights[..., None].to(done.dtype)
        result: torch.Tensor = mixed.sum(1).view_as(input)
        if self.shared is not None:
            beside = self.shared(input)
            result = result + (beside if self.shared_gate is None else self.shared_gate(input).sigmoid() * beside)
        return result

    def _send(self, rows: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        assert self.exchange is not None
        return self.exchange.visit(self.experts, rows, counts)


def split_experts(mixture: MixtureOfExperts, mesh: DeviceMesh, group: dist.ProcessGroup) -> None:
    """Keep this rank's experts, or slices of them, on a mesh ep x etp; ``group`` has all its ranks."""
    experts, (ep, etp) = mixture.experts, mesh.shape
    experts.slices = etp
    for name, parameter in list(experts.named_parameters()):
        sliced = {"down": Shard(2), "down_bias": None}.get(name, Shard(1))
        values: torch.Tensor = parameter.detach()
        for axis, placement in enumerate((Shard(0), sliced)):
            if placement is not None:
                values = values.chunk(mesh.size(axis), placement.dim)[mesh.get_local_rank(axis)]
        placements = (Shard(0), sliced or Replicate())
        part = DTensor.from_local(
            values.clone(), mesh, placements, run_check=False, shape=parameter.shape, stride=parameter.stride()
        )
        setattr(experts, name, nn.Parameter(part))
    mixture.exchange = Exchange(group, ep, etp)


def expert_parameters(modules: Iterable[nn.Module]) -> set[nn.Parameter]:
    """The parameters of routed experts."""
    return {
        parameter
        for module in modules
        for part in module.modules()
        if isinstance(part, Experts)
        for parameter in part.parameters()
    }
