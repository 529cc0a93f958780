"""Fault presets against the counts that they come from, and price books."""

from __future__ import annotations

import pytest

from scenarios.faults import Faults
from scenarios.prices import Prices
from scenarios.scenario import FAULTS, PRICES
from topologies.document import load, read_mapping, shipped

DAY = 86400.0
LLAMA3 = {
    "faulty GPU": 148, "GPU HBM3 memory": 72, "software bug": 54, "network switch or cable": 35,
    "unplanned host maintenance": 32, "GPU SRAM memory": 19, "GPU system processor": 17, "NIC": 7,
    "NCCL watchdog timeout": 7, "silent data corruption": 6, "GPU thermal interface or sensor": 6, "SSD": 3,
    "power supply": 3, "server chassis": 2, "IO expansion board": 2, "dependency": 2, "CPU": 2, "system memory": 2,
}  # fmt: skip
"""Interruptions in 54 days of 16,384 GPUs in 2,048 servers: arXiv 2407.21783, table 5."""


def test_llama3_rates_give_back_the_counts_of_the_paper() -> None:
    faults = load(FAULTS / "llama3.yaml", Faults)
    components = {"gpu": 16384, "node": 2048}
    seconds = 54 * DAY
    found = {one.component: one.rate_per_second * components[one.per] * seconds for one in faults.failures}
    assert found == pytest.approx(LLAMA3, rel=1e-4)
    assert sum(LLAMA3.values()) == 419
    assert 1 / faults.rate_per_second(16384, 2048) / 3600 == pytest.approx(3.093, rel=1e-3)


@pytest.mark.parametrize(("name", "hours_at_2048_nodes"), [("rsc-1", 1.803), ("rsc-2", 5.008)])
def test_rsc_rates_give_the_projected_mean_time_to_failure(name: str, hours_at_2048_nodes: float) -> None:
    """arXiv 2410.21680: 6.50 and 2.34 per 1,000 node-days; 1.8 h at 16,384 GPUs for RSC-1."""
    rate = load(FAULTS / f"{name}.yaml", Faults).rate_per_second(16384, 2048)
    assert 1 / rate / 3600 == pytest.approx(hours_at_2048_nodes, rel=1e-3)


def test_nothing_fails_without_faults() -> None:
    assert load(FAULTS / "none.yaml", Faults).rate_per_second(10**6, 10**5) == 0


@pytest.mark.parametrize("name", sorted(shipped(FAULTS)))
def test_every_figure_of_a_preset_has_a_source(name: str) -> None:
    faults = load(FAULTS / f"{name}.yaml", Faults)
    written = read_mapping(FAULTS / f"{name}.yaml").keys() - {"name", "source"}
    assert set(faults.source) == (written or {"*"})


def test_llama3_stops_for_maintenance_47_times_in_54_days() -> None:
    maintenance = load(FAULTS / "llama3.yaml", Faults).maintenance
    assert maintenance is not None
    assert 54 * DAY / maintenance.every_seconds == pytest.approx(47, abs=0.01)


@pytest.mark.parametrize(
    ("name", "per_gpu_year"),
    [("a100-memory", 34 / 9.62e6 * 8766), ("h100-memory", 24 / 2.13e6 * 8766), ("b200", 10 / 504 / 55 * 365.25)],
)
def test_rates_per_gpu_are_counts_over_time(name: str, per_gpu_year: float) -> None:
    rate = load(FAULTS / f"{name}.yaml", Faults).rate_per_second(1, 1) * 365.25 * DAY
    assert rate == pytest.approx(per_gpu_year, rel=3e-3)


@pytest.mark.parametrize("name", sorted(shipped(PRICES)))
def test_every_price_is_marked(name: str) -> None:
    prices = load(PRICES / f"{name}.yaml", Prices)
    if prices.gpu_usd_per_second:
        assert prices.source["gpu"].startswith("assumed")
        assert "2026" in prices.source["gpu"]
        assert 0.5 < prices.gpu_usd_per_second * 3600 < 10
