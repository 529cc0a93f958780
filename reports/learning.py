"""A comparison goes back into the profile that its prediction was made with."""

from __future__ import annotations

import datetime
from pathlib import Path

from planner.plan import Plan
from reports.comparison import Comparison
from simulator.residuals import Lesson, Seen, learnt, residuals
from topologies.cluster import Cluster
from topologies.cluster_file import to_yaml
from topologies.document import load, write_atomically
from topologies.errors import InputError

MACHINE = "fingerprint"
"""Of machine and software, in a profile's environment."""


def update_profile(path: Path, plan: Plan, found: Comparison) -> tuple[Lesson, ...]:
    """File what a run showed in a profile, whole or not at all.

    Args:
        path: of the profile that ``headway calibrate`` wrote.
        plan: that was run.
        found: its comparison.

    Returns:
        What changed, the largest part of the residual first.

    Raises:
        InputError: the profile is of another machine than the plan, holds no calibrated costs, or cannot be written.
    """
    profile, cluster = load(path, Cluster), plan.scenario.cluster
    ours, theirs = (
        None if one.measured is None else one.measured.environment.get(MACHINE) for one in (profile, cluster)
    )
    if ours is None or ours != theirs:
        raise InputError(
            "is not the profile of the machine that the plan was made for",
            hint="plan with it: headway plan SCENARIO --set cluster=" + path.name,
            file=path,
        )
    if not (found.same_plan and found.same_world_size):
        raise InputError("the measurement is not that of the plan, so nothing is learnt from it", key="--update")
    predicted, measured = found.predicted["step_seconds"], found.measured["step_seconds"]
    assert predicted is not None
    assert measured is not None
    seen = Seen(
        step_seconds=measured,
        phases_seconds={name: float(phase["measured_seconds"] or 0.0) for name, phase in found.phases.items()},
        collective_seconds=found.measured["collective_seconds"],
        product_seconds=found.measured["product_seconds"],
    )
    lessons, changed = [], profile
    for one in residuals(
        cluster,
        plan.scenario.job,
        plan.layout,
        seen,
        predicted_seconds=predicted,
        plan_sha256=plan.sha256(),
        date=datetime.datetime.now(tz=datetime.UTC).date().isoformat(),
        contended=found.contended,
    ):
        changed, lesson = learnt(changed, one)
        lessons.append(lesson)
    if changed is not profile:
        write_atomically(path, to_yaml(changed))
    return tuple(lessons)
