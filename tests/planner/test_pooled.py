"""Clusters with two kinds of GPUs: the mix of replicas, what it is compared with, and what refuses it."""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from planner.mixing import Template
from planner.placement import healthy
from planner.plan import read_plan, refuse_unequal, write_plan
from planner.planning import plan
from planner.pooled import _least_seconds, plan_pools
from planner.replicas import layout_of, pool_templates, sub_cluster
from runtime.emit.emitting import Wishes, emit_plan
from scenarios.faults import Failure, Faults
from scenarios.job import Job
from scenarios.scenario import Scenario
from simulator.inputs import read_subject
from simulator.step import predict_step
from topologies.cluster import Cluster, Pool
from topologies.errors import Infeasible, InputError


@pytest.fixture
def scenario(make_model: Any, make_cluster: Any, make_node: Any) -> Scenario:
    """Five nodes of fast GPUs and seven of GPUs at a third of the peak; a model of 7 B parameters."""
    slow = make_node(8, memory=79e9, bf16=330e12)
    slow = slow.model_copy(update={"name": "slow-node", "gpu": slow.gpu.model_copy(update={"name": "slow-gpu"})})
    cluster: Cluster = make_cluster(5)
    cluster = cluster.model_copy(update={"pools": (*cluster.pools, Pool(node=slow, num_nodes=7))})
    job = Job(
        model=make_model(32, heads=32, kv_heads=8, head_dim=128, ffn=11_008),
        seq_length=4096,
        global_batch_size=64,
        target_tokens=1e11,
    )
    return Scenario(name="mixed", job=job, cluster=cluster)


def test_every_sequence_is_run_and_every_replica_fits(scenario: Scenario) -> None:
    made = plan(scenario)
    assert sum(one["replicas"] * one["num_microbatches"] * one["micro_batch_size"] for one in made.replicas) == 64
    gpus = {"test-node": 0, "slow-node": 0}
    for one in made.replicas:
        gpus[one["node"]] += one["replicas"] * one["gpus_per_replica"]
    assert 0 < gpus["test-node"] <= 40
    assert 0 < gpus["slow-node"] <= 56
    assert made.layout.dp == sum(one["replicas"] for one in made.replicas)
    assert made.predicted["memory_bytes"]["peak"] <= made.predicted["memory_bytes"]["capacity"]


def test_the_step_is_that_of_its_slowest_replica(scenario: Scenario) -> None:
    """Each share, priced alone with as many equal replicas, takes no longer; one of them takes all of the step."""
    made = plan(scenario)
    seconds = []
    for one in made.replicas:
        layout = made.layout.model_validate(one["layout"])
        batch = layout.dp * layout.micro_batch_size * one["num_microbatches"]
        job = scenario.job.model_copy(update={"global_batch_size": batch})
        seconds.append(predict_step(sub_cluster(scenario.cluster, one["pool"]), job, layout).total_seconds)
    assert max(seconds) == pytest.approx(made.predicted["step_seconds"], rel=0.02)
    assert sum(made.predicted["breakdown_seconds"].values()) == pytest.approx(made.predicted["step_seconds"])


def test_both_pools_beat_either_and_the_gap_is_told(scenario: Scenario) -> None:
    made = plan(scenario, top=20)
    alone = {
        one["lost_because"].split(":")[0]: one["step_seconds"]
        for one in made.alternatives
        if one["lost_because"].startswith("only the")
    }
    assert set(alone) == {"only the test-node nodes", "only the slow-node nodes"}
    assert made.predicted["step_seconds"] < min(alone.values())
    peaks = {"test-node": 40 * 989.5, "slow-node": 56 * 330.0}
    ideal = alone["only the test-node nodes"] * peaks["test-node"] / sum(peaks.values())
    assert made.predicted["step_seconds"] > 0.9 * ideal
    assert 0 <= made.solver["gap"] < 0.05
    assert made.solver["bound_seconds"] <= made.predicted["step_seconds"]


def test_no_mix_of_any_cut_is_faster_by_brute_force(scenario: Scenario) -> None:
    """Every pair of ways on the two pools, every number of replicas: the screened bound is not above the best."""
    few = {"tp": 8, "micro_batch_size": 1, "recompute": "none", "cp": 1}
    made = plan(scenario, pins=few)
    found = [pool_templates(scenario, pool, few) for pool in (0, 1)]
    best = math.inf
    for row, other in itertools.product(range(len(found[0].layouts)), range(len(found[1].layouts))):
        fast, slow = found[0].layouts.row(row), found[1].layouts.row(other)
        if (fast.pp, fast.sequence_parallel) != (slow.pp, slow.sequence_parallel):
            continue
        ring = max(found[0].ring_seconds[row], found[1].ring_seconds[other])
        for first, second in itertools.product(range(5 // fast.pp + 1), range(7 // fast.pp + 1)):
            for quick in range(fast.pp, 65):
                left = 64 - first * quick
                if (first == 0 and quick > fast.pp) or left < 0 or (left and not second) or (second and not left):
                    continue
                rest = math.ceil(left / second) if second else 0
                if second and left < second * fast.pp:
                    continue
                times = [found[0].fixed_seconds[row] + quick * found[0].microbatch_seconds[row]] if first else []
                times += [found[1].fixed_seconds[other] + rest * found[1].microbatch_seconds[other]] if second else []
                best = min(best, max(times) + ring) if times else best
    assert made.solver["bound_seconds"] <= best * (1 + 1e-9)
    assert made.solver["closed_form_seconds"] == pytest.approx(best, rel=1e-3)


def test_templates_are_the_closed_form(scenario: Scenario) -> None:
    """Fixed part, micro-batches and ring add up to the step of the simulator for another number of micro-batches."""
    found = pool_templates(scenario, 1, {})
    for row in range(0, len(found.layouts), max(1, len(found.layouts) // 12)):
        layout = layout_of(found, row, int(found.rings[row]))
        count = 3 * layout.pp + 5
        job = scenario.job.model_copy(update={"global_batch_size": layout.dp * layout.micro_batch_size * count})
        step = predict_step(sub_cluster(scenario.cluster, 1), job, layout).total_seconds
        told = found.fixed_seconds[row] + count * found.microbatch_seconds[row] + found.ring_seconds[row]
        assert told == pytest.approx(step, rel=5e-3)


def test_the_screening_is_the_best_of_one_template_a_pool() -> None:
    ways = [
        Template(name="a", nodes=(1, 0), replicas=1, fixed_seconds=2.0, microbatch_seconds=1.0, micro_batch_size=1),
        Template(name="b", nodes=(0, 2), replicas=1, fixed_seconds=0.5, microbatch_seconds=2.5, micro_batch_size=2),
    ]
    by_hand = min(
        seconds / 100
        for seconds in range(1, 5000)
        if 3 * max(0, int((seconds / 100 - 2.0) + 1e-9)) + 2 * 2 * max(0, int((seconds / 100 - 0.5) / 2.5 + 1e-9)) >= 40
    )
    assert _least_seconds(ways, (3, 4), 40) == pytest.approx(by_hand, rel=2e-3)


def test_the_plan_file_keeps_the_replicas_and_what_cannot_run_it_says_so(scenario: Scenario, tmp_path: Path) -> None:
    made = plan(scenario)
    write_plan(made, tmp_path / "plan.json")
    again = read_plan(tmp_path / "plan.json")
    assert again == made
    assert json.loads((tmp_path / "plan.json").read_text())["layout"]["num_microbatches"] == made.num_microbatches
    with pytest.raises(InputError, match=r"replicas run different numbers of micro-batches .* megatron runs all"):
        emit_plan(made, "megatron", tmp_path, Wishes())
    with pytest.raises(InputError, match="headway run runs all replicas alike"):
        refuse_unequal(again, "headway run")
    with pytest.raises(InputError, match="simulation plays all alike"):
        read_subject(str(tmp_path / "plan.json"))
    with pytest.raises(InputError, match="holds DGX H100 and DGX A100, and one layout for all"):
        read_subject("llama3-405b-h100-a100", pins=["dp=1248"])


def test_broken_nodes_leave_their_pool(scenario: Scenario) -> None:
    broken = scenario.model_copy(update={"exclude_nodes": "0, 5-6"})
    made = plan(broken)
    assert [pool.num_nodes for pool in healthy(broken).cluster.pools] == [4, 5]
    assert not set(made.placement["node_numbers"]) & {0, 5, 6}
    assert made.placement["excluded_nodes"] == [0, 5, 6]


def test_pins_that_leave_no_replica_are_refused(scenario: Scenario) -> None:
    with pytest.raises(
        Infeasible, match=r"no replica of small works on 5 x test-node, 7 x slow-node .*heads do not divide"
    ):
        plan_pools(scenario, {"tp": 7})
    small = scenario.model_copy(update={"job": scenario.job.model_copy(update={"global_batch_size": 2})})
    with pytest.raises(Infeasible, match="2 micro-batches for pp 4"):
        plan_pools(small, {"pp": 4})


def test_the_mix_is_confirmed_by_simulation_with_the_failures_of_each_pool(scenario: Scenario) -> None:
    """Only the slow nodes fail: the rate is that of the slow nodes at work, and both sides see it."""
    day = 86_400.0
    failing = Failure(component="GPU", rate_per_second=0.2 / day, pool="slow-node")
    faults = Faults(name="x", failures=(failing,), detection_seconds=60, restart_seconds=300, rate_spread=0.0)
    made = plan(scenario.model_copy(update={"faults": faults}))
    found = made.predicted["confirmation"]
    gpus = sum(one["replicas"] * one["gpus_per_replica"] for one in made.replicas if one["node"] == "slow-node")
    mtbf = day / (0.2 * gpus)
    assert found["agrees"]
    assert found["analytic"] == pytest.approx(made.predicted["goodput"])
    stall = sum(level["stall_seconds"] for level in made.checkpoint["levels"])
    lost = (
        made.checkpoint["interval_seconds"] / 2
        + 360
        + made.checkpoint["load_seconds"]
        + made.checkpoint["drain_seconds"]
    )
    first_order = 1 - stall / made.checkpoint["interval_seconds"] - lost / mtbf
    assert made.predicted["goodput"] == pytest.approx(first_order, abs=0.01)
    none = Failure(component="GPU", rate_per_second=0.2 / day, pool="test-node")
    spared = plan(scenario.model_copy(update={"faults": faults.model_copy(update={"failures": (none,)})}))
    assert spared.predicted["goodput"] != pytest.approx(made.predicted["goodput"], abs=1e-6)


def test_a_pool_that_is_not_there_cannot_fail(scenario: Scenario) -> None:
    content = scenario.model_dump(mode="json", by_alias=True)
    content["faults"] = {"name": "x", "failures": [{"component": "GPU", "rate": "1 %/year", "pool": "nobody"}]}
    with pytest.raises(ValidationError, match=r"nobody.*test-node, slow-node"):
        Scenario.model_validate(content)


@pytest.mark.parametrize("objective", ["cost", "energy"])
def test_the_objective_may_leave_a_pool_idle(scenario: Scenario, objective: str) -> None:
    """The slow GPUs draw as much for a third of the work: for cost and energy the fast ones alone are better.

    Node-seconds stand for cost where there are no prices.
    """
    few = {"tp": 8, "micro_batch_size": 1, "recompute": "none", "cp": 1}
    quick, frugal = (plan_pools(scenario.model_copy(update={"objective": one}), few) for one in ("time", objective))
    assert {one["node"] for one in quick.replicas} == {"test-node", "slow-node"}
    assert {one["node"] for one in frugal.replicas} == {"test-node"}
    assert frugal.predicted["energy_kwh"] < quick.predicted["energy_kwh"]
    assert frugal.predicted["days"]["p50"] > quick.predicted["days"]["p50"]
    assert any(f"% more {objective}" in one["lost_because"] for one in frugal.alternatives)
    assert any("the one with the least" in one for one in frugal.solver["restrictions"])
