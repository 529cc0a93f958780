"""A plan as a configuration function of torchtitan: a Python file chosen by ``--module`` and ``--config``.

Fields: torchtitan b5bcd76 (2026-08-21), torchtitan/config/configs.py, components/checkpointer, trainer.py. Its own dry
run, on one GPU and without the cluster: ``--comm.mode=fake_backend``.
"""

from __future__ import annotations

from planner.plan import Plan
from runtime.emit.launch import Program
from runtime.emit.recipe import Run, refuse, run_of
from runtime.emit.scripts import render
from runtime.emit.stages import stage_letters
from runtime.emit.torchtitan_models import flavour_of
from scenarios.job import Job
from scenarios.layout import Layout

TRAINER = "torchtitan"
MODULE, FUNCTION = "headway_torchtitan", "headway_plan"
SCHEDULES = {"gpipe": "GPipe", "1f1b": "1F1B", "interleaved": "Interleaved1F1B", "zbv": "ZBVZeroBubble"}
"""Classes of torch.distributed.pipelining.schedules."""
TWO_STAGES = {"zbv": "ZBVZeroBubble", "dualpipe": "DualPipeV"}
Settings = dict[str, object]


def torchtitan_program(plan: Plan, *, steps: int | None) -> Program:
    """Describe ``python -m torchtitan.train`` under torchrun, and the module that it reads.

    Raises:
        InputError: torchtitan cannot run the plan.
    """
    job, layout, run = plan.scenario.job, plan.layout, run_of(plan, steps)
    flavour = flavour_of(job.model)
    _refuse(job, layout)
    recompute, notes = _recompute(job, layout)
    notes += _notes(layout, job)
    content = render(
        "torchtitan.py.j2",
        plan=plan,
        flavour=flavour,
        function=FUNCTION,
        notes=notes,
        parallelism=parallelism(job, layout),
        training=training(job, layout, run),
        checkpoint=checkpoint(run),
        recompute=recompute,
    )
    return Program(
        trainer=TRAINER,
        words=("-m", "torchtitan.train", "--module", MODULE, "--config", FUNCTION),
        files={f"{MODULE}.py": content},
        environment={"PYTORCH_ALLOC_CONF": "expandable_segments:True"},
        notes=tuple(notes),
    )


def _refuse(job: Job, layout: Layout) -> None:
    if layout.etp > 1:
        raise refuse(
            TRAINER, f"it has no tensor parallelism inside experts, etp is {layout.etp}", "pin etp=1", "layout.etp"
        )
    if job.precision not in ("bf16", "fp32"):
        raise refuse(
            TRAINER,
            f"{job.precision} is a set of converters of each model in it, which is not emitted",
            "emit bf16 and add the converters",
            "job.precision",
        )
    if job.tuning == "lora" or job.optimizer != "adamw":
        raise refuse(TRAINER, "only full training with AdamW is emitted", "set tuning: full, optimizer: adamw", "job")
    if layout.ep > 1 and (layout.dp * layout.cp * layout.tp) % layout.ep:
        raise refuse(TRAINER, f"ep {layout.ep} does not divide dp x cp x tp", "pin another ep", "layout.ep")
    if layout.pp == 1:
        return
    if layout.schedule in ("zb-h1", "zb-h2") or (layout.schedule == "dualpipe" and layout.vpp != 2):
        raise refuse(
            TRAINER,
            f"it has no {layout.schedule} with {layout.vpp} stages a rank",
            "pin schedule=1f1b, interleaved or zbv",
            "layout.schedule",
        )
    if layout.schedule in TWO_STAGES and layout.vpp != 2:
        raise refuse(TRAINER, f"{layout.schedule} holds two stages a rank", "pin vpp=2", "layout.vpp")


def parallelism(job: Job, layout: Layout) -> Settings:
    """The fields of ParallelismConfig."""
    replicated = layout.optimizer_sharding == "none"
    settings: Settings = {
        "data_parallel_replicate_degree": layout.dp if replicated else layout.dp_replicate,
        "data_parallel_shard_degree": 1 if replicated else layout.dp // layout.dp_replicate,
        "fsdp_reshard_after_forward": "always" if layout.optimizer_sharding == "zero3" else "never",
        "tensor_parallel_degree": layout.tp,
        "enable_sequence_parallel": layout.sequence_parallel,
        "context_parallel_degree": layout.cp,
        "expert_parallel_degree": layout.ep,
        "pipeline_parallel_degree": layout.pp,
    }
    if layout.pp == 1:
        return settings
    return settings | {
        "pipeline_parallel_schedule": (SCHEDULES | TWO_STAGES)[layout.schedule],
        "num_pp_microbatches": layout.num_microbatches(job),
        "module_fqns_per_model_part": modules_by_stage(job, layout),
    }


def modules_by_stage(job: Job, layout: Layout) -> list[list[str]]:
    """Names of the modules of every virtual stage, in model order."""
    counts = [len(letters) for letters in stage_letters(job.model, layout)]
    stages, first = [], 0
    for count in counts:
        stages.append([f"layers.{layer}" for layer in range(first, first + count)])
        first += count
    stages[0].insert(0, "tok_embeddings")
    stages[-1] += ["norm", "lm_head"]
    return stages


def training(job: Job, layout: Layout, run: Run) -> Settings:
    """The fields of TrainingConfig. Batches are counted in tokens there."""
    return {
        "num_tokens_per_microbatch_per_dp_rank": layout.micro_batch_size * job.seq_length,
        "num_tokens_per_train_step": job.tokens_per_step,
        "max_context_length": job.seq_length,
        "steps": run.steps,
        "mixed_precision_param": "bfloat16" if job.precision == "bf16" else "float32",
        "disable_cuda_graphs": layout.pp > 1 or layout.ep > 1,
    }


def checkpoint(run: Run) -> Settings:
    """The fields of CheckpointManager.Config."""
    if run.interval_steps is None:
        return {"enable": False}
    mode = "async_with_pinned_mem" if run.asynchronous else "disabled"
    return {"enable": True, "interval": run.interval_steps, "async_mode": mode}


def _recompute(job: Job, layout: Layout) -> tuple[str | None, list[str]]:
    letters = "".join(stage_letters(job.model, layout))
    if "f" in letters:
        some = f"the plan recomputes {letters.count('f')} of {len(letters)} layers in full, torchtitan all or none"
        return "FullAC", [] if set(letters) == {"f"} else [f"{some}, so all: no more memory, a slower step"]
    if "s" not in letters:
        return None, []
    if set(layout.recompute_modules) == {"half_of_matmuls"}:
        return "SelectiveAC", []
    planned = ", ".join(layout.recompute_modules)
    return "SelectiveAC", [f"the plan recomputes {planned}; torchtitan chooses by operation, every second product"]


def _notes(layout: Layout, job: Job) -> list[str]:
    notes = []
    if layout.optimizer_sharding == "zero1" and layout.dp > 1:
        notes.append(
            "torchtitan has no ZeRO-1: FSDP2 that keeps weights gathered between forward and backward shards gradients "
            "and weights too, with less memory than planned and other communication"
        )
    if layout.optimizer_sharding == "none" and layout.dp > 1 and layout.pp * layout.tp > 1:
        notes.append("replicas without sharding beside tp or pp: check that this torchtitan supports it")
    if layout.pp == 1 and layout.num_microbatches(job) > 1:
        notes.append(
            f"{layout.num_microbatches(job)} micro-batches are gradient accumulation, by num_tokens_per_train_step"
        )
    notes.append(
        "data, tokenizer and the recipe of the optimizer are those of torchtitan's own configuration: set yours"
    )
    return notes
