"""The whole story on this machine, told with headway's own commands."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from topologies.errors import RunFailed

Headway = Callable[[list[str]], int]
"""Runs one headway command line in this process and returns its exit code."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """One layout of the demo: what was promised and what was measured."""

    layout: str
    predicted_seconds: float
    measured_seconds: float
    predicted_mfu: float | None
    measured_mfu: float | None
    contended: bool

    @property
    def error(self) -> float:
        """Predicted over measured step time, less one."""
        return self.predicted_seconds / self.measured_seconds - 1


def tell_the_story(headway: Headway, out: Path, scenario: str, steps: int) -> list[Result]:
    """Calibrate this machine, plan the scenario on it, run the plan and one rival for real, and report.

    Args:
        headway: runs a command line; every step of the story is a command that the reader can repeat.
        out: folder that receives machine.yaml, plan.json, trace.json.gz, measurement.json and report.html.
        scenario: name or path; its cluster is replaced by this machine.
        steps: optimizer steps that each job runs.
    """
    out.mkdir(parents=True, exist_ok=True)
    machine, plan, rival = (out / name for name in ("machine.yaml", "plan.json", "rival-plan.json"))
    measurement, rival_measurement = out / "measurement.json", out / "rival-measurement.json"

    do(headway, "calibrate", "-o", str(machine))
    on_this_machine = [scenario, "--set", f"cluster={machine.resolve()}", "--pin", "cp=1", "--top", "10"]
    do(headway, "plan", *on_this_machine, "-o", str(plan))
    do(headway, "simulate", str(plan), "--step", "--trace", str(out / "trace.json.gz"))
    do(headway, "run", str(plan), "--steps", str(steps), "-o", str(measurement))
    do(headway, "plan", *on_this_machine, *rival_pins(contents(plan)), "-o", str(rival))
    do(headway, "run", str(rival), "--steps", str(steps), "-o", str(rival_measurement))
    do(headway, "compare", str(plan), str(measurement))
    both = [str(plan), str(measurement), "--rival", str(rival), str(rival_measurement)]
    do(headway, "report", *both, "-o", str(out / "report.html"))
    return [_result(plan, measurement), _result(rival, rival_measurement)]


PINNED = (
    "tp",
    "pp",
    "dp",
    "vpp",
    "micro_batch_size",
    "sequence_parallel",
    "optimizer_sharding",
    "schedule",
    "recompute",
)
"""Fields of a layout that make a rival; the rest follows from them."""


def rival_pins(plan: dict[str, Any]) -> list[str]:
    """Pin the best alternative of a plan that spreads the job differently (other tp, pp or dp).

    Raises:
        RunFailed: every alternative spreads the job like the plan.
    """
    chosen = plan["layout"]
    for alternative in plan["alternatives"]:
        layout = alternative["layout"]
        if any(layout[axis] != chosen[axis] for axis in ("tp", "pp", "dp")):
            return layout_pins(layout)
    raise RunFailed("the plan names no rival that spreads the job differently; plan with a larger --top")


def layout_pins(layout: dict[str, Any]) -> list[str]:
    """Words that pin a layout of a plan file."""
    return [word for key in PINNED for word in ("--pin", f"{key}={json.dumps(layout[key]).strip(chr(34))}")]


def do(headway: Headway, *words: str) -> None:
    """Run a command line.

    Raises:
        RunFailed: it did not end well.
    """
    code = headway(list(words))
    if code != 0:
        raise RunFailed(f"'headway {' '.join(words)}' ended with exit code {code}; nothing more is done")


def contents(path: Path) -> dict[str, Any]:
    """Read a JSON file of headway's own making."""
    content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return content


def _result(plan_file: Path, measurement_file: Path) -> Result:
    plan, measured = contents(plan_file), contents(measurement_file)
    layout = plan["layout"]
    degrees = " ".join(f"{axis.upper()}{layout[axis]}" for axis in ("tp", "pp", "dp") if layout[axis] > 1)
    words = [degrees or "DP1", layout["optimizer_sharding"], *([layout["schedule"]] if layout["pp"] > 1 else [])]
    return Result(
        layout=" ".join(words),
        predicted_seconds=plan["predicted"]["step_seconds"],
        measured_seconds=measured["step_seconds"]["median"],
        predicted_mfu=plan["predicted"]["mfu"],
        measured_mfu=measured["mfu"],
        contended=bool(measured["environment"].get("contended")),
    )
