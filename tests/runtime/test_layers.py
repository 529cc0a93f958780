"""What a linear map keeps for its backward when its weight is in another format than its input."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from runtime.layers import Linear


@pytest.mark.parametrize(("into", "out"), [(8, 24), (16, 16)])
def test_a_weight_that_is_cast_again_has_the_gradients_of_one_that_is_kept(into: int, out: int) -> None:
    linear, input = Linear(into, out, bias=False), torch.randn(3, 5, into).to(torch.bfloat16).requires_grad_()
    gradient = torch.randn(3, 5, out).to(torch.bfloat16)
    result = linear(input)
    plain = functional.linear(input, linear.weight.to(torch.bfloat16))
    assert torch.equal(result, plain)
    found = torch.autograd.grad(result, (input, linear.weight), gradient)
    expected = torch.autograd.grad(plain, (input, linear.weight), gradient)
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


@pytest.mark.parametrize("recompute", [False, True])
def test_no_copy_of_a_weight_lives_until_the_backward(monkeypatch: pytest.MonkeyPatch, recompute: bool) -> None:
    linear, input = Linear(8, 24, bias=False), torch.randn(5, 8, dtype=torch.bfloat16, requires_grad=True)
    copies: list[weakref.ref[Any]] = []
    plain = functional.linear

    def watched(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        copies.append(weakref.ref(weight.untyped_storage()))
        return plain(input, weight, bias)

    monkeypatch.setattr(functional, "linear", watched)
    result = checkpoint(linear, input, use_reentrant=False) if recompute else linear(input)
    gc.collect()
    assert [one() for one in copies] == [None]
    result.square().sum().backward()
    assert linear.weight.grad is not None
    assert linear.weight.grad.dtype == torch.float32
