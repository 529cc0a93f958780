"""Small plans for the tests of the runtime."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tiny_training import BATCH, SEQ, tiny

from planner.plan import Plan, write_plan
from scenarios.job import Job
from scenarios.layout import Layout
from scenarios.model import ModelSpec
from scenarios.scenario import Scenario, load_scenario


def plan_of(model: ModelSpec | None = None, *, job: dict[str, Any] | None = None, **layout: Any) -> Plan:
    """A plan for the tiny model on the shipped laptop; nothing is promised."""
    details = {"seq_length": SEQ, "global_batch_size": BATCH, "precision": "fp32"} | (job or {})
    scenario = Scenario(name="tiny", job=Job(model=model or tiny(), **details), cluster=load_scenario("laptop").cluster)
    return Plan(
        scenario=scenario,
        layout=Layout(**layout),
        placement={},
        checkpoint={},
        predicted={},
        alternatives=[],
        solver={},
        inputs=[],
    )


def plan_file(folder: Path, plan: Plan) -> str:
    path = folder / "plan.json"
    write_plan(plan, path)
    return str(path)
