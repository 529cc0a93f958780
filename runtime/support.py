"""What this runtime can execute: every reason why it cannot is told before anything starts."""

from __future__ import annotations

from collections.abc import Iterator

from scenarios.job import Job
from scenarios.layout import Layout
from scenarios.model import Attention, Layer, Mlp, ModelSpec
from topologies.errors import InputError

ONE_STAGE_SCHEDULES = ("gpipe", "1f1b", "zb-h1")
"""Schedules that hold one stage on each pipeline rank."""


def check_runnable(job: Job, layout: Layout) -> None:
    """Refuse what cannot run.

    Raises:
        InputError: names the part of the model, job or layout that this runtime does not execute, and what to do.
    """
    known = (model_reasons(job.model, job.seq_length), job_reasons(job), layout_reasons(job, layout))
    for reasons in (*known, copies_reasons(layout)):
        for key, reason, hint in reasons:
            raise InputError(f"this plan cannot run here: {reason}", hint=hint, key=key)


Reason = tuple[str, str, str]
"""Key, what is wrong, what to do."""


def model_reasons(model: ModelSpec, seq_length: int) -> Iterator[Reason]:
    """Say what of a model the transformer of this runtime does not build."""
    dense = "choose a dense decoder with attention + mlp layers, such as llama-30m"
    for name, kind in model.layer_kinds.items():
        if model.kind_counts.get(name):
            for reason in _layer_reasons(kind, seq_length):
                yield f"model.layer_kinds.{name}", reason, dense
    missing = {
        "norm_bias": model.norm_bias,
        "embedding_norm": model.embedding_norm,
        "embedding_size": model.embedding_size not in (None, model.hidden_size),
        "position_embeddings": model.position_embeddings > 0,
        "head_bias": model.head_bias,
        "mtp_layers": model.mtp_layers > 0,
        "final_norm": not model.final_norm,
    }
    for key, present in missing.items():
        if present:
            yield f"model.{key}", f"{key} = {getattr(model, key)} is not built by the runtime's transformer", dense


def _layer_reasons(kind: Layer, seq_length: int) -> Iterator[str]:
    mixer, feed_forward = kind.mixer, kind.feed_forward
    if not isinstance(mixer, Attention) or not isinstance(feed_forward, Mlp) or kind.norms != 2:
        yield f"layers of the kind {kind.kind} with {kind.norms} norms are not built, only attention+mlp with 2"
        return
    if mixer.heads % mixer.kv_heads:
        yield f"{mixer.heads} query heads are not a multiple of {mixer.kv_heads} key-value heads"
    if mixer.head_dim % 2:
        yield f"rotary positions need an even head_dim, this is {mixer.head_dim}"
    for name in ("window", "chunk"):
        span = getattr(mixer, name)
        if span is not None and span < seq_length:
            yield f"attention within a {name} of {span} tokens is not built (seq_length is {seq_length})"
    for name in ("qk_norm", "sinks"):
        if getattr(mixer, name):
            yield f"attention with {name} is not built"


def job_reasons(job: Job) -> Iterator[Reason]:
    """Say what of a job is not executed."""
    if job.precision not in ("fp32", "bf16"):
        yield "job.precision", f"training in {job.precision} is not executed, only fp32 and bf16", "set precision: bf16"
    if job.gradient_precision != "fp32":
        yield (
            "job.gradient_precision",
            "gradients are accumulated and reduced in fp32 only",
            "set gradient_precision: fp32",
        )
    if job.optimizer != "adamw":
        yield "job.optimizer", f"only AdamW is executed, not {job.optimizer}", "set optimizer: adamw"
    if job.attention != "flash":
        yield "job.attention", "only fused attention (SDPA) is executed", "set attention: flash"


def layout_reasons(job: Job, layout: Layout) -> Iterator[Reason]:
    """Say what of a layout is not executed."""
    pin = "pin another layout, for example --pin {}=1"
    for axis, name in (("cp", "context"), ("ep", "expert"), ("etp", "expert-tensor")):
        degree = getattr(layout, axis)
        if degree > 1:
            yield f"layout.{axis}", f"{name} parallelism ({axis} = {degree}) is not executed yet", pin.format(axis)
    if job.global_batch_size % (layout.dp * layout.micro_batch_size):
        yield (
            "layout.micro_batch_size",
            f"global batch {job.global_batch_size} is not a multiple of dp {layout.dp} x micro-batch "
            f"{layout.micro_batch_size}",
            "choose a divisor",
        )
        return
    yield from _tensor_reasons(job, layout)
    yield from _pipeline_reasons(job, layout)


def copies_reasons(layout: Layout) -> Iterator[Reason]:
    """Say what is only predicted so far: copies of shards, and ZB-H2."""
    if layout.dp_replicate > 1:
        yield "layout.dp_replicate", f"{layout.dp_replicate} copies of the shards are not executed", "set it to 1"
    if layout.pp > 1 and layout.schedule == "zb-h2":
        yield "layout.schedule", "zb-h2 is not executed", "use zb-h1, zbv or 1f1b"


def _tensor_reasons(job: Job, layout: Layout) -> Iterator[Reason]:
    divided: dict[str, int] = {"vocab_size": job.model.vocab_size}
    for layer in job.model.layer_kinds.values():
        if isinstance(layer.mixer, Attention) and isinstance(layer.feed_forward, Mlp):
            divided |= {"heads": layer.mixer.heads, "kv_heads": layer.mixer.kv_heads}
            divided |= {"ffn_hidden_size": layer.feed_forward.ffn_hidden_size}
    if layout.sequence_parallel:
        divided["seq_length"] = job.seq_length
    for name, size in divided.items():
        if size % layout.tp:
            yield "layout.tp", f"{name} {size} is not divisible by tp {layout.tp}", "choose a tp that divides it"


def _pipeline_reasons(job: Job, layout: Layout) -> Iterator[Reason]:
    slots, layers = layout.pp * layout.vpp, job.model.num_layers
    num_microbatches = layout.num_microbatches(job)
    if layout.stages and (len(layout.stages) != slots or sum(stage.layers for stage in layout.stages) != layers):
        held = "+".join(str(stage.layers) for stage in layout.stages)
        yield "layout.stages", f"{held} layers do not fill {slots} stages of {layers} layers", "correct the stages"
    inner = layout.stages[1:-1] if layout.stages else ()
    if any(stage.layers == 0 for stage in inner):
        yield "layout.stages", "a stage between first and last holds no layer", "give every inner stage a layer"
    if layout.pp == 1:
        if layout.vpp > 1:
            yield "layout.vpp", f"vpp {layout.vpp} without a pipeline has no meaning", "set vpp: 1"
        return
    if layout.schedule == "dualpipe":
        yield (
            "layout.schedule",
            "dualpipe (two copies of the model, both directions) is not executed",
            "use zbv or 1f1b",
        )
    if layout.schedule in ONE_STAGE_SCHEDULES and layout.vpp > 1:
        yield "layout.vpp", f"{layout.schedule} holds one stage a rank, vpp is {layout.vpp}", "use interleaved"
    if layout.schedule == "interleaved" and layout.vpp == 1:
        yield "layout.vpp", "interleaved needs vpp of at least 2", "use 1f1b"
    if layout.schedule == "zbv" and layout.vpp != 2:
        yield "layout.vpp", f"zbv holds two stages a rank, vpp is {layout.vpp}", "set vpp: 2"
    rounds = max(1, num_microbatches // layout.pp)
    if layout.schedule in ("interleaved", "zb-h1") and num_microbatches % rounds:
        yield (
            "layout.schedule",
            f"{layout.schedule} needs micro-batches in rounds of pp: {num_microbatches} do not divide into {rounds}",
            "choose a multiple of pp",
        )
    if layout.schedule in ("zb-h1", "zbv") and layout.recompute != "none":
        yield (
            "layout.recompute",
            f"{layout.schedule} splits the backward pass, which cannot be joined with recompute",
            "use recompute: none",
        )
    if layout.schedule in ("zb-h1", "zbv", "1f1b") and num_microbatches < layout.pp:
        yield (
            "layout.micro_batch_size",
            f"{layout.schedule} needs at least pp {layout.pp} micro-batches, there are {num_microbatches}",
            "use a smaller micro-batch or gpipe",
        )
