"""Right-sizing with commands that only pretend: which are called, in which order, and which plan wins."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from planner.rightsizing import right_size
from topologies.errors import RunFailed


def layout(**fields: Any) -> dict[str, Any]:
    return {
        "tp": 1, "cp": 1, "pp": 1, "vpp": 1, "dp": 1, "micro_batch_size": 1, "sequence_parallel": False,
        "optimizer_sharding": "none", "schedule": "1f1b", "recompute": "none",
    } | fields  # fmt: skip


SECONDS = {"dp": (1.0, 1.3), "tp": (1.1, 1.2), "pp": (1.2, 1.6)}
"""Predicted and measured, by the axis that is used."""


class Pretence:
    """Answers the command lines of headway with files."""

    def __init__(self, fails: str = "") -> None:
        self.calls: list[list[str]] = []
        self.fails = fails

    def __call__(self, words: list[str]) -> int:
        self.calls.append(words)
        command, target = words[0], Path(words[words.index("-o") + 1]) if "-o" in words else None
        if command == self.fails:
            return 2
        if command == "calibrate":
            assert target is not None
            target.write_text("machine")
        elif command == "plan":
            assert target is not None
            axis = next((one for one in SECONDS if f"{one}=2" in words), "dp")
            idle = {"layout": layout(), "step_seconds": 0.9, "lost_because": "leaves cores idle"}
            rivals = [
                {"layout": layout(**{one: 2}), "step_seconds": 1.2, "lost_because": "slower"} for one in ("tp", "pp")
            ]
            told = {"layout": layout(**{axis: 2}), "predicted": {"step_seconds": SECONDS[axis][0]}}
            target.write_text(json.dumps(told | {"alternatives": [idle, *rivals]}))
        elif command == "run":
            assert target is not None
            chosen = json.loads(Path(words[1]).read_text())["layout"]
            axis = next(one for one in SECONDS if chosen[one] == 2)
            told = {"step_seconds": {"median": SECONDS[axis][1]}, "environment": {"contended": False}}
            target.write_text(json.dumps(told))
        return 0


def test_the_fastest_by_measurement_wins_and_every_run_is_filed(tmp_path: Path) -> None:
    headway = Pretence()
    trials = right_size(headway, "laptop", tmp_path, settings=["--set", "job.seq_length=64"])
    assert [trial.layout.split()[0] for trial in trials] == ["TP2", "DP2", "PP2"]
    assert trials[0].error == pytest.approx(1.1 / 1.2 - 1)
    names = [words[0] for words in headway.calls]
    assert names == ["calibrate", "plan", "plan", "plan", *["run", "compare"] * 3]
    assert all("job.seq_length=64" in words for words in headway.calls if words[0] == "plan")
    updated = {words[words.index("--update") + 1] for words in headway.calls if words[0] == "compare"}
    assert updated == {str(tmp_path / "machine.yaml")}
    # plans rest on the machine as it was calibrated, so that no trial changes the prediction of the next
    assert all("machine-as-calibrated" in " ".join(words) for words in headway.calls if words[0] == "plan")


def test_a_command_that_fails_ends_it(tmp_path: Path) -> None:
    with pytest.raises(RunFailed, match="headway run"):
        right_size(Pretence(fails="run"), "laptop", tmp_path, settings=[])
