"""Why a plan is what it is, from the plan file alone: limits, seconds, memory, rivals, rules, sources."""

from __future__ import annotations

from typing import Any

from planner.notes import stages_text
from planner.plan import Plan
from planner.reasons import PARTS
from scenarios.layout import Stage
from simulator.memory import memory_use
from simulator.outcome import BREAKDOWN, MEMORY_PARTS
from topologies.document import FileDocument
from topologies.units import format_quantity

TIGHT = 0.08
"""A GPU with less free memory than this share is called full."""


def explanation(plan: Plan) -> dict[str, Any]:
    """Return everything that ``headway explain`` tells, as plain data."""
    return {
        "layout": plan.layout.model_dump(mode="json") | {"label": plan.layout.label()},
        "stages": stages_text(plan.layout),
        "limits": limits(plan),
        "waterfall": waterfall(plan),
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


def waterfall(plan: Plan) -> list[dict[str, Any]]:
    """From the time at peak to the predicted step: what each cause adds, in seconds and in share of the step.

    The first entry is model FLOPs over dense peak (``mfu`` times the step). Where the peak is unknown it is missing,
    and compute is told by its parts.
    """
    predicted = plan.predicted
    step, mfu, parts = predicted["step_seconds"], predicted["mfu"], dict(predicted.get("compute_parts_seconds") or {})
    breakdown = predicted["breakdown_seconds"]
    told: list[tuple[str, float]] = []
    if mfu is not None:
        told.append(("model FLOPs at the dense peak", mfu * step))
        extra = {name: parts.pop(name) for name in list(parts) if name not in ("gemm", "attention", "head")}
        slower = breakdown["compute"] - mfu * step - sum(extra.values())
        told.append(
            ("matrix units below their peak (shapes, attention, clocks) and the longest stage's extra work", slower)
        )
        told += [(PARTS[name], seconds) for name, seconds in extra.items()]
    elif parts:
        told += [(PARTS[name], seconds) for name, seconds in parts.items()]
    else:
        told.append((PARTS["compute"], breakdown["compute"]))
    told += [(PARTS[name], breakdown[name]) for name in BREAKDOWN if name != "compute"]
    return [
        {"name": name, "seconds": seconds, "share": seconds / step}
        for name, seconds in told
        if abs(seconds) > 1e-6 * step
    ]


def limits(plan: Plan) -> list[str]:
    """What stands in the way of a faster step, strongest first."""
    step = plan.predicted["step_seconds"]
    breakdown = plan.predicted["breakdown_seconds"]
    lost = [entry for entry in waterfall(plan) if entry["name"] != "model FLOPs at the dense peak"]
    largest = sorted(lost, key=lambda entry: -entry["seconds"])[:3]
    told = [
        f"{entry['name']}: {format_quantity(entry['seconds'], 'seconds')}, {100 * entry['share']:.1f} % of the step"
        for entry in largest
    ]
    told += [_memory_limit(plan), *_recompute_limit(plan)]
    job, layout = plan.scenario.job, plan.layout
    if breakdown["pp_bubble"] > 0.05 * step:
        told.append(
            f"the global batch of {job.global_batch_size} sequences gives {plan.num_microbatches} micro-batches "
            f"per replica to {layout.pp} stages: more would shrink the bubble"
        )
    domain = plan.scenario.cluster.domain_size
    if layout.tp == domain and layout.tp > 1:
        told.append(f"tp {layout.tp} fills the scale-up domain of {domain} GPUs: it cannot grow without crossing NICs")
    return told


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
    if plan.layout.recompute == "none":
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
