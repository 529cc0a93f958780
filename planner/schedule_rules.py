"""What schedules of a pipeline need: chunks, micro-batches, symmetry; and what may be sharded under one."""

from __future__ import annotations

import numpy as np

from planner.rule import DUALPIPE, GPIPE, INTERLEAVED, ONE_F_ONE_B, ZB_H2, ZBV, Rule, count, left, microbatches
from scenarios.layout import SHARDINGS, Layout

ZERO2 = SHARDINGS.index("zero2")


def _vpp_needed(layout: Layout) -> str:
    return {"interleaved": "vpp > 1", "zbv": "vpp = 2", "dualpipe": "vpp = 1 or 2"}.get(layout.schedule, "vpp = 1")


SCHEDULING: tuple[Rule, ...] = (
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
        "microbatches_fill_pipeline",
        ("pp", "dp", "micro_batch_size"),
        lambda q, x: microbatches(q, x) >= x.pp,
        lambda q, x: (
            f"{count(q, x)} micro-batches for pp {x.pp}: with fewer micro-batches than stages some "
            "stages never work, and torch refuses the schedule"
        ),
    ),
    Rule(
        "interleaved_microbatches",
        ("pp", "dp", "micro_batch_size", "schedule"),
        lambda q, x: (x.schedule != INTERLEAVED) | (microbatches(q, x) % x.pp == 0),
        lambda q, x: f"the interleaved schedule needs micro-batches in rounds of pp: {left(count(q, x), x.pp)}",
    ),
    Rule(
        "microbatches_of_zb_h2",
        ("pp", "dp", "micro_batch_size", "schedule"),
        lambda q, x: (x.schedule != ZB_H2) | (microbatches(q, x) >= 2 * x.pp - 1),
        lambda q, x: f"zb-h2 needs 2 x pp - 1 = {2 * x.pp - 1} micro-batches, there are {count(q, x)}",
    ),
    Rule(
        "two_microbatches_per_stage",
        ("pp", "dp", "micro_batch_size", "schedule"),
        lambda q, x: (x.schedule != DUALPIPE) | (microbatches(q, x) >= 2 * x.pp),
        lambda q, x: (
            f"{x.schedule} feeds the pipeline from both ends and needs 2 x pp = {2 * x.pp} micro-batches, "
            f"there are {count(q, x)}"
        ),
    ),
    Rule(
        "dualpipe_symmetry",
        ("pp", "dp", "micro_batch_size", "schedule", "vpp"),
        lambda q, x: (x.schedule != DUALPIPE) | (x.vpp != 1) | ((x.pp % 2 == 0) & (microbatches(q, x) % 2 == 0)),
        lambda q, x: (
            f"dualpipe with vpp 1 runs two equal halves and needs even pp and micro-batches, not {x.pp} and "
            f"{count(q, x)}"
        ),
    ),
    Rule(
        "sharding_under_pp",
        ("pp", "sharding"),
        lambda _, x: (x.pp == 1) | (x.sharding < ZERO2),
        lambda _, x: (
            f"{x.optimizer_sharding} with pp {x.pp} would reduce gradients (and gather weights) for each micro-batch "
            "instead of once a step; DeepSpeed's pipeline engine refuses that, torch's stages keep the gradients of "
            "FSDP2 whole until the last micro-batch, which saves nothing; under a pipeline use zero1"
        ),
    ),  # PipelineEngine.__init__ of DeepSpeed (its issue 1110); _PipelineStageBase of torch 2.13 turns off FSDP2's
    # gradient sync and resharding in all backwards and reduces once, in perform_reduce_grad
)
"""Each after those that make its numbers meaningful."""
