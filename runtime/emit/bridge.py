"""A plan as overrides for Megatron-Bridge's run_recipe.py: the flags of Megatron-LM under Bridge's names.

The pairs are those of docs/megatron-lm-to-megatron-bridge.md and scripts/translate_mlm_to_bridge.py, Megatron-Bridge
067f987 (2026-08-22).
"""

from __future__ import annotations

from planner.plan import Plan
from runtime.emit.launch import Program
from runtime.emit.megatron import megatron_flags
from runtime.emit.megatron_model import Flags
from runtime.emit.recipe import where_to_find
from runtime.emit.scripts import render

RECIPE = "vanilla_gpt_pretrain_1gpu_h100_bf16_config"
"""A GPT decoder whose every size is overridden here."""
LATENT_RECIPE = "deepseek_v3_pretrain_1024gpu_h100_bf16_config"
"""The same for multi-head latent attention, which has a provider of its own."""
KEYS: dict[str, tuple[str, ...]] = {
    "--num-layers": ("model.num_layers",),
    "--hidden-size": ("model.hidden_size",),
    "--ffn-hidden-size": ("model.ffn_hidden_size",),
    "--num-attention-heads": ("model.num_attention_heads",),
    "--num-query-groups": ("model.num_query_groups",),
    "--kv-channels": ("model.kv_channels",),
    "--seq-length": ("model.seq_length", "dataset.seq_length"),
    "--max-position-embeddings": (),  # the provider takes seq_length for it
    "--position-embedding-type": ("model.position_embedding_type",),
    "--normalization": ("model.normalization",),
    "--vocab-size": ("tokenizer.vocab_size",),
    "--make-vocab-size-divisible-by": ("model.make_vocab_size_divisible_by",),
    "--mtp-num-layers": ("model.mtp_num_layers",),
    "--window-size": ("model.window_size",),
    "--q-lora-rank": ("model.q_lora_rank",),
    "--kv-lora-rank": ("model.kv_lora_rank",),
    "--qk-head-dim": ("model.qk_head_dim",),
    "--qk-pos-emb-head-dim": ("model.qk_pos_emb_head_dim",),
    "--v-head-dim": ("model.v_head_dim",),
    "--num-experts": ("model.num_moe_experts",),
    "--moe-router-topk": ("model.moe_router_topk",),
    "--moe-ffn-hidden-size": ("model.moe_ffn_hidden_size",),
    "--moe-layer-freq": ("model.moe_layer_freq",),
    "--moe-shared-expert-intermediate-size": ("model.moe_shared_expert_intermediate_size",),
    "--moe-token-dispatcher-type": ("model.moe_token_dispatcher_type",),
    "--moe-flex-dispatcher-backend": ("model.moe_flex_dispatcher_backend",),
    "--tensor-model-parallel-size": ("model.tensor_model_parallel_size",),
    "--pipeline-model-parallel-size": ("model.pipeline_model_parallel_size",),
    "--context-parallel-size": ("model.context_parallel_size",),
    "--cp-comm-type": ("model.cp_comm_type",),
    "--num-distributed-optimizer-instances": ("ddp.num_distributed_optimizer_instances",),
    "--expert-model-parallel-size": ("model.expert_model_parallel_size",),
    "--expert-tensor-parallel-size": ("model.expert_tensor_parallel_size",),
    "--num-virtual-stages-per-pipeline-rank": ("model.virtual_pipeline_model_parallel_size",),
    "--pipeline-model-parallel-layout": ("model.pipeline_model_parallel_layout",),
    "--recompute-granularity": ("model.recompute_granularity",),
    "--recompute-method": ("model.recompute_method",),
    "--recompute-num-layers": ("model.recompute_num_layers",),
    "--data-parallel-sharding-strategy": ("ddp.data_parallel_sharding_strategy",),
    "--micro-batch-size": ("train.micro_batch_size",),
    "--global-batch-size": ("train.global_batch_size",),
    "--train-iters": ("train.train_iters",),
    "--optimizer": ("optimizer.optimizer",),
    "--lr": ("optimizer.lr",),
    "--tokenizer-type": ("tokenizer.tokenizer_type",),
    "--attention-backend": ("model.attention_backend",),
    "--save": ("checkpoint.save",),
    "--load": ("checkpoint.load",),
    "--save-interval": ("checkpoint.save_interval",),
    "--ckpt-format": ("checkpoint.ckpt_format",),
}
SWITCHES: dict[str, tuple[str, ...]] = {
    "--untie-embeddings-and-output-weights": ("model.share_embeddings_and_output_weights=false",),
    "--swiglu": ("model.gated_linear_unit=true", "model.activation_func=silu"),
    "--disable-bias-linear": ("model.add_bias_linear=false",),
    "--add-qkv-bias": ("model.add_qkv_bias=true",),
    "--qk-layernorm": ("model.qk_layernorm=true",),
    "--group-query-attention": (),
    "--multi-latent-attention": ("model.multi_latent_attention=true",),
    "--moe-grouped-gemm": ("model.moe_grouped_gemm=true",),
    "--moe-shared-expert-gate": ("model.moe_shared_expert_gate=true",),
    "--sequence-parallel": ("model.sequence_parallel=true",),
    "--use-tp-pp-dp-mapping": ("dist.use_tp_pp_dp_mapping=true",),
    "--use-distributed-optimizer": ("ddp.use_distributed_optimizer=true",),
    "--use-megatron-fsdp": ("ddp.use_megatron_fsdp=true",),
    "--overlap-grad-reduce": ("ddp.overlap_grad_reduce=true",),
    "--overlap-param-gather": ("ddp.overlap_param_gather=true",),
    "--tp-comm-overlap": ("model.tp_comm_overlap=true",),
    "--accumulate-allreduce-grads-in-fp32": ("ddp.grad_reduce_in_fp32=true",),
    "--grad-reduce-in-bf16": ("ddp.grad_reduce_in_fp32=false",),
    "--exit-signal-handler": ("train.exit_signal_handler=true",),
    "--async-save": ("checkpoint.async_save=true",),
    "--mock-data": (),  # run_recipe.py --dataset mock
}
PRECISIONS = {
    "fp32": "null",
    "fp16": "fp16_mixed",
    "bf16": "bf16_mixed",
    "fp8": "bf16_with_fp8_current_scaling_mixed",
    "mxfp8": "bf16_with_mxfp8_mixed",
    "nvfp4": "bf16_with_nvfp4_mixed",
}
NUMERIC = ("--fp16", "--bf16", "--fp8-format", "--fp8-recipe", "--fp4-format", "--fp4-recipe")
"""What the name of a mixed precision stands for."""


def bridge_program(plan: Plan, *, steps: int | None, entry: str = "scripts/training/run_recipe.py") -> Program:
    """Describe Megatron-Bridge under torchrun; its overrides also stand in a file for reading.

    Raises:
        InputError: Megatron-LM cannot run the plan, and so Bridge cannot.
    """
    flags, notes = megatron_flags(plan, steps=steps)
    overrides = [*bridge_overrides(flags), f"mixed_precision={PRECISIONS[plan.scenario.job.precision]}"]
    if plan.layout.vpp > 1 and "--pipeline-model-parallel-layout" in flags:
        overrides.append(f"model.virtual_pipeline_model_parallel_size={plan.layout.vpp}")
    notes = [_in_bridges_words(note) for note in notes] + where_to_find(entry)
    recipe = LATENT_RECIPE if "--multi-latent-attention" in flags else RECIPE
    if recipe == LATENT_RECIPE:
        notes.append(f"what is not overridden, such as the rules of the router, is that of {recipe}")
    listing = render("bridge_overrides.sh.j2", overrides=overrides, notes=notes, plan=plan, recipe=recipe)
    return Program(
        trainer="bridge",
        words=(entry, "--recipe", recipe, "--mode", "pretrain", "--dataset", "mock", *overrides),
        files={"bridge_overrides.sh": listing},
        notes=tuple(notes),
    )


def bridge_overrides(flags: Flags) -> list[str]:
    """Rename the flags of Megatron-LM.

    Raises:
        KeyError: a flag without a counterpart, which would be a mistake of headway.
    """
    overrides: list[str] = []
    for flag, value in flags.items():
        if flag in NUMERIC:
            continue
        if value is None:
            overrides += SWITCHES[flag]
        elif flag == "--recompute-modules":
            overrides.append(f"model.recompute_modules=[{','.join(value.split())}]")
        elif flag == "--pipeline-model-parallel-layout":
            overrides.append(f"model.pipeline_model_parallel_layout='{value}'")  # Hydra's grammar: quote ( ) | *
        else:
            overrides += [f"{key}={_hydra(value)}" for key in KEYS[flag]]
    return overrides


def _in_bridges_words(note: str) -> str:
    words = {
        "--rotary-base": "model.rotary_base",
        "--mock-data": "--dataset mock",
        "--moe-router-*": "model.moe_router_*",
        "Megatron's default recipe: choose with --fp8-recipe": "current scaling: choose another mixed_precision",
    }
    for flag, word in words.items():
        note = note.replace(flag, word)
    return note


def _hydra(value: str) -> str:
    if value.startswith("([") or "," in value:  # a list of Megatron's own small language, or a tuple
        return "[" + ",".join(map(str, _expanded(value))) + "]"
    return value


def _expanded(value: str) -> list[int]:
    if not value.startswith("(["):
        return [int(number) for number in value.split(",")]
    runs = [run.split("]*") for run in value.strip("()").split("+")]
    return [int(kind.strip("[")) for kind, count in runs for _ in range(int(count))]
