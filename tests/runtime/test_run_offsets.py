from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from plans import plan_file, plan_of
from tiny_training import BATCH, SEQ

from planner.cli import headway
from planner.plan import Plan
from simulator.outcome import Measurement, plain
from topologies.document import to_json

PROMISED = {"step_seconds": 2.0, "step_seconds_low": 1.6, "step_seconds_high": 2.5}


def planned(**job: str) -> Plan:
    return replace(plan_of(dp=2, job=dict(job)), predicted=PROMISED)


def log(path: Path, *times: float, batch: int = BATCH) -> str:
    lines = [
        f" iteration {step}/ 9 | consumed samples: {step * batch} | consumed tokens: {step * batch * SEQ} | "
        f"elapsed time per iteration (s): {time} | global batch size: {batch} | number of skipped iterations: 0 |"
        for step, time in enumerate(times, 1)
    ]
    path.write_text("\n".join(lines) + "\n")
    return str(path)


def calibrate(*words: str) -> Result:
    return CliRunner().invoke(headway, ["calibrate", *words])


def test_one_run_moves_a_promise_by_a_third(tmp_path: Path) -> None:
    plan = plan_file(tmp_path, planned())
    result = calibrate("--runs", log(tmp_path / "a.log", 9.0, 2.2, 2.2), "--plan", plan, "--json")
    assert result.exit_code == 0, result.output
    told = json.loads(result.stdout)
    assert told["at_face_value"] == pytest.approx(1.1)
    assert told["factor"] == pytest.approx(1.1 ** (1 / 3))
    assert told["shifted"][plan]["step_seconds"] == pytest.approx(2.0 * 1.1 ** (1 / 3))
    assert told["shifted"][plan]["step_seconds_high"] == pytest.approx(2.5 * 1.1 ** (1 / 3))
    (run,) = told["runs"]
    assert (run["measured_step_seconds"], run["predicted_step_seconds"]) == (2.2, 2.0)


def test_several_runs_and_a_measurement_of_headway(tmp_path: Path) -> None:
    plan = planned()
    file = plan_file(tmp_path, plan)
    measured = Measurement(
        plan_sha256=plan.sha256(),
        world_size=2,
        steps=5,
        step_seconds={"median": 2.4, "p10": 2.4, "p90": 2.4},
        mfu=None,
        tokens_per_second_per_gpu=1.0,
        peak_memory_bytes=1.0,
        losses=[],
        phases_seconds={},
        environment={},
    )
    (tmp_path / "m.json").write_text(to_json(plain(measured)))
    logs = [log(tmp_path / f"{name}.log", 9.0, 2.4, 2.4) for name in "ab"]
    out = tmp_path / "offset.json"
    result = calibrate("--runs", *logs, str(tmp_path / "m.json"), "--plan", file, "-o", str(out))
    assert result.exit_code == 0, result.output
    assert "factor 1.116: 60 % of the median 1.200 is believed after 3 runs" in result.stdout
    assert json.loads(out.read_text())["factor"] == pytest.approx(1.2**0.6)


def test_runs_of_other_plans_are_refused(tmp_path: Path) -> None:
    plan = plan_file(tmp_path, planned())
    other = calibrate("--runs", log(tmp_path / "b.log", 9.0, 2.2, batch=2 * BATCH), "--plan", plan)
    assert other.exit_code == 2
    assert "is the log of another run than plan.json: global batch" in other.stderr
    (tmp_path / "m.json").write_text("{}")
    assert "is not a measurement" in calibrate("--runs", str(tmp_path / "m.json"), "--plan", plan).stderr
    first = calibrate("--runs", log(tmp_path / "c.log", 9.0), "--plan", plan)
    assert first.exit_code == 2
    assert "c.log: the Megatron log has no steady iteration" in first.stderr


def test_plans_and_runs_belong_together(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    plan, half = plan_file(tmp_path, planned()), plan_file(tmp_path / "other", planned(precision="bf16"))
    run = log(tmp_path / "a.log", 9.0, 2.2, 2.2)
    assert "--runs needs the plan of the runs" in calibrate("--runs", run).stderr
    assert "2 plans are given for 1 runs" in calibrate("--runs", run, "--plan", plan, "--plan", half).stderr
    mixed = calibrate("--runs", run, run, "--plan", plan, "--plan", half)
    assert "different GPUs, precisions" in mixed.stderr
    assert calibrate(run).exit_code == 2
    assert calibrate("--plan", plan).exit_code == 2


def test_of_five_runs_a_wild_one_is_named_and_moves_little(tmp_path: Path) -> None:
    plan = plan_file(tmp_path, planned())
    logs = [log(tmp_path / f"{name}.log", 9.0, 2.2, 2.2) for name in "abcd"] + [log(tmp_path / "e.log", 9.0, 8.0, 8.0)]
    result = calibrate("--runs", *logs, "--plan", plan, "--json")
    assert result.exit_code == 0, result.output
    told = json.loads(result.stdout)
    assert (told["factor"], told["weight"]) == (pytest.approx(1.1 ** (5 / 7)), pytest.approx(5 / 7))
    assert "4 times the predicted step" in result.stderr
