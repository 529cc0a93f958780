"""What was searched, what was proved and under which restrictions: the ``solver`` part of a plan."""

from __future__ import annotations

from typing import Any

from planner.judging import Judged
from planner.pricing import Priced, finite
from planner.search import SPREAD, Found, Opened
from scenarios.scenario import Scenario

AGAINST = (
    "value and bound are steps of the simulator's longest path, so the gap is against the simulator, not against a "
    "formula; how far the simulator is from the machine is said by the step's 80 % band"
)


def certificate(scenario: Scenario, priced: Priced, judged: Judged) -> dict[str, Any]:
    """Value, bound, gap, status, counts and restrictions."""
    rejected, seconds = priced.found.rejected, judged.outlooks[0].step.total_seconds
    told: dict[str, Any] = {
        "objective": scenario.objective,
        "objective_seconds": seconds,
        "bound_seconds": seconds / (1.0 + judged.gap),
        "gap": judged.gap,
        "candidates": len(priced.layouts) + sum(rejected.values()),
        "legal": len(priced.layouts),
        "feasible": int(priced.fits.sum()),
        "rejected_by_rule": {
            name: {"count": count, "example": priced.found.examples[name].sentence}
            for name, count in sorted(rejected.items(), key=lambda item: -item[1])
        },
        "rejected_by_memory": int((~priced.fits).sum()),
        "note": AGAINST,
    }
    if judged.found is None or judged.chosen is None:
        return told | {
            "name": "as pinned",
            "status": "best of the layouts with the pinned stages that were walked",
            "sol_status": "feasible",
            "opened": len(judged.outlooks),
            "solved_exactly": 0,
            "restrictions": ["the stages are pinned: nothing was proved about others"],
        }
    return told | _proof(scenario, priced, judged, judged.found, judged.chosen)


def _proof(scenario: Scenario, priced: Priced, judged: Judged, found: Found, chosen: Opened) -> dict[str, Any]:
    partition, opened = chosen.found, found.opened
    proved = found.stopped_by == "proof"
    return {
        "name": "best first with stage programs",
        "status": "proved within the gap" if proved else f"stopped by the {found.stopped_by}",
        "scope": _scope(chosen),
        "sol_status": partition.sol_status,
        "stage_solver": partition.solver,
        "stage_status": partition.status,
        "uniform_seconds": finite(partition.uniform_seconds),
        "bounded": int(priced.fits.sum()) - len(opened),
        "opened": len(opened),
        "walked": sum(one.found.choice is not None for one in opened),
        "relaxed": found.relaxed,
        "solved_exactly": sum(one.found.programs > 0 or one.found.status == "Optimal" for one in opened),
        "programs": sum(one.found.programs for one in opened),
        "nodes": sum(one.found.nodes for one in opened),
        "restrictions": restrictions(scenario, judged, found),
    }


def _scope(chosen: Opened) -> str:
    """For which stages of a layout the gap holds."""
    if chosen.layout.pp == 1:
        return "against every layout that keeps the rules"
    region = "virtual stages near the even split" if chosen.layout.vpp > 1 else f"stages up to {SPREAD} layers longer"
    return f"against every layout that keeps the rules, but only with {region} (the trust region); not beyond it"


def restrictions(scenario: Scenario, judged: Judged, found: Found) -> list[str]:
    """What the proof leaves out."""
    told = []
    if any(one.layout.pp > 1 for one in found.opened):
        told += [
            f"a stage of a pipeline with one chunk per rank holds at most {SPREAD} layers beyond the even split",
            "virtual stages hold the even split rounded down or up (first and last down to 2 less), a rank no more "
            "than its even share rounded up, and none works 3 % longer than the slowest one of the equal split",
        ]
    if "zero-bubble" not in scenario.allow:
        told.append("schedules: 1f1b and interleaved, which trainers offer; 'allow: [zero-bubble]' adds the others")
    if found.unplayable:
        told.append(f"{found.unplayable} layouts with very many ops per step are bounded, not solved")
    if any(one.work.problem.contents.thinned for one in found.opened):
        told.append("recompute mixes of very large stages are thinned")
    return [*told, *sorted(found.notes)]


def plain(value: Any) -> Any:
    """A pin as plain data."""
    if isinstance(value, tuple):
        return [plain(one) for one in value]
    return value.model_dump(mode="json") if hasattr(value, "model_dump") else value
