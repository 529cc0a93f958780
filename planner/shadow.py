"""What a little more would be worth: the question asked again with more memory, network, domain or batch."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from planner.plan import Plan
from planner.planning import plan
from planner.story import changed_layout, per_token
from scenarios.layout import Pins
from scenarios.scenario import Scenario
from topologies.cluster import Cluster
from topologies.errors import Infeasible
from topologies.hardware import Node
from topologies.units import format_quantity

MORE_BYTES = 2e9
"""Memory that a price is asked for; also what a leaner allocator or one offloaded buffer frees."""
NOTHING = 5e-4
"""Changes below this share are told as none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Price:
    """What one change of the question would do to its answer."""

    change: str
    gain: float | None
    """Share of the objective per token that is saved (negative: lost); None: there is no layout any more."""
    layout: str
    words: str


def shadow_prices(made: Plan, tell: Callable[[str], None] | None = None) -> list[Price]:
    """Ask again with one thing changed at a time, the pins kept.

    Args:
        made: the plan whose scenario is asked again.
        tell: is given a line before each question.
    """
    pins = Pins.model_validate(made.solver.get("pins") or {})
    kept = {name: value for name in type(pins).model_fields if (value := getattr(pins, name)) is not None}
    kept.pop("stages", None)  # stages of one layout say nothing about another
    return [_asked(made, name, changed, kept, tell) for name, changed in _changes(made.scenario)]


def _asked(made: Plan, name: str, changed: Scenario, pins: dict[str, Any], tell: Callable[[str], None] | None) -> Price:
    if tell is not None:
        tell(f"asking again with {name}")
    try:
        other = plan(changed, pins=pins, top=0)
    except Infeasible as refusal:
        return Price(change=name, gain=None, layout="", words=f"{name}: no layout works any more: {refusal.constraint}")
    gain = 1 - per_token(other) / per_token(made)
    what = changed_layout(made.layout, other.layout)
    if abs(gain) < NOTHING:
        words = f"{name} would change nothing"
    else:
        verb = "save" if gain > 0 else "cost"
        goal = {"time": "of the time", "cost": "of the cost", "energy": "of the energy"}.get(
            made.scenario.objective, "of what is lost"
        )
        allows = f"allow {what} and " if what else ""
        words = f"{name} would {allows}{verb} {100 * abs(gain):.1f} % {goal} per token"
    return Price(change=name, gain=gain, layout=other.layout.label(), words=words)


def _changes(scenario: Scenario) -> Iterator[tuple[str, Scenario]]:
    """Questions with one thing changed, in words."""
    cluster, job = scenario.cluster, scenario.job
    node = cluster.node
    yield f"{format_quantity(MORE_BYTES, 'bytes')} more memory per GPU", _with_nodes(scenario, _more_memory)
    if node.nic is not None and cluster.num_nodes > 1:
        rate = 2 * node.nic.bandwidth_bytes_per_second
        yield f"NICs of {format_quantity(rate, 'bytes_per_second')}", _with_nodes(scenario, _faster_nics)
    if cluster.num_gpus > node.scale_up.domain_size > 1:
        size = 2 * node.scale_up.domain_size
        yield f"scale-up domains of {size} GPUs", _with_nodes(scenario, _larger_domain)
    for factor in (2, 0.5):
        batch = job.global_batch_size * factor
        if batch == math.floor(batch):
            changed = job.model_copy(update={"global_batch_size": int(batch)})
            yield f"a global batch of {int(batch)} sequences", scenario.model_copy(update={"job": changed})


def _with_nodes(scenario: Scenario, change: Callable[[Node], Node]) -> Scenario:
    cluster: Cluster = scenario.cluster
    pools = tuple(pool.model_copy(update={"node": change(pool.node)}) for pool in cluster.pools)
    return scenario.model_copy(update={"cluster": cluster.model_copy(update={"pools": pools})})


def _more_memory(node: Node) -> Node:
    usable = node.gpu.usable_memory_bytes + MORE_BYTES
    more = {"usable_memory_bytes": usable, "memory_bytes": node.gpu.memory_bytes + MORE_BYTES}
    return node.model_copy(update={"gpu": node.gpu.model_copy(update=more)})


def _faster_nics(node: Node) -> Node:
    if node.nic is None:
        return node
    faster = {"bandwidth_bytes_per_second": 2 * node.nic.bandwidth_bytes_per_second}
    return node.model_copy(update={"nic": node.nic.model_copy(update=faster)})


def _larger_domain(node: Node) -> Node:
    larger = {"domain_size": 2 * node.scale_up.domain_size}
    return node.model_copy(update={"scale_up": node.scale_up.model_copy(update=larger)})
