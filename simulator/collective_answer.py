"""What ``headway collective`` answers: the time, what binds it, and what the answer does not know."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from simulator.collectives import CollectiveTime, bus_factor, collective_seconds
from simulator.disturbances import OtherJob
from simulator.flows import NOT_MODELLED, FlowTime, play_collective
from simulator.links import exchange_taper, ring_taper
from simulator.log_curves import curve_for
from simulator.outcome import plain
from simulator.sharing import collective_load, play_together
from topologies.cluster import Cluster, CollectiveKind
from topologies.errors import InputError
from topologies.link_map import LinkMap, link_map
from topologies.link_names import with_faults
from topologies.units import format_quantity


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveAnswer:
    """One collective, predicted by the closed form or played as flows."""

    time: CollectiveTime
    bottleneck: str
    """What binds it: a link of the fabric where flows were played, a kind of link otherwise."""
    warnings: tuple[str, ...]
    basis: str
    """What the time rests on."""
    played: FlowTime | None = None
    closed_form: CollectiveTime | None = None
    """Beside flows: the same by NCCL's model."""
    beside_seconds: float | None = None
    """While other jobs repeat their collectives; None: there are none."""

    @property
    def not_modelled(self) -> tuple[str, ...]:
        """What neither way of predicting knows."""
        return NOT_MODELLED

    def as_json(self) -> dict[str, Any]:
        """Plain data with stable keys."""
        content = plain(self.time) | {"bottleneck": self.bottleneck, "warnings": list(self.warnings)}
        content["basis"] = self.basis
        content["not_modelled"] = list(self.not_modelled)
        if self.played is not None:
            content |= {"flows": plain(self.played), "closed_form": plain(self.closed_form)}
            content["beside_seconds"] = self.beside_seconds
        return content


def answer_collective(
    kind: CollectiveKind,
    cluster: Cluster,
    gpus: int,
    size_bytes: float,
    *,
    flows: bool = False,
    faults: tuple[tuple[str, float], ...] = (),
    others: tuple[OtherJob, ...] = (),
    seed: int = 0,
) -> CollectiveAnswer:
    """Predict a collective over the first ``gpus`` GPUs of a cluster.

    Args:
        kind: which one.
        cluster: the machine.
        gpus: ranks, packed node by node.
        size_bytes: the whole buffer as in nccl-tests.
        flows: play it on the links of the cluster, with the algorithm that NCCL's model picks.
        faults: links and switches with what is left of them, see ``topologies.link_names``; they need flows.
        others: what other jobs repeat meanwhile; they need flows.
        seed: of the fabric's hash, where it hashes.

    Raises:
        Infeasible: the cluster has fewer GPUs.
        InputError: links cannot be numbered, or two ranks have no way to each other.
    """
    _refuse_parts(cluster, gpus)
    closed = collective_seconds(kind, cluster, gpus, size_bytes)
    warnings = traffic_warnings(cluster, gpus)
    if not (flows or faults or others):
        return CollectiveAnswer(
            time=closed,
            bottleneck=_closed_bottleneck(kind, cluster, gpus, closed),
            warnings=warnings,
            basis=_basis(kind, cluster, gpus, closed),
        )
    network = with_faults(link_map(cluster), faults)
    algorithm = _playable(closed.algorithm, kind, cluster, gpus)
    played = play_collective(network, kind, np.arange(gpus), size_bytes, algorithm=algorithm, seed=seed)
    algbw = size_bytes / played.seconds if played.seconds > 0 else 0.0
    time = CollectiveTime(
        seconds=played.seconds,
        algbw_bytes_per_second=algbw,
        busbw_bytes_per_second=algbw * bus_factor(kind, gpus),
        algorithm=algorithm,
        protocol="fluid",
    )
    return CollectiveAnswer(
        time=time,
        bottleneck=played.bottleneck,
        warnings=warnings,
        basis="flows that share the links of the fabric, with the starts of NCCL's tuning model",
        played=played,
        closed_form=closed,
        beside_seconds=_beside(network, kind, gpus, size_bytes, algorithm, others, seed, played) if others else None,
    )


def _basis(kind: CollectiveKind, cluster: Cluster, gpus: int, time: CollectiveTime) -> str:
    curve = curve_for(kind, cluster, gpus)
    if time.algorithm == "measured":
        return "measured on this cluster"
    if curve is None:
        return "gloo's rings" if time.protocol == "gloo" else "NCCL's tuning model"
    of = "" if (curve.kind, curve.ranks) == (kind, gpus) else f"NCCL's tuning model, corrected by {curve.kind} in "
    return f"{of}a log of {curve.ranks} ranks: {curve.origin}"


def _refuse_parts(cluster: Cluster, gpus: int) -> None:
    """Refuse GPUs that no fabric joins."""
    fabric, nodes = cluster.fabric, math.ceil(gpus / cluster.node.gpus_per_node)
    if gpus <= cluster.domain_size:
        return
    if fabric.kind == "none" or not fabric.tiers or cluster.node.nic is None:
        raise InputError(
            f"{gpus} GPUs of {cluster.name} stand in domains of {cluster.domain_size} with no fabric between them",
            hint="describe one under 'fabric', with NICs in the node, or use fewer GPUs",
        )
    top = fabric.tiers[-1]
    if nodes > top.nodes:
        raise InputError(
            f"{gpus} GPUs need {nodes} nodes, and {top.name!r}, the top level of {cluster.name}, joins {top.nodes}",
            hint="describe a level above it, or use fewer GPUs",
        )


def _beside(
    network: LinkMap,
    kind: CollectiveKind,
    gpus: int,
    size_bytes: float,
    algorithm: str,
    others: tuple[OtherJob, ...],
    seed: int,
    alone: FlowTime,
) -> float:
    """Play it while the others go on; what latency adds, it adds here as well."""
    mine = collective_load("this", kind, np.arange(gpus), size_bytes, algorithm=algorithm, seed=seed)
    loads = [mine]
    for number, one in enumerate(others):
        if max(one.gpus) >= network.cluster.num_gpus:
            raise InputError(
                f"another job is to run on GPU {max(one.gpus)}; {network.cluster.name} has {network.cluster.num_gpus}"
            )
        name = f"job {number}"
        load = collective_load(name, one.kind, one.gpus, one.size_bytes, seed=seed + 1 + number)
        loads.append(replace(load, repeats=None))
    return play_together(network, loads).end_seconds["this"] + alone.latency_seconds


def _playable(algorithm: str, kind: CollectiveKind, cluster: Cluster, gpus: int) -> str:
    """The algorithm as flows: a ring where it was measured and nobody says what ran, or where domains are uneven."""
    if kind in ("all_to_all", "send_recv"):
        return "p2p"
    uneven = gpus > cluster.domain_size and gpus % cluster.domain_size
    return "ring" if algorithm == "measured" or uneven else algorithm


def _closed_bottleneck(kind: CollectiveKind, cluster: Cluster, gpus: int, time: CollectiveTime) -> str:
    if time.algorithm == "measured":
        return "as measured"
    scale_up, fabric = cluster.scale_up, cluster.fabric
    if gpus <= cluster.domain_size:
        return f"{scale_up.kind} links of each GPU"
    nodes = math.ceil(gpus / cluster.node.gpus_per_node)
    reached = fabric.tier(nodes)
    taper = exchange_taper if kind == "all_to_all" else ring_taper
    factor = float(taper(fabric.tiers, np.array([float(nodes)]), np.ones(1))[0])
    if reached is not None and factor > 1:
        return f"links into {reached.name} (a NIC keeps 1/{factor:.3g})"
    members = min(cluster.domain_size, gpus)
    if members * cluster.node.network_bytes_per_second_per_gpu > scale_up.bus_bandwidth_bytes_per_second:
        return f"{scale_up.kind} links of each GPU"
    return "NICs"


def traffic_warnings(cluster: Cluster, gpus: int) -> tuple[str, ...]:
    """Say what of a cluster's fabric makes traffic between ``gpus`` GPUs slower or less certain than predicted."""
    fabric, found = cluster.fabric, []
    nodes = math.ceil(gpus / cluster.node.gpus_per_node)
    if gpus <= cluster.domain_size or fabric.kind == "none":
        return ()
    if not fabric.lossless:
        found.append(
            "the fabric drops packets under congestion: collectives stall on retransmission, which is not modelled; "
            "measure fabric.efficiency or turn flow control on"
        )
    factor = fabric.oversubscription(nodes)
    if factor > 1:
        rate = format_quantity(cluster.node.network_bytes_per_second_per_gpu / factor, "bytes_per_second")
        found.append(
            f"{nodes} nodes reach across an oversubscription of {factor:g}:1: a GPU keeps {rate} where all send at once"
        )
    if fabric.routing == "ecmp" and len(fabric.tiers) > 1 and nodes > fabric.tiers[0].nodes:
        found.append(
            f"connections are hashed onto equal paths with {fabric.queue_pairs} queue pairs each: collisions depend on "
            "the seed (--seed)"
        )
    if cluster.storage_network is None and any(not store.per_node for store in cluster.storage):
        found.append("storage traffic shares this fabric and is not in this answer")
    return tuple(found)
