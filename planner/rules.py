"""Which layouts can exist: all rules as data, each with its reason in numbers.

``splitting_rules`` say what divides and fits, ``schedule_rules`` what pipelines need; those here leave out what is the
same as a simpler layout.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from planner.question import Question
from planner.rule import DUALPIPE, GPIPE, INTERLEAVED, ONE_F_ONE_B, ZB_H2, Broken, Rule
from planner.schedule_rules import SCHEDULING
from planner.splitting_rules import SPLITTING
from scenarios.layout import Layout, Stage
from simulator.arrays import LayoutArrays


def _spare_slots(question: Question, rows: Any) -> Any:
    stages = rows.pp * rows.vpp
    return -(-question.num_layers // stages) * stages - question.num_layers


REDUNDANT: tuple[Rule, ...] = (
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
"""Not wrong, but no better than a simpler layout."""

RULES = (*SPLITTING, *SCHEDULING, *REDUNDANT)
"""All rules, each after those that make its numbers meaningful."""


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
