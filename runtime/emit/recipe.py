"""What other trainers need to know of a run beside the layout: steps, saves, and words of refusal."""

from __future__ import annotations

from dataclasses import dataclass

from planner.plan import Plan
from topologies.errors import InputError

LEARNING_RATE = "3e-4"
"""A placeholder, the same as in headway's own runtime: a plan says nothing about the recipe of the optimizer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """How long a run is and how often it is saved."""

    steps: int
    interval_steps: int | None
    """None: the plan saves nothing."""
    asynchronous: bool


def run_of(plan: Plan, steps: int | None) -> Run:
    """Read the run from a plan.

    Raises:
        InputError: neither the caller nor the plan's job says how many steps.
    """
    job, saved = plan.scenario.job, plan.checkpoint
    if steps is None and job.target_tokens is None:
        raise InputError("the plan's job has no target_tokens, so its length is unknown", hint="give --steps")
    count = steps if steps is not None else max(1, round((job.target_tokens or 0) / job.tokens_per_step))
    interval = saved.get("interval_steps")
    return Run(
        steps=count,
        interval_steps=None if interval is None else max(1, int(interval)),
        asynchronous=saved.get("mode") == "async",
    )


def where_to_find(entry: str) -> list[str]:
    """A note where the program's path is not absolute."""
    return (
        [] if entry.startswith("/") else [f"{entry} is looked for in the folder of the job: give its path by --entry"]
    )


def refuse(trainer: str, what: str, hint: str, key: str) -> InputError:
    """An error for what a trainer cannot express."""
    return InputError(f"{trainer} cannot run this plan: {what}", hint=hint, key=key)
