"""Which layouts can exist: divisibility and placement rules as data, each with its reason in numbers.

A rule looks at some axes of a layout. ``holds`` checks many layouts at once, ``sentence`` tells what is wrong with one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from planner.question import Question
from scenarios.layout import SCHEDULES, SHARDINGS, Layout, Stage
from simulator.arrays import LayoutArrays

Bools = npt.NDArray[np.bool_]
GPIPE, ONE_F_ONE_B, INTERLEAVED, ZB_H1, ZBV, DUALPIPE, ZB_H2 = range(len(SCHEDULES))
ZERO2 = SHARDINGS.index("zero2")


@dataclass(frozen=True, slots=True)
class Rule:
    """One condition on a layout."""

    name: str
    axes: tuple[str, ...]
    """Fields of a layout that the rule looks at; none: the rule is about the job and the cluster."""
    holds: Callable[[Question, LayoutArrays], Bools]
    sentence: Callable[[Question, Layout], str]
    redundant: bool = False
    """Not wrong, but the same as a simpler layout: left out of a search, allowed where pinned."""


@dataclass(frozen=True, slots=True)
class Broken:
    """A rule that a layout breaks, and how."""

    rule: str
    sentence: str


def broken(question: Question, layout: Layout) -> list[Broken]:
    """Return the rules that a layout breaks, in the order of ``RULES``."""
    row = LayoutArrays.of([layout])
    rules = [*RULES, *([stages_rule(layout.stages)] if layout.stages else [])]
    found = [rule for rule in rules if not rule.redundant and not bool(np.all(rule.holds(question, row)))]
    return [Broken(rule.name, rule.sentence(question, layout)) for rule in found]


def stages_rule(stages: tuple[Stage, ...]) -> Rule:
    """Explicit stages must hold each layer once: lost layers train another model without a word."""
    held, given = sum(stage.layers for stage in stages), len(stages)
    over = next((stage for stage in stages if stage.recompute_layers > stage.layers), None)

    def sentence(question: Question, layout: Layout) -> str:
        if held != question.num_layers:
            return f"the stages hold {held} layers, the model has {question.num_layers}"
        if over is not None:
            return f"a stage of {over.layers} layers cannot recompute {over.recompute_layers} of them"
        return f"{given} stages are given, pp {layout.pp} x vpp {layout.vpp} needs {layout.pp * layout.vpp}"

    return Rule(
        "stages",
        ("pp", "vpp"),
        lambda q, x: (x.pp * x.vpp == given) & (held == q.num_layers) & (over is None),
        sentence,
    )


def _splits(sizes: Iterable[int], parts: npt.NDArray[Any]) -> Bools:
    """True where every size divides evenly over the parts."""
    result = np.ones(parts.shape, dtype=bool)
    for size in sizes:
        result &= size % parts == 0
    return result


def _splits_or_repeats(sizes: Iterable[int], parts: npt.NDArray[Any]) -> Bools:
    """True where every size divides over the parts, or can be repeated evenly to fill them."""
    result = np.ones(parts.shape, dtype=bool)
    for size in sizes:
        result &= (size % parts == 0) | (parts % size == 0)
    return result


def _all(value: bool, rows: LayoutArrays) -> Bools:
    return np.full(len(rows), value)


def _microbatches(question: Question, rows: LayoutArrays) -> npt.NDArray[Any]:
    return np.asarray(question.job.global_batch_size // np.maximum(rows.dp * rows.micro_batch_size, 1))


def _left(size: int, parts: int) -> str:
    return f"{size} % {parts} = {size % parts}"


def _lefts(sizes: Iterable[int], parts: int) -> str:
    return ", ".join(_left(size, parts) for size in sizes if size % parts)


RULES: tuple[Rule, ...] = (
    Rule(
        "precision",
        (),
        lambda q, x: _all(q.cluster.gpu.peak(q.job.precision) is not None, x),
        lambda q, _: (
            f"{q.cluster.gpu.name} does not multiply matrices in {q.job.precision}; "
            f"it does {', '.join(q.cluster.gpu.peak_flop_per_second)}"
        ),
    ),
    Rule(
        "layers",
        ("pp",),
        lambda q, x: x.pp <= q.num_layers,
        lambda q, x: f"pp {x.pp} stages need at least as many layers, the model has {q.num_layers}",
    ),
    Rule(
        "attention_heads",
        ("tp",),
        lambda q, x: _splits(q.heads, x.tp),
        lambda q, x: f"{q.heads[0]} attention heads do not divide over tp {x.tp} ({_lefts(q.heads, x.tp)})",
    ),
    Rule(
        "kv_heads",
        ("tp",),
        lambda q, x: _splits_or_repeats(q.kv_heads, x.tp),
        lambda q, x: f"{q.kv_heads[0]} key-value heads neither divide over tp {x.tp} nor repeat evenly on it",
    ),
    Rule(
        "ffn_size",
        ("tp",),
        lambda q, x: _splits(q.ffn_sizes, x.tp),
        lambda q, x: f"the feed-forward size does not divide over tp {x.tp} ({_lefts(q.ffn_sizes, x.tp)})",
    ),
    Rule(
        "mamba_size",
        ("tp",),
        lambda q, x: _splits(q.mamba_sizes, x.tp) & _splits_or_repeats(q.mamba_groups, x.tp),
        lambda q, x: f"the Mamba mixer does not divide over tp {x.tp} ({_lefts(q.mamba_sizes, x.tp) or 'groups'})",
    ),
    Rule(
        "nvlink_domain",
        ("tp",),
        lambda q, x: (x.tp <= q.largest_domain) | q.allows("tp-across-domains"),
        lambda q, x: (
            f"tp {x.tp} does not fit in the {q.scale_up_name} domain of {q.largest_domain} GPUs, and across it "
            "every layer would wait for the NICs; 'allow: [tp-across-domains]' in the scenario permits it"
        ),
    ),
    Rule(
        "gpus",
        ("tp", "cp", "pp", "dp"),
        lambda q, x: (
            (x.world_size <= q.cluster.num_gpus)
            & (x.world_size >= (q.cluster.num_gpus if q.least_gpus is None else q.least_gpus))
        ),
        lambda q, x: (
            f"tp {x.tp} x cp {x.cp} x pp {x.pp} x dp {x.dp} = {x.world_size} GPUs, the cluster has {q.cluster.num_gpus}"
        ),
    ),
    Rule(
        "domain_capacity",
        ("tp", "cp", "pp", "dp"),
        lambda q, x: (x.cp * x.pp * x.dp <= q.groups_in_domains(x.tp)) | (x.tp > q.largest_domain),
        lambda q, x: (
            f"{x.cp * x.pp * x.dp} groups of tp {x.tp} are needed, and the {q.scale_up_name} domains "
            f"({q.domains_text}) hold {int(q.groups_in_domains(np.array([x.tp]))[0])} whole ones"
        ),
    ),
    Rule(
        "network",
        ("tp", "cp", "pp", "dp"),
        lambda q, x: (x.world_size <= q.largest_domain) | (q.cluster.node.nic is not None),
        lambda q, x: f"{x.world_size} GPUs lie on several nodes of {q.largest_domain}, and the nodes have no NIC",
    ),
    Rule(
        "sequence_over_cp",
        ("cp",),
        lambda q, x: (x.cp == 1) | (q.job.seq_length % (2 * x.cp) == 0),
        lambda q, x: (
            f"context parallelism cuts the sequence into 2 x cp blocks (zigzag, so that causal work is equal): "
            f"{_left(q.job.seq_length, 2 * x.cp)}"
        ),
    ),
    Rule(
        "cp_needs_attention",
        ("cp",),
        lambda q, x: (x.cp == 1) | bool(q.heads),
        lambda q, x: f"cp {x.cp} splits attention, and the model has none",
    ),
    Rule(
        "global_batch",
        ("dp", "micro_batch_size"),
        lambda q, x: q.job.global_batch_size % np.maximum(x.dp * x.micro_batch_size, 1) == 0,
        lambda q, x: (
            f"the global batch of {q.job.global_batch_size} sequences does not divide over dp {x.dp} x "
            f"micro-batch {x.micro_batch_size} ({_left(q.job.global_batch_size, x.dp * x.micro_batch_size)})"
        ),
    ),
    Rule(
        "microbatches_fill_pipeline",
        ("pp", "dp", "micro_batch_size"),
        lambda q, x: _microbatches(q, x) >= x.pp,
        lambda q, x: (
            f"{_count(q, x)} micro-batches for pp {x.pp}: with fewer micro-batches than stages some "
            "stages never work, and torch refuses the schedule"
        ),
    ),
    Rule(
        "dense_has_no_experts",
        ("ep", "etp"),
        lambda q, x: bool(q.num_experts) | ((x.ep == 1) & (x.etp == 1)),
        lambda q, x: f"ep {x.ep} x etp {x.etp} spread experts, and the model is dense",
    ),
    Rule(
        "experts",
        ("ep",),
        lambda q, x: _splits(q.num_experts, x.ep),
        lambda q, x: f"the experts do not divide over ep {x.ep} ({_lefts(q.num_experts, x.ep)})",
    ),
    Rule(
        "expert_ffn_size",
        ("etp",),
        lambda q, x: _splits(q.expert_ffn_sizes, x.etp),
        lambda q, x: f"the expert's size does not divide over etp {x.etp} ({_lefts(q.expert_ffn_sizes, x.etp)})",
    ),
    Rule(
        "etp_inside_tp",
        ("tp", "etp"),
        lambda _, x: x.tp % x.etp == 0,
        lambda _, x: f"an expert is split inside the tp group: {_left(x.tp, x.etp)}",
    ),
    Rule(
        "expert_groups",
        ("tp", "cp", "dp", "ep", "etp"),
        lambda _, x: (x.tp * x.cp * x.dp) % (x.ep * x.etp) == 0,
        lambda _, x: (
            f"ep {x.ep} x etp {x.etp} = {x.ep * x.etp} does not divide the {x.tp * x.cp * x.dp} GPUs of a stage "
            f"(tp {x.tp} x cp {x.cp} x dp {x.dp})"
        ),
    ),
    Rule(
        "pipeline_schedule",
        ("pp", "schedule"),
        lambda _, x: (x.pp > 1) | (x.schedule == ONE_F_ONE_B) | (x.schedule == GPIPE),
        lambda _, x: f"the schedule {x.schedule} needs pp > 1",
    ),
    Rule(
        "virtual_stages",
        ("vpp", "schedule"),
        lambda _, x: np.select(
            [x.schedule == INTERLEAVED, x.schedule == ZBV, x.schedule == DUALPIPE],
            [x.vpp > 1, x.vpp == 2, x.vpp <= 2],
            x.vpp == 1,
        ),
        lambda _, x: f"the schedule {x.schedule} needs {_vpp_needed(x)}, and vpp is {x.vpp}",
    ),
    Rule(
        "layers_per_virtual_stage",
        ("pp", "vpp"),
        lambda q, x: x.pp * x.vpp <= q.num_layers + np.where(x.vpp > 1, 2, 0),
        lambda q, x: (
            f"pp {x.pp} x vpp {x.vpp} = {x.pp * x.vpp} virtual stages for {q.num_layers} layers: only the first "
            "and the last, which hold embedding and head, may have no layer"
        ),
    ),
    Rule(
        "interleaved_microbatches",
        ("pp", "dp", "micro_batch_size", "schedule"),
        lambda q, x: (x.schedule != INTERLEAVED) | (_microbatches(q, x) % x.pp == 0),
        lambda q, x: f"the interleaved schedule needs micro-batches in rounds of pp: {_left(_count(q, x), x.pp)}",
    ),
    Rule(
        "microbatches_of_zb_h2",
        ("pp", "dp", "micro_batch_size", "schedule"),
        lambda q, x: (x.schedule != ZB_H2) | (_microbatches(q, x) >= 2 * x.pp - 1),
        lambda q, x: f"zb-h2 needs 2 x pp - 1 = {2 * x.pp - 1} micro-batches, there are {_count(q, x)}",
    ),
    Rule(
        "copies_of_shards",
        ("dp",),
        lambda _, x: x.dp % x.dp_replicate == 0,
        lambda _, x: f"dp {x.dp} does not divide into the pinned dp_replicate groups",
    ),
    Rule(
        "heads_over_cp",
        ("tp", "cp"),
        lambda q, x: _splits(q.heads, x.tp * x.cp) if x.cp_comm == "all-to-all" else np.ones(len(x), dtype=bool),
        lambda q, x: f"cp_comm all-to-all gives whole heads to tp x cp ranks ({_lefts(q.heads, x.tp * x.cp)})",
    ),
    Rule(
        "two_microbatches_per_stage",
        ("pp", "dp", "micro_batch_size", "schedule"),
        lambda q, x: (x.schedule != DUALPIPE) | (_microbatches(q, x) >= 2 * x.pp),
        lambda q, x: (
            f"{x.schedule} feeds the pipeline from both ends and needs 2 x pp = {2 * x.pp} micro-batches, "
            f"there are {_count(q, x)}"
        ),
    ),
    Rule(
        "dualpipe_symmetry",
        ("pp", "dp", "micro_batch_size", "schedule", "vpp"),
        lambda q, x: (x.schedule != DUALPIPE) | (x.vpp != 1) | ((x.pp % 2 == 0) & (_microbatches(q, x) % 2 == 0)),
        lambda q, x: (
            f"dualpipe with vpp 1 runs two equal halves and needs even pp and micro-batches, not {x.pp} and "
            f"{_count(q, x)}"
        ),
    ),
    Rule(
        "sharding_under_pp",
        ("pp", "sharding"),
        lambda _, x: (x.pp == 1) | (x.sharding < ZERO2),
        lambda _, x: (
            f"{x.optimizer_sharding} with pp {x.pp} would reduce gradients (and gather weights) for each micro-batch "
            "instead of once a step; trainers refuse that (DeepSpeed) or keep gradients whole until the last "
            "micro-batch (FSDP2), which saves nothing; under a pipeline use zero1"
        ),
    ),
    Rule(
        "sequence_parallel",
        ("tp", "cp", "sequence_parallel"),
        lambda q, x: ~x.sequence_parallel | ((x.tp > 1) & (q.job.seq_length % (x.tp * x.cp) == 0)),
        lambda q, x: (
            "sequence parallelism splits inside the tp group and needs tp > 1"
            if x.tp == 1
            else f"sequence parallelism: {_left(q.job.seq_length, x.tp * x.cp)} over tp x cp"
        ),
    ),
    Rule(
        "split_backward",
        ("schedule",),
        lambda q, x: (x.schedule <= INTERLEAVED) | (q.allows("zero-bubble") & (x.schedule != ZB_H2)),
        lambda _, x: (
            f"{x.schedule} splits the backward pass, which few trainers offer; "
            + ("" if x.schedule == "zb-h2" else "'allow: [zero-bubble]' in the scenario, or ")
            + f"--pin schedule={x.schedule} permits it"
        ),
        redundant=True,
    ),
    Rule(
        "more_live_than_1f1b",
        ("pp", "schedule"),
        lambda _, x: (x.schedule != GPIPE) | (x.pp == 1),
        lambda _, x: "gpipe takes as long as 1f1b and keeps the activations of all micro-batches",
        redundant=True,
    ),
    Rule(
        "even_virtual_stages",
        ("pp", "vpp"),
        lambda q, x: (x.vpp == 1) | (_spare_slots(q, x) <= 2 + q.tail_layers),
        lambda q, x: (
            f"{q.num_layers} layers over pp {x.pp} x vpp {x.vpp} leave {_spare_slots(q, x)} of the chunks a layer "
            "shorter: chunks run in step and wait for the longest; only those with embedding and head should be shorter"
        ),
        redundant=True,
    ),
    Rule(
        "schedule_without_pipeline",
        ("pp", "schedule"),
        lambda _, x: (x.pp > 1) | (x.schedule == ONE_F_ONE_B),
        lambda _, x: f"without a pipeline {x.schedule} is the same as 1f1b",
        redundant=True,
    ),
    Rule(
        "two_copies_of_the_model",
        ("schedule", "vpp"),
        lambda _, x: (x.schedule != DUALPIPE) | (x.vpp != 1),
        lambda _, x: (
            "dualpipe with vpp 1 keeps every stage twice; with vpp 2 (DualPipeV) it does the same with one copy"
        ),
        redundant=True,
    ),
    Rule(
        "nothing_to_shard",
        ("cp", "dp", "sharding"),
        lambda _, x: (x.cp * x.dp > 1) | (x.sharding == 0),
        lambda _, x: f"{x.optimizer_sharding} over dp x cp = 1 shards nothing",
        redundant=True,
    ),
)
"""All rules, each after those that make its numbers meaningful."""


def _spare_slots(question: Question, rows: Any) -> Any:
    stages = rows.pp * rows.vpp
    return -(-question.num_layers // stages) * stages - question.num_layers


def _count(question: Question, layout: Layout) -> int:
    return question.job.global_batch_size // (layout.dp * layout.micro_batch_size)


def _vpp_needed(layout: Layout) -> str:
    return {"interleaved": "vpp > 1", "zbv": "vpp = 2", "dualpipe": "vpp = 1 or 2"}.get(layout.schedule, "vpp = 1")
