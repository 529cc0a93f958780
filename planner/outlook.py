"""What a layout promises for the whole run: step, memory, checkpoints, goodput, days, cost, energy."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from planner.checkpointing import Operation, operation
from planner.placement import Placement, place
from planner.upkeep import Upkeep, upkeep, value
from scenarios.job import Job
from scenarios.layout import Layout, Stage
from scenarios.model import ModelSpec
from scenarios.scenario import Scenario
from simulator.memory import memory_use
from simulator.outcome import MemoryUse, StepTime
from simulator.stages import stage_layers, tail_layers

DAY = 86_400.0
DAYS_BASIS = (
    "p50: target tokens / tokens per step x predicted step / expected goodput; p10 and p90: the same with the low and "
    "high end of the step's 80 % band"
)

NO_TARGET = "the job names no target_tokens, so the run has no length: no days, no cost, no energy"


@dataclass(frozen=True, slots=True, kw_only=True)
class Outlook:
    """One layout with explicit stages, and everything that is predicted for it."""

    layout: Layout
    placement: Placement
    step: StepTime
    memory: MemoryUse
    checkpoint: Operation
    steps: float | None
    """Optimizer steps to the target tokens; None: the scenario names no target."""
    upkeep: Upkeep
    """Of the nodes in use and the spares beside them."""

    @property
    def goodput(self) -> float:
        """Expected useful share of the wall time."""
        return self.checkpoint.expected_goodput

    def seconds(self, step_seconds: float) -> float | None:
        """Wall time of the whole run if a step took so long."""
        return None if self.steps is None or self.goodput <= 0 else self.steps * step_seconds / self.goodput

    @property
    def seconds_per_step(self) -> float:
        """Wall time per step with failures and checkpoints in it."""
        return self.step.total_seconds / self.goodput if self.goodput > 0 else math.inf


def with_stages(layout: Layout, model: ModelSpec) -> Layout:
    """Spell out the uniform split, so that no layer can be lost on the way to a framework."""
    if layout.stages:
        return layout
    sizes = stage_layers(model.num_layers, layout.pp, layout.vpp, tail_layers(model))
    full = layout.recompute == "full"
    stages = tuple(Stage(layers=size, recompute_layers=size if full else 0) for size in sizes)
    return layout.model_copy(update={"stages": stages})


def outlook(scenario: Scenario, layout: Layout, step: StepTime) -> Outlook:
    """Predict everything about one layout whose step is known."""
    cluster, job = scenario.cluster, scenario.job
    placement = place(cluster, layout)
    operated = operation(scenario, layout, step.total_seconds)
    idle = (operated.spares or 0) + scenario.faults.standbys
    return Outlook(
        layout=layout,
        placement=placement,
        step=step,
        memory=memory_use(cluster, job, layout),
        checkpoint=operated,
        steps=None if job.target_tokens is None else math.ceil(job.target_tokens / job.tokens_per_step),
        upkeep=upkeep(scenario, layout.world_size, placement.nodes, idle),
    )


def objective_value(found: Outlook, objective: str) -> float:
    """What is minimised, per step: wall seconds, US dollars, joules, or (goodput) the lost share of the wall time."""
    return float(value(objective, found.step.total_seconds, found.goodput, found.upkeep))


def promise(found: Outlook, job: Job) -> dict[str, Any]:
    """The ``predicted`` part of a plan, with the keys of the contract."""
    flops = job.model.forward_flops_per_token(job.seq_length)
    step, usd = found.step, float(found.upkeep.usd_per_second)
    p10, p50, p90 = (found.seconds(one) for one in (step.low_seconds, step.total_seconds, step.high_seconds))
    return {
        "step_seconds": step.total_seconds,
        "step_seconds_low": step.low_seconds,
        "step_seconds_high": step.high_seconds,
        "mfu": step.mfu,
        "hfu": step.hfu,
        "tokens_per_second_per_gpu": step.tokens_per_second_per_gpu,
        "tflops_per_gpu": step.tflops_per_gpu,
        "breakdown_seconds": step.breakdown_seconds,
        "compute_parts_seconds": step.compute_parts_seconds,
        "attention_flops_share": flops["attention"] / sum(flops.values()),
        "memory_bytes": found.memory.as_json(),
        "goodput": found.goodput,
        "steps": found.steps,
        "days": None
        if p10 is None or p50 is None or p90 is None
        else {"p10": p10 / DAY, "p50": p50 / DAY, "p90": p90 / DAY},
        "days_basis": NO_TARGET if found.steps is None else DAYS_BASIS,
        "spares": found.checkpoint.spares,
        "cost_usd": None if p50 is None or usd == 0 else p50 * usd,
        "energy_kwh": None if p50 is None else p50 * float(found.upkeep.watts) / 3.6e6,
        "basis": list(step.basis),
    }
