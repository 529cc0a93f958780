"""headway's own runtime as the program of a job: one worker per rank, and the request that it reads."""

from __future__ import annotations

from planner.plan import Plan
from runtime.emit.launch import Program
from runtime.request import REQUEST_FILE, CheckpointSettings, TrainRequest
from runtime.support import check_runnable
from topologies.document import to_json

WARMUP_STEPS = 2
LOSS_OF_A_NODE_SECONDS = 120.0
"""How long a collective may wait: a lost node shows as a closed connection, a hang only so."""


def headway_program(plan: Plan, *, steps: int, seed: int) -> Program:
    """Describe ``headway-worker`` under torchrun.

    Raises:
        InputError: the runtime does not execute the plan.
    """
    job, layout, cluster = plan.scenario.job, plan.layout, plan.scenario.cluster
    check_runnable(job, layout)
    request = TrainRequest(
        job=job,
        layout=layout,
        device="cpu" if cluster.gpu.architecture == "cpu" else "cuda",
        steps=steps,
        warmup_steps=min(WARMUP_STEPS, steps - 1),
        seed=seed,
        timeout_seconds=LOSS_OF_A_NODE_SECONDS,
        checkpoint=_saving(plan),
    )
    return Program(
        trainer="headway",
        words=("headway-worker", "{directory}"),
        files={REQUEST_FILE: to_json(request.model_dump(mode="json")) + "\n"},
        environment={"OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "PYTHONUNBUFFERED": "1"},
        notes=("trains on synthetic tokens; rank 0 leaves result.json beside this file",),
        python=False,
        supervised=True,
    )


def _saving(plan: Plan) -> CheckpointSettings | None:
    interval = plan.checkpoint.get("interval_steps")
    if interval is None:
        return None
    mode = "sync" if plan.checkpoint.get("mode") == "sync" else "async"
    return CheckpointSettings(directory="checkpoints", interval_steps=max(1, int(interval)), mode=mode)
