from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from planner.cli import headway
from planner.plan import Plan, write_plan
from reports.log_comparison import compare_log

MakePlan = Callable[..., Plan]

LINE = (
    " iteration {step}/ 50 | consumed samples: {samples} | consumed tokens: {tokens} | "
    "elapsed time per iteration (ms): {time} | global batch size: {batch} | lm loss: 2.5E+00 | "
    "number of skipped iterations: 0 |"
)
ARGUMENTS = """\
using world size: 16, data-parallel-size: 2, tensor-model-parallel size: 4, pipeline-model-parallel size: 2
[Rank 0] (after 1 iterations) memory (MB) | allocated: 9000.0 | max allocated: 50000.0 | max reserved: 57220.4590
"""


def megatron_log(*times: float, batch: int = 64, start: str = ARGUMENTS) -> str:
    lines = [
        LINE.format(step=step, samples=step * batch, tokens=step * batch * 1024, time=1e3 * time, batch=batch)
        for step, time in enumerate(times, 1)
    ]
    return start + "\n".join(lines) + "\n"


@pytest.fixture
def plan_file(tmp_path: Path, make_plan: MakePlan) -> Path:
    write_plan(make_plan(), tmp_path / "plan.json")
    return tmp_path / "plan.json"


def invoke(*words: str | Path) -> Result:
    return CliRunner().invoke(headway, [str(word) for word in words])


def test_a_log_beside_its_plan(tmp_path: Path, plan_file: Path) -> None:
    log = tmp_path / "train.log"
    log.write_text(megatron_log(30.0, 5.0, 5.0, 5.2))
    result = invoke("compare", plan_file, log, "--json")
    assert result.exit_code == 0, result.output
    told = json.loads(result.stdout)
    assert {"predicted", "measured", "error", "phases"} <= told.keys()
    assert told["measured"]["step_seconds"] == pytest.approx(5.0)
    assert told["error"]["step_seconds"] == pytest.approx(4.0 / 5.0 - 1)
    assert told["measured"]["tokens_per_second_per_gpu"] == pytest.approx(64 * 1024 / 5.0 / 16)
    assert told["measured"]["memory_bytes"] == pytest.approx(60e9)
    assert told["error"]["memory"] == pytest.approx(53.5e9 / 60e9 - 1)
    assert told["within_band"] is False
    assert told["same_plan"] is True
    assert told["source"] == "Megatron log, 3 of 4 iterations"


def test_mfu_is_counted_as_headway_counts(tmp_path: Path, make_plan: MakePlan) -> None:
    plan = make_plan()
    log = tmp_path / "train.log"
    log.write_text(megatron_log(30.0, 5.0, 5.0))
    job = plan.scenario.job
    expected = job.model.flops_per_token(1024) * 64 * 1024 / (5.0 * 16 * 100e12)
    assert compare_log(plan, log).measured["mfu"] == pytest.approx(expected)


def test_people_are_told_where_it_comes_from(tmp_path: Path, plan_file: Path) -> None:
    log = tmp_path / "train.log"
    log.write_text(megatron_log(30.0, 4.1, 4.1, start=""))
    result = invoke("compare", plan_file, log)
    assert result.exit_code == 0
    assert "4.1 s" in result.stdout
    assert "measured: Megatron log, 2 of 3 iterations" in result.stderr
    assert "the log does not state GPUs (16): taken from the plan" in result.stderr
    assert "inside the predicted 80 % band" in result.stderr


def test_a_log_of_another_run_needs_force(tmp_path: Path, plan_file: Path) -> None:
    log = tmp_path / "train.log"
    log.write_text(megatron_log(30.0, 5.0, 5.0, batch=128))
    result = invoke("compare", plan_file, log)
    assert result.exit_code == 2
    assert "the log is of another run than the plan: global batch: 128 in the log, 64 in the plan" in result.stderr
    forced = invoke("compare", plan_file, log, "--json", "--force")
    assert forced.exit_code == 0
    told = json.loads(forced.stdout)
    assert told["same_plan"] is False
    assert any(note.startswith("another run") for note in told["notes"])


def test_a_log_with_a_first_iteration_only(tmp_path: Path, plan_file: Path) -> None:
    log = tmp_path / "train.log"
    log.write_text(megatron_log(30.0))
    result = invoke("compare", plan_file, log)
    assert result.exit_code == 2
    assert "no steady iteration" in result.stderr
    told = json.loads(invoke("compare", plan_file, log, "--json", "--force").stdout)
    assert told["measured"]["step_seconds"] == pytest.approx(30.0)


@pytest.mark.parametrize(
    "content", [b"", b"\x00\x01", b"nothing of interest\n", b"[titan] step:  1  loss:  nan  tps: 0\n"]
)
def test_what_is_neither_measurement_nor_log(tmp_path: Path, plan_file: Path, content: bytes) -> None:
    log = tmp_path / "train.log"
    log.write_bytes(content)
    result = invoke("compare", plan_file, log)
    assert result.exit_code == 2
    assert result.stderr.startswith(f"error: {log}: ")
    assert result.stderr.count("\n") == 1
    assert result.stdout == ""
