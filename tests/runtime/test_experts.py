"""Routing and experts: what the balance loss rewards, what the correction does, and the two ways to multiply."""

from __future__ import annotations

import pytest
import torch
from tiny_models import SIGMOID, SOFTMAX

from runtime.experts import Experts, MixtureOfExperts
from runtime.routing import CORRECTION_STEP, Balance, Router, correct
from scenarios.model import Moe

TOKENS = torch.randn(2, 16, 64, generator=torch.Generator().manual_seed(0))


def filled(module: torch.nn.Module) -> None:
    drawn = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=drawn) / parameter.shape[-1] ** 0.5)


@pytest.mark.parametrize("spec", [SOFTMAX, SIGMOID, SOFTMAX.model_copy(update={"route_norm": False})])
def test_weights_of_a_token_add_up_as_the_spec_says(spec: Moe) -> None:
    router = Router(64, spec)
    filled(router)
    weights, experts = router(TOKENS)
    assert weights.shape == experts.shape == (32, spec.top_k)
    assert all(len(set(row)) == spec.top_k for row in experts.tolist())
    if spec.route_norm:
        torch.testing.assert_close(weights.sum(1), torch.full((32,), spec.route_scale))
    else:
        assert weights.sum(1).max() < 1


def test_limited_groups_limit_the_choice() -> None:
    router = Router(64, SIGMOID)
    filled(router)
    size = SIGMOID.num_experts // SIGMOID.expert_groups
    for row in router(TOKENS)[1].tolist():
        assert len({expert // size for expert in row}) <= SIGMOID.limited_groups


def test_the_balance_loss_pulls_scores_towards_an_even_load() -> None:
    """Its value is the equation's, and a step against its gradient lowers the scores of a crowded expert."""
    spec = Moe(num_experts=4, top_k=1, ffn_hidden_size=8)
    router = Router(64, spec)
    filled(router)
    router.balance = Balance(coefficient=1.0, global_batch_size=2)
    logits = router.gate(TOKENS)
    scores = logits.softmax(-1)
    chosen = scores.argmax(-1)
    expected = torch.zeros(())
    for row in range(2):
        for expert in range(4):
            frequency = 4 * (chosen[row] == expert).float().mean()
            expected = expected + frequency * scores[row, :, expert].mean() / 2
    found = router._balance_loss(scores, chosen.flatten()[:, None])
    torch.testing.assert_close(found, expected)
    assert found > 1.0  # 1 is an even load
    weights, _ = router(TOKENS)
    (0.0 * weights.sum()).backward()
    (by_hand,) = torch.autograd.grad(expected, router.gate.weight)
    torch.testing.assert_close(router.gate.weight.grad, by_hand)


def test_the_correction_moves_against_the_load() -> None:
    router = Router(64, SIGMOID)
    router.loads = [torch.tensor([100.0] * 8), torch.tensor([4.0, 4, 4, 4, 4, 4, 0, 8])]
    correct([router], (), 1)
    assert router.correction is not None
    expected = [0.0] * 6 + [CORRECTION_STEP, -CORRECTION_STEP]
    torch.testing.assert_close(router.correction, torch.tensor(expected))
    assert router.loads == []


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("bias", [True, False])
def test_grouped_matrices_equal_one_after_the_other(gated: bool, bias: bool) -> None:
    """The kernel for GPUs, on the CPU: values and gradients, an expert without a token among them."""
    experts = Experts(64, Moe(num_experts=4, top_k=1, ffn_hidden_size=32, gated=gated, bias=bias))
    filled(experts)
    rows, counts = torch.randn(20, 64, requires_grad=True), torch.tensor([7, 0, 12, 1])
    results = []
    for compute in (experts.forward, experts.grouped):
        out = compute(rows, counts)
        inputs = [rows, *experts.parameters()]
        results.append([out.detach(), *torch.autograd.grad(out.square().sum(), inputs)])
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_every_token_of_a_mixture_is_its_own() -> None:
    """No capacity, nothing dropped: a token's result does not depend on the others."""
    mixture = MixtureOfExperts(64, SIGMOID)
    filled(mixture)
    whole = mixture(TOKENS)
    torch.testing.assert_close(mixture(TOKENS[1:, 5:9]), whole[1:, 5:9], rtol=1e-4, atol=1e-6)
