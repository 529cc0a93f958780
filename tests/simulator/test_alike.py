"""Rows that send the same traffic are priced once: that must not show."""

import numpy as np

from scenarios.scenario import load_scenario
from simulator.arrays import LayoutArrays, every_row
from simulator.step import step_seconds


def test_pricing_alike_rows_once_changes_nothing(monkeypatch):
    scenario = load_scenario("deepseek-v3-2048-h800")
    random = np.random.default_rng(1)
    count = 400
    powers = {name: 2 ** random.integers(0, 3, count) for name in ("tp", "cp", "pp", "ep", "micro_batch_size")}
    rows = LayoutArrays(
        **powers,
        vpp=random.choice([1, 2], count),
        dp=np.full(count, 64),
        etp=np.ones(count, dtype=np.int64),
        sequence_parallel=random.random(count) < 0.5,
        sharding=random.integers(0, 4, count),
        schedule=np.zeros(count, dtype=np.int64),
        recompute=random.integers(0, 3, count),
    )
    job = scenario.job.model_copy(update={"global_batch_size": 1024})
    together = step_seconds(scenario.cluster, job, rows).total_seconds
    kinds = rows.alike()
    assert 1 < len(kinds.first) < count
    np.testing.assert_array_equal(rows.sharding[kinds.first][kinds.index], rows.sharding)
    monkeypatch.setattr(LayoutArrays, "alike", lambda self: every_row(len(self)))
    np.testing.assert_array_equal(step_seconds(scenario.cluster, job, rows).total_seconds, together)
