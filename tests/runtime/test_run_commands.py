"""The command line of the runtime, without starting anything."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from plans import plan_file, plan_of

from planner.plan import read_plan, write_plan
from planner.planning import plan as make_plan
from reports.commands import report
from runtime.calibration.commands import calibrate
from runtime.commands import run
from scenarios.scenario import load_scenario


def test_dry_run_tells_command_meshes_and_what_each_rank_holds(tmp_path: Path) -> None:
    plan = plan_file(tmp_path, plan_of(pp=2, dp=2, micro_batch_size=1, optimizer_sharding="zero1"))
    result = CliRunner().invoke(run, [plan, "--dry-run", "--no-trace", "--json"])
    assert result.exit_code == 0, result.output
    told = json.loads(result.stdout)
    assert "--nproc-per-node=4" in told["command"]
    assert Path(told["command"][0]) == Path(sys.executable).parent / "torchrun"
    assert any(Path(word) == Path(sys.executable).parent / "headway-worker" for word in told["command"])
    assert told["environment"]["OMP_NUM_THREADS"] == "1"
    assert told["environment"]["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] == "1"
    assert told["mesh"] == {"pp": 2, "dp": 2, "cp": 1, "tp": 1}
    assert told["num_microbatches"] == 4
    held = [(one["coordinates"]["pp"], one["stages"][0]["layers"], one["stages"][0]["head"]) for one in told["ranks"]]
    assert held == [(0, [0, 2], False), (0, [0, 2], False), (1, [2, 4], True), (1, [2, 4], True)]
    words = CliRunner().invoke(run, [plan, "--dry-run", "--no-trace"]).stdout
    assert "rank 3 (tp0 cp0 dp1 pp1): stage 1: layers 2-3, head" in words


def test_dry_run_needs_no_torch(tmp_path: Path, without_torch: None) -> None:
    plan = plan_file(tmp_path, plan_of(dp=2))
    assert CliRunner().invoke(run, [plan, "--dry-run"]).exit_code == 0


def test_a_plan_for_more_than_this_machine_has_is_told_but_not_started(tmp_path: Path) -> None:
    plan = plan_file(tmp_path, plan_of(pp=4, dp=256, job={"global_batch_size": 1024}))
    told = json.loads(CliRunner().invoke(run, [plan, "--dry-run", "--no-trace", "--json"]).stdout)
    assert not told["fits_here"]
    assert told["command"] == []
    assert "this machine has" in told["not_here"]
    assert [one["coordinates"]["pp"] for one in told["ranks"]] == [0, 1, 2, 3]
    assert told["trace"] is None
    refused = CliRunner().invoke(run, [plan])
    assert refused.exit_code == 2
    assert "--dry-run" in refused.output


@pytest.mark.slow
def test_a_dry_run_traces_the_fullest_rank_into_a_file_that_the_report_shows(tmp_path: Path) -> None:
    plan, dry, page = (str(tmp_path / name) for name in ("plan.json", "dry.json", "report.html"))
    pins = {"dp": 2, "optimizer_sharding": "zero3", "recompute": "none"}
    write_plan(make_plan(load_scenario("laptop"), pins=pins), plan)
    assert CliRunner().invoke(run, [plan, "--dry-run", "-o", dry]).exit_code == 0
    told = json.loads(Path(dry).read_text())["trace"]
    rows = {row["part"]: row for row in told["memory"]}
    whole = rows.pop("peak without reserve")
    for side in ("traced_bytes", "predicted_bytes", "promised_bytes"):
        assert whole[side] == pytest.approx(sum(row[side] for row in rows.values()))
    # fp32: sharded weights and two moments, 12 bytes of a parameter on 2 ranks
    params = read_plan(plan).scenario.model.num_params
    state = told["traced_memory"]["weights_bytes"] + told["traced_memory"]["optimizer_bytes"]
    assert state == pytest.approx(12 * params / 2, rel=0.02)
    shown = CliRunner().invoke(report, [plan, "--dry-run", dry, "-o", page])
    assert shown.exit_code == 0, shown.output
    assert "One rank traced without weights" in Path(page).read_text(encoding="utf-8")
    write_plan(make_plan(load_scenario("laptop"), pins={**pins, "micro_batch_size": 1}), plan)
    assert "another plan" in CliRunner().invoke(report, [plan, "--dry-run", dry, "-o", page]).output


@pytest.fixture
def without_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.util.find_spec

    def find_spec(name: str, package: str | None = None) -> Any:
        return None if name == "torch" else real(name, package)

    monkeypatch.setattr(importlib.util, "find_spec", find_spec)


@pytest.mark.parametrize("command", ["run", "calibrate"])
def test_without_torch_the_pip_line_is_told(tmp_path: Path, command: str, without_torch: None) -> None:
    plan = plan_file(tmp_path, plan_of())
    result = CliRunner().invoke(run, [plan]) if command == "run" else CliRunner().invoke(calibrate, [])
    assert result.exit_code == 2
    assert "pip install 'headway-planner[runtime]'" in result.output


def test_help_does_not_import_torch() -> None:
    code = "import sys, runtime.commands; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["missing.json"], "cannot be read"),
        (["{plan}", "--timeout", "5"], "has no unit"),
        (["{ep}"], "the model has none"),
    ],
)
def test_bad_input_is_refused(tmp_path: Path, arguments: list[str], reason: str) -> None:
    plan = plan_file(tmp_path, plan_of())
    (tmp_path / "other").mkdir()
    split = plan_file(tmp_path / "other", plan_of(dp=2, ep=2))
    result = CliRunner().invoke(run, [word.format(plan=plan, ep=split) for word in arguments])
    assert result.exit_code == 2
    assert reason in result.output


@pytest.mark.parametrize("ranks", ["2,x", "1", ""])
def test_bad_group_sizes_are_refused(ranks: str) -> None:
    result = CliRunner().invoke(calibrate, ["--ranks", ranks])
    assert result.exit_code == 2
    assert "--ranks" in result.output


def test_a_worker_called_by_hand_says_so() -> None:
    worker = Path(sys.executable).parent / "headway-worker"
    result = subprocess.run([str(worker)], capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 2
    assert "headway run" in result.stderr
