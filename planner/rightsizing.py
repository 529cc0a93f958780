"""The best layout by measurement: calibrate, plan, run the most promising briefly, keep the fastest, learn.

Every step is one of headway's own commands, so that the reader can repeat it.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path

from planner.demo import Headway, contents, do, layout_pins

STEPS = 8
"""Of each trial; two of them warm up."""
TRIALS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """One layout that was run."""

    layout: str
    plan: Path
    predicted_seconds: float
    measured_seconds: float
    contended: bool

    @property
    def error(self) -> float:
        """Predicted over measured, less one."""
        return self.predicted_seconds / self.measured_seconds - 1


def right_size(
    headway: Headway, scenario: str, folder: Path, *, settings: list[str], trials: int = TRIALS, steps: int = STEPS
) -> list[Trial]:
    """Plan a scenario for this machine and let a few real runs decide.

    Args:
        headway: runs a command line.
        scenario: name or path; its cluster is replaced by this machine.
        folder: receives machine.yaml, and a plan and a measurement of each trial.
        settings: further words for ``headway plan`` (pins, changes).
        trials: layouts to run, the planner's choice first.
        steps: of each run.

    Returns:
        The trials, the fastest first. Their residuals are in the machine's profile.

    Raises:
        RunFailed: one of the commands failed.
    """
    folder.mkdir(parents=True, exist_ok=True)
    machine = folder / "machine.yaml"
    do(headway, "calibrate", "-o", str(machine))
    # the machine as it was calibrated, for all plans: what one trial teaches must not favour the next
    frozen = folder / "machine-as-calibrated.yaml"
    shutil.copyfile(machine, frozen)
    cp = [] if any(word.startswith("cp=") for word in settings) else ["--pin", "cp=1"]  # pays off on no single machine
    asked = [scenario, "--set", f"cluster={frozen.resolve()}", *cp, *settings]
    first = folder / "plan-1.json"
    do(headway, "plan", *asked, "--top", "10", "-o", str(first))
    rivals = [one["layout"] for one in contents(first)["alternatives"] if "lost_because" in one]
    plans = [first]
    for layout in rivals:
        if len(plans) == trials:
            break
        if layout["tp"] * layout["cp"] * layout["pp"] * layout["dp"] < _ranks(first):
            continue  # leaves cores idle: another question
        plan = folder / f"plan-{len(plans) + 1}.json"
        if headway(["plan", *asked, *layout_pins(layout), "--top", "0", "-o", str(plan)]) == 0:
            plans.append(plan)
    return sorted((_trial(headway, plan, machine, steps) for plan in plans), key=lambda one: one.measured_seconds)


def _ranks(plan: Path) -> int:
    layout = contents(plan)["layout"]
    return int(layout["tp"] * layout["cp"] * layout["pp"] * layout["dp"])


def _trial(headway: Headway, plan: Path, machine: Path, steps: int) -> Trial:
    measurement = plan.with_name(plan.name.replace("plan", "measurement"))
    do(headway, "run", str(plan), "--steps", str(steps), "-o", str(measurement))
    do(headway, "compare", str(plan), str(measurement), "--update", str(machine))
    told, seen = contents(plan), json.loads(measurement.read_text(encoding="utf-8"))
    layout = told["layout"]
    degrees = " ".join(f"{axis.upper()}{layout[axis]}" for axis in ("tp", "cp", "pp", "dp") if layout[axis] > 1)
    details = [layout["optimizer_sharding"], *([layout["schedule"]] if layout["pp"] > 1 else [])]
    return Trial(
        layout=" ".join([degrees or "DP1", *details, f"mb{layout['micro_batch_size']}"]),
        plan=plan,
        predicted_seconds=told["predicted"]["step_seconds"],
        measured_seconds=seen["step_seconds"]["median"],
        contended=bool(seen["environment"].get("contended")),
    )
