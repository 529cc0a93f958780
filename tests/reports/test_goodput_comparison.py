from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest

from planner.plan import Plan
from reports.comparison import compare
from reports.comparison_tables import goodput_rows
from reports.document import report
from scenarios.faults import Failure, Faults
from simulator.outcome import Measurement
from topologies.cluster import Storage
from topologies.errors import InputError

MakePlan = Callable[..., Plan]
MakeMeasurement = Callable[..., Measurement]


def job(*, lost: dict[str, float], useful: float, checkpoint: Any = None, **changes: Any) -> dict[str, Any]:
    """What a measurement says about its whole job."""
    wall = useful + sum(lost.values())
    return {
        "goodput": useful / wall,
        "wall_seconds": wall,
        "lost_seconds": lost,
        "failures": {},
        "checkpoints": 0,
        "incidents": [],
        "checkpoint": checkpoint,
    } | changes


def with_scenario(plan: Plan, **changes: Any) -> Plan:
    """A plan of a changed scenario."""
    return dataclasses.replace(plan, scenario=plan.scenario.model_copy(update=changes))


def test_without_failures_the_predicted_losses_are_the_stalls_of_the_saves(
    make_plan: MakePlan, make_measurement: MakeMeasurement
) -> None:
    plan = make_plan()
    disk = Storage(
        name="disk", kind="parallel-file-system", write_bytes_per_second=1e9, read_bytes_per_second=1e9, per_node=False
    )
    plan = with_scenario(plan, cluster=plan.scenario.cluster.model_copy(update={"storage": (disk,)}))
    run = job(lost={"checkpoint": 12.0}, useful=100 * 4.2, checkpoint={"interval_steps": 25, "mode": "sync"})
    found = compare(plan, make_measurement(plan, steps=100, run=run)).run
    assert found is not None
    params = plan.scenario.model.num_params
    stall = params * 14 / 1e9  # bf16 AdamW keeps 14 bytes of a parameter; the disk takes 1 GB/s
    assert found.predicted["lost_seconds"]["checkpoint"] == pytest.approx(4 * stall, rel=1e-3)
    assert found.predicted["wall_seconds"] == pytest.approx(400.0 + 4 * stall)
    assert found.predicted["goodput"] == pytest.approx(400 / (400 + 4 * stall))
    assert found.promised == 0.93


def test_failures_that_the_scenario_expects_are_predicted_for_the_length_of_the_job(
    make_plan: MakePlan, make_measurement: MakeMeasurement
) -> None:
    plan = make_plan()
    often = Failure(component="software", rate_per_second=1 / 1000, per="job", lost_nodes=0)
    faults = Faults(
        name="often", failures=(often,), detection_seconds=5.0, restart_phases={"queue": 20.0, "start": 10.0},
        rate_spread=0.0,
    )  # fmt: skip
    plan = with_scenario(plan, faults=faults)
    run = job(
        lost={"rework": 200.0, "detection": 20.0, "restart": 120.0},
        useful=4000.0,
        checkpoint={"interval_steps": 25, "mode": "sync"},
        failures={"killed": 4},
    )
    found = compare(plan, make_measurement(plan, steps=1000, run=run)).run
    assert found is not None
    struck = found.predicted["failures"]["software"]
    assert struck == pytest.approx(4.3, abs=0.8)  # one a 1,000 s, in 4,000 s of work and what is lost
    assert found.predicted["lost_seconds"]["detection"] == pytest.approx(5 * struck, rel=0.05)
    assert found.predicted["lost_seconds"]["restart"] == pytest.approx(30 * struck, rel=0.05)
    assert "queue" not in found.predicted["lost_seconds"]
    assert found.within_band
    assert [row[0] for row in goodput_rows(found)][:3] == ["Goodput", "Wall time", "Lost to rework"]


def test_failures_that_nobody_expected_are_named(make_plan: MakePlan, make_measurement: MakeMeasurement) -> None:
    plan = make_plan()
    run = job(lost={"restart": 40.0}, useful=40.0, failures={"killed": 1})
    found = compare(plan, make_measurement(plan, run=run))
    assert found.error["goodput"] == pytest.approx(1.0)
    assert found.run is not None
    assert not found.run.within_band
    assert "1 failure struck" in found.run.notes[0]
    assert "Goodput: 1 failure struck" in report(plan, [make_measurement(plan, run=run)])


def test_a_measurement_without_the_whole_job_has_no_goodput(
    make_plan: MakePlan, make_measurement: MakeMeasurement
) -> None:
    plan = make_plan()
    found = compare(plan, make_measurement(plan))
    assert found.run is None
    assert found.error["goodput"] is None


def test_a_damaged_record_is_refused(make_plan: MakePlan, make_measurement: MakeMeasurement) -> None:
    plan = make_plan()
    with pytest.raises(InputError, match=r"run\.wall_seconds"):
        compare(plan, make_measurement(plan, run={"goodput": 1.0}))
