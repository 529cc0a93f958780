"""What a job would be, without starting it: command, meshes, what each rank holds, and one rank traced on shapes."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

from planner.plan import Plan
from runtime.environment import usable_cores
from runtime.job import USUAL, check_room, request_for
from runtime.launch import launch_command, launch_environment
from runtime.ranks import coordinates, rank_at, shares, stages_of
from runtime.request import Recipe
from runtime.tracing import traced_memory
from scenarios.layout import Layout
from topologies.document import FORMAT_VERSION
from topologies.errors import HeadwayError, InputError

MOST_RANKS = 64
"""Of a larger job, one rank of each pipeline rank stands for those that hold the same."""


def dry_run(plan: Plan, *, steps: int, seed: int = 0, trace: bool = True, recipe: Recipe = USUAL) -> dict[str, Any]:
    """Say what would be started, for a plan of any size.

    Args:
        plan: of any size; one that this machine cannot hold has no command here.
        steps: of the job.
        seed: of the job.
        trace: run one rank on shapes alone, where torch is installed: its memory and its collectives.
        recipe: learning rate, clipping and the like.

    Returns:
        Plain data. ``trace`` is None where nothing was traced, and ``trace_refused`` then says why.
    """
    layout, job = plan.layout, plan.scenario.job
    told: dict[str, Any] = {
        "format_version": FORMAT_VERSION,
        "plan_sha256": plan.sha256(),
        "command": [],
        "environment": {},
        "fits_here": False,
        "world_size": layout.world_size,
        "oversubscription": 1.0,
        "mesh": meshes(layout),
        "rank_order": list(layout.rank_order),
        "num_microbatches": layout.num_microbatches(job),
        "data_parallel": data_parallel_words(plan),
    }
    try:
        request = request_for(plan, steps=steps, seed=seed, recipe=recipe)
        check_room(plan)
    except InputError as error:
        told["not_here"] = str(error)
    else:
        told |= {
            "fits_here": True,
            "command": launch_command(layout.world_size, Path("WORKING_DIRECTORY"), request.max_restarts),
            "environment": launch_environment(),
            "oversubscription": max(1.0, layout.world_size / usable_cores()) if request.device == "cpu" else 1.0,
        }
    return told | {"ranks": ranks_held(plan)} | _traced(plan, trace)


def _traced(plan: Plan, wanted: bool) -> dict[str, Any]:
    if not wanted:
        return {"trace": None, "trace_refused": "it was not asked for"}
    if importlib.util.find_spec("torch") is None:
        return {"trace": None, "trace_refused": "torch is not installed: pip install 'headway-planner[runtime]'"}
    try:
        return {"trace": traced_memory(plan), "trace_refused": None}
    except HeadwayError as error:
        return {"trace": None, "trace_refused": str(error)}


def ranks_held(plan: Plan) -> list[dict[str, Any]]:
    """Place and stages of every rank, or of one of each pipeline rank where there are many."""
    layout = plan.layout
    divided = shares(plan.scenario.model, layout)
    if layout.world_size <= MOST_RANKS:
        told = list(range(layout.world_size))
    else:
        told = [rank_at(layout, pp=stage) for stage in range(layout.pp)]
    held = []
    for rank in told:
        place = coordinates(layout, rank)
        stages = [divided[index] for index in stages_of(layout, place["pp"])]
        held.append(
            {
                "rank": rank,
                "coordinates": place,
                "stages": [
                    {
                        "stage": stage.index,
                        "layers": [stage.first, stage.last],
                        "embedding": stage.embedding,
                        "head": stage.head,
                        "recompute_layers": stage.modes.count("f"),
                    }
                    for stage in stages
                ],
            }
        )
    return held


def meshes(layout: Layout) -> dict[str, int]:
    """Degrees of the dense view of the ranks, and of the experts' view where it is another."""
    dense = {"pp": layout.pp, "dp": layout.dp, "cp": layout.cp, "tp": layout.tp}
    if layout.ep * layout.etp == 1:
        return dense
    copies = layout.dp * layout.cp * layout.tp // (layout.ep * layout.etp)
    return dense | {"expert_dp": copies, "ep": layout.ep, "etp": layout.etp}


def data_parallel_words(plan: Plan) -> str:
    """Name the mechanism behind the plan's sharding."""
    layout = plan.layout
    if layout.dp * layout.cp == 1:
        return "one replica: AdamW on local weights"
    return {
        "none": "one all-reduce of all gradients per step",
        "zero1": "reduce-scatter of all gradients, AdamW on a slice, all-gather of the weights, per step",
        "zero2": "FSDP2 without resharding after forward; weights gathered once per step",
        "zero3": "FSDP2 with resharding after forward",
    }[layout.optimizer_sharding]
