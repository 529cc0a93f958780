from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from planner.plan import Plan, read_plan, write_plan
from planner.planning import plan as make_plan
from reports.commands import compare
from scenarios.scenario import load_scenario
from simulator.outcome import Measurement, plain
from topologies.cluster import Cluster, Measured
from topologies.cluster_file import to_yaml
from topologies.document import load, to_json

COSTS = {"layer": 1e-3, "tp_layer": 1e-2, "dp_layer": 5e-3}


def profile(folder: Path, fingerprint: str = "this") -> Path:
    environment = {"fingerprint": fingerprint}
    measured = Measured(date="2026-01-01", host_seconds=COSTS, environment=environment)
    cluster = load_scenario("laptop").cluster.model_copy(update={"measured": measured})
    path = folder / f"{fingerprint}.yaml"
    path.write_text(to_yaml(cluster))
    return path


def planned(machine: Path) -> Plan:
    scenario = load_scenario("laptop", overrides=[f"cluster={machine}"])
    pins = {"tp": 2, "dp": 1, "recompute": "none", "micro_batch_size": 2, "sequence_parallel": False}
    return make_plan(scenario, pins=pins, top=0)


def measured(plan: Plan, slower: float, **environment: Any) -> Measurement:
    seconds = slower * plan.predicted["step_seconds"]
    return Measurement(
        plan_sha256=plan.sha256(), world_size=2, steps=10, mfu=None, tokens_per_second_per_gpu=1.0,
        step_seconds={"median": seconds, "p10": seconds, "p90": seconds}, peak_memory_bytes=1e9, losses=[1.0],
        phases_seconds={}, environment={"contended": False, **environment},
    )  # fmt: skip


def compared(folder: Path, plan: Plan, measurement: Measurement, machine: Path) -> Any:
    write_plan(plan, folder / "plan.json")
    again = read_plan(folder / "plan.json")
    found = dataclasses.replace(measurement, plan_sha256=again.sha256())
    (folder / "measurement.json").write_text(to_json(plain(found)))
    words = [str(folder / "plan.json"), str(folder / "measurement.json"), "--update", str(machine), "--json"]
    return CliRunner().invoke(compare, words)


def test_what_was_measured_comes_back_in_the_next_prediction(tmp_path: Path) -> None:
    machine = profile(tmp_path)
    plan = planned(machine)
    result = compared(tmp_path, plan, measured(plan, 1.5), machine)
    assert result.exit_code == 0, result.output
    lesson = json.loads(result.stdout)["lesson"]
    assert lesson["cost"] == "tp_layer"
    assert lesson["after_seconds"] > lesson["before_seconds"]
    known = load(machine, Cluster).measured
    assert known is not None
    assert known.residuals[0].plan_sha256 == read_plan(tmp_path / "plan.json").sha256()
    assert known.residuals[0].measured_seconds == pytest.approx(1.5 * plan.predicted["step_seconds"], rel=1e-5)
    before, after = plan.predicted["step_seconds"], planned(machine).predicted["step_seconds"]
    assert after == pytest.approx(before + 0.5 * before / 3, rel=0.01)  # one run is believed by a third


def test_a_profile_of_another_machine_stays_as_it_is(tmp_path: Path) -> None:
    plan, other = planned(profile(tmp_path)), profile(tmp_path, "other")
    text = other.read_bytes()
    result = compared(tmp_path, plan, measured(plan, 1.5), other)
    assert result.exit_code == 2
    assert "not the profile of the machine" in result.output
    assert other.read_bytes() == text


def test_a_contended_run_changes_no_prediction(tmp_path: Path) -> None:
    machine = profile(tmp_path)
    plan = planned(machine)
    result = compared(tmp_path, plan, measured(plan, 3.0, contended=True), machine)
    assert "not believed" in json.loads(result.stdout)["lesson"]["note"]
    assert planned(machine).predicted["step_seconds"] == plan.predicted["step_seconds"]
