from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from click.testing import CliRunner, Result

from planner.cli import headway
from planner.plan import read_plan
from topologies.errors import InputError

NUMBER = {"type": "number"}
PLAN = {
    "type": "object",
    "required": [
        "format_version",
        "scenario",
        "layout",
        "placement",
        "checkpoint",
        "predicted",
        "alternatives",
        "solver",
        "inputs",
    ],
    "properties": {
        "format_version": {"const": 1},
        "layout": {
            "required": [
                *("tp", "cp", "pp", "vpp", "ep", "etp", "dp", "micro_batch_size", "num_microbatches"),
                *("sequence_parallel", "optimizer_sharding", "schedule", "recompute", "stages"),
            ],
            "properties": {
                "optimizer_sharding": {"enum": ["none", "zero1", "zero2", "zero3"]},
                "stages": {"minItems": 1, "items": {"required": ["layers", "recompute_layers"]}},
            },
        },
        "checkpoint": {"required": ["interval_steps", "interval_seconds", "mode", "tiers", "bytes"]},
        "predicted": {
            "required": [
                *("step_seconds", "step_seconds_low", "step_seconds_high", "mfu", "hfu", "tokens_per_second_per_gpu"),
                *("tflops_per_gpu", "breakdown_seconds", "memory_bytes", "goodput", "days", "cost_usd", "energy_kwh"),
            ],
            "properties": {
                "step_seconds": NUMBER,
                "memory_bytes": {"required": ["peak", "capacity", "per_stage"]},
                "days": {"required": ["p10", "p50", "p90"]},
            },
        },
        "alternatives": {"items": {"required": ["layout", "step_seconds", "mfu", "lost_because"]}},
        "solver": {
            "required": [
                *("name", "status", "objective_seconds", "bound_seconds", "gap", "candidates", "feasible"),
                *("solved_exactly", "seconds"),
            ]
        },
        "inputs": {"minItems": 1, "items": {"required": ["path", "sha256"]}},
    },
}
"""The contract of the plan file: stable keys, others may be added."""


def run(*words: Any) -> Result:
    return CliRunner().invoke(headway, [str(word) for word in words])


@pytest.fixture(scope="module")
def plan_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("plans") / "plan.json"
    result = run("plan", "laptop", "-o", path)
    assert result.exit_code == 0, result.stderr
    assert result.stdout == ""
    assert f"wrote {path}" in result.stderr
    return path


def test_the_plan_file_keeps_the_contract(plan_file: Path) -> None:
    jsonschema.validate(json.loads(plan_file.read_text()), PLAN)


def test_json_goes_to_stdout_alone() -> None:
    result = run("plan", "laptop", "--json", "--top", 2)
    told = json.loads(result.stdout)
    jsonschema.validate(told, PLAN)
    assert len(told["alternatives"]) <= 2
    assert {Path(one["path"]).name for one in told["inputs"]} >= {"laptop.yaml", "llama-30m.yaml"}
    assert json.loads(run("plan", "laptop", "-o", "-").stdout)["layout"] == told["layout"]


def test_the_summary_is_for_people() -> None:
    result = run("plan", "laptop")
    assert result.exit_code == 0
    for word in ("layout", "MFU", "fullest", "checkpoint", "goodput", "why it lost", "no step below"):
        assert word in result.stdout


def test_set_and_pin_and_objective_reach_the_plan() -> None:
    words = ["plan", "laptop", "--json", "--set", "job.global_batch_size=8", "--pin", "tp=2", "--objective", "cost"]
    told = json.loads(run(*words).stdout)
    assert told["layout"]["tp"] == 2
    assert told["scenario"]["job"]["global_batch_size"] == 8
    assert told["solver"]["objective"] == "cost"
    assert told["solver"]["pins"] == {"tp": 2}


def test_llama3_405b_is_planned_and_meta_s_own_layout_beside_it() -> None:
    """Meta's run: TP 8, PP 16, DP 128 at 400 TFLOP/s (arXiv 2407.21783, table 4)."""
    free = json.loads(run("plan", "llama3-405b-16k-h100", "--json").stdout)
    jsonschema.validate(free, PLAN)
    assert free["layout"]["tp"] in (4, 8)
    pins = [word for pin in ("tp=8", "pp=16", "dp=128") for word in ("--pin", pin)]
    metas = json.loads(run("plan", "llama3-405b-16k-h100", "--json", *pins).stdout)
    assert metas["predicted"]["tflops_per_gpu"] == pytest.approx(400, rel=0.05)
    assert metas["predicted"]["step_seconds"] >= free["predicted"]["step_seconds"]
    assert "excluded by the pins" in metas["alternatives"][0]["lost_because"]


def test_explain_tells_limits_seconds_rules_and_sources(plan_file: Path) -> None:
    told = json.loads(run("explain", plan_file, "--json").stdout)
    made = read_plan(plan_file)
    step = made.predicted["step_seconds"]
    assert sum(one["seconds"] for one in told["waterfall"]) == pytest.approx(step, rel=1e-4)
    assert sum(one["share"] for one in told["waterfall"]) == pytest.approx(1, rel=1e-4)
    assert any("memory" in line for line in told["limits"])
    assert told["rejected_by_rule"]["gpus"]["count"] > 0
    assert told["inputs"] == made.inputs
    assert {one["document"] for one in told["sources"]} >= {made.scenario.model.name}
    spoken = run("explain", plan_file)
    assert spoken.exit_code == 0
    for word in ("What limits it", "predicted step", "Alternatives", "Combinations", "Sources"):
        assert word in spoken.stdout


def test_the_waterfall_starts_at_the_peak(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    run("plan", "llama3-70b-512-h100", "-o", path, "--top", 0)
    made, told = read_plan(path), json.loads(run("explain", path, "--json").stdout)
    job, cluster = made.scenario.job, made.scenario.cluster
    ideal = job.model.flops_per_token(job.seq_length) * job.tokens_per_step / (cluster.num_gpus * 989.5e12)
    assert told["waterfall"][0]["seconds"] == pytest.approx(ideal, rel=1e-3)
    assert all(one["seconds"] > 0 for one in told["waterfall"])


def test_diff_exits_1_where_plans_differ(plan_file: Path, tmp_path: Path) -> None:
    same = run("diff", plan_file, plan_file)
    assert (same.exit_code, same.stdout) == (0, "")
    other = tmp_path / "other.json"
    run("plan", "laptop", "--pin", "recompute=full", "-o", other)
    result = run("diff", plan_file, other, "--json")
    assert result.exit_code == 1
    found = {one["key"]: one for one in json.loads(result.stdout)["differences"]}
    assert found["layout.recompute"]["after"] == "full"
    assert found["predicted.step_seconds"]["change"] > 0
    assert not any(key.startswith("solver") for key in found)
    assert "layout.recompute" in run("diff", plan_file, other).stdout


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["plan", "lapto"], 2, "did you mean 'laptop'"),
        (["plan", "no/such/file.yaml"], 2, "no file"),
        (["plan", "laptop", "--pin", "tq=2"], 2, "did you mean 'tp'"),
        (["plan", "laptop", "--pin", "tp"], 2, "not of the form field=value"),
        (["plan", "laptop", "--pin", "tp=none"], 2, "integer"),
        (["plan", "laptop", "--pin", "tp=0"], 2, "greater than or equal to 1"),
        (["plan", "laptop", "--pin", "tp=1", "--pin", "tp=2"], 2, "given twice, 1 and 2"),
        (["plan", "laptop", "--pin", "tp=1", "--set", "layout.tp=2"], 2, "pinned to 2 by the scenario and to 1 here"),
        (["plan", "laptop", "--pin", "schedule=zbh"], 2, "schedule"),
        (["plan", "laptop", "--pin", "tp=3"], 1, "rule attention_heads"),
        (["plan", "laptop", "--set", "cluster.node.gpu.usable_memory=50 MB"], 1, "nearest miss"),
        (["plan", "laptop", "--objective", "speed"], 2, "--objective"),
        (["explain", "/no/such/plan.json"], 2, "cannot be read"),
        (["diff", "/no/such/plan.json", "/no/such/plan.json"], 2, "cannot be read"),
    ],
)
def test_exit_codes_and_sentences(words: list[str], code: int, said: str) -> None:
    result = run(*words)
    assert result.exit_code == code, result.output
    assert said in result.stderr
    assert result.stdout == ""
    assert "Traceback" not in result.output


def test_a_no_is_told_as_json_too() -> None:
    result = run("plan", "laptop", "--pin", "tp=3", "--json")
    assert result.exit_code == 1
    error = json.loads(result.stdout)["error"]
    assert error["kind"] == "infeasible"
    assert "pin tp=" in error["message"]


def altered(plan_file: Path, path: Path, **changes: Any) -> Path:
    path.write_text(json.dumps(json.loads(plan_file.read_text()) | changes))
    return path


def test_plan_files_that_cannot_be_used(plan_file: Path, tmp_path: Path) -> None:
    text = plan_file.read_text()
    truncated = tmp_path / "truncated.json"
    truncated.write_text(text[: len(text) // 2])
    newer = altered(plan_file, tmp_path / "newer.json", format_version=2)
    layout = json.loads(text)["layout"]
    wrong = altered(plan_file, tmp_path / "wrong.json", layout=layout | {"tp": "many"})
    other = tmp_path / "other.json"
    other.write_text('{"format_version": 1}')
    for path, said in ((truncated, "truncated"), (newer, "format_version 2"), (wrong, "tp"), (other, "is missing")):
        with pytest.raises(InputError, match=said):
            read_plan(path)
        result = run("explain", path)
        assert (result.exit_code, result.stdout) == (2, "")
        assert path.name in result.stderr


def test_unknown_keys_in_a_plan_file_are_allowed(plan_file: Path, tmp_path: Path) -> None:
    assert read_plan(altered(plan_file, tmp_path / "more.json", weather="fine")) == read_plan(plan_file)


def test_a_place_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    result = run("plan", "laptop", "-o", tmp_path / "file" / "plan.json")
    assert result.exit_code == 2
    assert "cannot be written" in result.stderr
