"""Power by phase, caps and bills against hand calculation."""

import pytest

from scenarios.prices import Prices
from simulator.outcome import RunOutcome
from simulator.power import Bill, NodePower, billed, capped_speed, draws, energy_band_kwh, node_power, power_json
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
    order = ("down", "hung", "checkpoint", "communication", "compute")
    assert [power.watts[one] for one in order] == sorted(power.watts[one] for one in order)
    for doing, (low, high) in power.band_watts.items():
        assert power.idle_watts <= low <= power.watts[doing] <= high <= cluster.node.power_watts


def test_training_on_h100_draws_what_was_measured(cluster):
    """Nodes rated 10.2 kW: 76 % in intense training (arXiv 2506.14551), 8.4 kW at most (arXiv 2412.08602)."""
    power = node_power(cluster, None, 2048)
    assert cluster.node.power_watts == 10_200
    assert power.band_watts["compute"][0] == pytest.approx(0.76 * 10_200, rel=0.02)
    assert power.band_watts["compute"][1] == pytest.approx(8_400, rel=0.02)
    assert power.sources["compute"].startswith("measured")
    assert power.sources["communication"].startswith("assumed")


@pytest.mark.parametrize("name", ["A100 SXM 80GB", "H100 SXM", "B200", "MI300X", "a GPU of tomorrow"])
def test_every_family_has_a_sourced_draw_for_every_phase(name):
    found = draws(name)
    assert set(found) == {"compute", "communication", "hung", "checkpoint", "down"}
    for one in found.values():
        assert one.band[0] <= one.share <= one.band[1]
        assert one.source.startswith(("measured", "assumed"))


@pytest.mark.parametrize(
    ("limit", "watts", "seconds"),
    [(200, 181.5, 3705.6), (175, 165.2, 3851.5), (150, 143.8, 4179.8), (125, 119.8, 5145.3)],
)
def test_the_curve_of_a_cap_holds_for_another_gpu(limit, watts, seconds):
    """V100 under power limits, ResNet-50 with batches of 360: 217.5 W and 3,519.5 s an epoch at 250 W, idle 39 W.

    Artifact of Zeus (You et al., NSDI 2023), not used for the curve.
    """
    assert watts < limit
    speed = capped_speed((watts - 39.0) / (217.5 - 39.0))
    assert speed == pytest.approx(3519.5 / seconds, rel=0.02)


@pytest.mark.parametrize(("megahertz", "seconds", "joules"), [(1290, 0.15573, 61.185), (1080, 0.18173, 48.884)])
def test_the_curve_of_a_cap_holds_for_another_model(megahertz, seconds, joules):
    """A stage of BLOOM 176B on an A100 SXM: 0.15030 s and 70.116 J at 1,410 MHz (artifact of Perseus, SOSP 2024)."""
    assert megahertz < 1410
    free, idle = 70.116 / 0.15030, 55.0
    speed = capped_speed((joules / seconds - idle) / (free - idle))
    assert speed == pytest.approx(0.15030 / seconds, rel=0.06)


@pytest.mark.parametrize("share", [0.9, 0.7, 0.5])
def test_a_cap_slows_compute_by_the_stated_curve(cluster, share):
    free = node_power(cluster, None, 2048)
    cap = free.idle_watts + share * (free.watts["compute"] - free.idle_watts)
    measured = node_power(powered(cluster, node_cap_watts=cap), None, 2048)
    assert measured.speed == pytest.approx(capped_speed(share))
    assert "SOSP 2024" in measured.sources["cap"]
    for exponent in (3.0, 1.0):
        power = node_power(powered(cluster, node_cap_watts=cap, cap_exponent=exponent), None, 2048)
        assert power.speed == pytest.approx(share ** (1 / exponent))
        assert max(power.watts.values()) <= cap * (1 + 1e-12)


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
        power=NodePower(
            watts=watts, band_watts={one: (0.9 * value, 1.2 * value) for one, value in watts.items()}, sources={},
            idle_watts=200.0, cap_watts=None, speed=1.0,
        ),
        nodes=10, spares=2, gpus_per_node=8, pue=1.2,
        prices=Prices(name="x", gpu_usd_per_second=2 / 3600, electricity_usd_per_joule=0.1 / 3.6e6),
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
    idle = 1.2 * 2 * 200 * 3600
    low, high = energy_band_kwh(3000.0, outcome.lost_seconds, power_json(bill))
    assert 3.6e6 * low == pytest.approx(0.9 * (joules - idle) + idle)
    assert 3.6e6 * high == pytest.approx(1.2 * (joules - idle) + idle)
