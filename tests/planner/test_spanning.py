"""Replicas over two pools: the split of layers against every split, the mix against the homogeneous one."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from planner.pooled import plan_pools
from planner.spanning import best_split, spanning_mix, stage_pieces, stage_seconds
from scenarios.job import Job
from scenarios.layout import Layout
from scenarios.scenario import Scenario
from topologies.cluster import Cluster, Pool
from topologies.errors import Infeasible

CUT = Layout(tp=8, sequence_parallel=True)


@pytest.fixture
def scenario(make_model: Any, make_cluster: Any, make_node: Any) -> Scenario:
    """Three nodes of fast GPUs with little memory and four of slow GPUs with more."""
    slow = make_node(8, memory=79e9, bf16=330e12).model_copy(update={"name": "slow-node"})
    cluster: Cluster = make_cluster(3, memory=30e9)
    cluster = cluster.model_copy(update={"pools": (*cluster.pools, Pool(node=slow, num_nodes=4))})
    model = make_model(12, heads=64, kv_heads=64, head_dim=128, ffn=28_672)
    return Scenario(name="mixed", job=Job(model=model, seq_length=8192, global_batch_size=48), cluster=cluster)


def timed(scenario: Scenario, kinds: tuple[int, ...]) -> Any:
    depth, layers = len(kinds), np.arange(13)
    return np.array(
        [
            stage_seconds(stage_pieces(scenario, CUT, pool, depth), stage, depth, layers)
            for stage, pool in enumerate(kinds)
        ]
    )


@pytest.mark.parametrize("kinds", [(0,), (1,), (0, 1), (1, 0), (0, 0, 1), (1, 1, 1), (0, 1, 1, 1)])
def test_no_split_of_the_layers_has_a_faster_slowest_stage(scenario: Scenario, kinds: tuple[int, ...]) -> None:
    depth = len(kinds)
    seconds = timed(scenario, kinds)
    best = min(
        max(float(seconds[stage, layers]) for stage, layers in enumerate(split))
        for split in itertools.product(range(13), repeat=depth)
        if sum(split) == 12
    )
    found = best_split(seconds)
    if best == float("inf"):
        assert found is None
        return
    assert found is not None
    assert sum(found.layers) == 12
    assert found.slowest == pytest.approx(best)
    assert found.through >= found.slowest


def test_slow_stages_hold_fewer_layers(scenario: Scenario) -> None:
    found = best_split(timed(scenario, (1, 0, 1, 1)))
    assert found is not None
    assert found.layers[1] > max(found.layers[0], found.layers[2], found.layers[3])


def test_mixed_templates_are_never_slower_than_replicas_of_one_kind(scenario: Scenario) -> None:
    """The set holds every homogeneous replica too; it is compared by its own arithmetic."""
    found = spanning_mix(scenario, CUT)
    assert found is not None
    mixed = found.mix
    assert sum(one.sequences for one in mixed.shares) == 48
    assert mixed.bound_seconds <= mixed.seconds <= mixed.bound_seconds * 1.01
    made = plan_pools(scenario, {"tp": 8, "cp": 1, "micro_batch_size": 1})
    assert mixed.seconds < 1.05 * made.predicted["step_seconds"]


def allowing(scenario: Scenario) -> Scenario:
    return scenario.model_copy(update={"allow": ("mixed-replicas",)})


def test_the_option_chooses_the_faster_of_equal_and_mixed_cuts(scenario: Scenario) -> None:
    pins = {"tp": 8, "cp": 1}
    made, alike = plan_pools(allowing(scenario), pins, top=9), plan_pools(scenario, pins)
    told = made.solver["mixed_replicas"]
    assert 0 < told["bound_seconds"] <= told["seconds"]
    assert "mixed_replicas" not in alike.solver
    assert made.predicted["step_seconds"] == min(told["played_seconds"], alike.predicted["step_seconds"])
    assert told["chosen"] == (told["played_seconds"] < alike.predicted["step_seconds"])


def test_mixed_replicas_are_chosen_whole(make_model: Any, make_cluster: Any, scenario: Scenario) -> None:
    """One fast node cannot hold the model, so it works only in a replica that reaches over both pools.

    Every layer is held once, no pool gives more nodes than it has, and the step is about that of the closed form.
    """
    pools = [*make_cluster(1, memory=40e9).pools, scenario.cluster.pools[1].model_copy(update={"num_nodes": 5})]
    model = make_model(48, heads=64, kv_heads=64, head_dim=128, ffn=28_672)
    job = scenario.job.model_copy(update={"model": model})
    cluster = scenario.cluster.model_copy(update={"pools": tuple(pools)})
    made = plan_pools(allowing(scenario.model_copy(update={"job": job, "cluster": cluster})), {"tp": 8, "cp": 1}, top=9)
    assert made.solver["mixed_replicas"]["chosen"]
    assert sum(one["replicas"] * one["num_microbatches"] * one["micro_batch_size"] for one in made.replicas) == 48
    used = [0, 0]
    for one in made.replicas:
        stages = one["layout"]["stages"]
        assert sum(stage["layers"] for stage in stages) == 48
        for pool in one.get("stage_pools", [one["pool"]] * len(stages)):
            used[pool] += one["replicas"]
    assert any("stage_pools" in one for one in made.replicas)
    assert used[0] == 1
    assert used[1] <= 5
    assert made.placement["nodes"] == sum(used)
    told = made.predicted
    assert told["memory_bytes"]["peak"] <= told["memory_bytes"]["capacity"]
    assert sum(told["breakdown_seconds"].values()) == pytest.approx(told["step_seconds"])
    assert told["step_seconds"] == pytest.approx(made.solver["closed_form_seconds"], rel=0.05)
    assert any("all cut alike" in one["lost_because"] for one in made.alternatives)
    again = plan_pools(scenario.model_copy(update={"job": job, "cluster": cluster}), {"tp": 8, "cp": 1})
    assert again.predicted["step_seconds"] > told["step_seconds"]


def test_stages_that_share_nodes_are_refused(scenario: Scenario) -> None:
    with pytest.raises(Infeasible, match="fills whole nodes"):
        spanning_mix(scenario, Layout(tp=4))
