"""What a run teaches: the machine is made up, so that the truth is known."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from scenarios.layout import Layout
from scenarios.scenario import load_scenario
from simulator.phases import phase_seconds
from simulator.residuals import FACTORS, Seen, learnt, residuals, seconds_per_unit
from simulator.step import predict_step
from topologies.cluster import Cluster, CollectivePoint, GemmPoint, Measured, Residual
from topologies.errors import InputError

SCENARIO = load_scenario("laptop")
JOB = SCENARIO.job
COSTS = {"layer": 1e-3, "tp_layer": 1e-2, "tp_sequence_layer": 1.5e-2, "dp_layer": 5e-3, "pp_microbatch": 2e-3}


def machine(**costs: float) -> Cluster:
    measured = Measured(date="2026-01-01", host_seconds=COSTS | costs, environment={"fingerprint": "one"})
    return SCENARIO.cluster.model_copy(update={"measured": measured})


def seconds(cluster: Cluster, layout: Layout) -> float:
    return predict_step(cluster, JOB, layout).total_seconds


def run_on(truth: Cluster, profile: Cluster, layout: Layout, number: int = 0, **more: Any) -> Residual:
    """Predict with the profile, and run on a machine whose costs are other ones."""
    (found,) = residuals(
        profile,
        JOB,
        layout,
        Seen(step_seconds=seconds(truth, layout)),
        predicted_seconds=seconds(profile, layout),
        plan_sha256=f"plan {number}",
        date="2026-01-02",
        contended=more.get("contended", False),
    )
    return found


@pytest.mark.parametrize(
    ("cost", "layout", "other"),
    [
        ("tp_layer", {"tp": 2}, {"tp": 2, "micro_batch_size": 4}),
        ("tp_sequence_layer", {"tp": 2, "sequence_parallel": True}, {"tp": 2, "pp": 1, "sequence_parallel": True}),
        ("dp_layer", {"dp": 2, "optimizer_sharding": "zero3"}, {"dp": 2, "optimizer_sharding": "zero2"}),
        ("pp_microbatch", {"pp": 2}, {"pp": 2, "micro_batch_size": 2}),
        ("layer", {"dp": 2}, {"dp": 2, "micro_batch_size": 4}),
    ],
)
def test_one_run_finds_the_cost_that_is_wrong_and_helps_another_plan(
    cost: str, layout: dict[str, Any], other: dict[str, Any]
) -> None:
    profile, truth = machine(), machine(**{cost: 2 * COSTS[cost]})
    found = run_on(truth, profile, Layout(**layout))
    assert found.cost == cost
    assert found.implied_seconds == pytest.approx(2 * COSTS[cost], rel=1e-6)
    changed, lesson = learnt(profile, found)
    assert lesson.before_seconds == COSTS[cost]
    assert lesson.after_seconds == pytest.approx(COSTS[cost] + (found.implied_seconds - COSTS[cost]) / 3)
    second = Layout(**other)
    before, after = (abs(seconds(one, second) / seconds(truth, second) - 1) for one in (profile, changed))
    assert after < 0.75 * before


def test_the_error_falls_with_every_run_and_what_was_calibrated_is_not_forgotten() -> None:
    profile, truth, layout = machine(), machine(tp_layer=3e-2), Layout(tp=2)
    errors = []
    for number in range(6):
        errors.append(abs(seconds(profile, layout) / seconds(truth, layout) - 1))
        profile, lesson = learnt(profile, run_on(truth, profile, layout, number))
    assert all(later < earlier for earlier, later in itertools.pairwise(errors))
    measured = profile.measured
    assert measured is not None
    assert measured.calibrated_seconds == {"tp_layer": 1e-2}
    assert len(measured.residuals) == lesson.runs == 6
    # each run implies the truth, whatever the profile had become: 6 of 6 + 2 parts of the way
    assert lesson.after_seconds == pytest.approx(1e-2 + 6 / 8 * 2e-2)
    assert lesson.spread_seconds == pytest.approx(0.0, abs=1e-9)


def test_a_contended_run_is_kept_but_not_believed() -> None:
    profile = machine()
    changed, lesson = learnt(profile, run_on(machine(tp_layer=1.0), profile, Layout(tp=2), contended=True))
    assert changed.measured is not None
    assert changed.measured.host_seconds == COSTS
    assert len(changed.measured.residuals) == 1
    assert "not believed" in lesson.note


def test_the_same_run_counts_once() -> None:
    profile, truth = machine(), machine(tp_layer=2e-2)
    found = run_on(truth, profile, Layout(tp=2))
    once, _ = learnt(profile, found)
    twice, lesson = learnt(once, found)
    assert twice is once
    assert "before" in lesson.note


def test_a_cost_is_never_negative() -> None:
    assert run_on(machine(dp_layer=0.0), machine(dp_layer=1.0), Layout(tp=2)).implied_seconds >= 0
    found = run_on(machine(tp_layer=0.0, layer=0.0), machine(), Layout(tp=2))
    assert found.implied_seconds == 0.0


def test_how_often_a_cost_is_paid() -> None:
    layers, batch = JOB.model.num_layers, JOB.global_batch_size

    def paid(cost: str, **layout: Any) -> float:
        return seconds_per_unit(machine(), JOB, Layout(**layout), cost)

    assert paid("tp_layer", tp=2, micro_batch_size=2) == pytest.approx(layers * batch / 2)
    # on two stages of two replicas the ramp is one micro-batch more
    assert paid("layer", pp=2, dp=2) == pytest.approx(layers / 2 * (batch / 2 + 1))
    assert paid("pp_microbatch", pp=2) == pytest.approx(batch + 1)


RATES = Measured(
    date="2026-01-01",
    host_seconds=COSTS,
    gemms=tuple(
        GemmPoint(m=m, n=512, k=512, precision="fp32", rate_flop_per_second=9e10 if m > 100 else 8e10)
        for m in (64, 512)
    ),
    collectives=tuple(
        CollectivePoint(kind=kind, ranks=2, size_bytes=size, time_seconds=1e-4 + size / 1e9)
        for kind in ("all_reduce", "all_gather", "reduce_scatter")
        for size in (1e3, 1e8)
    ),
    memory_bandwidth_bytes_per_second=1e10,
    update_bandwidth_bytes_per_second=4e10,
)
CHANGES: dict[str, tuple[dict[str, Any], dict[str, float]]] = {
    "products": ({"dp": 2, "optimizer_sharding": "none"}, {"products": 1.4}),
    "products under tensor parallelism": ({"tp": 2}, {"products": 0.8}),
    "collectives": ({"tp": 2, "micro_batch_size": 4}, {"collectives": 3.0}),
    "collectives of FSDP": ({"dp": 2, "optimizer_sharding": "zero3"}, {"collectives": 2.0}),
    "collectives of gradients": ({"dp": 2, "optimizer_sharding": "none"}, {"collectives": 4.0}),
    "host": ({"tp": 2}, {"tp_layer": 3e-2}),
    "host of FSDP": ({"dp": 2, "optimizer_sharding": "zero3"}, {"dp_layer": 1.5e-2}),
    "copies of gradients": ({"dp": 2, "optimizer_sharding": "none"}, {"flat_gigabyte": 2.0}),
    "update": ({"tp": 2, "micro_batch_size": 8}, {"update": 6.0}),
    "two at once": ({"tp": 2}, {"products": 1.3, "tp_layer": 2e-2}),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_run_blames_what_its_phases_say(change: str) -> None:
    """A made-up machine of which a rate or a cost is not what was calibrated, and a run that tells its parts."""
    degrees, changes = CHANGES[change]
    layout = Layout(**degrees)
    profile = SCENARIO.cluster.model_copy(update={"measured": RATES})
    costs = COSTS | changes
    truth = profile.model_copy(update={"measured": RATES.model_copy(update={"host_seconds": costs})})
    step = predict_step(truth, JOB, layout)

    def inside(factor: str) -> float:
        return costs.get(factor, 1.0) * seconds_per_unit(truth, JOB, layout, factor)

    phases = ("forward_backward", "gradient_reduction", "optimizer")
    seen = Seen(
        step_seconds=step.total_seconds,
        phases_seconds={name: phase_seconds(step.breakdown_seconds, layout, name) for name in phases},
        collective_seconds=inside("collectives"),
        product_seconds=inside("products"),
    )
    about: dict[str, Any] = {"plan_sha256": "one", "date": "2026-01-02", "contended": False}
    found = residuals(profile, JOB, layout, seen, predicted_seconds=seconds(profile, layout), **about)
    assert {one.cost: one.implied_seconds for one in found} == pytest.approx(changes)
    for one in found:
        profile, lesson = learnt(profile, one)
        before = COSTS.get(one.cost, 1.0 if one.cost in FACTORS else 0.0)
        assert lesson.after_seconds == pytest.approx(before + (changes[one.cost] - before) / 3)


def test_a_profile_without_costs_teaches_nothing() -> None:
    with pytest.raises(InputError, match="headway calibrate --runs"):
        run_on(machine(), SCENARIO.cluster.model_copy(update={"measured": None}), Layout(tp=2))
