"""Run a plan on this machine: check, start, measure."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from planner.plan import Plan
from runtime.environment import usable_cores
from runtime.indexed_data import check_data
from runtime.journal import Event
from runtime.launch import run_job
from runtime.measurement import measurement_from
from runtime.request import CheckpointSettings, DataSettings, Recipe, TrainRequest
from runtime.resume import check_folder
from runtime.support import check_recipe, check_runnable
from simulator.outcome import Measurement
from topologies.errors import InputError

RANKS_PER_CORE = 8
"""More ranks than this on one core would only fill the memory."""
MOST_WARMUP_STEPS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Durability:
    """What the person who runs a job says about its checkpoints and failures; None: as the plan says."""

    directory: str | None = None
    """Folder of the checkpoints; None: nothing is saved."""
    interval_steps: int | None = None
    keep: int | None = None
    mode: Literal["async", "sync"] | None = None
    archive: str | None = None
    resume: bool = False
    on_nan: Literal["stop", "rollback"] = "stop"
    max_restarts: int | None = None
    heartbeat_timeout_seconds: float = 10.0
    progress_timeout_seconds: float = 120.0

    def settings(self, plan: Plan, steps: int) -> CheckpointSettings | None:
        """Fill in what the plan says."""
        if self.directory is None:
            return None
        policy = plan.checkpoint
        return CheckpointSettings(
            directory=str(Path(self.directory).absolute()),
            interval_steps=self.interval_steps or int(policy.get("interval_steps") or steps),
            keep=self.keep or int(policy.get("keep") or 2),
            mode=self.mode or ("sync" if policy.get("mode") == "sync" else "async"),
            archive=None if self.archive is None else str(Path(self.archive).absolute()),
            on_nan=self.on_nan,
        )


NOTHING_SAVED = Durability()
USUAL = Recipe()
MAX_RESTARTS = 3
"""Of a job with checkpoints, unless it is said otherwise."""


def request_for(
    plan: Plan,
    *,
    steps: int,
    seed: int = 0,
    durability: Durability = NOTHING_SAVED,
    data: DataSettings | None = None,
    profile_directory: str | None = None,
    recipe: Recipe = USUAL,
) -> TrainRequest:
    """Turn a plan into what the workers are asked.

    Raises:
        InputError: the runtime does not execute such a plan.
    """
    job, layout = plan.scenario.job, plan.layout
    check_runnable(job, layout)
    check_recipe(job, layout, recipe, on_gpu=not on_cpu(plan))
    settings = durability.settings(plan, steps)
    restarts = durability.max_restarts if durability.max_restarts is not None else MAX_RESTARTS if settings else 0
    return TrainRequest(
        job=job,
        layout=layout,
        device="cpu" if on_cpu(plan) else "cuda",
        steps=steps,
        warmup_steps=min(MOST_WARMUP_STEPS, max(steps - 1, 0)),
        seed=seed,
        profile_directory=profile_directory,
        checkpoint=settings,
        data=data,
        recipe=recipe,
        max_restarts=restarts,
        heartbeat_timeout_seconds=durability.heartbeat_timeout_seconds,
        progress_timeout_seconds=durability.progress_timeout_seconds,
    )


def on_cpu(plan: Plan) -> bool:
    """Tell whether a plan is for CPU cores."""
    return plan.scenario.cluster.gpu.architecture == "cpu"


def check_room(plan: Plan) -> None:
    """Refuse a plan that this machine cannot hold.

    Raises:
        InputError: more ranks than the cores or GPUs of this machine can take.
    """
    gpu, world_size = plan.scenario.cluster.gpu, plan.layout.world_size
    here = RANKS_PER_CORE * usable_cores() if on_cpu(plan) else gpus_here()
    if world_size > here:
        has = f"{usable_cores()} cores" if on_cpu(plan) else f"{here} GPUs"
        raise InputError(
            f"the plan needs {world_size} ranks on {gpu.name}, and this machine has {has}",
            hint="look at it with --dry-run; or plan for this machine: 'headway calibrate -o machine.yaml', then "
            "--set cluster=machine.yaml",
            key="layout",
        )


def gpus_here() -> int:
    """CUDA devices of this machine; 0 without torch."""
    if importlib.util.find_spec("torch") is None:
        return 0
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def run_plan(
    plan: Plan,
    *,
    steps: int,
    seed: int = 0,
    durability: Durability = NOTHING_SAVED,
    data: DataSettings | None = None,
    profile_directory: str | None = None,
    recipe: Recipe = USUAL,
    timeout_seconds: float = 1800.0,
    on_progress: Callable[[str], None] | None = None,
    on_event: Callable[[Event], None] | None = None,
) -> Measurement:
    """Execute a plan as a torchrun job on this machine and measure it.

    Args:
        plan: what to run.
        steps: optimizer steps, counted from the start of the training; after each start the first two are warm-up.
        seed: of weights and tokens.
        durability: checkpoints, restarts, and what a failure means.
        data: tokens from files; None: synthetic ones.
        profile_directory: folder for a torch.profiler trace of one step of each rank.
        recipe: learning rate, clipping and the like.
        timeout_seconds: after this the job is ended.
        on_progress: receives lines of progress.
        on_event: receives what happens, as it is written into the journal.

    Raises:
        InputError: the plan cannot run here, or cannot be resumed from these checkpoints.
        RunFailed: a rank failed, or the time was up.
        MissingExtra: torch is not installed.
    """
    request = request_for(
        plan,
        steps=steps,
        seed=seed,
        durability=durability,
        data=data,
        profile_directory=profile_directory,
        recipe=recipe,
    )
    check_room(plan)
    if data is not None:
        check_data(data, plan.scenario.job)
    if request.checkpoint is not None:
        check_folder(request, resume=durability.resume)
    report, events = run_job(request, timeout_seconds=timeout_seconds, on_progress=on_progress, on_event=on_event)
    return measurement_from(plan, request, report, events)
