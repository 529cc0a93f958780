"""DeepSpeed's JSON against the names of its source and its own rule of batch sizes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from emit_plans import large_plan

from planner.plan import Plan
from runtime.emit.emitting import Wishes, emit_plan
from topologies.errors import InputError

Facts = Callable[[str], dict[str, Any]]


def config_of(plan: Plan) -> dict[str, Any]:
    _, files = emit_plan(plan, "deepspeed", Path("/shared/job"), Wishes(steps=10))
    content: dict[str, Any] = json.loads(files["deepspeed.json"])
    return content


@pytest.mark.parametrize("sharding", ["none", "zero1", "zero2", "zero3"])
def test_stage_and_batches(sharding: str, facts: Facts) -> None:
    plan = large_plan(tp=4, cp=2, dp=4, micro_batch_size=2, optimizer_sharding=sharding)
    config = config_of(plan)
    known = facts("deepspeed_keys")
    assert set(config) <= set(known["top"].split())
    for name, section in config.items():
        if isinstance(section, dict):
            assert set(section) <= set(known["sections"][name].split())
    assert config["zero_optimization"]["stage"] == ["none", "zero1", "zero2", "zero3"].index(sharding)
    per_step = config["train_micro_batch_size_per_gpu"] * config["gradient_accumulation_steps"]
    assert per_step * plan.layout.dp == config["train_batch_size"] == 512
    assert config["tensor_parallel"]["autotp_size"] * config["sequence_parallel_size"] * plan.layout.dp == 32


def test_experts(facts: Facts) -> None:
    config = config_of(large_plan("mixtral-8x7b", ep=8, dp=16, optimizer_sharding="zero2"))
    assert config["expert_parallel"] == {"enabled": True, "autoep_size": 8}
    assert set(config["expert_parallel"]) <= set(facts("deepspeed_keys")["sections"]["expert_parallel"].split())


@pytest.mark.parametrize(
    ("plan", "reason"),
    [
        (lambda: large_plan(pp=4, dp=2), "PipelineModule"),
        (lambda: large_plan("mixtral-8x7b", tp=2, ep=8, dp=8), "AutoTP"),
        (lambda: large_plan("mixtral-8x7b", tp=2, ep=4, etp=2, dp=8), "etp"),
        (lambda: large_plan(dp=8, job={"precision": "fp8"}), "fp8"),
    ],
)
def test_what_deepspeed_cannot_do_is_refused(plan: Callable[[], Plan], reason: str) -> None:
    with pytest.raises(InputError, match=reason):
        config_of(plan())


def test_what_the_program_must_do_stands_in_the_script() -> None:
    _, files = emit_plan(large_plan("llama3-8b", dp=8, recompute="full"), "deepspeed", Path("/x"), Wishes(steps=10))
    head = files["job.sh"].split("set -euo pipefail")[0]
    assert "save_checkpoint every 50 steps" in head
    assert "32 layers in full" in head
