"""From the ranks' report to a measurement."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st
from plans import plan_file, plan_of
from tiny_models import MODELS
from tiny_training import BATCH, SEQ
from torch.utils.flop_counter import FlopCounterMode

from runtime.commands import run
from runtime.environment import CpuClock, usable_cores
from runtime.initial import build_decoder
from runtime.job import request_for
from runtime.measurement import measurement_from, percentile, write_measurement
from runtime.ranks import shares
from runtime.transformer import token_loss
from scenarios.layout import Layout
from simulator.outcome import read_measurement


def report(**changes: Any) -> dict[str, Any]:
    return {
        "losses": [5.0, 4.0, 3.0, 2.0, 1.0],
        "step_seconds": [9.0, 7.0, 1.0, 2.0, 3.0],
        "phases_seconds": {
            "forward_backward": [8.0, 6.0, 0.8, 1.6, 2.4],
            "gradient_reduction": [0.5] * 5,
            "optimizer": [0.1] * 5,
        },
        "cpu_seconds": [8.0, 6.0, 1.0, 1.5, 2.0],
        "communication_seconds": 0.4,
        "foreign_cpu_share": 0.01,
        "peak_memory_bytes": [3e8, 4e8],
        "baseline_memory_bytes": [2e8, 2e8],
    } | changes


def test_warm_up_is_dropped_and_rates_follow_from_the_median(tmp_path: Path) -> None:
    plan = plan_of(dp=2)
    measured = measurement_from(plan, request_for(plan, steps=5), report())
    assert measured.step_seconds == {"median": 2.0, "p10": pytest.approx(1.2), "p90": pytest.approx(2.8)}
    assert measured.phases_seconds["forward_backward"] == pytest.approx(1.6)
    assert measured.tokens_per_second_per_gpu == BATCH * SEQ / 2.0 / 2
    flops = plan.scenario.model.flops_per_token(SEQ) * BATCH * SEQ
    peak = plan.scenario.cluster.gpu.peak("fp32")
    assert peak is not None
    assert measured.mfu == pytest.approx(flops / (2.0 * 2 * peak))
    assert measured.peak_memory_bytes == 4e8
    assert measured.losses == report()["losses"]
    assert measured.plan_sha256 == plan.sha256()
    assert not measured.environment["contended"]
    write_measurement(measured, tmp_path / "m.json")
    assert read_measurement(tmp_path / "m.json") == measured


@pytest.mark.parametrize("name", ["dense", "moe", "llama4"])
def test_the_model_flops_are_those_that_torch_counts_of_chosen_experts_alone(name: str) -> None:
    """Attention left out: torch does not count its fused kernel on CPUs."""
    model = MODELS[name]
    (share,) = shares(model, Layout())
    decoder = build_decoder(model, share, seed=0, dtype=torch.float32, device=torch.device("cpu"))
    tokens = torch.randint(0, model.vocab_size, (2, SEQ))
    with FlopCounterMode(display=False) as counter:
        token_loss(decoder(tokens), tokens).backward()
    parts = model.forward_flops_per_token(SEQ)
    assert counter.get_total_flops() == 3 * (sum(parts.values()) - parts["attention"]) * tokens.numel()


def test_an_unknown_peak_means_no_mfu() -> None:
    plan = plan_of()
    cluster = plan.scenario.cluster
    gpu = cluster.gpu.model_copy(update={"peak_flop_per_second": {"bf16": 2e11}})
    pool = cluster.pools[0].model_copy(update={"node": cluster.node.model_copy(update={"gpu": gpu})})
    scenario = plan.scenario.model_copy(update={"cluster": cluster.model_copy(update={"pools": (pool,)})})
    plan = replace(plan, scenario=scenario)
    assert measurement_from(plan, request_for(plan, steps=5), report()).mfu is None


@pytest.mark.parametrize(("share", "contended"), [(None, False), (0.05, False), (0.06, True)])
def test_contention_is_marked_above_five_percent(share: float | None, contended: bool) -> None:
    plan = plan_of()
    measured = measurement_from(plan, request_for(plan, steps=5), report(foreign_cpu_share=share))
    assert measured.environment["contended"] is contended


@pytest.mark.parametrize("ranks", [usable_cores(), 4 * usable_cores()])
def test_ranks_that_share_cores_are_told(tmp_path: Path, ranks: int) -> None:
    plan = plan_of(dp=ranks, job={"global_batch_size": ranks})
    measured = measurement_from(plan, request_for(plan, steps=5), report())
    assert measured.environment["oversubscription"] == ranks / usable_cores()
    told = any(f"{ranks} ranks share {usable_cores()} cores" in note for note in measured.environment["notes"])
    assert told == (ranks > usable_cores())
    lines = CliRunner().invoke(run, [plan_file(tmp_path, plan), "--dry-run", "--no-trace"]).stdout
    assert ("oversubscribed: 4 ranks on each core" in lines) == (ranks > usable_cores())


def test_foreign_share_is_what_was_busy_and_not_own() -> None:
    before, after = CpuClock(0.0, 100.0, 0.0), CpuClock(10.0, 115.0, 8.0)
    assert after.foreign_share(before, own_seconds=12.0, cores=2) == pytest.approx(3 / 20)
    assert after.foreign_share(before, own_seconds=16.0, cores=2) == 0.0
    assert CpuClock(10.0, float("nan"), 8.0).foreign_share(before, 1.0, 2) is None


@given(st.lists(st.floats(0, 100), min_size=1, max_size=30), st.floats(0, 100))
def test_percentile_agrees_with_numpy(values: list[float], percent: float) -> None:
    import numpy as np

    assert percentile(values, percent) == pytest.approx(float(np.percentile(values, percent)), abs=1e-9)
