"""Does a cluster describe something that can be built? Findings, each with its rule and what to do."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import BaseModel

from topologies.cluster import Cluster, Measured
from topologies.document import FileDocument, did_you_mean
from topologies.errors import InputError
from topologies.fabric import LEVELS, wiring
from topologies.units import format_quantity


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing that a check found. A failure cannot be built or used; a warning should be known."""

    level: Literal["failure", "warning"]
    rule: str
    text: str


def check_cluster(cluster: Cluster) -> list[Finding]:
    """Return what is wrong (failures) and what deserves a look (warnings)."""
    return [
        *_size(cluster),
        *_tiers(cluster),
        *_transport(cluster),
        *_ports(cluster),
        *_hardware(cluster),
        *_sources(cluster),
    ]


def _failure(rule: str, text: str) -> Finding:
    return Finding(level="failure", rule=rule, text=text)


def _warning(rule: str, text: str) -> Finding:
    return Finding(level="warning", rule=rule, text=text)


def _size(cluster: Cluster) -> Iterator[Finding]:
    fabric = cluster.fabric
    if fabric.kind != "none" and not fabric.tiers:
        yield _failure("tiers", f"a {fabric.kind} fabric without tiers joins nothing; describe its levels")
    if cluster.num_nodes > 1 and fabric.kind == "none":
        yield _failure("fabric", f"{cluster.num_nodes} nodes and no fabric between them; describe one or keep one node")
    if fabric.tiers and cluster.num_nodes > fabric.tiers[-1].nodes:
        top = fabric.tiers[-1]
        yield _failure(
            "size", f"{cluster.num_nodes} nodes, and the top level {top.name!r} holds {top.nodes}; add a level or nodes"
        )


def _tiers(cluster: Cluster) -> Iterator[Finding]:
    tiers = cluster.fabric.tiers
    for near, far in itertools.pairwise(tiers):
        if far.nodes < near.nodes:
            yield _failure("tiers", f"{far.name!r} holds {far.nodes} nodes, fewer than {near.name!r} below it")
        elif far.nodes % near.nodes:
            yield _warning("tiers", f"{far.name!r} holds {far.nodes} nodes, not a multiple of {near.name!r} below it")
        if far.latency_seconds < near.latency_seconds:
            yield _warning("latency", f"{far.name!r} has a lower latency than {near.name!r} below it")
    for tier in tiers:
        if tier.oversubscription > 1:
            yield _warning(
                "oversubscription", f"across {tier.name!r} each NIC keeps 1/{tier.oversubscription:g} of its rate"
            )


def _transport(cluster: Cluster) -> Iterator[Finding]:
    fabric = cluster.fabric
    if fabric.kind == "none":
        return
    if not fabric.lossless:
        yield _warning(
            "lossy", "packets are dropped under congestion, and collectives stall on each; turn flow control on"
        )
    if fabric.routing == "ecmp" and fabric.queue_pairs == 1 and len(fabric.tiers) > 1:
        yield _warning(
            "hashing", "each connection is hashed onto one path, so that two may halve each other; use more queue pairs"
        )


def _ports(cluster: Cluster) -> Iterator[Finding]:
    fabric, node = cluster.fabric, cluster.node
    if fabric.kind not in ("none", "fat-tree") and node.nics_per_node != fabric.rails:
        rails, nics = fabric.rails, node.nics_per_node
        yield _failure("rails", f"{rails} rails and {nics} NICs a node; a rail is one NIC of each node")
        return
    try:
        wires = wiring(cluster)
    except InputError as error:
        yield _failure("wiring", str(error))
        return
    if wires is None:
        return
    for name, used, ports in zip(LEVELS, wires.ports_used, wires.ports, strict=False):
        if used > ports:
            yield _failure("ports", f"a {name} switch needs {used} ports and has {ports}; use fewer nodes a {name}")


def _hardware(cluster: Cluster) -> Iterator[Finding]:
    for node in {pool.node.name: pool.node for pool in cluster.pools}.values():
        gpu, scale_up = node.gpu, node.scale_up
        if gpu.usable_memory_bytes > gpu.memory_bytes:
            yield _failure("memory", f"{gpu.name}: more usable than nominal memory")
        if scale_up.bus_bandwidth_bytes_per_second > 2 * scale_up.bandwidth_bytes_per_second:
            text = f"{node.name}: the bus bandwidth is more than twice the link, beyond even in-switch reduction"
            yield _failure("bus bandwidth", text)
        if 1 < scale_up.domain_size < node.gpus_per_node:
            yield _warning("domain", f"{node.name}: {node.gpus_per_node} GPUs in domains of {scale_up.domain_size}")
        if node.power_watts and node.power_watts < node.gpus_per_node * gpu.power_watts:
            yield _failure("power", f"{node.name}: the node draws less than its GPUs together")
    if len({pool.node.nics_per_node for pool in cluster.pools}) > 1:
        yield _warning(
            "pools", "the pools differ in NICs a node; switches and cables are counted with the first pool's"
        )
    watts, limit = power_watts(cluster), cluster.power.facility_watts
    if limit and watts > limit:
        needs, has = format_quantity(watts, "watts"), format_quantity(limit, "watts")
        yield _failure("power", f"the nodes can draw {needs} with cooling, and the facility gives {has}")


def power_watts(cluster: Cluster) -> float:
    """Largest draw of all nodes times the PUE; switches and storage are not included."""
    return cluster.power.pue * sum(
        pool.num_nodes * (pool.node.power_watts or pool.node.gpus_per_node * pool.node.gpu.power_watts)
        for pool in cluster.pools
    )


def _sources(cluster: Cluster) -> Iterator[Finding]:
    for document in file_documents(cluster):
        for key in unsourced(document):
            yield _warning("source", f"{document.name}: {key} has no source; add it under 'source'")
        for key in document.source:
            if key != "*" and not any(_covers(key, path) for path in numbers(document)):
                hint = did_you_mean(key, numbers(document))
                yield _warning(
                    "source", f"{document.name}: the source {key!r} names no number here{f'; {hint}' * bool(hint)}"
                )


def file_documents(document: BaseModel) -> list[FileDocument]:
    """Return a document and the documents of their own files inside it, each once by name and class."""
    found: dict[tuple[type, str], FileDocument] = {}

    def visit(value: Any) -> None:
        if isinstance(value, FileDocument):
            found.setdefault((type(value), value.name), value)
        if isinstance(value, BaseModel):
            for name in type(value).model_fields:
                visit(getattr(value, name))
        elif isinstance(value, tuple | list):
            for entry in value:
                visit(entry)

    visit(document)
    return list(found.values())


def numbers(document: FileDocument) -> list[str]:
    """Return the dotted keys of all numbers that a document's own file gives, as they are written in it."""
    one_pool = isinstance(document, Cluster) and len(document.pools) == 1  # written without the word 'pools'
    keys = (key.removeprefix("pools.") if one_pool else key for key in _numbers(document) if key != "version")
    return list(dict.fromkeys(keys))


def _numbers(model: BaseModel) -> Iterator[str]:
    for name in type(model).model_fields:
        if name not in model.model_fields_set:
            continue
        key = type(model).model_fields[name].alias or name
        for below in _inside(getattr(model, name)):
            yield f"{key}.{below}" if below else key


def _inside(value: Any) -> Iterator[str]:
    if isinstance(value, FileDocument | Measured | bool):
        return
    if isinstance(value, BaseModel):
        yield from _numbers(value)
    elif isinstance(value, int | float):
        yield ""
    elif isinstance(value, dict):
        for key, entry in value.items():
            for below in _inside(entry):
                yield f"{key}.{below}" if below else str(key)
    elif isinstance(value, tuple | list):
        for entry in value:
            yield from _inside(entry)


def _covers(source: str, key: str) -> bool:
    return source in ("*", key) or key.startswith(f"{source}.")


def unsourced(document: FileDocument) -> list[str]:
    """Return the numbers of a document that no entry of its ``source`` covers (an entry covers all keys below it)."""
    return [key for key in numbers(document) if not any(_covers(source, key) for source in document.source)]
