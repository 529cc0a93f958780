"""A plan as the command line of Megatron-LM's pretrain_gpt.py.

Names of flags and what they exclude: Megatron-LM d98e8a6 (2026-08-22), megatron/training/arguments.py and the
dataclasses that it builds flags from.
"""

from __future__ import annotations

from planner.plan import Plan
from runtime.emit.launch import Program
from runtime.emit.megatron_layout import layout_string, recomputing
from runtime.emit.megatron_model import TRAINER, Flags, model_flags
from runtime.emit.recipe import LEARNING_RATE, Run, refuse, run_of, where_to_find
from runtime.emit.scripts import render
from runtime.emit.stages import equal_stages
from scenarios.job import Job
from scenarios.layout import Axis, Layout

ORDERS: dict[tuple[Axis, ...], bool] = {("tp", "cp", "ep", "dp", "pp"): False, ("tp", "cp", "ep", "pp", "dp"): True}
"""Rank orders that Megatron-LM lays out, and whether each needs --use-tp-pp-dp-mapping (initialize.py)."""
MODULES = {"core_attn", "layernorm", "mla_up_proj", "mlp", "moe", "shared_experts"}
"""What selective recompute knows under the same name (transformer_config.py)."""
STRATEGIES = {"zero2": "optim_grads", "zero3": "optim_grads_params"}


def megatron_program(plan: Plan, *, steps: int | None, entry: str = "pretrain_gpt.py") -> Program:
    """Describe Megatron-LM under torchrun; its flags also stand in a file for reading.

    Raises:
        InputError: Megatron-LM cannot run the plan.
    """
    flags, notes = megatron_flags(plan, steps=steps)
    notes += where_to_find(entry)
    arguments = [word for flag, value in flags.items() for word in (flag, *(value or "").split())]
    listing = render("megatron_args.sh.j2", flags=flags, notes=notes, plan=plan)
    fsdp = "--use-megatron-fsdp" in flags
    environment = {} if fsdp else {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}  # FSDP refuses 1, tp and sp want it
    return Program(
        trainer="megatron",
        words=(entry, *arguments),
        files={"megatron_args.sh": listing},
        environment=environment,
        notes=tuple(notes),
    )


def megatron_flags(plan: Plan, *, steps: int | None) -> tuple[Flags, list[str]]:
    """All flags of a plan in a stable order, and what Megatron-LM does not do as planned.

    Raises:
        InputError: Megatron-LM cannot run the plan.
    """
    job, layout, run = plan.scenario.job, plan.layout, run_of(plan, steps)
    _refuse(job, layout)
    model, notes = model_flags(job.model, job.seq_length)
    flags = model | _parallel_flags(job, layout)
    recompute, recompute_notes = _recompute_flags(job, layout)
    sharding, sharding_notes = _sharding_flags(job, layout)
    flags |= recompute | sharding | _batch_flags(job, layout, run) | _precision_flags(job) | _save_flags(run, sharding)
    notes += recompute_notes + sharding_notes
    if job.precision == "fp8":
        notes.append("the plan's fp8 is emitted with Megatron's default recipe: choose with --fp8-recipe")
    notes.append(
        "the data is synthetic (--mock-data) and the learning rate a placeholder: a plan knows neither; give your own"
    )
    return flags, notes


def _refuse(job: Job, layout: Layout) -> None:
    if layout.pp > 1 and layout.schedule not in ("1f1b", "interleaved"):
        raise refuse(
            TRAINER,
            f"it has no {layout.schedule} schedule, only 1f1b and interleaved",
            "plan again with --pin schedule=interleaved or --pin schedule=1f1b",
            "layout.schedule",
        )
    if tuple(layout.rank_order) not in ORDERS:
        known = " or ".join(" ".join(order) for order in ORDERS)
        raise refuse(
            TRAINER,
            f"it lays ranks out as {known}, not as {' '.join(layout.rank_order)}",
            "pin one of these rank orders",
            "layout.rank_order",
        )
    if job.tuning == "lora":
        raise refuse(TRAINER, "pretrain_gpt.py trains no adapters", "emit for bridge", "job.tuning")
    if layout.sequence_parallel and layout.tp == 1:
        raise refuse(TRAINER, "sequence parallelism needs tp", "set sequence_parallel: false", "layout")
    unknown = set(layout.recompute_modules) - MODULES
    if layout.recompute == "selective" and unknown:
        raise refuse(
            TRAINER,
            f"selective recompute of {', '.join(sorted(unknown))} has no name in it",
            f"use {', '.join(sorted(MODULES))}",
            "layout.recompute_modules",
        )
    if layout.optimizer_sharding in STRATEGIES and layout.pp > 1:
        raise refuse(
            TRAINER, "Megatron-FSDP with a pipeline is not emitted", "pin pp=1 or zero1", "layout.optimizer_sharding"
        )
    if layout.ep > 1 and layout.tp > 1 and not layout.sequence_parallel:
        raise refuse(
            TRAINER, "ep with tp needs sequence parallelism", "pin sequence_parallel=true", "layout.sequence_parallel"
        )


CONTEXT_EXCHANGES = {"all-gather": "all_gather", "all-to-all": "a2a"}
"""Megatron-Core's words for how the ranks of a context-parallel group exchange."""


def _parallel_flags(job: Job, layout: Layout) -> Flags:
    flags: Flags = {
        "--tensor-model-parallel-size": str(layout.tp),
        "--pipeline-model-parallel-size": str(layout.pp),
        "--context-parallel-size": str(layout.cp),
        "--expert-model-parallel-size": str(layout.ep),
        "--expert-tensor-parallel-size": str(layout.etp),
    }
    if layout.cp > 1 and layout.cp_comm != "ring":
        flags["--cp-comm-type"] = CONTEXT_EXCHANGES[layout.cp_comm]
    if layout.dp_replicate > 1 and layout.optimizer_sharding != "none":
        flags["--num-distributed-optimizer-instances"] = str(layout.dp_replicate)
    if layout.sequence_parallel:
        flags["--sequence-parallel"] = None
    if ORDERS[tuple(layout.rank_order)]:
        flags["--use-tp-pp-dp-mapping"] = None
    if layout.pp > 1 and not equal_stages(job.model, layout):
        flags["--pipeline-model-parallel-layout"] = layout_string(job.model, layout)
    elif layout.vpp > 1:
        flags["--num-virtual-stages-per-pipeline-rank"] = str(layout.vpp)
    if layout.ep > 1:
        flags["--moe-token-dispatcher-type"] = "alltoall"
        if job.stack.moe_dispatcher == "deduplicating":
            flags |= {"--moe-token-dispatcher-type": "flex", "--moe-flex-dispatcher-backend": "deepep"}
    if job.stack.tp_overlap and layout.tp > 1:
        flags["--tp-comm-overlap"] = None
    return flags


def _recompute_flags(job: Job, layout: Layout) -> tuple[Flags, list[str]]:
    told = recomputing(job.model, layout)
    if told.granularity is None:
        return {}, []
    flags: Flags = {"--recompute-granularity": told.granularity}
    if told.granularity == "selective":
        flags["--recompute-modules"] = " ".join(layout.recompute_modules)
    else:
        flags |= {"--recompute-method": "block", "--recompute-num-layers": str(told.layers)}
    return flags, [told.note] if told.note else []


def _sharding_flags(job: Job, layout: Layout) -> tuple[Flags, list[str]]:
    overlap: Flags = {} if job.stack.dp_overlap is False else {"--overlap-grad-reduce": None}
    if layout.optimizer_sharding == "none":
        return overlap, []
    overlap |= {"--overlap-param-gather": None} if overlap else {}
    flags = {"--use-distributed-optimizer": None, **overlap}
    if layout.optimizer_sharding == "zero1":
        return flags, []
    strategy = STRATEGIES[layout.optimizer_sharding]
    note = f"{layout.optimizer_sharding} is Megatron-FSDP ({strategy}), whose checkpoints have their own format"
    return flags | {"--use-megatron-fsdp": None, "--data-parallel-sharding-strategy": strategy}, [note]


def _batch_flags(job: Job, layout: Layout, run: Run) -> Flags:
    return {
        "--micro-batch-size": str(layout.micro_batch_size),
        "--global-batch-size": str(job.global_batch_size),
        "--train-iters": str(run.steps),
        "--optimizer": "adam" if job.optimizer == "adamw" else "sgd",
        "--lr": LEARNING_RATE,
        "--tokenizer-type": "NullTokenizer",
        "--mock-data": None,
        "--attention-backend": job.attention,
    }


def _precision_flags(job: Job) -> Flags:
    kinds: dict[str, Flags] = {
        "fp32": {},
        "fp16": {"--fp16": None},
        "bf16": {"--bf16": None},
        "fp8": {"--bf16": None, "--fp8-format": "hybrid"},
        "mxfp8": {"--bf16": None, "--fp8-format": "e4m3", "--fp8-recipe": "mxfp8"},
        "nvfp4": {"--bf16": None, "--fp4-format": "e2m1", "--fp4-recipe": "nvfp4"},
    }
    flags = kinds[job.precision]
    reduced: Flags = {} if job.precision == "fp32" else {"--accumulate-allreduce-grads-in-fp32": None}
    return flags | ({"--grad-reduce-in-bf16": None} if job.gradient_precision == "bf16" else reduced)


def _save_flags(run: Run, sharding: Flags) -> Flags:
    if run.interval_steps is None:
        return {}
    flags: Flags = {
        "--save": "checkpoints",
        "--load": "checkpoints",
        "--save-interval": str(run.interval_steps),
        "--ckpt-format": "fsdp_dtensor" if "--use-megatron-fsdp" in sharding else "torch_dist",
        "--exit-signal-handler": None,
    }
    return flags | ({"--async-save": None} if run.asynchronous else {})
