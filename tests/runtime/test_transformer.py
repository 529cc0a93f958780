"""The decoder: as many parameters as the spec counts, causal, relative positions, values by seed and name alone."""

from __future__ import annotations

import pytest
import torch
from tiny_training import tiny

from runtime.attention import SelfAttention
from runtime.initial import build_decoder
from runtime.layers import rotary_angles, rotate
from runtime.ranks import shares
from runtime.transformer import Decoder, token_loss
from scenarios.layout import Layout
from scenarios.model import Attention, Layer, Mlp, ModelSpec
from scenarios.scenario import load_scenario

CPU = torch.device("cpu")


def whole(model: ModelSpec, seed: int = 0, dtype: torch.dtype = torch.float32) -> Decoder:
    (share,) = shares(model, Layout())
    return build_decoder(model, share, seed=seed, dtype=dtype, device=CPU)


def with_biases() -> ModelSpec:
    layer = Layer(
        mixer=Attention(heads=4, kv_heads=4, head_dim=16, qkv_bias=True, output_bias=True),
        feed_forward=Mlp(ffn_hidden_size=96, gated=False, bias=True),
    )
    return tiny().model_copy(update={"layer_kinds": {"dense": layer}})


@pytest.mark.parametrize("model", [tiny(), tiny("tied"), with_biases(), load_scenario("laptop").model])
def test_as_many_parameters_as_the_spec_counts(model: ModelSpec) -> None:
    held = {id(parameter): parameter.numel() for parameter in whole(model).parameters()}
    assert sum(held.values()) == model.num_params


def test_no_token_sees_a_later_one() -> None:
    decoder, tokens = whole(tiny()), torch.randint(0, 256, (2, 12))
    changed = tokens.clone()
    changed[:, 7:] = (changed[:, 7:] + 1) % 256
    before, after = decoder(tokens), decoder(changed)
    torch.testing.assert_close(before[:, :7], after[:, :7])
    assert not torch.allclose(before[:, 7], after[:, 7])


def test_rotary_products_depend_on_the_distance_only() -> None:
    query, key = torch.randn(1, 1, 1, 16), torch.randn(1, 1, 1, 16)
    angles = rotary_angles(torch.arange(32), 16)

    def product(at: int, other: int) -> float:
        return (rotate(query, angles[at : at + 1]) * rotate(key, angles[other : other + 1])).sum().item()

    assert product(20, 13) == pytest.approx(product(9, 2), rel=1e-5)
    assert product(20, 13) != pytest.approx(product(20, 12), rel=1e-3)
    torch.testing.assert_close(rotate(query, angles[:1]), query)


def test_grouped_queries_equal_full_heads_with_repeated_keys() -> None:
    grouped = SelfAttention(64, Attention(heads=4, kv_heads=2, head_dim=16), recompute_core=False)
    full = SelfAttention(64, Attention(heads=4, kv_heads=4, head_dim=16), recompute_core=False)
    with torch.no_grad():
        full.query.weight.copy_(grouped.query.weight)
        full.output.weight.copy_(grouped.output.weight)
        for name in ("key", "value"):
            heads = getattr(grouped, name).weight.view(2, 16, 64)
            getattr(full, name).weight.copy_(heads.repeat_interleave(2, 0).reshape(64, 64))
    hidden = torch.randn(2, 10, 64)
    torch.testing.assert_close(grouped(hidden), full(hidden))


def test_a_stage_holds_the_values_of_the_whole_model() -> None:
    model, layout = tiny("tied"), Layout(pp=2)
    reference = dict(whole(model, seed=3).named_parameters())
    for share in shares(model, layout):
        stage = build_decoder(model, share, seed=3, dtype=torch.float32, device=CPU)
        for name, parameter in stage.named_parameters():
            expected = reference["embedding.weight" if name == "head.weight" else name]
            assert torch.equal(parameter, expected), name
    other = dict(whole(model, seed=4).named_parameters())
    assert not torch.equal(other["embedding.weight"], reference["embedding.weight"])


def test_bf16_computes_in_bf16_and_keeps_fp32_weights() -> None:
    decoder, tokens = whole(tiny(), dtype=torch.bfloat16), torch.randint(0, 256, (2, 12))
    logits = decoder(tokens)
    assert logits.dtype == torch.bfloat16
    token_loss(logits, tokens).backward()
    assert {parameter.dtype for parameter in decoder.parameters()} == {torch.float32}
    assert all(
        parameter.grad is not None and parameter.grad.dtype == torch.float32 for parameter in decoder.parameters()
    )
    torch.testing.assert_close(logits.float(), whole(tiny())(tokens), atol=0.02, rtol=0.05)
