"""Traffic beside a training step: other jobs that repeat a collective, and a checkpoint on its way to storage."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from scipy import sparse

from simulator.disturbances import Disturbances
from simulator.flow_traffic import collective_traffic, lockstep
from simulator.step_problem import StepProblem
from simulator.step_records import Background
from simulator.step_traffic import StepTraffic, Stream
from topologies.errors import InputError
from topologies.link_map import Floats, Ints, LinkMap
from topologies.routes import Routes, per_lane, storage_routes

OTHER = "other"
"""Kind of a stream that is not the step's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Other:
    """Streams of somebody else: they are told from each other by number and size."""

    name: str
    number: int
    size_bytes: dict[int, float]
    """By the ``other`` of their streams."""
    again: bool


def with_others(
    network: LinkMap, traffic: StepTraffic, gpus: Ints, wish: Disturbances
) -> tuple[StepTraffic, tuple[Other, ...]]:
    """Add the traffic of others to that of a step on some GPUs.

    Raises:
        InputError: GPUs or storage that the cluster does not have, or ranks without a way to each other.
    """
    found: list[Other] = []
    for number, job in enumerate(wish.others):
        if max(job.gpus) >= network.cluster.num_gpus:
            raise InputError(
                f"another job is to run on GPU {max(job.gpus)}; {network.cluster.name} has {network.cluster.num_gpus}"
            )
        phases = collective_traffic(
            network, job.kind, np.array(job.gpus, np.int64), job.size_bytes, seed=wish.seed + 1 + number
        )
        flows, sizes = lockstep(phases[0])
        name = f"{job.kind} on GPUs {job.gpus[0]} to {job.gpus[-1]}"
        traffic, other = _added(network, traffic, name, number, flows, sizes, again=True)
        found.append(other)
    if wish.drain is not None:
        nodes = np.unique(gpus // network.gpus_per_node)
        flows = storage_routes(network, nodes, wish.drain.store, write=True, seed=wish.seed)
        if len(flows.links):
            name = f"checkpoint to {network.cluster.storage[wish.drain.store].name}"
            flows, sizes = per_lane(flows, np.full(len(nodes), wish.drain.node_bytes))
            traffic, other = _added(network, traffic, name, len(wish.others), flows, sizes, again=False)
            found.append(other)
    return traffic, tuple(found)


def _added(
    network: LinkMap, traffic: StepTraffic, name: str, number: int, flows: Routes, sizes: Floats, *, again: bool
) -> tuple[StepTraffic, Other]:
    """Append streams; alone, each goes as fast as its links let it."""
    count = len(sizes)
    loads: Any = sparse.csr_array((flows.loads, flows.links, flows.starts), shape=(count, network.num_links))
    with np.errstate(divide="ignore"):
        room = network.capacities_bytes_per_second[flows.links] / flows.loads
    pace = np.minimum.reduceat(room, flows.starts[:-1])
    if (pace <= 0).any():
        dead = int(flows.links[np.flatnonzero(room <= 0)[0]])
        raise InputError(f"{name} never ends: {network.name(dead)} is dead")
    kinds, kind = np.unique(sizes, return_inverse=True)
    streams = tuple(Stream(OTHER, -1, -1 - number, int(one)) for one in kind)
    joined = replace(
        traffic,
        streams=traffic.streams + streams,
        pace_bytes_per_second=np.concatenate([traffic.pace_bytes_per_second, pace]),
        loads=sparse.csr_array(sparse.vstack([traffic.loads, loads])),
        flows=traffic.flows + count,
    )
    return joined, Other(name=name, number=number, size_bytes=dict(enumerate(kinds.tolist())), again=again)


def background(problem: StepProblem, others: Sequence[Other]) -> tuple[Background, ...]:
    """Return the traffic of others on the streams of a problem."""
    found = []
    for one in others:
        mine = [
            k for k, stream in enumerate(problem.streams) if stream.kind == OTHER and stream.rank == -1 - one.number
        ]
        sizes = tuple(one.size_bytes[problem.streams[k].other] for k in mine)
        found.append(Background(name=one.name, streams=tuple(mine), size_bytes=sizes, again=one.again))
    return tuple(found)
