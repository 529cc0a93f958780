"""Ranks hold the values of the whole model without ever holding the whole model."""

from __future__ import annotations

from typing import Any

import pytest
from building import built
from ranks_of_gloo import in_ranks
from tiny_models import model, of
from tiny_training import request

from runtime.initial import BLOCK_ELEMENTS
from runtime.request import TrainRequest
from scenarios.job import Job
from scenarios.layout import Layout
from scenarios.model import Attention, Mlp, ModelSpec, Moe

pytestmark = pytest.mark.jobs
LARGE = Attention(heads=16, kv_heads=4, head_dim=64)
DENSE = model("large", {"dense": of(LARGE, Mlp(ffn_hidden_size=4096, gated=True))}, ("dense",) * 4)
EXPERTS = model("experts", {"moe": of(LARGE, Moe(num_experts=8, top_k=2, ffn_hidden_size=1024))}, ("moe",) * 3)
WIDE = {"hidden_size": 1024, "vocab_size": 8192}


def asked(spec: ModelSpec, layout: dict[str, Any]) -> dict[str, Any]:
    job = Job(model=spec, seq_length=32, global_batch_size=8, precision="fp32")
    return TrainRequest(job=job, layout=Layout(**layout)).model_dump(mode="json")


LAYOUTS: dict[str, dict[str, Any]] = {
    "fsdp": {"dp": 2, "optimizer_sharding": "zero3"},
    "tp": {"tp": 2, "sequence_parallel": True},
    "tied, pp": {"model": "tied", "pp": 2},
    "gpt, tp": {"model": "gpt", "tp": 2},
    "ep": {"model": "moe", "dp": 2, "ep": 2, "optimizer_sharding": "zero1"},
    "ep, fsdp": {"model": "deepseek", "dp": 2, "ep": 2, "optimizer_sharding": "zero3"},
    "etp": {"model": "gpt-oss", "tp": 2, "etp": 2},
}
HALVES: dict[str, tuple[ModelSpec, dict[str, Any]]] = {
    "half by fsdp": (DENSE.model_copy(update=WIDE), {"dp": 2, "optimizer_sharding": "zero3"}),
    "half by tp": (DENSE.model_copy(update=WIDE), {"tp": 2}),
    "half by ep, fsdp": (EXPERTS.model_copy(update=WIDE), {"dp": 2, "ep": 2, "optimizer_sharding": "zero3"}),
}


def test_ranks_hold_the_values_of_the_whole_model_and_need_little_more_than_their_own_part() -> None:
    cases = {name: ("growth", asked(*half)) for name, half in HALVES.items()}
    cases |= {name: ("differences", request(**one).model_dump(mode="json")) for name, one in LAYOUTS.items()}
    found = in_ranks(2, built, cases)
    assert {name: found[name] for name in LAYOUTS} == {name: [] for name in LAYOUTS}
    for name, (spec, _) in HALVES.items():
        half, largest = 2 * spec.num_params, 4 * spec.vocab_size * spec.hidden_size
        assert 0.9 * half < found[name] < half + largest + 8 * BLOCK_ELEMENTS, name
