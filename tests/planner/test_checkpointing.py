"""The grid of policies and spares against closed forms, brute force and the scalar optimum."""

from __future__ import annotations

import itertools
import json
import math
from typing import Any

import numpy as np
import pytest
from scipy.stats import gamma

from planner.checkpointing import WORTH_A_SPARE, operation
from planner.planning import plan
from planner.policy_grid import best_point, table, ways
from scenarios.faults import Elastic, Failure, Faults
from scenarios.job import Job
from scenarios.layout import Layout
from scenarios.operations import Checkpointing
from scenarios.prices import Prices
from scenarios.scenario import Scenario
from simulator.checkpoint_policy import policy_of
from simulator.checkpoints import choose_interval
from simulator.failures import sources
from simulator.goodput_theory import daly_higher_order_interval, erlang_b, optimum_interval
from simulator.whole_runs import whole_run
from topologies.cluster import Storage

DAY = 86_400.0
LAYOUT = Layout(tp=8, dp=8)
STEP = 2.0


def failing(per_day: float = 8.0, **more: Any) -> Faults:
    """Failures of a job on 64 GPUs: most take a node, some only processes, few a whole switch."""
    parts = (("gpu", 1.0, 1), ("software", 0.5, 0), ("switch", 0.1, 2))
    failures = tuple(
        Failure(component=name, rate_per_second=share * per_day / DAY / 64, lost_nodes=lost)
        for name, share, lost in parts
    )
    fields = {"detection_seconds": 60.0, "restart_seconds": 300.0, "repair_seconds": 2 * DAY, "rate_spread": 0.0}
    return Faults(name="some", failures=failures, **(fields | more))


def stored(kind: Any, write: float, *, per_node: bool = False) -> Storage:
    return Storage(name=kind, kind=kind, write_bytes_per_second=write, read_bytes_per_second=write, per_node=per_node)


@pytest.fixture
def scenario(make_model: Any, make_cluster: Any) -> Scenario:
    model = make_model(32, heads=32, kv_heads=8, head_dim=128, ffn=14_336)
    storage = (
        stored("peer-memory", 10e9, per_node=True),
        stored("local-nvme", 5e9, per_node=True),
        stored("parallel-file-system", 5e9),
    )
    return Scenario(
        name="test",
        job=Job(model=model, seq_length=4096, global_batch_size=64, target_tokens=1e12),
        cluster=make_cluster(8).model_copy(update={"storage": storage}),
        faults=failing(),
        prices=Prices(name="p", gpu_usd_per_second=2.0 / 3600),
    )


def changed(scenario: Scenario, **changes: Any) -> Scenario:
    return scenario.model_copy(update=changes)


def with_far_storage(scenario: Scenario, write: float) -> Scenario:
    storage = (*scenario.cluster.storage[:2], stored("parallel-file-system", write))
    return changed(scenario, cluster=scenario.cluster.model_copy(update={"storage": storage}))


def all_steps(way: Any, most: int) -> np.ndarray[Any, Any]:
    """Every number of steps after which the last save to the nearest tier is complete."""
    return np.arange(max(1, math.ceil((way.drains[0] - way.stall) / STEP - 1e-9)), most)


def test_the_interval_is_lamberts_where_one_tier_is_saved_to(scenario: Scenario) -> None:
    """Synchronous saves to one tier: the exact optimum within half a step, and near Daly's higher order."""
    pinned = changed(scenario, checkpoint=Checkpointing(mode="sync", peer_memory=False))
    near_free = pinned.cluster.model_copy(update={"storage": pinned.cluster.storage[2:]})
    policy = operation(changed(pinned, cluster=near_free), LAYOUT, STEP).policy
    mtbf = 1 / sum(source.rate_per_second for source in sources(scenario.faults, 64, 8))
    assert policy.mode == "sync"
    assert policy.write_seconds > 10
    assert abs(policy.interval_seconds - optimum_interval(policy.write_seconds, mtbf)) <= STEP
    assert policy.interval_seconds == pytest.approx(daly_higher_order_interval(policy.write_seconds, mtbf), rel=0.03)


def test_the_best_point_is_that_of_every_number_of_steps_and_saves(scenario: Scenario) -> None:
    """Brute force over all intervals up to 600 steps and all multiples up to 80."""
    found = sources(scenario.faults, 64, 8)
    seen = []
    for way in ways(scenario, LAYOUT, found, STEP):
        every = np.arange(1, 81) if way.second is not None else np.array([1])
        slow = table(scenario, found, way, all_steps(way, 600), every)[0]
        best, _ = best_point(scenario, found, way)
        assert best.slowdown == pytest.approx(float(slow.min()), rel=1e-9)
        seen.append(way.label)
    assert len(seen) == 4, seen


@pytest.mark.parametrize("objective", ["time", "cost", "energy", "goodput"])
@pytest.mark.parametrize(("per_day", "write"), [(1.0, 1e9), (8.0, 5e9), (60.0, 200e9)])
def test_policy_and_spares_are_the_best_of_the_whole_product(
    scenario: Scenario, objective: str, per_day: float, write: float
) -> None:
    """No way, interval, multiple and number of spares together is better than the choice, by Erlang's formula."""
    asked = with_far_storage(changed(scenario, faults=failing(per_day), objective=objective), write)
    one = operation(asked, LAYOUT, STEP)
    found = sources(asked.faults, 64, 8)
    away = sum(s.rate_per_second * s.lost_nodes * (s.repair_seconds + s.detection_seconds) for s in found)

    def value(goodput: float, spares: int) -> float:
        return 1 - goodput if objective == "goodput" else (8 + (spares if objective == "cost" else 0)) / goodput

    best = math.inf
    for way in ways(asked, LAYOUT, found, STEP):
        every = np.arange(1, 200, 3) if way.second is not None else np.array([1])
        slow = float(table(asked, found, way, all_steps(way, 3000)[::3], every)[0].min())
        best = min([best, *(value((1 - erlang_b(spares + 1, away)) / slow, spares) for spares in range(120))])
    tolerance = (
        0.0 if objective == "cost" else 1.01 * WORTH_A_SPARE * (1 if objective == "goodput" else 8 / one.goodput)
    )
    assert one.spares is not None
    assert value(one.goodput, one.spares) <= best * (1 + 1e-9) + tolerance


def test_one_spare_fewer_would_make_the_job_wait(scenario: Scenario) -> None:
    one = operation(scenario, LAYOUT, STEP)
    assert one.spares is not None
    fewer = operation(changed(scenario, faults=failing(spares=one.spares - 1)), LAYOUT, STEP)
    assert one.goodput / fewer.goodput > 1
    none = operation(changed(scenario, faults=failing(spares=10_000)), LAYOUT, STEP)
    assert none.goodput * (1 - WORTH_A_SPARE) <= one.goodput <= none.goodput
    assert fewer.goodput < none.goodput * (1 - WORTH_A_SPARE)


def test_rates_that_are_known_roughly_need_more_spares(scenario: Scenario) -> None:
    """The share without waiting, averaged over a gamma distribution of the rate by quadrature."""
    sure = operation(scenario, LAYOUT, STEP)
    rough = operation(changed(scenario, faults=failing(rate_spread=0.3)), LAYOUT, STEP)
    assert sure.spares is not None
    assert rough.spares is not None
    assert rough.spares > sure.spares + 3
    away = sum(
        s.rate_per_second * s.lost_nodes * (s.repair_seconds + s.detection_seconds)
        for s in sources(scenario.faults, 64, 8)
    )
    factor = np.linspace(1e-3, 4, 4000)
    density = gamma.pdf(factor, 0.3**-2, scale=0.3**2)
    waits = [
        float(np.sum(density * [erlang_b(spares + 1, away * one) for one in factor]) / np.sum(density))
        for spares in (rough.spares, rough.spares - 4)
    ]
    assert waits[0] < 2 * WORTH_A_SPARE < waits[1] * 1.5


def test_an_elastic_job_needs_fewer_spares(scenario: Scenario) -> None:
    """It goes on with fewer replicas, so a missing node costs a share of the work and not all of it."""
    rigid = operation(changed(scenario, faults=failing(0.5, rate_spread=0.3), objective="cost"), LAYOUT, STEP)
    elastic = failing(0.5, rate_spread=0.3, elastic=Elastic(reconfigure_seconds=60.0))
    supple = operation(changed(scenario, faults=elastic, objective="cost"), LAYOUT, STEP)
    assert rigid.spares is not None
    assert supple.spares is not None
    assert supple.spares < rigid.spares


def test_the_grid_never_loses_to_the_scalar_choice(scenario: Scenario) -> None:
    for write in (0.5e9, 5e9, 500e9):
        for mode in (None, "sync", "async"):
            asked = with_far_storage(changed(scenario, checkpoint=Checkpointing(mode=mode)), write)
            usual = choose_interval(asked.cluster, asked.job, LAYOUT, asked.faults, STEP, wish=asked.checkpoint)
            free = operation(changed(asked, faults=failing(spares=10_000)), LAYOUT, STEP)
            assert free.goodput >= usual.expected_goodput * (1 - 1e-9)


def test_what_is_pinned_stays(scenario: Scenario) -> None:
    wish = Checkpointing(mode="async", interval_seconds=240.0, file_system_every=7, peer_memory=True)
    one = operation(changed(scenario, checkpoint=wish, faults=failing(spares=3)), LAYOUT, STEP)
    assert one.policy.interval_steps == 120
    assert [level.every for level in one.policy.levels[:2]] == [1, 7]
    assert one.policy.levels[0].name == "peer-memory"
    assert one.spares == 3


def test_spares_inside_are_the_nodes_left_idle(scenario: Scenario) -> None:
    smaller = Layout(tp=8, dp=7)
    one = operation(changed(scenario, spare_nodes="inside"), smaller, STEP)
    away = sum(
        s.rate_per_second * s.lost_nodes * (s.repair_seconds + s.detection_seconds)
        for s in sources(scenario.faults, 56, 7)
    )
    beside = operation(changed(scenario, faults=failing(spares=10_000)), smaller, STEP)
    assert one.spares == 1
    assert one.goodput == pytest.approx(beside.goodput * (1 - erlang_b(2, away)))


def test_spares_inside_are_weighed_against_work(scenario: Scenario) -> None:
    """Failures that take nodes for long: with spares inside, the plan leaves nodes idle; beside, it uses them all."""
    asked = changed(scenario, faults=failing(6.0), allow=("fewer-gpus",))
    beside = plan(asked, pins={"tp": 8}, top=0)
    inside = plan(changed(asked, spare_nodes="inside"), pins={"tp": 8}, top=0)
    assert beside.layout.world_size == 64
    assert inside.layout.world_size < 64
    assert inside.predicted["spares"] == 8 - inside.layout.world_size // 8
    everything = plan(changed(asked, spare_nodes="inside", allow=()), pins={"tp": 8}, top=0)
    assert everything.predicted["spares"] == 0
    assert inside.predicted["days"]["p50"] < everything.predicted["days"]["p50"]


def test_neighbours_are_no_better_and_the_customary_ones_are_told(scenario: Scenario) -> None:
    one = operation(changed(scenario, objective="cost"), LAYOUT, STEP)
    told = {entry["change"]: entry for entry in one.neighbours}
    assert all(entry["objective_change"] > 0 for entry in told.values())
    customary = {
        round(entry["interval_seconds"]): entry["goodput"] for entry in told.values() if "interval_seconds" in entry
    }
    goodputs = [customary[seconds] for seconds in (600, 1200, 1800)]
    assert goodputs == sorted(goodputs, reverse=True)


def test_a_simulation_of_the_plan_has_its_policy_and_spares(scenario: Scenario) -> None:
    one = operation(scenario, LAYOUT, STEP)
    stored_text = json.loads(json.dumps(one.as_json()))
    assert policy_of(stored_text) == one.policy
    run = whole_run(scenario, LAYOUT, STEP, planned=stored_text)
    assert run.policy == one.policy
    assert run.setup.faults.spares == one.spares
    assert run.setup.expected_goodput() == pytest.approx(one.goodput)
    assert policy_of({"interval_steps": 3}) is None


def test_without_failures_nothing_is_weighed(scenario: Scenario) -> None:
    one = operation(changed(scenario, faults=Faults(name="none")), LAYOUT, STEP)
    assert one.spares is None
    assert one.neighbours == []
    assert one.goodput > 0.99


def test_combinations_of_pins_leave_something_to_choose(scenario: Scenario) -> None:
    for mode, peer, every in itertools.product(("sync", "async", None), (True, False, None), (1, 50, None)):
        if mode == "sync" and peer:
            continue
        one = operation(
            changed(scenario, checkpoint=Checkpointing(mode=mode, peer_memory=peer, file_system_every=every)),
            LAYOUT,
            STEP,
        )
        assert 0.5 < one.goodput < 1
