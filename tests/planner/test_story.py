"""Explanations: shadow prices by asking again, the story of a difference, the waterfall, rules of thumb."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from planner.explain import explanation, limits
from planner.plan import Plan
from planner.planning import plan
from planner.shadow import MORE_BYTES, shadow_prices
from planner.story import changed_layout, headline, recomputed_text
from planner.thumb import LAYOUTS, NAMES, check_rules, tried
from planner.waterfall import waterfall
from scenarios.job import Job
from scenarios.layout import Layout, Stage
from scenarios.scenario import Scenario, load_scenario
from simulator.outcome import BREAKDOWN
from topologies.errors import InputError


@pytest.fixture
def scenario(make_model: Any, make_cluster: Any) -> Scenario:
    """13 B parameters on two nodes whose GPUs hold 30 GB: something must be recomputed."""
    model = make_model(40, heads=40, kv_heads=40, head_dim=128, ffn=13_824)
    job = Job(model=model, seq_length=4096, global_batch_size=64, target_tokens=1e11)
    return Scenario(name="tight", job=job, cluster=make_cluster(2, memory=30e9))


@pytest.fixture
def made(scenario: Scenario) -> Plan:
    return plan(scenario, top=2)


def test_each_price_is_the_plan_of_the_changed_question(made: Plan, scenario: Scenario) -> None:
    asked: list[str] = []
    prices = {one.change: one for one in shadow_prices(made, asked.append)}
    assert len(asked) == len(prices) == 5
    gpu = scenario.cluster.gpu
    roomy = gpu.model_copy(update={"usable_memory_bytes": gpu.usable_memory_bytes + MORE_BYTES})
    node = scenario.cluster.node.model_copy(update={"gpu": roomy})
    pools = (scenario.cluster.pools[0].model_copy(update={"node": node}),)
    other = plan(scenario.model_copy(update={"cluster": scenario.cluster.model_copy(update={"pools": pools})}), top=0)
    gain = 1 - other.predicted["step_seconds"] / made.predicted["step_seconds"]
    assert prices["2 GB more memory per GPU"].gain == pytest.approx(gain, abs=1e-3)
    assert gain > 0
    assert "would allow" in prices["2 GB more memory per GPU"].words
    larger, smaller = (prices[f"a global batch of {size} sequences"] for size in (128, 32))
    assert larger.gain is not None and smaller.gain is not None
    assert larger.gain > 0 > smaller.gain
    assert prices["NICs of 100 GB/s"].gain is not None
    assert prices["NICs of 100 GB/s"].gain >= -1e-3


def test_pins_are_kept_when_asking_again(scenario: Scenario) -> None:
    pinned = plan(scenario, pins={"tp": 4, "pp": 1}, top=0)
    for one in shadow_prices(pinned):
        assert one.layout.startswith("TP4")
        assert " PP" not in one.layout


def test_the_waterfall_is_the_step_and_starts_at_the_peak(made: Plan) -> None:
    parts = waterfall(made.predicted)
    assert sum(part.value for part in parts) == pytest.approx(made.predicted["step_seconds"], rel=1e-5)
    assert parts[0].key == "ideal"
    assert parts[0].value == pytest.approx(made.predicted["mfu"] * made.predicted["step_seconds"])
    seconds = {part.key: part.value for part in parts}
    scores = parts[0].value * made.predicted["attention_flops_share"]
    assert seconds["attention_below_peak"] == pytest.approx(
        made.predicted["compute_parts_seconds"]["attention"] - scores
    )
    assert 0 < seconds["attention_below_peak"] < seconds["gemm_below_peak"]
    told = explanation(made)["waterfall"]
    assert [entry["seconds"] for entry in told] == [part.value for part in parts]


def test_limits_name_what_binds(made: Plan) -> None:
    told = "; ".join(limits(made))
    assert "memory binds: stage" in told
    starved = dataclasses.replace(
        made,
        layout=made.layout.model_copy(update={"dp": 5, "tp": 2, "pp": 1, "cp": 1, "vpp": 1, "stages": ()}),
        placement=made.placement | {"idle_gpus": 6},
        replicas=[],
    )
    job = scenario_job(made, 60)
    starved = dataclasses.replace(starved, scenario=made.scenario.model_copy(update={"job": job}))
    assert "6 idle GPUs would hold 3 more replicas, and the global batch of 60 sequences does not divide over 8" in (
        "; ".join(limits(starved))
    )


def scenario_job(made: Plan, batch: int) -> Job:
    return made.scenario.job.model_copy(update={"global_batch_size": batch})


def test_a_difference_is_told_by_its_parts(scenario: Scenario, made: Plan) -> None:
    other = plan(scenario, pins={"recompute": "full", "tp": 8}, top=0)
    told = headline(made, other)
    change = other.predicted["step_seconds"] / made.predicted["step_seconds"] - 1
    assert told[0].startswith("layout: ")
    assert any(line.startswith(f"step: {100 * change:+.1f} %") for line in told)
    assert headline(made, made) == []
    biggest = max(
        BREAKDOWN,
        key=lambda part: abs(other.predicted["breakdown_seconds"][part] - made.predicted["breakdown_seconds"][part]),
    )
    line = next(line for line in told if line.startswith("step:"))
    assert {"compute": "compute", "tp_comm": "TP communication", "pp_bubble": "pipeline bubble"}[biggest] in line


def test_layouts_are_told_apart() -> None:
    before = Layout(tp=8, dp=2, recompute="full", stages=(Stage(layers=4, recompute_layers=3),))
    after = Layout(tp=4, dp=4, micro_batch_size=2, stages=(Stage(layers=4),))
    assert changed_layout(before, after) == (
        "TP4 instead of TP8, DP4 instead of DP2, micro batch size 2 instead of 1, "
        "no recompute instead of full recompute of 3 layers"
    )
    assert changed_layout(before, before) == ""
    assert recomputed_text(Layout(recompute="selective")) == "selective recompute"
    mixed = Layout(recompute="full", stages=(Stage(layers=3, recompute="fsn", recompute_layers=1),))
    assert recomputed_text(mixed) == "full recompute of 1 layers and selective recompute of 1 layers"


@pytest.mark.parametrize(("place", "nodes"), [(0, 2), (3, 4)])
def test_rules_of_thumb_are_tried_on_their_scenarios(place: int, nodes: int) -> None:
    thumb = LAYOUTS[place]
    one = tried(thumb, load_scenario(thumb.scenario, overrides=[f"cluster.num_nodes={nodes}"]))
    assert one.rule == thumb.name
    assert one.cost is not None
    assert one.cost > -1e-3, "headway's choice must not lose to a rule of thumb"
    assert one.verdict.startswith("good" if one.cost <= 0.02 else "costs")
    if thumb.name == "10b":
        assert one.ruled.startswith("TP4 PP2")
    else:
        assert int(one.ruled.split("PP")[1].split()[0]) <= 4


def test_a_rule_that_cannot_work_says_why(scenario: Scenario) -> None:
    pinned = scenario.model_copy(update={"layout": type(scenario.layout)(tp=16)})
    one = tried(LAYOUTS[0], pinned)
    assert one.cost is None
    assert one.verdict.startswith("does not work: the pinned layout (tp=16) cannot work")


def test_customary_intervals_suit_middling_clusters_only() -> None:
    """Every 10 to 30 minutes: fine at 512 GPUs, points of goodput at 16,384 (reliability arithmetic of Llama 3)."""
    told = list(check_rules(["checkpoint"]))
    by_size = {size: [one.cost for one in told if f"{size} H100" in one.case] for size in ("512", "16,384")}
    assert max(cost for cost in by_size["512"] if cost is not None) < 0.005
    late = [cost for cost in by_size["16,384"] if cost is not None]
    assert max(late) > 0.05
    assert min(late) > 0


def test_an_unknown_rule_is_refused() -> None:
    with pytest.raises(InputError, match=f"there is no rule '2t'; the rules are {', '.join(NAMES)}"):
        list(check_rules(["2t"]))
