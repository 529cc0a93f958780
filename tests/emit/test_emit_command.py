"""``headway emit`` at the command line."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner
from emit_plans import large_plan, tiny_plan

from planner.plan import read_plan, write_plan
from runtime.emit.commands import emit
from runtime.emit.emitting import LAUNCHERS


def plan_file(folder: Path, large: bool = False) -> str:
    write_plan(large_plan(tp=8, dp=4) if large else tiny_plan(2), folder / "plan.json")
    return str(folder / "plan.json")


@pytest.mark.parametrize(
    "target", ["slurm", "torchrun", "volcano", "jobset", "trainjob", "megatron", "bridge", "torchtitan", "deepspeed"]
)
def test_files_are_written_and_told(tmp_path: Path, target: str) -> None:
    plan = plan_file(tmp_path, large=target not in LAUNCHERS)
    result = CliRunner().invoke(
        emit, [target, plan, "-o", str(tmp_path / "job"), "--steps", "20", "--image", "trainer:1", "--json"]
    )
    assert result.exit_code == 0, result.output
    told = json.loads(result.stdout)
    assert {Path(file).name for file in told["files"]} == {file.name for file in (tmp_path / "job").iterdir()}
    assert read_plan(tmp_path / "job" / "plan.json") == read_plan(plan)
    assert told["nodes"] * told["ranks_per_node"] == read_plan(plan).layout.world_size
    assert told["trainer"] == "headway" if target in LAUNCHERS else target


def test_script_on_stdout(tmp_path: Path) -> None:
    result = CliRunner().invoke(emit, ["slurm", plan_file(tmp_path), "-o", "-"])
    assert result.stdout.startswith("#!/bin/bash\n")
    assert "#SBATCH --nodes=2\n" in result.stdout


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["slurm", "--env", "HF_TOKEN=x"], "secret"),
        (["slurm", "--sbatch", "nodes=9"], "decided by the plan"),
        (["torchrun", "--sbatch", "partition=x"], "for slurm only"),
        (["slurm", "--directory", "here"], "absolute"),
        (["torchtitan"], "ships no model"),
    ],
)
def test_trouble_is_told_in_one_line(tmp_path: Path, words: list[str], reason: str) -> None:
    target, *rest = words
    arguments = [target, plan_file(tmp_path), "-o", str(tmp_path / "job"), "--steps", "5", *rest]
    result = CliRunner().invoke(emit, arguments)
    assert result.exit_code == 2
    assert reason in result.stderr
    assert not (tmp_path / "job").exists()


def test_emitting_imports_no_torch(tmp_path: Path) -> None:
    code = (
        "import sys; from planner.cli import headway; "
        f"headway(['emit', 'slurm', {plan_file(tmp_path)!r}, '-o', '-'], standalone_mode=False); "
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, timeout=60)
