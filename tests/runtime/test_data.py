"""Synthetic tokens are a function of seed, step and place."""

from __future__ import annotations

import torch

from runtime.data import synthetic_batch


def test_a_slice_of_the_batch_is_the_same_whoever_asks() -> None:
    tokens, targets = synthetic_batch(1, 5, 0, 8, 16, 100)
    part, wanted = synthetic_batch(1, 5, 4, 2, 16, 100)
    assert torch.equal(part, tokens[4:6])
    assert torch.equal(wanted, targets[4:6])


def test_targets_are_the_next_tokens() -> None:
    tokens, targets = synthetic_batch(0, 0, 0, 2, 16, 100)
    assert torch.equal(tokens[:, 1:], targets[:, :-1])
    assert tokens.min() >= 0
    assert targets.max() < 100


def test_seed_step_and_place_all_matter() -> None:
    batches = [synthetic_batch(*where, 1, 16, 10_000)[0] for where in ((0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1))]
    assert len({tuple(batch.flatten().tolist()) for batch in batches}) == 4


def test_small_tokens_are_frequent() -> None:
    tokens, _ = synthetic_batch(0, 0, 0, 64, 256, 1000)
    share = (tokens < 125).float().mean().item()  # u ** 3 < 1 / 8 for half of all u
    assert abs(share - 0.5) < 0.02
