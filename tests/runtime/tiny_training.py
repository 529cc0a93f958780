"""Tiny models in any layout, as the parity tests train them; imported by the spawned ranks too."""

from __future__ import annotations

from typing import Any

import torch
from tiny_models import LAYERS, MODELS
from torch.nn import functional

from runtime.data import synthetic_batch
from runtime.initial import build_decoder
from runtime.ranks import shares
from runtime.request import Recipe, TrainRequest
from runtime.routing import CORRECTION_STEP, Balance
from runtime.train import train
from runtime.transformer import Decoder
from scenarios.job import Job
from scenarios.layout import Layout
from scenarios.model import ModelSpec

__all__ = ["BATCH", "LAYERS", "SEQ", "STEPS", "plain_losses", "request", "run", "tiny"]
STEPS, BATCH, SEQ, RATE, BALANCE = 4, 8, 32, 1e-3, 0.01
SEEDS = {"moe": 7, "gpt-oss": 11}
"""Seeds with which no token stands so near between two experts that rounding decides (their scores differ by 3e-6)."""


def tiny(name: str = "dense") -> ModelSpec:
    return MODELS[name]


def request(
    precision: str = "fp32",
    model: str = "dense",
    recipe: dict[str, Any] | None = None,
    steps: int = STEPS,
    **layout: Any,
) -> TrainRequest:
    job = Job(model=tiny(model), seq_length=SEQ, global_batch_size=BATCH, precision=precision)  # type: ignore[arg-type]
    chosen = {"learning_rate": RATE, "balance_loss": BALANCE} | (recipe or {})
    return TrainRequest(
        job=job,
        layout=Layout(**layout),
        steps=steps,
        warmup_steps=1,
        seed=SEEDS.get(model, 0),
        recipe=Recipe(**chosen),
        profile=False,
    )


def plain_losses(model: str = "dense", clip_norm: float | None = None) -> list[float]:
    """One process, whole batch at once, torch's AdamW: no micro-batches, meshes, wrappers or schedules."""
    spec, (whole,), seed = tiny(model), shares(tiny(model), Layout()), SEEDS.get(model, 0)
    balance = Balance(coefficient=BALANCE, global_batch_size=BATCH)
    device = torch.device("cpu")
    decoder = build_decoder(spec, whole, seed=seed, dtype=torch.float32, device=device, balance=balance)
    optimizer = torch.optim.AdamW(decoder.parameters(), lr=RATE, betas=(0.9, 0.95), weight_decay=0.1)
    losses = []
    for step in range(STEPS):
        tokens, targets = synthetic_batch(seed, step, 0, BATCH, SEQ, spec.vocab_size)
        loss = functional.cross_entropy(decoder(tokens).flatten(0, 1), targets.flatten())
        loss.backward()
        if clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(decoder.parameters(), clip_norm)
        optimizer.step()
        optimizer.zero_grad()
        correct_routers(decoder)
        losses.append(loss.item())
    return losses


def correct_routers(decoder: Decoder) -> None:
    for router in decoder.routers():
        if router.correction is not None:
            mean = BATCH * SEQ * router.spec.top_k / router.spec.num_experts
            router.correction += CORRECTION_STEP * torch.sign(mean - router.loads.pop())


def run(case: dict[str, Any]) -> list[float]:
    return train(request(**case), torch.device("cpu")).losses
