"""What a layer of routed experts keeps for its backward, against torch's own saved tensors of one written plainly.

This is how a model library without fused kernels does it; headway's own layer is traced in test_tracing.py.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional

from scenarios.job import Job
from scenarios.layout import Layout
from scenarios.model import Attention, Layer, ModelSpec, Moe
from scenarios.stack import Stack
from simulator.activations import layer_bytes
from simulator.arrays import LayoutArrays
from simulator.layers import shares
from simulator.traffic import ranks_of

TOKENS, HIDDEN = 256, 64


class RoutedExperts(nn.Module):
    """Router, gather by expert, SwiGLU of each expert, weighted sum: one torch operation each."""

    def __init__(self, experts: int, top_k: int, width: int) -> None:
        super().__init__()
        self.top_k = top_k
        self.router = nn.Linear(HIDDEN, experts, bias=False, dtype=torch.bfloat16)
        sizes = {"gate": (HIDDEN, width), "up": (HIDDEN, width), "down": (width, HIDDEN)}
        for name, (into, out) in sizes.items():
            self.register_parameter(name, nn.Parameter(torch.randn(experts, into, out, dtype=torch.bfloat16) * 0.1))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Send token t to experts t, t + 1, ... (balanced), whatever the router says of their weights."""
        experts = self.router.out_features
        shares = self.router(tokens).float().softmax(dim=-1)
        chosen = (torch.arange(TOKENS)[:, None] + torch.arange(self.top_k)) % experts
        order = chosen.flatten().argsort(stable=True)
        routed = tokens[order // self.top_k].view(experts, -1, HIDDEN)
        inner = functional.silu(routed @ self.gate) * (routed @ self.up)
        mixed = (inner @ self.down).view(-1, HIDDEN)
        weights = shares.gather(1, chosen).flatten()[order].to(mixed.dtype)
        return torch.zeros_like(tokens).index_add(0, order // self.top_k, mixed * weights[:, None])


def saved_bytes(module: nn.Module, tokens: torch.Tensor) -> int:
    """Bytes of all tensors that autograd saves, parameters and shared storages left out."""
    known = {parameter.untyped_storage().data_ptr() for parameter in module.parameters()}
    kept: dict[int, tuple[torch.Tensor, int]] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known and tensor.is_floating_point():
            kept[storage.data_ptr()] = (tensor, storage.nbytes())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        module(tokens)
    return sum(size for _, size in kept.values())


@pytest.mark.parametrize(("experts", "top_k", "width"), [(8, 2, 128), (16, 4, 48)])
def test_experts_keep_what_autograd_saves(experts: int, top_k: int, width: int) -> None:
    part = Moe(num_experts=experts, top_k=top_k, ffn_hidden_size=width)
    mixer = Attention(heads=4, kv_heads=4, head_dim=16)
    kinds = {"moe": Layer(mixer=mixer, feed_forward=part), "alone": Layer(mixer=mixer, feed_forward=None, norms=2)}
    model = ModelSpec(name="small", hidden_size=HIDDEN, vocab_size=64, layer_kinds=kinds, pattern=("moe", "alone"))
    job = Job(model=model, seq_length=TOKENS, global_batch_size=1, stack=Stack(trainer="huggingface"))
    rows = LayoutArrays.of([Layout()])
    share = shares(job, rows, ranks_of(rows))
    told = {name: float(layer_bytes(job, kind, share)[0][0]) for name, kind in kinds.items()}
    tokens = torch.randn(TOKENS, HIDDEN, dtype=torch.bfloat16).requires_grad_()
    assert told["moe"] - told["alone"] == pytest.approx(
        saved_bytes(RoutedExperts(experts, top_k, width), tokens), rel=0.03
    )
