"""Replicas over two pools: the split of layers against every split, the mix against the homogeneous one."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from planner.pooled import plan_pools
from planner.spanning import _pieces, best_split, mixed_mix, stage_seconds
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
        [stage_seconds(_pieces(scenario, CUT, pool, depth), stage, depth, layers) for stage, pool in enumerate(kinds)]
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
    mixed = mixed_mix(scenario, CUT)
    assert mixed is not None
    assert sum(one.sequences for one in mixed.shares) == 48
    assert mixed.bound_seconds <= mixed.seconds <= mixed.bound_seconds * 1.01
    made = plan_pools(scenario, {"tp": 8, "cp": 1, "micro_batch_size": 1})
    assert mixed.seconds < 1.05 * made.predicted["step_seconds"]


def test_the_option_tells_what_mixed_replicas_would_gain(scenario: Scenario) -> None:
    made = plan_pools(scenario.model_copy(update={"allow": ("mixed-replicas",)}), {"tp": 8, "cp": 1})
    told = made.solver["mixed_replicas"]
    assert told["seconds"] > 0
    assert told["bound_seconds"] <= told["seconds"]
    assert any("cut differently" in line for line in made.predicted["notes"])
    assert "mixed_replicas" not in plan_pools(scenario, {"tp": 8, "cp": 1}).solver


def test_stages_that_share_nodes_are_refused(scenario: Scenario) -> None:
    with pytest.raises(Infeasible, match="fills whole nodes"):
        mixed_mix(scenario, Layout(tp=4))
