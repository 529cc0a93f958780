"""A cluster in one page of plain data: size, bandwidth at each level, switches, storage, power, sources."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from topologies.checks import file_documents, power_watts
from topologies.cluster import Cluster
from topologies.fabric import count
from topologies.hardware import Gpu, Nic, Node


@dataclass(frozen=True, slots=True, kw_only=True)
class Reach:
    """What one GPU can send when its peers stand up to one level away."""

    name: str
    gpus: int
    """GPUs within reach."""
    oversubscription: float
    """Of all levels on the way."""
    bytes_per_second_per_gpu: float
    """One direction: measured bus bandwidth inside the domain, line rate less oversubscription outside."""
    usable_bytes_per_second_per_gpu: float
    """Times the fabric's measured efficiency."""
    latency_seconds: float


def reaches(cluster: Cluster) -> list[Reach]:
    """Return the levels of a cluster from the inside out: the scale-up domain, then each tier of the fabric."""
    scale_up, node = cluster.scale_up, cluster.node
    levels = [
        Reach(
            name=f"{scale_up.kind} domain",
            gpus=cluster.domain_size,
            oversubscription=1.0,
            bytes_per_second_per_gpu=scale_up.bandwidth_bytes_per_second,
            usable_bytes_per_second_per_gpu=scale_up.bus_bandwidth_bytes_per_second,
            latency_seconds=scale_up.latency_seconds,
        )
    ]
    factor = 1.0
    for tier in cluster.fabric.tiers:
        factor *= tier.oversubscription
        rate = node.network_bytes_per_second_per_gpu / factor
        levels.append(
            Reach(
                name=tier.name,
                gpus=min(tier.nodes * node.gpus_per_node, cluster.num_gpus),
                oversubscription=factor,
                bytes_per_second_per_gpu=rate,
                usable_bytes_per_second_per_gpu=rate * cluster.fabric.efficiency,
                latency_seconds=tier.latency_seconds,
            )
        )
    return levels


def summary(cluster: Cluster) -> dict[str, Any]:
    """Return what ``headway topology show --json`` prints; SI units, in the names of the keys."""
    counts = count(cluster)
    return {
        "name": cluster.name,
        "num_gpus": cluster.num_gpus,
        "num_nodes": cluster.num_nodes,
        "pools": [{"num_nodes": pool.num_nodes, "node": hardware(pool.node)} for pool in cluster.pools],
        "gpu": hardware(cluster.gpu),
        "domain_size": cluster.domain_size,
        "levels": [asdict(level) for level in reaches(cluster)],
        "fabric": {
            "kind": cluster.fabric.kind,
            "rails": cluster.fabric.rails,
            "efficiency": cluster.fabric.efficiency,
            "routing": cluster.fabric.routing,
            "queue_pairs": cluster.fabric.queue_pairs,
            "lossless": cluster.fabric.lossless,
            "counts": None if counts is None else asdict(counts) | {"switches": counts.switches, "links": counts.links},
        },
        "storage": [tier.model_dump(by_alias=False) for tier in cluster.storage],
        "storage_network": (
            None if cluster.storage_network is None else cluster.storage_network.model_dump(by_alias=False)
        ),
        "power": {
            "pue": cluster.power.pue,
            "watts": power_watts(cluster),
            "facility_watts": cluster.power.facility_watts,
        },
        "measured": None if cluster.measured is None else {"date": cluster.measured.date},
        "sources": {document.name: document.source for document in file_documents(cluster)},
    }


def hardware(document: Gpu | Nic | Node) -> dict[str, Any]:
    """Return a piece of hardware as plain data; the hardware inside it is given by name."""
    content = document.model_dump(by_alias=False, exclude={"version", "source", "curves"})
    named = {
        key: value["name"] if isinstance(value, dict) and "name" in value else value for key, value in content.items()
    }
    logs = [one.name for one in document.curves] if isinstance(document, Node) else []
    return named | ({"curves": "; ".join(logs)} if logs else {})
