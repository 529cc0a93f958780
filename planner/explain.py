"""Why a plan is what it is, from the plan file alone: limits, seconds, memory, rivals, rules, sources."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from planner.notes import stages_text
from planner.plan import Plan
from planner.shadow import Price
from planner.waterfall import waterfall
from scenarios.layout import Stage
from simulator.memory import memory_use
from simulator.outcome import MEMORY_PARTS
from topologies.document import FileDocument
from topologies.units import format_quantity

TIGHT = 0.08
"""A GPU with less free memory than this share is called full."""


def explanation(plan: Plan, prices: Sequence[Price] = ()) -> dict[str, Any]:
    """Return everything that ``headway explain`` tells, as plain data."""
    step = plan.predicted["step_seconds"]
    return {
        "layout": plan.layout.model_dump(mode="json") | {"label": plan.layout.label()},
        "stages": stages_text(plan.layout),
        "limits": limits(plan),
        "shadow_prices": [asdict(price) for price in prices],
        "waterfall": [
            {"name": part.words, "seconds": part.value, "share": part.value / step}
            for part in waterfall(plan.predicted)
        ],
        "memory_bytes": plan.predicted["memory_bytes"],
        "checkpoint": plan.checkpoint,
        "alternatives": plan.alternatives,
        "rejected_by_rule": plan.solver.get("rejected_by_rule", {}),
        "rejected_by_memory": plan.solver.get("rejected_by_memory"),
        "solver": plan.solver,
        "notes": plan.predicted.get("notes", []),
        "assumptions": plan.predicted.get("basis", []),
        "inputs": plan.inputs,
        "sources": sources(plan),
    }


def limits(plan: Plan) -> list[str]:
    """What stands in the way of a faster step, strongest first."""
    step = plan.predicted["step_seconds"]
    breakdown = plan.predicted["breakdown_seconds"]
    lost = [part for part in waterfall(plan.predicted) if part.key != "ideal"]
    told = [
        f"{part.words}: {format_quantity(part.value, 'seconds')}, {100 * part.value / step:.1f} % of the step"
        for part in sorted(lost, key=lambda part: -part.value)[:3]
    ]
    told += [_memory_limit(plan), *_recompute_limit(plan)]
    job, layout = plan.scenario.job, plan.layout
    if breakdown["pp_bubble"] > 0.05 * step:
        told.append(
            f"the global batch of {job.global_batch_size} sequences gives {plan.num_microbatches} micro-batches "
            f"per replica to {layout.pp} stages: more would shrink the bubble"
        )
    if layout.pp > 1 and plan.num_microbatches == layout.pp:
        told.append(
            f"each replica has as many micro-batches as stages ({layout.pp}): more replicas, larger micro-batches or "
            "more stages would leave stages without work"
        )
    told += _batch_limit(plan)
    domain = plan.scenario.cluster.domain_size
    if layout.tp == domain and layout.tp > 1:
        told.append(f"tp {layout.tp} fills the scale-up domain of {domain} GPUs: it cannot grow without crossing NICs")
    return told


def _batch_limit(plan: Plan) -> list[str]:
    """Whether the global batch is what keeps GPUs idle or the number of replicas odd."""
    idle, batch = plan.placement.get("idle_gpus") or 0, plan.scenario.job.global_batch_size
    replica = plan.layout.world_size // plan.layout.dp
    if plan.replicas or idle < replica:
        return []
    more = plan.layout.dp + idle // replica
    if batch % (more * plan.layout.micro_batch_size) == 0:
        return []
    return [
        f"{idle} idle GPUs would hold {idle // replica} more replicas, and the global batch of {batch} sequences does "
        f"not divide over {more}"
    ]


def _memory_limit(plan: Plan) -> str:
    memory = plan.predicted["memory_bytes"]
    free = memory["capacity"] - memory["peak"]
    stages = memory["per_stage"]
    fullest = max(range(len(stages)), key=lambda stage: stages[stage]["total_bytes"])
    largest = max(MEMORY_PARTS, key=lambda part: stages[fullest][f"{part}_bytes"])
    state = "memory binds" if free < TIGHT * memory["capacity"] else "memory does not bind"
    return (
        f"{state}: stage {fullest} holds {format_quantity(memory['peak'], 'bytes')} of "
        f"{format_quantity(memory['capacity'], 'bytes')} ({format_quantity(max(free, 0.0), 'bytes')} free), most of it "
        f"{largest} ({format_quantity(stages[fullest][f'{largest}_bytes'], 'bytes')})"
    )


def _recompute_limit(plan: Plan) -> list[str]:
    """What the same layout would need without recompute."""
    if plan.layout.recompute == "none" or plan.replicas:
        return []
    changes = {"recompute": "none", "stages": tuple(Stage(layers=stage.layers) for stage in plan.layout.stages)}
    use = memory_use(plan.scenario.cluster, plan.scenario.job, plan.layout.model_copy(update=changes))
    verdict = "does not fit" if use.headroom_bytes < 0 else "fits"
    return [
        f"recompute is {plan.layout.recompute}; without it the layout {verdict}: it needs "
        f"{format_quantity(use.peak_bytes, 'bytes')} of {format_quantity(use.capacity_bytes, 'bytes')}"
    ]


def sources(plan: Plan) -> list[dict[str, str]]:
    """Where the numbers of the inputs come from, as the documents say."""
    scenario = plan.scenario
    node = scenario.cluster.node
    documents: list[FileDocument] = [scenario, scenario.model, scenario.cluster, node, node.gpu]
    documents += [one for one in (node.nic, scenario.faults, scenario.prices) if one is not None]
    return [
        {"document": document.name, "key": key, "source": source}
        for document in documents
        for key, source in document.source.items()
    ]
