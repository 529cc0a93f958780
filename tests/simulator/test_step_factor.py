"""What a few measured runs say about a stack shifts every second of its predictions."""

import pytest

from scenarios.layout import Layout
from scenarios.scenario import load_scenario
from simulator.arrays import LayoutArrays
from simulator.step import predict_step, stage_costs, step_seconds
from simulator.training import play_step

LAYOUT = Layout(tp=8, pp=8, dp=8, sequence_parallel=True)


def scenario(factor):
    return load_scenario("llama3-70b-512-h100", overrides=[f"stack.step_factor={factor}"])


def test_every_second_is_multiplied_and_the_parts_still_add_up():
    plain, shifted = scenario(1.0), scenario(1.2)
    before = predict_step(plain.cluster, plain.job, LAYOUT)
    after = predict_step(shifted.cluster, shifted.job, LAYOUT)
    assert after.breakdown_seconds == pytest.approx({name: 1.2 * s for name, s in before.breakdown_seconds.items()})
    assert sum(after.compute_parts_seconds.values()) == pytest.approx(after.compute_seconds)
    assert after.mfu == pytest.approx(before.mfu / 1.2)
    assert any("1.2" in fact and "measured" in fact for fact in after.basis)


def test_array_form_and_event_driven_step_agree():
    plain, shifted = scenario(1.0), scenario(0.9)
    rows = LayoutArrays.of([LAYOUT])
    ratio = (
        step_seconds(shifted.cluster, shifted.job, rows).total_seconds
        / step_seconds(plain.cluster, plain.job, rows).total_seconds
    )
    assert ratio == pytest.approx(0.9)
    played = [play_step(one.cluster, one.job, LAYOUT).step_seconds for one in (plain, shifted)]
    assert played[1] / played[0] == pytest.approx(0.9)
    costs = [stage_costs(one.cluster, one.job, LAYOUT) for one in (plain, shifted)]
    assert costs[0].dp_bytes == costs[1].dp_bytes
    assert costs[0].straggler_factor == costs[1].straggler_factor
