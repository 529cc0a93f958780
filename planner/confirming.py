"""The choice confirmed: whole runs of the chosen plan, played with failures, beside the closed form that chose it."""

from __future__ import annotations

from typing import Any

from planner.outlook import Outlook
from scenarios.scenario import Scenario
from simulator.run_answers import confirmation
from simulator.whole_runs import whole_run


def confirmed(scenario: Scenario, found: Outlook) -> dict[str, Any]:
    """Return what ``predicted`` says of whole runs: ``confirmation``; nothing where the scenario states no failures."""
    if not scenario.faults.failures and scenario.faults.trace is None:
        return {}
    planned = found.checkpoint.as_json()
    run = whole_run(scenario, found.layout, found.step.total_seconds, step=found.step, planned=planned)
    return {"confirmation": confirmation(run)}


def told(confirmation: dict[str, Any]) -> str:
    """One line about it."""
    points, runs = confirmation["difference_points"], confirmation["runs"]
    days = confirmation["work_seconds"] / 86400
    line = f"{runs} runs of {days:.0f} days of work played: {confirmation['goodput']:.2%} ({points:+.2f} points)"
    spread = confirmation["rate_spread"]
    if spread:
        uncertain = confirmation["uncertain_goodput"]
        line += f", {uncertain:.2%} with failure rates that are known to {100 * spread:.0f} %"
    if confirmation["because"]:
        line += f"; the closed form leaves out: {'; '.join(confirmation['because'])}"
    return line
