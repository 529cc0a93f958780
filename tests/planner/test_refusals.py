"""A no with its reason: deadlines, contradictory pins, the near miss of every rule."""

from __future__ import annotations

from typing import Any

import pytest

from planner.candidates import legal_layouts
from planner.planning import enumerate_layouts, plan
from planner.refusal import near_misses
from planner.rules import broken
from scenarios.job import Job
from scenarios.prices import Prices
from scenarios.scenario import Scenario
from topologies.errors import Infeasible, InputError

DAY = 86_400.0


@pytest.fixture
def scenario(make_model: Any, make_cluster: Any) -> Scenario:
    job = Job(
        model=make_model(16, heads=32, kv_heads=8, head_dim=128, ffn=11_008),
        seq_length=4096,
        global_batch_size=64,
        target_tokens=1e11,
    )
    return Scenario(name="test", job=job, cluster=make_cluster(2), prices=Prices(name="p", gpu_usd_per_second=1 / 3600))


def due(scenario: Scenario, days: float, **changes: Any) -> Scenario:
    job = scenario.job.model_copy(update={"deadline_seconds": days * DAY})
    return scenario.model_copy(update={"job": job, **changes})


def test_a_deadline_that_cannot_be_met_is_a_no_with_the_closest(scenario: Scenario) -> None:
    days = plan(scenario, top=0).predicted["days"]["p50"]
    assert plan(due(scenario, 1.01 * days), top=0).predicted["days"]["p50"] == pytest.approx(days)
    with pytest.raises(Infeasible) as refused:
        plan(due(scenario, days / 2))
    assert refused.value.needed == f"{days:.4g} days"
    assert refused.value.available == f"{days / 2:.4g} days"
    assert refused.value.relax[0] == f"a deadline of {-(-days * 10 // 1) / 10:g} days"
    assert refused.value.relax[1] == "50 B tokens instead of 100 B tokens"
    assert refused.value.relax[2] == "more than 32 GPUs of this kind"


def test_a_layout_that_is_cheap_and_late_gives_way_to_the_fastest(scenario: Scenario) -> None:
    """With idle GPUs allowed, fewer GPUs are cheaper by a little and slower by much."""
    cheap = scenario.model_copy(update={"objective": "cost", "allow": ("fewer-gpus",)})
    late = plan(cheap, top=0)
    fast = plan(scenario, top=0)
    assert late.predicted["days"]["p50"] > 1.2 * fast.predicted["days"]["p50"]
    made = plan(due(cheap, 1.1 * fast.predicted["days"]["p50"]), top=0)
    assert made.predicted["days"]["p50"] <= 1.1 * fast.predicted["days"]["p50"]
    assert made.scenario.objective == "cost"
    assert "the deadline decides" in made.predicted["notes"][0]


def test_a_deadline_without_tokens_is_bad_input(scenario: Scenario) -> None:
    job = scenario.job.model_copy(update={"target_tokens": None, "deadline_seconds": DAY})
    with pytest.raises(InputError, match="say how many target_tokens"):
        plan(scenario.model_copy(update={"job": job}))


@pytest.mark.parametrize(
    ("pins", "rule"),
    [
        ({"schedule": "1f1b", "vpp": 2, "pp": 2}, "virtual_stages"),
        ({"tp": 1, "sequence_parallel": True}, "sequence_parallel"),
        ({"tp": 16}, "nvlink_domain"),
        ({"ep": 8}, "dense_has_no_experts"),
        ({"pp": 2, "optimizer_sharding": "zero3"}, "sharding_under_pp"),
        ({"tp": 8, "pp": 4, "dp": 4}, "gpus"),
    ],
)
def test_pins_that_contradict_name_the_rule_between_them(scenario: Scenario, pins: dict[str, Any], rule: str) -> None:
    with pytest.raises(Infeasible, match=rf"\(rule {rule}\)") as refused:
        plan(scenario, pins=pins)
    assert refused.value.exit_code == 1
    assert refused.value.relax


def test_a_near_miss_breaks_one_rule_and_no_other(scenario: Scenario) -> None:
    pins = {"pp": 2, "optimizer_sharding": "zero3"}
    with pytest.raises(Infeasible, match=r"nearest miss: PP2 .*zero3.*, but for rule sharding_under_pp"):
        plan(scenario, pins=pins)
    question, _ = enumerate_layouts(scenario, {})
    found = legal_layouts(question, pins)
    misses = near_misses(question, pins, found)
    assert [one.rule for one, _ in misses] == ["sharding_under_pp"]
    for one, near in misses:
        assert [each.rule for each in broken(question, near)] == [one.rule]
        assert (near.pp, near.optimizer_sharding) == (2, "zero3")


def test_two_rules_in_the_way_are_no_near_miss(scenario: Scenario) -> None:
    with pytest.raises(Infeasible, match="at least two rules would have to give way"):
        plan(scenario, pins={"tp": 16, "ep": 8})
