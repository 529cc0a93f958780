from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from planner.plan import Plan
from planner.waterfall import waterfall
from reports.comparison import compare
from reports.comparison_tables import comparison_rows
from scenarios.layout import Layout
from simulator.outcome import Measurement, plain, read_measurement
from simulator.phases import phase_parts
from topologies.document import to_json
from topologies.errors import InputError

MakePlan = Callable[..., Plan]
MakeMeasurement = Callable[..., Measurement]


def test_errors_are_predicted_over_measured_less_one(make_plan: MakePlan, make_measurement: MakeMeasurement) -> None:
    plan = make_plan()
    found = compare(plan, make_measurement(plan))
    assert found.error["step_seconds"] == pytest.approx(4.0 / 4.2 - 1)
    assert found.error["mfu"] == pytest.approx(4.2 / 4.0 - 1)
    assert found.error["memory"] == pytest.approx(53.5e9 / 60e9 - 1)
    assert found.within_band
    assert found.same_plan
    assert found.same_world_size
    assert found.notes == ()


def test_phases_stand_beside_the_parts_that_make_them_up(
    make_plan: MakePlan, make_measurement: MakeMeasurement
) -> None:
    plan = make_plan()
    phases = {"forward_backward": 3.9, "gradient_reduction": 0.25, "optimizer": 0.05, "data": 0.1}
    found = compare(plan, make_measurement(plan, phases_seconds=phases)).phases
    assert found["forward_backward"]["predicted_seconds"] == pytest.approx(3.0 + 0.4 + 0.3 + 0.05)
    assert found["gradient_reduction"]["predicted_seconds"] == pytest.approx(0.2)
    assert found["optimizer"]["error"] == pytest.approx(0.0)
    assert found["data"] == {"predicted_seconds": None, "measured_seconds": 0.1, "error": None}


def test_fully_sharded_traffic_belongs_to_forward_and_backward(
    make_plan: MakePlan, make_measurement: MakeMeasurement
) -> None:
    plan = make_plan()
    object.__setattr__(plan, "layout", plan.layout.model_copy(update={"optimizer_sharding": "zero3"}))
    phases = {"forward_backward": 3.9, "gradient_reduction": 0.0}
    found = compare(plan, make_measurement(plan, phases_seconds=phases)).phases
    assert found["forward_backward"]["predicted_seconds"] == pytest.approx(3.0 + 0.4 + 0.3 + 0.05 + 0.2)
    assert found["gradient_reduction"]["predicted_seconds"] is None


@pytest.mark.parametrize(("median", "inside"), [(3.59, False), (3.6, True), (4.5, True), (4.51, False)])
def test_the_band(make_plan: MakePlan, make_measurement: MakeMeasurement, median: float, inside: bool) -> None:
    plan = make_plan()
    seconds = {"median": median, "p10": median, "p90": median}
    assert compare(plan, make_measurement(plan, step_seconds=seconds)).within_band is inside


def test_a_measurement_of_another_plan_needs_force(make_plan: MakePlan, make_measurement: MakeMeasurement) -> None:
    plan = make_plan()
    other = make_measurement(plan, plan_sha256="0" * 64, world_size=4)
    with pytest.raises(InputError, match=r"belongs to another plan .*--force"):
        compare(plan, other)
    found = compare(plan, other, force=True)
    assert not found.same_plan
    assert not found.same_world_size
    assert "measured on 4 ranks, planned for 16" in found.notes


@pytest.mark.parametrize(
    ("predicted", "measured", "note"),
    [
        (None, 0.38, "no MFU was predicted"),
        (0.40, None, "no MFU was measured"),
        # 420 TFLOP/s on an H200: 42.4 % of the dense 989.5, 21.2 % of the sparse 1,979 (NVIDIA/Megatron-LM#1565)
        (0.424, 0.212, "do not compare"),
    ],
)
def test_mfu_is_compared_only_on_one_yardstick(
    make_plan: MakePlan, make_measurement: MakeMeasurement, predicted: float | None, measured: float | None, note: str
) -> None:
    plan = make_plan(mfu=predicted)
    found = compare(plan, make_measurement(plan, mfu=measured, tokens_per_second_per_gpu=1024.0))
    assert found.error["mfu"] is None
    assert any(note in one for one in found.notes)


def test_memory_that_was_not_measured_has_no_error(make_plan: MakePlan, make_measurement: MakeMeasurement) -> None:
    plan = make_plan()
    found = compare(plan, make_measurement(plan, peak_memory_bytes=0.0))
    assert found.measured["memory_bytes"] is None
    assert found.error["memory"] is None


def test_memory_from_before_the_model_is_taken_off(make_plan: MakePlan, make_measurement: MakeMeasurement) -> None:
    plan = make_plan()
    environment = {"baseline_memory_bytes": 6.5e9, "notes": ["4 ranks share 2 cores"]}
    found = compare(plan, make_measurement(plan, environment=environment))
    assert found.measured["memory_bytes"] == 53.5e9
    assert found.error["memory"] == pytest.approx(0.0)
    assert found.remarks == ("4 ranks share 2 cores",)


def test_on_a_contended_machine_the_cpu_time_of_a_rank_is_compared(
    make_plan: MakePlan, make_measurement: MakeMeasurement
) -> None:
    plan = make_plan()
    environment = {"contended": True, "foreign_cpu_share": 0.4, "cpu_seconds_per_rank": 3.5}
    of_gpus = compare(plan, make_measurement(plan, environment=environment))
    assert of_gpus.error["cpu_seconds"] is None
    card = plan.scenario.cluster.gpu.model_copy(update={"architecture": "cpu"})
    node = plan.scenario.cluster.node.model_copy(update={"gpu": card})
    pool = plan.scenario.cluster.pools[0].model_copy(update={"node": node})
    cluster = plan.scenario.cluster.model_copy(update={"pools": (pool,)})
    object.__setattr__(plan, "scenario", plan.scenario.model_copy(update={"cluster": cluster}))
    found = compare(plan, make_measurement(plan, environment=environment))
    # a step of 4 s, in which a rank waits 0.3 s in the bubble and 0.05 s for its neighbours
    assert found.error["cpu_seconds"] == pytest.approx((4.0 - 0.35) / 3.5 - 1)
    assert any("CPU time of a rank is what compares" in note for note in found.notes)
    assert "CPU time of a rank" in [row[0] for row in comparison_rows(found)]


def test_a_plan_without_a_promise_is_refused(make_plan: MakePlan, make_measurement: MakeMeasurement) -> None:
    plan = make_plan()
    del plan.predicted["step_seconds_low"]
    with pytest.raises(InputError, match=r"predicted\.step_seconds_low: is missing in the plan"):
        compare(plan, make_measurement(plan))


@pytest.mark.parametrize(
    "changes", [{}, {"mfu": None}, {"compute_parts_seconds": {}}, {"mfu": None, "compute_parts_seconds": {}}]
)
def test_the_waterfall_adds_up(make_plan: MakePlan, changes: dict[str, Any]) -> None:
    parts = waterfall(make_plan(**changes).predicted)
    assert sum(part.value for part in parts) == pytest.approx(4.0)
    assert (parts[0].key == "ideal") == ("mfu" not in changes)


def test_a_measurement_survives_its_file(
    tmp_path: Path, make_plan: MakePlan, make_measurement: MakeMeasurement
) -> None:
    measurement = make_measurement(make_plan())
    path = tmp_path / "measurement.json"
    path.write_text(to_json(plain(measurement) | {"added_later": 1}))
    assert read_measurement(path) == measurement


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format_version": 2}, r"has format_version 2, and this headway reads up to 1; upgrade headway"),
        ({"format_version": None}, r"is not a measurement: it has no format_version"),
        ({"step_seconds": {"median": 0, "p10": 1, "p90": 1}}, r"step_seconds\.median: is not a number above 0"),
        ({"step_seconds": {"median": 1.0}}, r"step_seconds\.p10: is not a number above 0"),
        ({"step_seconds": 3.0}, r"step_seconds: is not a mapping"),
        ({"world_size": "8"}, r"world_size: is not a whole number"),
        ({"mfu": "high"}, r"mfu: is not a number or null"),
        ({"tokens_per_second_per_gpu": None}, r"tokens_per_second_per_gpu: is not a number of at least 0"),
        ({"phases_seconds": {"optimizer": None}}, r"phases_seconds\.optimizer: is not a number of seconds"),
    ],
)
def test_wrong_measurements_are_refused(
    tmp_path: Path,
    make_plan: MakePlan,
    make_measurement: MakeMeasurement,
    change: dict[str, Any],
    message: str,
) -> None:
    path = tmp_path / "measurement.json"
    path.write_text(json.dumps(plain(make_measurement(make_plan())) | change))
    with pytest.raises(InputError, match=message):
        read_measurement(path)


def test_files_that_are_no_measurement(tmp_path: Path, make_plan: MakePlan, make_measurement: MakeMeasurement) -> None:
    plan = make_plan()
    path = tmp_path / "file.json"
    with pytest.raises(InputError, match="cannot be read: No such file"):
        read_measurement(path)
    path.write_text(to_json(plan.as_json()))
    with pytest.raises(InputError, match="plan_sha256: is missing; this is a plan; give a measurement file"):
        read_measurement(path)
    whole = to_json(plain(make_measurement(plan)))
    path.write_text(whole[: len(whole) // 2])
    with pytest.raises(InputError, match=r"file\.json:\d+:\d+: is not complete JSON.*make the measurement again"):
        read_measurement(path)
    path.write_text("[]")
    with pytest.raises(InputError, match="is not a measurement; make one with 'headway run"):
        read_measurement(path)
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(InputError, match="is not a text file"):
        read_measurement(path)


def test_every_sharding_places_data_parallel_traffic_in_one_phase_only() -> None:
    for sharding in ("none", "zero1", "zero2", "zero3"):
        parts = phase_parts(Layout(dp=2, optimizer_sharding=sharding))
        assert [phase for phase in ("forward_backward", "gradient_reduction") if "dp_comm" in parts[phase]] == [
            "forward_backward" if sharding in ("zero2", "zero3") else "gradient_reduction"
        ]
