"""Power by phase, caps and bills against hand calculation."""

import pytest

from scenarios.prices import Prices
from simulator.outcome import RunOutcome
from simulator.power import Bill, NodePower, billed, node_power
from topologies.catalog import load_cluster
from topologies.errors import Infeasible


@pytest.fixture(scope="module")
def cluster():
    return load_cluster("llama3-roce-16k")


def powered(cluster, **changes):
    return cluster.model_copy(update={"power": cluster.power.model_copy(update=changes)})


def test_without_a_cap_a_node_draws_by_what_it_does(cluster):
    power = node_power(cluster, None, 2048)
    assert power.speed == 1.0
    assert power.watts["compute"] == pytest.approx(2000 + 0.95 * 8200)  # 2.0 kW idle, 10.2 kW at most
    order = ("down", "checkpoint", "hung", "communication", "compute")
    assert [power.watts[one] for one in order] == sorted(power.watts[one] for one in order)


@pytest.mark.parametrize("share", [0.9, 0.7, 0.5])
def test_a_cap_slows_compute_by_the_stated_curve(cluster, share):
    free = node_power(cluster, None, 2048).watts["compute"]
    cap = 2000 + share * (free - 2000)
    power = node_power(powered(cluster, node_cap_watts=cap, cap_exponent=3.0), None, 2048)
    assert power.speed == pytest.approx(share ** (1 / 3))
    assert max(power.watts.values()) <= cap * (1 + 1e-12)
    steeper = node_power(powered(cluster, node_cap_watts=cap, cap_exponent=1.0), None, 2048)
    assert steeper.speed == pytest.approx(share)


def test_the_facility_limit_is_a_cap(cluster):
    free = node_power(cluster, None, 2048).watts["compute"]
    ample, tight = (
        node_power(powered(cluster, facility_watts=share * free * 2048 * cluster.power.pue), None, 2048)
        for share in (1.01, 0.8)
    )
    assert ample.speed == 1.0
    assert tight.speed < 1.0
    assert tight.cap_watts == pytest.approx(0.8 * free)
    with pytest.raises(Infeasible, match="idle"):
        node_power(powered(cluster, facility_watts=1e5), None, 2048)


def test_a_bill_by_hand():
    watts = {
        "work": 1000.0,
        "checkpoint": 500.0,
        "hung": 600.0,
        "communication": 700.0,
        "down": 300.0,
        "compute": 1000.0,
    }
    bill = Bill(
        power=NodePower(watts=watts, idle_watts=200.0, cap_watts=None, speed=1.0), nodes=10, spares=2, gpus_per_node=8,
        pue=1.2, prices=Prices(name="x", gpu_usd_per_second=2 / 3600, electricity_usd_per_joule=0.1 / 3.6e6),
    )  # fmt: skip
    outcome = RunOutcome(
        source="simulated", seed=0, wall_seconds=3600.0, useful_seconds=3000.0, tokens=1.0,
        lost_seconds={"rework": 100.0, "checkpoint": 200.0, "detection": 100.0, "restart": 150.0, "degraded": 50.0},
        failures={}, checkpoints=0,
    )  # fmt: skip
    joules = 1.2 * (10 * (3100e3 + 200 * 500 + 100 * 600 + 150 * 300 + 50 * 700) + 2 * 200 * 3600)
    found = billed(outcome, bill)
    assert found.energy_joules == pytest.approx(joules)
    assert found.cost_usd == pytest.approx(12 * 8 * 2 + joules * 0.1 / 3.6e6)
