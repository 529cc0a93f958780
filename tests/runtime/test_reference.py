"""The decoder equals an independent one of plain functions, for every kind of model, on its own weights."""

from __future__ import annotations

import pytest
import reference_decoder
import torch
from tiny_models import MODELS

from runtime.initial import build_decoder
from runtime.ranks import shares
from runtime.transformer import Decoder
from scenarios.layout import Layout
from scenarios.model import ModelSpec


def whole(model: ModelSpec) -> Decoder:
    (share,) = shares(model, Layout())
    return build_decoder(model, share, seed=5, dtype=torch.float32, device=torch.device("cpu"))


def spread(decoder: Decoder) -> None:
    """Make every weight count: norms that differ, biases, sinks and corrections that are not 0, clear choices."""
    drawn = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, tensor in decoder.state_dict().items():
            noise = torch.randn(tensor.shape, generator=drawn)
            if name.endswith("gate.weight"):
                tensor.copy_(noise / tensor.shape[-1] ** 0.5)
            elif tensor.dim() > 1 and not name.endswith("bias"):
                tensor.copy_(0.1 * noise)
            else:
                tensor.add_(0.2 * noise)


@pytest.mark.parametrize("name", MODELS)
def test_the_decoder_computes_what_its_spec_says(name: str) -> None:
    model, decoder = MODELS[name], whole(MODELS[name])
    spread(decoder)
    tokens = torch.randint(0, model.vocab_size, (2, 14), generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        weights = dict(decoder.state_dict())
        expected = torch.stack([reference_decoder.logits(model, weights, row) for row in tokens])
        found = decoder(tokens)
    assert expected.std() > 0.1
    torch.testing.assert_close(found, expected, rtol=2e-4, atol=2e-5)


@pytest.mark.parametrize("name", MODELS)
def test_as_many_weights_as_the_spec_counts(name: str) -> None:
    model, decoder = MODELS[name], whole(MODELS[name])
    held = {tensor.data_ptr(): tensor.numel() for tensor in decoder.state_dict().values()}
    assert sum(held.values()) == model.num_params
