"""Plans for clusters with several kinds of GPUs: equal replicas within a pool, micro-batches by speed between pools."""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from planner.checkpointing import operation
from planner.confirming import at_work, confirmed
from planner.deadline import deadline_refusal, in_time
from planner.judging import EQUAL_STEP
from planner.mixing import Mix, Share, Template, fastest_mix
from planner.outlook import Outlook, objective_value, promise, with_stages
from planner.placement import healthy, place
from planner.plan import Plan
from planner.playing import played_step
from planner.pool_choice import Choice, first_layout, nodes_at_work, of_all, place_text, replicas_told
from planner.replicas import (
    FREE,
    PoolTemplates,
    cuts_of,
    layout_of,
    legal_replicas,
    pool_templates,
    sub_cluster,
    template,
)
from planner.spanned import spanned_choice
from planner.upkeep import upkeep, working_watts
from scenarios.layout import Layout
from scenarios.scenario import Scenario
from simulator.memory import memory_use
from simulator.outcome import MemoryUse, StepTime
from topologies.document import InputFile
from topologies.errors import Infeasible
from topologies.numbering import node_numbers

CUTS_MIXED = 12
"""Cuts of the model whose mix is solved exactly, the most promising ones."""
PLAYED = 3
"""Of them, those whose replicas are played event by event."""
RESTRICTIONS = (
    "all replicas are cut alike (tp, cp, pp, layers of each stage), run 1F1B and share their optimizer states",
    "stages are split uniformly and recompute is the same for all layers of a pool",
    "a replica lies in one pool; gradients are weighted by the tokens of their replica",
)
BY_OBJECTIVE = (
    "of the fastest mixes and the fastest of each pool alone, the one with the least {}; value, bound and gap are "
    "those of the step time"
)


def plan_pools(asked: Scenario, pins: Mapping[str, Any], *, top: int = 5, inputs: Sequence[InputFile] = ()) -> Plan:
    """Choose replicas for each pool and their micro-batches.

    Raises:
        Infeasible: no replica fits on any pool, or the batch is too small for one.
    """
    started = time.perf_counter()
    scenario = healthy(asked)
    pools = range(len(scenario.cluster.pools))
    found = [pool_templates(scenario, pool, pins) for pool in pools]
    search = _best_mixes(scenario, found, list(pools))
    if not search.mixes:
        raise _refusal(scenario, found, pins)
    choices = [_predicted(scenario, found, mix) for mix in search.mixes[:PLAYED]]
    choices.sort(key=lambda one: one.step.total_seconds)
    spanned = _spanned(scenario, choices) if "mixed-replicas" in scenario.allow else None
    rivals = [("replicas of one pool each, all cut alike: ", one) for one in choices]
    for pool in pools:
        name = scenario.cluster.pools[pool].node.name
        rivals += [
            (f"only the {name} nodes: ", _predicted(scenario, found, mix))
            for mix in _best_mixes(scenario, found, [pool]).mixes[:1]
        ]
    alike = _best(scenario, [one for _, one in rivals])
    if spanned is not None and spanned[0] is not None:
        rivals.append(("replicas that are cut differently: ", spanned[0]))
    best = _best(scenario, [one for _, one in rivals])
    alternatives = [_told(scenario, one, best, reason) for reason, one in rivals if one is not best]
    alternatives.sort(key=lambda one: float(one["step_seconds"]))
    scenario = at_work(scenario, nodes_at_work(scenario, best))
    outlook = _outlook(scenario, best)
    if not in_time(scenario, outlook):
        raise deadline_refusal(scenario, outlook)
    mixed = {} if spanned is None else spanned[1] | {"chosen": best is not alike}
    solver = _certificate(scenario, found, alike, search) | {
        "pins": {name: value for name, value in pins.items() if name not in FREE},
        **({"mixed_replicas": mixed} if mixed else {}),
        **(_mixed_certificate(best, mixed) if best is not alike else {}),
        "seconds": time.perf_counter() - started,
    }
    return Plan(
        scenario=asked,
        layout=outlook.layout,
        placement=_placement(asked, scenario, best),
        checkpoint=outlook.checkpoint.as_json(),
        predicted=promise(outlook, scenario.job)
        | {"notes": _notes(scenario, best, mixed)}
        | (confirmed(scenario, outlook) if top > 0 else {}),
        alternatives=alternatives[:top],
        solver=solver,
        inputs=[asdict(one) for one in inputs],
        replicas=replicas_told(scenario, best),
    )


def _certificate(scenario: Scenario, found: list[PoolTemplates], best: Choice, search: _Search) -> dict[str, Any]:
    seconds, ways = best.step.total_seconds, sum(len(one.layouts) for one in found)
    bound = min(search.bound, seconds)
    return {
        "name": "bisection over integer knapsacks",
        "status": "fastest mix of the enumerated replicas",
        "sol_status": "optimal",
        "objective": scenario.objective,
        "objective_seconds": seconds,
        "closed_form_seconds": best.mix.seconds,
        "bound_seconds": bound,
        "gap": seconds / bound - 1,
        "candidates": ways,
        "legal": ways,
        "feasible": ways,
        "opened": search.cuts,
        "solved_exactly": len(search.mixes),
        "programs": search.programs,
        "rejected_by_rule": {},
        "rejected_by_memory": None,
        "note": "the bound is the fastest step of any mix by the closed form",
        "restrictions": [
            *RESTRICTIONS,
            *([BY_OBJECTIVE.format(scenario.objective)] if scenario.objective != "time" else []),
        ],
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class _Search:
    """The best mixes, fastest first by the closed form; what was looked at."""

    mixes: list[Mix]
    bound: float
    cuts: int
    programs: int


def _best_mixes(scenario: Scenario, found: list[PoolTemplates], pools: list[int]) -> _Search:
    """Bound every cut of the model, and mix the most promising ones exactly."""
    held = tuple(pool.num_nodes if number in pools else 0 for number, pool in enumerate(scenario.cluster.pools))
    ways: dict[tuple[int, ...], list[tuple[int, int]]] = defaultdict(list)
    for pool in pools:
        for row, cut in enumerate(cuts_of(found[pool])):
            ways[cut].append((pool, row))
    batch, bounds = scenario.job.global_batch_size, {}
    offered: dict[tuple[int, ...], list[Template]] = {}
    for cut, rows in ways.items():
        ring = max(float(found[pool].ring_seconds[row]) for pool, row in rows)
        offered[cut] = [template(scenario, found[pool], row, pool, ring) for pool, row in rows]
        bounds[cut] = _least_seconds(offered[cut], held, batch)
    order = sorted((cut for cut in bounds if math.isfinite(bounds[cut])), key=lambda cut: bounds[cut])
    mixes = [mix for cut in order[:CUTS_MIXED] if (mix := fastest_mix(offered[cut], held, batch)) is not None]
    return _Search(
        mixes=sorted(mixes, key=lambda one: one.seconds),
        bound=min(bounds.values(), default=math.inf),
        cuts=len(bounds),
        programs=sum(one.programs for one in mixes),
    )


def _least_seconds(templates: list[Template], held: tuple[int, ...], batch: int) -> float:
    """The fastest step of replicas that all lie in one pool: then each pool takes its best template, by bisection."""
    by_pool: dict[int, list[Template]] = defaultdict(list)
    for one in templates:
        by_pool[int(np.argmax(one.nodes))].append(one)

    def sequences(seconds: float) -> int:
        return sum(
            max(
                held[pool] // one.nodes[pool] * one.replicas * one.micro_batch_size * one.microbatches(seconds)
                for one in own
            )
            for pool, own in by_pool.items()
        )

    low, high = 0.0, max(one.seconds(max(batch, one.least)) for one in templates)
    if sequences(high) < batch:
        return math.inf
    while high - low > 1e-4 * high:
        middle = (low + high) / 2
        low, high = (low, middle) if sequences(middle) >= batch else (middle, high)
    return low


def _predicted(scenario: Scenario, found: list[PoolTemplates], mix: Mix) -> Choice:
    """Play the slowest replicas of each template; the step is the slowest of them with the slowest ring."""
    total = sum(one.replicas for one in mix.shares)
    steps: dict[str, StepTime] = {}
    memories: list[MemoryUse] = []
    layouts: dict[str, tuple[tuple[int, ...], Layout]] = {}
    for name, shares in _by_template(mix).items():
        pool, row = (int(part) for part in name.split(":"))
        layout = with_stages(layout_of(found[pool], row, total), scenario.model)
        most = max(one.microbatches for one in shares)
        batch = total * layout.micro_batch_size * most
        job = scenario.job.model_copy(update={"global_batch_size": batch})
        cluster = sub_cluster(scenario.cluster, pool)
        steps[name] = played_step(cluster, job, layout)
        memories.append(memory_use(cluster, job, layout))
        layouts[name] = ((pool,) * layout.pp, layout)
    ring = max(one.dp_comm_seconds for one in steps.values())
    slowest = max(steps.values(), key=lambda one: one.total_seconds - one.dp_comm_seconds)
    step = of_all(scenario, replace(slowest, dp_comm_seconds=ring), slowest.total_seconds, mix, layouts)
    fullest = min(memories, key=lambda one: one.headroom_bytes / one.capacity_bytes)
    return Choice(mix=mix, layouts=layouts, step=step, memory=fullest)


def _by_template(mix: Mix) -> dict[str, list[Share]]:
    grouped: dict[str, list[Share]] = defaultdict(list)
    for share in mix.shares:
        grouped[share.template.name].append(share)
    return grouped


def _outlook(scenario: Scenario, best: Choice) -> Outlook:
    cluster, job = scenario.cluster, scenario.job
    layout = first_layout(best)
    used = nodes_at_work(scenario, best)
    operated = operation(scenario, layout, best.step.total_seconds)
    kept = upkeep(scenario, layout.world_size, 0, (operated.spares or 0) + scenario.faults.standbys)
    watts = sum(working_watts(sub_cluster(cluster, pool), nodes) for pool, nodes in enumerate(used))
    usd = kept.usd_per_second + scenario.prices.electricity_usd_per_joule * watts
    return Outlook(
        layout=layout,
        placement=place(cluster, layout),
        step=best.step,
        memory=best.memory,
        checkpoint=operated,
        steps=None if job.target_tokens is None else math.ceil(job.target_tokens / job.tokens_per_step),
        upkeep=replace(kept, usd_per_second=usd, watts=kept.watts + watts, nodes=kept.nodes + sum(used)),
    )


def _placement(asked: Scenario, scenario: Scenario, best: Choice) -> dict[str, Any]:
    """Healthy nodes of each pool in the order of its replicas."""
    gone = node_numbers(asked.exclude_nodes, asked.cluster) if asked.exclude_nodes else frozenset[int]()
    numbers: list[int] = []
    used = dict(zip((pool.node.name for pool in scenario.cluster.pools), nodes_at_work(scenario, best), strict=True))
    first = 0
    for pool in asked.cluster.pools:
        free = [number for number in range(first, first + pool.num_nodes) if number not in gone]
        numbers += free[: used.get(pool.node.name, 0)]
        first += pool.num_nodes
    layout = first_layout(best)
    placed = place(scenario.cluster, layout).as_json()
    return placed | {"nodes": len(numbers), "node_numbers": numbers, "excluded_nodes": sorted(gone)}


def _best(scenario: Scenario, choices: list[Choice]) -> Choice:
    """By the objective; of the goodput only among those that are nearly as fast as the fastest."""
    if scenario.objective == "goodput":
        limit = EQUAL_STEP * min(one.step.total_seconds for one in choices)
        choices = [one for one in choices if one.step.total_seconds <= limit]
    return min(choices, key=lambda one: _worth(scenario, one))


def _worth(scenario: Scenario, one: Choice) -> float:
    """What the objective minimises, per step."""
    if scenario.objective == "time":
        return one.step.total_seconds
    working = at_work(scenario, nodes_at_work(scenario, one))
    return objective_value(_outlook(working, one), scenario.objective)


def _spanned(scenario: Scenario, choices: list[Choice]) -> tuple[Choice | None, dict[str, Any]]:
    """What replicas of any depth, over one or both pools, make of the cuts that were played."""
    cuts = {(one.tp, one.cp, one.micro_batch_size): one for one in map(first_layout, choices)}
    return spanned_choice(scenario, list(cuts.values()))


def _mixed_certificate(best: Choice, mixed: Mapping[str, Any]) -> dict[str, Any]:
    """Of replicas that are cut differently; the gap is that of the closed form by which they were chosen."""
    return {
        "status": "fastest mix of replicas that may be cut differently, for the degrees that were best for equal cuts",
        "objective_seconds": best.step.total_seconds,
        "closed_form_seconds": best.mix.seconds,
        "bound_seconds": best.step.total_seconds / (1 + mixed["gap"]),
        "gap": mixed["gap"],
        "restrictions": [
            f"tp {mixed['tp']}, cp {mixed['cp']} and micro-batch size alike in all replicas, 1F1B, optimizer shared",
            "a stage fills whole nodes of one pool and recomputes in all of its layers or in none",
            mixed["gradients"],
        ],
    }


def _notes(scenario: Scenario, best: Choice, mixed: Mapping[str, Any]) -> list[str]:
    told = [
        f"{share.replicas} replicas on {place_text(scenario, best.layouts[share.template.name][0])} run "
        f"{share.microbatches} micro-batches of {share.template.micro_batch_size} each"
        for share in best.mix.shares
    ]
    idle = [
        pool.num_nodes - used for pool, used in zip(scenario.cluster.pools, nodes_at_work(scenario, best), strict=True)
    ]
    told += [
        f"{count} {pool.node.name} nodes stay idle: too few for another replica, or a slower step with it"
        for count, pool in zip(idle, scenario.cluster.pools, strict=True)
        if count
    ]
    if mixed.get("chosen"):
        told.append(f"replicas are cut differently: {mixed['gradients']}; equal cuts are among the runners-up")
    elif mixed.get("seconds"):
        gain = 1 - mixed["seconds"] / best.mix.seconds
        told.append(
            f"replicas that are cut differently or reach over both pools would take {mixed['seconds']:.4g} s a step "
            f"({100 * gain:+.1f} % saved), the rings of their gradients included (gap {mixed['gap']:.2%})"
        )
    elif mixed:
        told.append(f"mixed replicas were not looked at: {mixed['reason']}")
    if scenario.faults.failures:
        told.append("failures count by pool; a spare is taken to fit every pool, and a lost node to stop all replicas")
    return [*told, "no shipped trainer runs replicas with different numbers of micro-batches: emit and run refuse"]


def _told(scenario: Scenario, one: Choice, best: Choice, reason: str) -> dict[str, Any]:
    values = _worth(scenario, one), _worth(scenario, best)
    more = values[0] / values[1] - 1 if values[1] > 0 else 0.0
    than = "slower" if scenario.objective == "time" else f"more {scenario.objective}"
    layout = first_layout(one)
    shares = ", ".join(f"{share.replicas} x {share.microbatches} micro-batches" for share in one.mix.shares)
    return {
        "layout": layout.model_dump(mode="json") | {"num_microbatches": max(s.microbatches for s in one.mix.shares)},
        "label": layout.label(),
        "step_seconds": one.step.total_seconds,
        "mfu": one.step.mfu,
        "peak_bytes": one.memory.peak_bytes,
        "lost_because": f"{reason}{100 * more:.1f} % {than} ({shares})",
    }


def _refusal(scenario: Scenario, found: list[PoolTemplates], pins: Mapping[str, Any]) -> Infeasible:
    kinds = ", ".join(f"{pool.num_nodes} x {pool.node.name}" for pool in scenario.cluster.pools)
    if any(len(one.layouts) for one in found):
        return Infeasible(
            f"no mix of replicas of {scenario.model.name} on {kinds} holds the global batch of "
            f"{scenario.job.global_batch_size} sequences: each replica needs as many micro-batches as stages",
            relax=("a larger global batch", "pins that leave shorter pipelines"),
        )
    reasons = []
    for number, pool in enumerate(scenario.cluster.pools):
        legal = legal_replicas(scenario, number, pins)[1]
        rules = [legal.examples[name].sentence for name in legal.emptied_by[:2]]
        reasons.append(f"{pool.node.name}: {'; '.join(rules) or 'none fits in memory'}")
    return Infeasible(
        f"no replica of {scenario.model.name} works on {kinds} ({', '.join(reasons)})",
        relax=("more nodes of one kind", "GPUs with more memory", "fewer pins"),
    )
