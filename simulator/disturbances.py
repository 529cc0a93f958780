"""What makes GPUs and links of one step unlike: slow GPUs, jitter, faults of links, other jobs, a checkpoint drain."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from scipy.special import ndtri

from scenarios.job import Job
from scenarios.layout import Layout
from simulator.checkpoints import checkpoint_bytes
from simulator.longest_path import OpGraph
from topologies.cluster import Cluster, CollectiveKind
from topologies.errors import InputError
from topologies.link_map import Floats, Ints


@dataclass(frozen=True, slots=True, kw_only=True)
class OtherJob:
    """A collective that another job repeats all the time."""

    kind: CollectiveKind
    gpus: tuple[int, ...]
    size_bytes: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Drain:
    """A checkpoint that is on its way to storage."""

    store: int
    """Number of the cluster's storage tier."""
    node_bytes: float
    """From each node of the job."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Disturbances:
    """Nothing by default."""

    slow_gpus: dict[int, float] = field(default_factory=dict)
    """Speed of a GPU, as a share of the others'."""
    faults: tuple[tuple[str, float], ...] = ()
    """Links and switches, and what is left of them; see ``topologies.link_names``."""
    jitter: float = 0.0
    """Coefficient of variation of an op's time on one GPU (lognormal, mean 1); 0: the closed form's mean effect."""
    others: tuple[OtherJob, ...] = ()
    drain: Drain | None = None
    seed: int = 0
    """Of the jitter and of hashed paths."""

    @property
    def any(self) -> bool:
        """Whether something is disturbed."""
        return bool(self.slow_gpus or self.faults or self.jitter or self.others or self.drain)


def checkpoint_drain(cluster: Cluster, job: Job, layout: Layout) -> Drain:
    """Return a whole checkpoint on its way to the first shared storage of a cluster, spread over the job's nodes.

    Raises:
        InputError: the cluster has no shared storage.
    """
    store = next((number for number, one in enumerate(cluster.storage) if not one.per_node), None)
    if store is None:
        raise InputError(
            f"{cluster.name} has no shared storage to which a checkpoint could drain",
            hint="describe it under 'storage'",
        )
    nodes = -(-layout.world_size // cluster.node.gpus_per_node)
    return Drain(store=store, node_bytes=checkpoint_bytes(job) / nodes)


def work_factors(
    disturbances: Disturbances, layout: Layout, graph: OpGraph, grid: Ints, unit_of_replica: Ints
) -> Floats:
    """Return by how much longer each op takes in each unit: shape (units, ops). ``grid`` has the GPU of each rank.

    The ranks of a tensor or context parallel group, and replicas that exchange tokens, run an op at the pace of their
    slowest: of n lognormal times the largest is drawn by its quantile ``u ** (1 / n)``.

    Raises:
        InputError: a slow GPU that the job does not use, or a speed that is none.
    """
    units = int(unit_of_replica.max()) + 1
    rank_factor = np.ones((units, layout.pp))
    for gpu, speed in disturbances.slow_gpus.items():
        if not 0 < speed <= 1:
            raise InputError(f"GPU {gpu} runs at {speed:g} of its speed; give a share above 0, at most 1")
        place = np.argwhere(grid == gpu)
        if not len(place):
            raise InputError(f"the job does not use GPU {gpu}: its {grid.size} GPUs are {grid.min()} to {grid.max()}")
        rank, replica = int(place[0][0]), int(place[0][1])
        unit = int(unit_of_replica[replica])
        rank_factor[unit, rank] = max(rank_factor[unit, rank], 1.0 / speed)
    factors = rank_factor[:, list(graph.ranks)]
    if disturbances.jitter > 0:
        sigma = float(np.sqrt(np.log1p(disturbances.jitter**2)))
        members = layout.tp * layout.cp * np.bincount(unit_of_replica, minlength=units)[:, None]
        drawn = np.random.default_rng(disturbances.seed).random(factors.shape) ** (1.0 / members)
        factors = factors * np.exp(sigma * ndtri(drawn) - sigma**2 / 2)
    return factors
