"""The choice confirmed: whole runs of the chosen plan, played with failures, beside the closed form that chose it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from planner.outlook import Outlook
from scenarios.scenario import Scenario
from simulator.run_answers import confirmation
from simulator.whole_runs import whole_run
from topologies.units import format_quantity


def confirmed(scenario: Scenario, found: Outlook) -> dict[str, Any]:
    """Return what ``predicted`` says of whole runs: ``confirmation``; nothing where the scenario states no failures."""
    if not scenario.faults.failures and scenario.faults.trace is None:
        return {}
    planned = found.checkpoint.as_json()
    run = whole_run(scenario, found.layout, found.step.total_seconds, step=found.step, planned=planned)
    return {"confirmation": confirmation(run)}


def at_work(scenario: Scenario, used: Sequence[int]) -> Scenario:
    """Return the scenario with the failure rates of a job on so many nodes of each pool."""
    pools = zip(scenario.cluster.pools, used, strict=True)
    counts = {pool.node.name: (nodes, nodes * pool.node.gpus_per_node) for pool, nodes in pools}
    return scenario.model_copy(update={"faults": scenario.faults.at_work(counts)})


def told(confirmation: Mapping[str, Any]) -> str:
    """One line about it."""
    points, runs = confirmation["difference_points"], confirmation["runs"]
    line = f"{runs} runs of {_work(confirmation)} played: {confirmation['goodput']:.2%} ({points:+.2f} points)"
    spread = confirmation["rate_spread"]
    if spread:
        uncertain = confirmation["uncertain_goodput"]
        line += f", {uncertain:.2%} with failure rates that are known to {100 * spread:.0f} %"
    if confirmation["because"]:
        line += f"; the closed form leaves out: {'; '.join(confirmation['because'])}"
    return line


def _work(confirmation: Mapping[str, Any]) -> str:
    """How much of the run was played: goodput is a rate, so a stretch of a long run stands for all of it."""
    played, whole = confirmation["work_seconds"], confirmation.get("whole_work_seconds")
    work = f"{format_quantity(played, 'seconds')} of work"
    if not whole or whole <= played:
        return work
    return f"{work} ({confirmation['saves']:,} saves), a stretch of the {format_quantity(whole, 'seconds')} of the run,"
