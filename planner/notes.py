"""What is legal and yet worth a word: uneven stages, padding, idle GPUs, lonely experts, thin links."""

from __future__ import annotations

import math

from planner.placement import Placement
from planner.question import Question
from scenarios.layout import Layout
from simulator.fabric_notes import fabric_notes


def notes(question: Question, layout: Layout, placement: Placement) -> list[str]:
    """Return what a person should know about a layout that works, one sentence each."""
    told = [
        _uneven_stages(question, layout),
        _padded_vocabulary(question, layout),
        _idle_gpus(question, layout, placement),
        _one_expert_per_rank(question, layout),
        _expert_traffic(question, layout),
        _tp_across_domains(question, layout),
    ]
    return [sentence for sentence in told if sentence] + fabric_notes(question.cluster, layout)


def _uneven_stages(question: Question, layout: Layout) -> str | None:
    sizes = [stage.layers for stage in layout.stages]
    if len(set(sizes)) < 2:
        return None
    return (
        f"{question.num_layers} layers do not split evenly over {len(sizes)} stages: they hold {stages_text(layout)}; "
        "a framework that only knows equal stages would drop or refuse the rest"
    )


def stages_text(layout: Layout) -> str:
    """Layers of each stage, runs of equal stages drawn together: ``7/8/8/7`` or ``7 + 14 x 8 + 7``."""
    sizes = [stage.layers for stage in layout.stages]
    if len(sizes) <= 8:
        return "/".join(map(str, sizes))
    runs: list[tuple[int, int]] = []
    for size in sizes:
        if runs and runs[-1][1] == size:
            runs[-1] = (runs[-1][0] + 1, size)
        else:
            runs.append((1, size))
    return " + ".join(f"{count} x {size}" if count > 1 else str(size) for count, size in runs)


def padded_vocab_size(vocab_size: int, tp: int) -> int:
    """Rows of the embedding after padding to a multiple of lcm(128, tp), as Megatron-LM pads.

    >>> padded_vocab_size(65535, 8)
    65536
    """
    multiple = math.lcm(128, tp)
    return -(-vocab_size // multiple) * multiple


def _padded_vocabulary(question: Question, layout: Layout) -> str | None:
    vocab = question.job.model.vocab_size
    if layout.tp == 1 or vocab % layout.tp == 0:
        return None
    return (
        f"{vocab} tokens do not divide over tp {layout.tp}: pad the vocabulary to "
        f"{padded_vocab_size(vocab, layout.tp)} rows (a multiple of lcm(128, tp)), and unpad when weights are exported"
    )


def _idle_gpus(question: Question, layout: Layout, placement: Placement) -> str | None:
    idle = question.cluster.num_gpus - layout.world_size
    if idle == 0:
        return None
    reason = "the scenario allows idle GPUs" if question.allows("fewer-gpus") else "no layout keeps all rules on all"
    return (
        f"{layout.world_size} of {question.cluster.num_gpus} GPUs work and {idle} stay idle: {reason}; "
        f"nodes needed: {placement.nodes}"
    )


def _one_expert_per_rank(question: Question, layout: Layout) -> str | None:
    if layout.ep == 1 or min(question.num_experts, default=0) != layout.ep:
        return None
    return (
        f"ep {layout.ep} leaves one expert per rank: a rank whose expert receives no token must still join every "
        "all-to-all, or the job hangs; keep dropless dispatch or capacity padding on"
    )


def _expert_traffic(question: Question, layout: Layout) -> str | None:
    if layout.ep == 1:
        return None
    group = layout.ep * max(layout.tp // layout.etp, 1)
    if group <= question.largest_domain:
        return (
            f"ep {layout.ep} stays inside the {question.scale_up_name} domain: plain all-to-all is enough, dispatchers "
            "for several nodes do not pay"
        )
    return (
        f"ep {layout.ep} crosses {question.scale_up_name} domains: use a dispatcher that sends each token once per node"
    )


def _tp_across_domains(question: Question, layout: Layout) -> str | None:
    if layout.tp <= question.largest_domain:
        return None
    return f"tp {layout.tp} crosses {question.scale_up_name} domains of {question.largest_domain} GPUs, as was allowed"
