"""From the layout that a published row states to a Layout; what it leaves open is assumed and said, or refused."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from scenarios.layout import ContextExchange, Layout, RecomputeModule, Schedule, Sharding, Stage
from scenarios.model import ModelSpec, Moe
from simulator.published import PublishedRun
from simulator.stages import stage_layers
from topologies.errors import InputError

SCHEDULE_WORDS: tuple[tuple[str, Schedule], ...] = (
    ("dualpipe", "dualpipe"),
    ("zb-v", "zbv"),
    ("zb-1p", "zb-h1"),
    ("zb-2p", "zb-h2"),
    ("zero-bubble", "zb-h1"),
    ("interleaved", "interleaved"),
    ("gpipe", "gpipe"),
    ("1f1b", "1f1b"),
    ("none", "1f1b"),
)
MODULE_WORDS: tuple[tuple[str, tuple[RecomputeModule, ...]], ...] = (
    (r"per-op|selective ac|selective op", ("half_of_matmuls",)),
    (r"core_attn|attention core", ("core_attn",)),
    (r"layernorm|rmsnorm|\bnorm\b", ("layernorm",)),
    (r"moe_act|\bact\b", ("act",)),
    (r"mla_up_proj|mla up", ("mla_up_proj",)),
    (r"shared_expert", ("shared_experts",)),
    (r"except_mlp|(?<![\w-])mlp\b", ("mlp",)),
    (r"(?<![\w])moe(?!_act| dispatcher|\w)", ("moe",)),
    (r"minimal_flash", ("layernorm", "act")),
)
"""Words in the details of selective recompute."""

CONTEXT_WORDS: tuple[tuple[str, ContextExchange], ...] = (
    (r"ulysses|\ba2a\b", "all-to-all"),
    (r"llama 3 herd|torchtitan", "all-gather"),
)
"""Words in the source and notes of a row. Llama 3 gathers keys and values (section 3.3.2 of the paper); so does
torchtitan unless told otherwise (context_parallel_rotate_method). Megatron-Core goes around a ring."""

LAYER_SHARES: tuple[tuple[str, float], ...] = ((r"every other layer", 0.5), (r"fraction not in readme", 1 / 3))
"""Selective recompute that repeats a share of whole layers; where IBM's fms-fsdp states none, its recipes use 1/3."""

MOST_CHUNKS = 8
"""Virtual stages that are assumed at most where a schedule is interleaved and their number is not stated."""


def layout_of(run: PublishedRun, model: ModelSpec, gpus: int, tuned: bool) -> tuple[Layout, int, list[str]]:
    """Build the layout and the global batch of a row, and say what was assumed.

    Raises:
        InputError: a degree is missing, or the layout is impossible.
    """
    stated, assumed = run.layout, list[str]()
    tp, pp = _degree(stated, "tp"), _degree(stated, "pp")
    cp = _optional(stated, "cp", assumed)
    model_ranks = tp * pp * cp
    if gpus % model_ranks:
        raise InputError(f"tp {tp} x pp {pp} x cp {cp} does not divide {gpus} GPUs", key="layout")
    dp = stated.get("dp") or gpus // model_ranks
    if dp * model_ranks != gpus:
        raise InputError(f"tp {tp} x pp {pp} x cp {cp} x dp {dp} is not {gpus} GPUs", key="layout")
    ep, etp = _experts(stated, model, tp, cp, dp, assumed)
    batch, micro = _batch(stated, dp, assumed)
    if pp > model.num_layers:
        raise InputError(f"pp {pp} is more than the {model.num_layers} layers", key="layout.pp")
    schedule, vpp = _pipeline(stated, model, pp, assumed)
    sequence_parallel = stated.get("sp")
    if sequence_parallel is None:
        sequence_parallel = False
        if tp > 1:
            assumed.append("no sequence parallelism (not stated)")
    recompute, modules, share = _recompute(stated, tuned, assumed)
    said = f"{run.source_group} {run.notes}".lower()
    copies = 1
    if "hsdp" in said and dp % (per_node := int(run.hardware.get("gpus_per_node") or 8)) == 0 and model_ranks == 1:
        copies = dp // per_node
        assumed.append(f"{copies} copies of the shards, one in each node (HSDP)")
    layout = Layout(
        tp=tp,
        cp=cp,
        pp=pp,
        dp=dp,
        ep=ep,
        etp=etp,
        vpp=vpp,
        micro_batch_size=micro,
        dp_replicate=copies,
        cp_comm=next((name for words, name in CONTEXT_WORDS if cp > 1 and re.search(words, said)), "ring"),
        sequence_parallel=bool(sequence_parallel),
        optimizer_sharding=_sharding(stated, pp, assumed),
        schedule=schedule,
        recompute=recompute,
        recompute_modules=modules,
        stages=_stages(model, pp, vpp, share),
    )
    return layout, batch, assumed


def _degree(stated: Mapping[str, Any], name: str) -> int:
    value = stated.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise InputError("is missing" if value is None else f"is {value!r}, not a degree", key=f"layout.{name}")
    return value


def _optional(stated: Mapping[str, Any], name: str, assumed: list[str]) -> int:
    if stated.get(name) is None:
        assumed.append(f"{name} 1 (not stated)")
        return 1
    return _degree(stated, name)


def _experts(
    stated: Mapping[str, Any], model: ModelSpec, tp: int, cp: int, dp: int, assumed: list[str]
) -> tuple[int, int]:
    experts = [layer.feed_forward.num_experts for layer in model.layers if isinstance(layer.feed_forward, Moe)]
    if not experts:
        return 1, 1
    ep = _optional(stated, "ep", assumed)
    ranks = tp * cp * dp
    etp = stated.get("etp")
    if etp is None:
        etp = tp if ranks % (ep * tp) == 0 else 1
        if tp > 1:
            assumed.append(f"etp {etp} (not stated; Megatron-Core takes tp)")
    if ranks % (ep * etp):
        raise InputError(f"ep {ep} x etp {etp} does not divide the {ranks} ranks of a pipeline stage", key="layout.ep")
    if ep > max(experts):
        raise InputError(f"ep {ep} is more than the {max(experts)} experts", key="layout.ep")
    return ep, etp


def _batch(stated: Mapping[str, Any], dp: int, assumed: list[str]) -> tuple[int, int]:
    micro, batch, rounds = stated.get("micro_batch"), stated.get("global_batch"), stated.get("grad_accum")
    if micro is None:
        micro = batch // (dp * rounds) if batch and rounds and batch % (dp * rounds) == 0 else 1
        assumed.append(f"micro-batch {micro} (not stated)")
    if batch is None:
        if rounds is None:
            raise InputError("is missing, and no number of micro-batches is given", key="layout.global_batch")
        batch = micro * dp * rounds
    for name, value in (("global_batch", batch), ("micro_batch", micro)):
        if not isinstance(value, int) or value < 1:
            raise InputError(f"is {value!r}, not a number of sequences", key=f"layout.{name}")
    if batch % (dp * micro):
        raise InputError(
            f"global batch {batch} is not a multiple of dp {dp} x micro-batch {micro}", key="layout.global_batch"
        )
    return batch, micro


def _pipeline(stated: Mapping[str, Any], model: ModelSpec, pp: int, assumed: list[str]) -> tuple[Schedule, int]:
    if pp == 1:
        return "1f1b", 1
    words, vpp = str(stated.get("schedule") or "").lower(), stated.get("vpp")
    schedule = next((name for word, name in SCHEDULE_WORDS if word in words), None)
    if schedule is None:
        if words:
            raise InputError(f"the schedule {words!r} is not modelled", key="layout.schedule")
        schedule = "interleaved" if vpp and vpp > 1 else "1f1b"
        assumed.append(f"schedule {schedule} (not stated)")
    if schedule == "interleaved" and not vpp:
        vpp = min(MOST_CHUNKS, -(-model.num_layers // pp))
        assumed.append(f"vpp {vpp} (interleaved, number not stated)")
    if schedule == "1f1b" and vpp and vpp > 1:
        schedule = "interleaved"
    if schedule in ("zbv", "interleaved") and not vpp:
        vpp = 2
    return schedule, int(vpp or 1)


def _sharding(stated: Mapping[str, Any], pp: int, assumed: list[str]) -> Sharding:
    stage = stated.get("zero_stage")
    if stage is None:
        stage = 3 if stated.get("fsdp") else 1
        assumed.append(f"optimizer sharding of ZeRO stage {stage} (not stated)")
    if stage == 2 and pp > 1:
        stage = 1
        assumed.append("gradients reduced once per step, as accumulation over the micro-batches of a pipeline asks for")
    return ("none", "zero1", "zero2", "zero3")[int(stage)]


def _recompute(
    stated: Mapping[str, Any], tuned: bool, assumed: list[str]
) -> tuple[Any, tuple[RecomputeModule, ...], float]:
    mode, detail = stated.get("recompute"), str(stated.get("recompute_detail") or "").lower()
    if mode is None:
        if tuned:
            assumed.append("no recompute (not stated)")
        return "none", ("core_attn",), 0.0
    if mode == "full":
        block = re.search(r"block, (\d+) layers", detail)
        return "full", ("core_attn",), -float(block[1]) if block else 0.0
    if mode != "selective":
        return "none", ("core_attn",), 0.0
    for words, share in LAYER_SHARES:
        if re.search(words, detail):
            return "none", ("core_attn",), share
    modules = tuple(dict.fromkeys(name for words, names in MODULE_WORDS if re.search(words, detail) for name in names))
    if not modules:
        assumed.append("selective recompute of the attention core (modules not stated)")
    return "selective", modules or ("core_attn",), 0.0


def _stages(model: ModelSpec, pp: int, vpp: int, share: float) -> tuple[Stage, ...]:
    """Stages that recompute a share of their layers (above 0) or a fixed number per rank (below 0)."""
    if share == 0.0:
        return ()
    sizes = stage_layers(model.num_layers, pp, vpp)
    if share < 0.0:
        return tuple(Stage(layers=size, recompute_layers=min(size, round(-share / vpp))) for size in sizes)
    return tuple(Stage(layers=size, recompute_layers=round(share * size)) for size in sizes)
