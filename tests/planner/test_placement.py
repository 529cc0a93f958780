"""Which nodes a plan takes, by number and by name."""

from __future__ import annotations

from typing import Any

import pytest

from planner.placement import arranged, healthy, nodes_text
from planner.planning import plan
from planner.story import per_token
from scenarios.job import Job
from scenarios.layout import Layout
from scenarios.scenario import Scenario
from topologies.cluster import Cluster, Fabric, Tier
from topologies.errors import InputError
from topologies.numbering import node_numbers, ranges_text, without_nodes


@pytest.fixture
def cluster(make_cluster: Any) -> Cluster:
    tiers = (Tier(name="leaf", nodes=5), Tier(name="spine", nodes=100))
    built: Cluster = make_cluster(15)
    return built.model_copy(update={"fabric": Fabric(kind="rail-optimized", rails=8, tiers=tiers)})


@pytest.fixture
def scenario(cluster: Cluster, make_model: Any) -> Scenario:
    job = Job(model=make_model(12, heads=32, head_dim=128), seq_length=2048, global_batch_size=96)
    return Scenario(name="test", job=job, cluster=cluster)


def test_stages_take_whole_units_and_the_rest_is_spare(scenario: Scenario) -> None:
    """Three stages of four nodes on units of five: rank order lets two rings leave their unit, the plan none."""
    placed = arranged(scenario, Layout(tp=8, pp=3, dp=4, sequence_parallel=True)).as_json()
    assert placed["node_numbers"] == [0, 1, 2, 3, 5, 6, 7, 8, 10, 11, 12, 13]
    assert placed["skipped_nodes"] == [4, 9]
    assert placed["idle_gpus"] == 24
    uplinks = placed["uplinks"]
    neighbours = 2 * 4 * (4 * 96 * 2048 * 4096 / 4)  # two boundaries, four replicas, bf16 there and back
    assert uplinks["bytes"] == pytest.approx(neighbours)
    assert uplinks["saved_bytes"] == pytest.approx(uplinks["rank_order_bytes"] - neighbours)
    assert 0 < uplinks["bound_bytes"] <= uplinks["bytes"]
    assert nodes_text(placed) == "nodes 0-3, 5-8, 10-13; skipped for whole units: 4, 9"


def test_broken_nodes_are_left_out(scenario: Scenario) -> None:
    broken = scenario.model_copy(update={"exclude_nodes": "1, 5-6"})
    placed = arranged(broken, Layout(tp=8, pp=3, dp=4))
    assert healthy(broken).cluster.num_nodes == 12
    assert placed.idle_gpus == 0
    assert sorted(placed.node_numbers) == [0, 2, 3, 4, *range(7, 15)]
    assert placed.as_json()["excluded_nodes"] == [1, 5, 6]


def test_a_plan_around_broken_nodes_is_no_worse_than_fewer_replicas(scenario: Scenario) -> None:
    whole = plan(scenario, top=0).layout
    degrees = {axis: getattr(whole, axis) for axis in ("tp", "cp", "pp", "ep")}
    broken = scenario.model_copy(update={"exclude_nodes": "4"})
    made, fewer = plan(broken, top=2), plan(broken, pins=degrees, top=0)
    assert per_token(made) <= per_token(fewer) * (1 + 1e-9)
    assert made.solver["bound_seconds"] <= made.predicted["step_seconds"]
    assert 4 not in made.placement["node_numbers"]


def test_each_block_of_an_expert_group_is_one_unit(scenario: Scenario) -> None:
    """Expert groups of two nodes: no group lies in two units."""
    layout = Layout(tp=1, pp=3, dp=32, ep=16)
    numbers = arranged(scenario, layout).node_numbers
    pairs = [(numbers[i] // 5, numbers[i + 1] // 5) for i in range(0, len(numbers), 2)]
    assert len(numbers) == 12
    assert all(first == second for first, second in pairs)


def test_data_parallel_neighbours_keep_their_rail(scenario: Scenario) -> None:
    assert arranged(scenario, Layout(tp=8, dp=12)).one_rail
    assert arranged(scenario, Layout(tp=2, cp=2, dp=24)).one_rail
    assert not arranged(scenario, Layout(tp=2, cp=3, dp=8)).one_rail


def test_names_stand_for_numbers(cluster: Cluster) -> None:
    named = cluster.model_copy(update={"node_names": "gpu[01-15]"})
    assert sorted(node_numbers("gpu[04,15]", named)) == [3, 14]
    assert node_numbers("3, 14", named) == node_numbers("gpu04,gpu15", named)
    assert ranges_text(node_numbers("9,1-3,2", cluster)) == "1-3, 9"


@pytest.mark.parametrize(
    ("text", "reason"),
    [("15", "has no node 15"), ("5-3", "is no node"), ("a", "is no node"), ("1;2", "is no node")],
)
def test_nodes_that_do_not_exist_are_refused(cluster: Cluster, text: str, reason: str) -> None:
    with pytest.raises(InputError, match=reason):
        node_numbers(text, cluster)


def test_names_must_be_those_of_the_cluster(cluster: Cluster) -> None:
    with pytest.raises(InputError, match="names 3 different nodes, test-cluster has 15"):
        node_numbers("1", cluster.model_copy(update={"node_names": "gpu[1-3]"}))
    with pytest.raises(InputError, match="has no node 'gpu99'"):
        node_numbers("gpu99", cluster.model_copy(update={"node_names": "gpu[01-15]"}))
    with pytest.raises(InputError, match="all 15 nodes"):
        without_nodes(cluster, range(15))


def on_racks(make_cluster: Any, make_model: Any, excluded: str) -> Scenario:
    """Sixteen nodes of two GPUs in four domains of four nodes."""
    job = Job(model=make_model(12, heads=32), seq_length=2048, global_batch_size=96)
    cluster = make_cluster(16, gpus_per_node=2, domain=8)
    return Scenario(name="racks", job=job, cluster=cluster, exclude_nodes=excluded)


@pytest.mark.parametrize(
    ("tp", "dp", "numbers"),
    [
        (8, 2, [8, 9, 10, 11, 12, 13, 14, 15]),  # whole domains only: the first two lack a node
        (4, 6, [0, 2, 4, 5, 8, 9, 10, 11, 12, 13, 14, 15]),  # pairs: one of each domain that lacks a node
        (2, 8, [0, 2, 3, 4, 5, 6, 8, 9]),  # a node holds a group
    ],
)
def test_groups_stay_in_their_domain_beside_broken_nodes(
    make_cluster: Any, make_model: Any, tp: int, dp: int, numbers: list[int]
) -> None:
    placed = arranged(on_racks(make_cluster, make_model, "1, 7"), Layout(tp=tp, dp=dp, sequence_parallel=True))
    assert list(placed.node_numbers) == numbers
    assert "cross" not in placed.step_assumes


def test_groups_that_no_choice_of_nodes_keeps_together_are_told(make_cluster: Any, make_model: Any) -> None:
    """Twelve nodes are left, three of each domain: as many as three groups of four, and none is whole."""
    placed = arranged(on_racks(make_cluster, make_model, "3, 7, 11, 15"), Layout(tp=8, dp=3, sequence_parallel=True))
    assert len(placed.node_numbers) == 12
    assert "tp groups inside a scale-up domain" in placed.step_assumes
    assert "on these nodes tp groups cross domains, which is not in the step time" in placed.step_assumes
    assert placed.as_json()["step_assumes"] == placed.step_assumes
