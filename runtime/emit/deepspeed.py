"""A plan as DeepSpeed's JSON configuration.

Keys and what they exclude: DeepSpeed edaa722 (2026-08-22), docs/_pages/config-json.md, deepspeed/runtime/constants.py,
runtime/zero/config.py, runtime/tensor_parallel/config.py. The JSON configures an engine around a model that the user's
program builds.
"""

from __future__ import annotations

from typing import Any

from planner.plan import Plan
from runtime.emit.launch import Program
from runtime.emit.recipe import LEARNING_RATE, refuse, run_of
from runtime.emit.stages import stage_letters
from scenarios.job import Job
from scenarios.layout import SHARDINGS, Layout
from topologies.document import to_json

TRAINER = "deepspeed"
CONFIG_FILE = "deepspeed.json"


def deepspeed_program(plan: Plan, *, steps: int | None, entry: str = "train.py") -> Program:
    """Describe the user's program under torchrun, with the configuration beside it.

    Raises:
        InputError: DeepSpeed's configuration cannot express the plan.
    """
    job, layout, run = plan.scenario.job, plan.layout, run_of(plan, steps)
    _refuse(job, layout)
    notes = [f"{entry} is yours: it builds the model, calls deepspeed.initialize and runs {run.steps} steps"]
    letters = "".join(stage_letters(job.model, layout))
    if letters.count("f") or letters.count("s"):
        notes.append(
            f"the plan recomputes {letters.count('f')} layers in full and {letters.count('s')} selectively: wrap them "
            "in your model, the configuration does not"
        )
    if run.interval_steps is not None:
        notes.append(f"call save_checkpoint every {run.interval_steps} steps: the configuration has no interval")
    if layout.tp > 1 and layout.sequence_parallel:
        notes.append("AutoTP has no sequence parallelism of the norms: more activation memory than planned")
    return Program(
        trainer=TRAINER,
        words=(entry, "--deepspeed", "--deepspeed_config", CONFIG_FILE),
        files={CONFIG_FILE: to_json(deepspeed_config(job, layout)) + "\n"},
        notes=tuple(notes),
    )


def _refuse(job: Job, layout: Layout) -> None:
    if layout.pp > 1:
        raise refuse(
            TRAINER,
            "a pipeline is a PipelineModule in the program there, not a setting",
            "plan again with --pin pp=1",
            "layout.pp",
        )
    if layout.etp > 1:
        raise refuse(TRAINER, "AutoEP accepts only etp 1", "pin etp=1", "layout.etp")
    if layout.ep > 1 and layout.tp > 1:
        raise refuse(TRAINER, "AutoEP cannot be joined with AutoTP yet", "pin tp=1 or ep=1", "layout.ep")
    if layout.ep > 1 and layout.cp > 1 and layout.optimizer_sharding == "zero3":
        raise refuse(TRAINER, "AutoEP with ZeRO-3 excludes sequence parallelism", "pin cp=1", "layout.cp")
    if job.precision not in ("bf16", "fp16", "fp32"):
        raise refuse(TRAINER, f"{job.precision} is not a setting of its engine", "set precision: bf16", "job.precision")
    if job.tuning == "lora":
        raise refuse(TRAINER, "adapters are part of the program there", "set tuning: full", "job.tuning")


def deepspeed_config(job: Job, layout: Layout) -> dict[str, Any]:
    """The configuration. ``train_batch_size`` is micro-batch x accumulation x dp, as DeepSpeed checks."""
    config: dict[str, Any] = {
        "train_batch_size": job.global_batch_size,
        "train_micro_batch_size_per_gpu": layout.micro_batch_size,
        "gradient_accumulation_steps": layout.num_microbatches(job),
        "zero_optimization": {
            "stage": SHARDINGS.index(layout.optimizer_sharding),
            "overlap_comm": job.stack.dp_overlap is not False,
        },
        "gradient_clipping": 1.0,
        "optimizer": {
            "type": "AdamW" if job.optimizer == "adamw" else "SGD",
            "params": {"lr": float(LEARNING_RATE)},
        },
    }
    if job.precision in ("bf16", "fp16"):
        config[job.precision] = {"enabled": True}
        config["data_types"] = {"grad_accum_dtype": "bf16" if job.gradient_precision == "bf16" else "fp32"}
    if layout.tp > 1:
        config["tensor_parallel"] = {"autotp_size": layout.tp}
    if layout.cp > 1:
        config["sequence_parallel_size"] = layout.cp
    if layout.ep > 1:
        config["expert_parallel"] = {"enabled": True, "autoep_size": layout.ep}
    return config
