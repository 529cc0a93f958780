"""What this runtime can execute: every reason why it cannot is told before anything starts."""

from __future__ import annotations

from collections.abc import Iterator

from runtime.request import Recipe
from scenarios.job import Job
from scenarios.layout import Layout
from scenarios.model import Attention, Layer, Mla, Mlp, ModelSpec, Moe
from topologies.errors import InputError

RECOMPUTED_MODULES = ("core_attn", "mlp", "moe")
"""What selective recompute can repeat."""
SPLIT_SCHEDULES = ("zb-h1", "zbv")
"""Schedules that compute the gradients of weights apart."""
ONE_STAGE_SCHEDULES = ("gpipe", "1f1b", "zb-h1")
"""Schedules that hold one stage on each pipeline rank."""


def check_runnable(job: Job, layout: Layout) -> None:
    """Refuse what cannot run.

    Raises:
        InputError: names the part of the model, job or layout that this runtime does not execute, and what to do.
    """
    for reasons in (model_reasons(job.model), job_reasons(job), layout_reasons(job, layout)):
        for key, reason, hint in reasons:
            raise InputError(f"this plan cannot run here: {reason}", hint=hint, key=key)


def check_recipe(job: Job, layout: Layout, recipe: Recipe, *, on_gpu: bool) -> None:
    """Refuse options that do not go with a job and its layout.

    Raises:
        InputError: names the option, and what to do.
    """
    chosen = {
        "--compile": (recipe.compile is not None, _compile_reasons(job, layout, recipe)),
        "--v-order": (recipe.v_order != "zbv", _order_reasons(job, layout)),
        "--split-attention": (recipe.split_attention != "own", _attention_reasons(job, layout, on_gpu)),
    }
    for option, (used, reasons) in chosen.items():
        for wrong, reason in reasons if used else ():
            if wrong:
                raise InputError(f"this plan cannot run here: {reason}", hint=f"leave {option} out", key=option)


Rule = tuple[bool, str]
"""Whether it is broken, and what is wrong then."""


def _compile_reasons(job: Job, layout: Layout, recipe: Recipe) -> Iterator[Rule]:
    graphs = recipe.compile == "reduce-overhead"
    sharded = layout.optimizer_sharding in ("zero2", "zero3") and layout.dp * layout.cp > 1
    kinds = job.model.layers
    split = layout.pp > 1 and layout.schedule in SPLIT_SCHEDULES
    again = layout.recompute != "none" or any(stage.recompute_layers for stage in layout.stages)
    yield split, f"{layout.schedule} splits the backward pass, and compiled layers cannot be split"
    yield (
        layout.tp > 1 and again,
        "torch 2.13 cannot compile recomputed layers whose weights are split over tp: it would keep a device mesh for "
        "the backward pass as if it were a tensor",
    )
    yield (
        layout.tp > 1 and any(one.norms == 1 for one in kinds),
        "torch 2.13 recurses without end when it compiles layers with one norm whose weights are split over tp",
    )
    sparse = any(isinstance(one.feed_forward, Moe) for one in kinds)
    yield sparse, "torch 2.13 cannot compile layers whose experts take as many tokens as a router sends them"
    yield (
        graphs and sharded,
        "FSDP gathers weights into other memory each time; CUDA graphs replay the same addresses",
    )
    yield graphs and layout.pp > 1, "pipelines keep results of several micro-batches, which CUDA graphs overwrite"


def _order_reasons(job: Job, layout: Layout) -> Iterator[Rule]:
    yield (
        layout.pp == 1 or layout.schedule != "zbv",
        f"dualpipev is an order of the V of stages that the schedule zbv has, and this is {layout.schedule}",
    )
    count = layout.num_microbatches(job)
    yield count < 2 * layout.pp, f"dualpipev needs 2 pp = {2 * layout.pp} micro-batches at least, there are {count}"


def _attention_reasons(job: Job, layout: Layout, on_gpu: bool) -> Iterator[Rule]:
    yield layout.cp == 1, "torch's context_parallel splits sequences over cp, which is 1"
    yield not on_gpu, "torch's context_parallel has no sharding rule for the attention kernel of CPUs, only for CUDA's"
    yield (
        layout.cp_comm == "all-to-all",
        "torch's context_parallel moves keys and values; cp_comm: all-to-all moves heads",
    )
    hidden = any(
        isinstance(one.mixer, Attention) and (one.mixer.window or one.mixer.chunk or one.mixer.sinks)
        for one in job.model.layers
    )
    yield hidden, "torch's context_parallel hides the future only: no windows, chunks or sinks"


Reason = tuple[str, str, str]
"""Key, what is wrong, what to do."""


def model_reasons(model: ModelSpec) -> Iterator[Reason]:
    """Say what of a model the transformer of this runtime does not build."""
    other = "choose a decoder of attention or mla with mlp or moe layers, such as llama-30m or moe-50m"
    for name, kind in model.layer_kinds.items():
        if model.kind_counts.get(name):
            for reason in _layer_reasons(kind):
                yield f"model.layer_kinds.{name}", reason, other
    missing = {
        "embedding_size": model.embedding_size not in (None, model.hidden_size),
        "final_norm": not model.final_norm,
    }
    for key, present in missing.items():
        if present:
            yield f"model.{key}", f"{key} = {getattr(model, key)} is not built by the runtime's transformer", other
    if model.mtp_layers:
        reason = f"multi-token prediction (mtp_layers = {model.mtp_layers}) is not trained"
        yield "model.mtp_layers", reason, "set num_nextn_predict_layers: 0 in its config"


def _layer_reasons(kind: Layer) -> Iterator[str]:
    mixer, feed_forward = kind.mixer, kind.feed_forward
    if not isinstance(mixer, Attention | Mla) or feed_forward is None or kind.norms not in (1, 2, 4):
        built = "only attention or mla with mlp or moe and 1, 2 or 4 norms"
        yield f"layers of the kind {kind.kind} with {kind.norms} norms are not built, {built}"
    elif isinstance(mixer, Mla):
        if mixer.indexer_heads:
            yield "the indexer of sparse attention (indexer_heads) is not built"
        if mixer.qk_rope_head_dim % 2:
            yield f"rotary positions need an even qk_rope_head_dim, this is {mixer.qk_rope_head_dim}"
    elif mixer.qk_norm_whole:
        yield "a norm over all query and key heads (qk_norm_whole) is not built"
    elif mixer.head_dim % 2:
        yield f"rotary positions need an even head_dim, this is {mixer.head_dim}"


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
    rows = job.model.position_embeddings
    if 0 < rows < job.seq_length:
        yield "job.seq_length", f"the model has {rows} learned positions, not {job.seq_length}", "shorten the sequences"
    if job.optimizer != "adamw":
        yield "job.optimizer", f"only AdamW is executed, not {job.optimizer}", "set optimizer: adamw"
    if job.attention != "flash":
        yield "job.attention", "only fused attention (SDPA) is executed", "set attention: flash"


def layout_reasons(job: Job, layout: Layout) -> Iterator[Reason]:
    """Say what of a layout is not executed."""
    if job.global_batch_size % (layout.dp * layout.micro_batch_size):
        yield (
            "layout.micro_batch_size",
            f"global batch {job.global_batch_size} is not a multiple of dp {layout.dp} x micro-batch "
            f"{layout.micro_batch_size}",
            "choose a divisor",
        )
        return
    yield from _split_reasons(job, layout)
    yield from _expert_reasons(job, layout)
    yield from _pipeline_reasons(job, layout)
    if layout.recompute == "selective" and (others := set(layout.recompute_modules) - set(RECOMPUTED_MODULES)):
        yield (
            "layout.recompute_modules",
            f"{', '.join(sorted(others))} cannot be recomputed alone, only {', '.join(RECOMPUTED_MODULES)}",
            "use recompute: full",
        )


def _split_reasons(job: Job, layout: Layout) -> Iterator[Reason]:
    """Everything that tp and cp divide must divide."""
    sparse = any(isinstance(layer.feed_forward, Moe) for layer in job.model.layers)
    heads = {layer.mixer.heads for layer in job.model.layers if isinstance(layer.mixer, Attention | Mla)}
    divided: dict[str, set[int]] = {"vocab_size": {job.model.vocab_size}, "heads": heads}
    divided["position_embeddings"] = {job.model.position_embeddings}
    divided["kv_heads"] = {layer.mixer.kv_heads for layer in job.model.layers if isinstance(layer.mixer, Attention)}
    divided["ffn_hidden_size"] = {width for layer in job.model.layers if (width := _dense_width(layer)) is not None}
    if layout.sequence_parallel or sparse:
        divided["seq_length / cp"] = {job.seq_length // layout.cp}
    for name, sizes in divided.items():
        for size in sorted(sizes):
            if size % layout.tp:
                yield "layout.tp", f"{name} {size} is not divisible by tp {layout.tp}", "choose a tp that divides it"
    if layout.cp > 1 and job.seq_length % (2 * layout.cp):
        reason = f"seq_length {job.seq_length} does not divide into 2 x cp = {2 * layout.cp} blocks"
        yield "layout.cp", reason, "choose a cp that divides it"
    if layout.cp > 1 and layout.cp_comm == "all-to-all" and any(one % (layout.tp * layout.cp) for one in heads):
        reason = f"{max(heads)} heads do not divide over tp {layout.tp} x cp {layout.cp}, which exchange heads"
        yield "layout.cp_comm", reason, "use cp_comm: ring"


def _dense_width(layer: Layer) -> int | None:
    block = layer.feed_forward
    if isinstance(block, Mlp):
        return block.ffn_hidden_size
    return block.shared_ffn_hidden_size if isinstance(block, Moe) else None


def _expert_reasons(job: Job, layout: Layout) -> Iterator[Reason]:
    """Experts divide over ep, their width over etp, and both over the ranks of a stage."""
    blocks = {layer.feed_forward for layer in job.model.layers if isinstance(layer.feed_forward, Moe)}
    both, ranks = layout.ep * layout.etp, layout.dp * layout.cp * layout.tp
    if both > 1 and not blocks:
        yield "layout.ep", f"ep {layout.ep} x etp {layout.etp} spread experts, and the model has none", "set ep: 1"
    if layout.dp_replicate > 1 and layout.optimizer_sharding != "none" and (ranks // both) % layout.dp_replicate:
        reason = f"{ranks // both} copies of the experts do not divide into dp_replicate {layout.dp_replicate} groups"
        yield "layout.dp_replicate", reason, "choose a smaller ep or dp_replicate: 1"
    if ranks % both:
        reason = f"ep {layout.ep} x etp {layout.etp} does not divide the {ranks} ranks of a stage"
        yield "layout.ep", reason, "choose an ep that divides dp x cp x tp"
    if layout.tp % layout.etp:
        yield "layout.etp", f"etp {layout.etp} does not divide tp {layout.tp}", "set etp: 1"
    for block in blocks:
        if block.num_experts % layout.ep:
            yield "layout.ep", f"{block.num_experts} experts do not divide over ep {layout.ep}", "choose a divisor"
        if block.ffn_hidden_size % layout.etp:
            reason = f"the expert's size {block.ffn_hidden_size} does not divide over etp {layout.etp}"
            yield "layout.etp", reason, "choose a divisor"


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
    if layout.schedule == "zb-h2":
        yield "layout.schedule", "zb-h2 is not executed", "use zb-h1, zbv or 1f1b"
    if layout.schedule == "dualpipe":
        yield (
            "layout.schedule",
            "dualpipe (two copies of the model, both directions) is not executed; torch has its half, DualPipeV",
            "use zbv, with --v-order dualpipev",
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
    if layout.schedule in SPLIT_SCHEDULES and layout.recompute != "none":
        yield (
            "layout.recompute",
            f"{layout.schedule} splits the backward pass, which cannot be joined with recompute",
            "use recompute: none",
        )
    if layout.schedule in SPLIT_SCHEDULES and layout.optimizer_sharding == "zero3":
        yield (
            "layout.optimizer_sharding",
            f"{layout.schedule} runs a part of the backward pass after FSDP has let the weights go (zero3)",
            "use zero1 or zero2",
        )
    if layout.schedule in ("zb-h1", "zbv", "1f1b") and num_microbatches < layout.pp:
        yield (
            "layout.micro_batch_size",
            f"{layout.schedule} needs at least pp {layout.pp} micro-batches, there are {num_microbatches}",
            "use a smaller micro-batch or gpipe",
        )
