"""A tiny model in any layout, as the parity tests train it; imported by the spawned ranks too."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional

from runtime.data import synthetic_batch
from runtime.ranks import shares
from runtime.request import TrainRequest
from runtime.train import train
from runtime.transformer import build_decoder
from scenarios.job import Job
from scenarios.layout import Layout
from scenarios.model import Attention, Layer, Mlp, ModelSpec

STEPS, BATCH, SEQ, LAYERS, RATE = 4, 8, 32, 4, 1e-3


def tiny(tied: bool = False) -> ModelSpec:
    layer = Layer(mixer=Attention(heads=4, kv_heads=2, head_dim=16), feed_forward=Mlp(ffn_hidden_size=96, gated=True))
    return ModelSpec(
        name="tiny",
        hidden_size=64,
        vocab_size=256,
        layer_kinds={"dense": layer},
        pattern=("dense",) * LAYERS,
        tied_embeddings=tied,
    )


def request(precision: str = "fp32", tied: bool = False, **layout: Any) -> TrainRequest:
    job = Job(model=tiny(tied), seq_length=SEQ, global_batch_size=BATCH, precision=precision)  # type: ignore[arg-type]
    return TrainRequest(
        job=job, layout=Layout(**layout), steps=STEPS, warmup_steps=1, learning_rate=RATE, profile=False
    )


def plain_losses(tied: bool = False) -> list[float]:
    """One process, whole batch at once, torch's AdamW: no micro-batches, meshes, wrappers or schedules."""
    model, (whole,) = tiny(tied), shares(tiny(tied), Layout())
    decoder = build_decoder(model, whole, seed=0, recompute_core=False, dtype=torch.float32, device=torch.device("cpu"))
    optimizer = torch.optim.AdamW(decoder.parameters(), lr=RATE, betas=(0.9, 0.95), weight_decay=0.1)
    losses = []
    for step in range(STEPS):
        tokens, targets = synthetic_batch(0, step, 0, BATCH, SEQ, model.vocab_size)
        loss = functional.cross_entropy(decoder(tokens).flatten(0, 1), targets.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def run(case: dict[str, Any]) -> list[float]:
    return train(request(**case), torch.device("cpu")).losses
