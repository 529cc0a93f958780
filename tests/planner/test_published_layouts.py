"""The plan of each shipped scenario is at least as fast as the layout that was published or is told as a rule."""

from __future__ import annotations

from typing import Any

import pytest

from planner.planning import plan
from planner.playing import played_step
from scenarios.layout import Layout
from scenarios.scenario import load_scenario

PUBLISHED = {
    # arXiv 2407.21783, table 4
    "llama3-405b-16k-h100": {"tp": 8, "pp": 16, "dp": 128},
    # arXiv 2104.04473, section 5.1 and figure 11: TP 8, PP 8 (DP 16) for GPT-3 175B on 1,024 A100
    "gpt3-175b-1024-a100": {"tp": 8, "pp": 8, "dp": 16},
    # arXiv 2412.19437, section 3.2: 16-way pipeline, 64-way experts, ZeRO-1 data parallelism, no tensor parallelism
    "deepseek-v3-2048-h800": {"tp": 1, "cp": 1, "pp": 16, "ep": 64, "dp": 128},
    # the starting ratios told for a model of 1T parameters: TP 16, PP 8
    "gpt-1t-8192-a100": {"tp": 16, "pp": 8, "dp": 64},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", PUBLISHED)
def test_the_published_layout_and_the_free_choice_stand_side_by_side(name: str) -> None:
    pinned = plan(load_scenario(name), pins=PUBLISHED[name], top=2)
    assert all(getattr(pinned.layout, axis) == value for axis, value in PUBLISHED[name].items())
    free = pinned.alternatives[0]
    assert "excluded by the pins" in free["lost_because"]
    assert free["step_seconds"] <= pinned.predicted["step_seconds"]
    assert pinned.predicted["memory_bytes"]["peak"] <= pinned.predicted["memory_bytes"]["capacity"]


def test_partial_recompute_lets_meta_s_layout_fit_at_nearly_the_speed_without() -> None:
    """Without recompute it needs more than a GPU has; recompute of all layers costs a fifth."""
    scenario = load_scenario("llama3-405b-16k-h100")
    pins: dict[str, Any] = PUBLISHED["llama3-405b-16k-h100"] | {"vpp": 1, "schedule": "1f1b", "sequence_parallel": True}
    made = plan(scenario, pins=pins, top=0)
    told = made.predicted
    assert told["memory_bytes"]["peak"] <= told["memory_bytes"]["capacity"]
    recomputed = sum(stage.recompute_layers for stage in made.layout.stages)
    assert recomputed < 20
    plain = played_step(scenario.cluster, scenario.job, Layout(**pins, micro_batch_size=1)).total_seconds
    full = played_step(scenario.cluster, scenario.job, Layout(**pins, micro_batch_size=1, recompute="full"))
    assert told["step_seconds"] < 1.05 * plain
    assert told["step_seconds"] < 0.9 * full.total_seconds
