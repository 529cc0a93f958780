"""Stages in Megatron-LM's words: the layout string and the recompute settings."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby

from runtime.emit.stages import stage_letters
from scenarios.layout import Layout
from scenarios.model import ModelSpec


def layout_string(model: ModelSpec, layout: Layout) -> str:
    """Write ``--pipeline-model-parallel-layout``: E embedding, t layer, m prediction layer, L loss, | between stages.

    Equal neighbours are written once, as ``(tt|)*3``. The grammar is that of ``PipelineParallelLayerLayout``
    (Megatron-LM d98e8a6, megatron/core/transformer/pipeline_parallel_layer_layout.py).

    >>> from scenarios.model import load_model
    >>> layout_string(load_model("llama3-405b"), Layout(pp=16))
    'Et*7|(t*8|)*14t*7L'
    """
    counts = [len(letters) for letters in stage_letters(model, layout)]
    if len(counts) == 1:
        return "E" + _layers(counts[0]) + "m" * model.mtp_layers + "L"
    first, *middle, last = counts
    parts = ["E" + _layers(first) + "|"]
    for count, run in groupby(middle):
        times = len(list(run))
        parts.append(f"({_layers(count)}|)*{times}" if times > 1 else _layers(count) + "|")
    return "".join(parts) + _layers(last) + "m" * model.mtp_layers + "L"


def _layers(count: int) -> str:
    return "t" * count if count < 4 else f"t*{count}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Recomputing:
    """What Megatron-LM is told about recompute."""

    granularity: str | None
    layers: int | None = None
    """The first so many of each stage, whole."""
    note: str | None = None


def recomputing(model: ModelSpec, layout: Layout) -> Recomputing:
    """Express the recompute of each layer, or the nearest that needs no more memory.

    Megatron-LM knows one granularity, and with full one number of layers for all (virtual) stages, counted from the
    first of each (``recompute_method`` block).
    """
    stages = stage_letters(model, layout)
    whole = [letters.count("f") for letters in stages]
    some = [letters.count("s") for letters in stages]
    if not any(whole):
        return Recomputing(granularity="selective" if any(some) else None)
    needed = [full + selective for full, selective in zip(whole, some, strict=True)]
    layers = max(needed)
    exact = not any(some) and all(full == min(layers, len(one)) for full, one in zip(whole, stages, strict=True))
    if exact:
        return Recomputing(granularity="full", layers=layers)
    planned = sum(whole)
    repeated = sum(min(layers, len(letters)) for letters in stages)
    return Recomputing(
        granularity="full",
        layers=layers,
        note=(
            f"the plan recomputes {planned} layers in full"
            + (f" and {sum(some)} selectively" if any(some) else "")
            + f", stage by stage; Megatron has one number for all, so the first {layers} of each stage are recomputed, "
            f"{repeated} in all: no more memory than planned, and a slower step"
        ),
    )
