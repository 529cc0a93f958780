"""Storage of checkpoints and data: what a save or a restore takes, alone and beside other jobs, and the data path."""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from scenarios.operations import Checkpointing, DataReading
from topologies.cluster import Cluster, Storage

QUIET_LOAD = 0.2
"""Offered load of a shared storage up to which ``1 / (1 - load)`` is close; above it transfers are played as flows."""


def storage_seconds(
    storage: Storage, cluster: Cluster, size_bytes: float, num_nodes: int, *, write: bool = True
) -> float:
    """Seconds in which nodes move equal shards to or from a storage: the slower of the whole and of each node.

    A node reaches shared storage at no more than the line rate of its NICs.
    """
    rate = storage.write_bytes_per_second if write else storage.read_bytes_per_second
    of_node = node_bytes_per_second(cluster)
    if storage.per_node:
        return size_bytes / num_nodes / (min(rate, of_node) if storage.kind == "peer-memory" else rate)
    return max(size_bytes / rate, size_bytes / num_nodes / of_node)


def node_bytes_per_second(cluster: Cluster) -> float:
    """Line rate of a node's NICs; infinite where it has none."""
    return cluster.node.network_bytes_per_second_per_gpu * cluster.node.gpus_per_node or math.inf


def known_storage(cluster: Cluster, wish: Checkpointing) -> tuple[Storage, ...]:
    """The storage of a cluster with the bandwidth that the scenario asks for; local disks where nothing is stated."""
    known = list(cluster.storage)
    node = cluster.node
    if not known and node.local_write_bytes_per_second > 0 and node.local_read_bytes_per_second > 0:
        known.append(
            Storage(
                name="local disk",
                kind="local-nvme",
                write_bytes_per_second=node.local_write_bytes_per_second,
                read_bytes_per_second=node.local_read_bytes_per_second,
                per_node=True,
            )
        )
    changes = {
        name: value
        for name in ("write_bytes_per_second", "read_bytes_per_second")
        if (value := getattr(wish, name)) is not None
    }
    return tuple(
        one.model_copy(update=changes) if changes and one.kind == "parallel-file-system" else one for one in known
    )


def choose_storage(
    cluster: Cluster, size_bytes: float, num_nodes: int, wish: Checkpointing | None = None
) -> Storage | None:
    """Return the storage for every save: the fastest that outlives the loss of any node, else of one node, else any.

    A shared file system or object store outlives everything here, a peer's memory the loss of one node, local disks
    only the process.
    """
    classes = {"parallel-file-system": 0, "object-store": 0, "peer-memory": 1, "local-nvme": 2}
    return min(
        known_storage(cluster, wish or Checkpointing()),
        key=lambda one: (classes[one.kind], storage_seconds(one, cluster, size_bytes, num_nodes)),
        default=None,
    )


# ---- sharing with other jobs


def shared_rates(caps: Sequence[float], capacity: float = 1.0) -> list[float]:
    """Max-min fair rates of flows with a cap each on one shared capacity: fill from the smallest cap up."""
    rates = [0.0] * len(caps)
    left = capacity
    for place, index in enumerate(sorted(range(len(caps)), key=caps.__getitem__)):
        rates[index] = min(caps[index], left / (len(caps) - place))
        left -= rates[index]
    return rates


@dataclass(frozen=True, slots=True, kw_only=True)
class Sharer:
    """A job that saves to a shared storage again and again."""

    save_bytes: float
    every_seconds: float
    cap_bytes_per_second: float
    """Of all its nodes together."""
    mtbf_seconds: float = math.inf
    in_phase: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Sharing:
    """What a job sees of a storage that it shares: mean seconds, alone and beside the others."""

    write_alone_seconds: float
    write_seconds: float
    read_alone_seconds: float
    read_seconds: float
    skipped_share: float
    """Saves that were left out because the last one was not yet complete."""


@lru_cache(maxsize=64)
def play_storage(
    jobs: tuple[Sharer, ...],
    write_bytes_per_second: float,
    read_bytes_per_second: float,
    *,
    seconds: float = 20 * 86400.0,
    seed: int = 0,
    reads_first: bool = False,
    busy_share: float = 0.0,
) -> tuple[Sharing, ...]:
    """Play saves and restores of several jobs as flows that share one storage max-min fairly.

    Each flow uses a share of the storage's time: its rate over the storage's rate in its direction. A save is left out
    while the last one drains; a failure stops the drain of its job and starts a read.

    Args:
        jobs: who saves, how often.
        write_bytes_per_second: of the whole storage.
        read_bytes_per_second: of the whole storage.
        seconds: simulated time.
        seed: of phases and failures.
        reads_first: restores before saves.
        busy_share: of the storage's time that other traffic (data loading) always takes.
    """
    random = np.random.default_rng(seed)
    rate = {"write": write_bytes_per_second, "read": read_bytes_per_second}
    queue: list[tuple[float, int, str]] = []
    for index, job in enumerate(jobs):
        first = job.every_seconds if job.in_phase else float(random.uniform(0, job.every_seconds))
        heapq.heappush(queue, (first, index, "write"))
        if math.isfinite(job.mtbf_seconds):
            heapq.heappush(queue, (float(random.exponential(job.mtbf_seconds)), index, "read"))
    flows: dict[tuple[int, str], list[float]] = {}
    shares: dict[tuple[int, str], float] = {}
    took: dict[tuple[int, str], list[float]] = {}
    begun, skipped = [0] * len(jobs), [0] * len(jobs)
    now, capacity = 0.0, 1.0 - busy_share

    def divided() -> dict[tuple[int, str], float]:
        groups = [[key for key in flows if key[1] == kind] for kind in ("read", "write")]
        if not reads_first:
            groups = [[*groups[0], *groups[1]]]
        found: dict[tuple[int, str], float] = {}
        left = capacity
        for group in groups:
            given = shared_rates([min(1.0, jobs[i].cap_bytes_per_second / rate[kind]) for i, kind in group], left)
            found |= dict(zip(group, given, strict=True))
            left = max(0.0, left - sum(given))
        return found

    while queue and now < seconds:
        following, ends = queue[0][0], None
        for key, flow in flows.items():
            if shares[key] > 0 and now + flow[0] / shares[key] < following:
                following, ends = now + flow[0] / shares[key], key
        for key, flow in flows.items():
            flow[0] -= shares[key] * (following - now)
        now = following
        if ends is not None:
            took.setdefault(ends, []).append(now - flows.pop(ends)[1])
        else:
            _, index, kind = heapq.heappop(queue)
            job = jobs[index]
            if kind == "write":
                begun[index] += 1
                busy = (index, "write") in flows or (index, "read") in flows
                skipped[index] += busy
                if not busy:
                    flows[(index, "write")] = [job.save_bytes / rate["write"], now]
                heapq.heappush(queue, (now + job.every_seconds, index, "write"))
            else:
                flows.pop((index, "write"), None)
                flows[(index, "read")] = [job.save_bytes / rate["read"], now]
                heapq.heappush(queue, (now + float(random.exponential(job.mtbf_seconds)), index, "read"))
        shares = divided()

    def mean(index: int, kind: str) -> tuple[float, float]:
        alone = jobs[index].save_bytes / min(rate[kind], jobs[index].cap_bytes_per_second)
        values = took.get((index, kind))
        return alone, float(np.mean(values)) if values else alone

    found = []
    for index in range(len(jobs)):
        write, read = mean(index, "write"), mean(index, "read")
        found.append(
            Sharing(
                write_alone_seconds=write[0],
                write_seconds=write[1],
                read_alone_seconds=read[0],
                read_seconds=read[1],
                skipped_share=skipped[index] / max(1, begun[index]),
            )
        )
    return tuple(found)


def contended_seconds(
    storage: Storage,
    cluster: Cluster,
    size_bytes: float,
    num_nodes: int,
    wish: Checkpointing,
    interval_seconds: float,
    data_share: float = 0.0,
) -> tuple[float, float]:
    """Seconds of a save and of a restore beside the scenario's other jobs and data loading.

    Alone, or with a load up to 0.2, the closed form ``alone / (1 - load of the others)``; else the flows are played.
    Per-node storage is not shared.
    """
    read_bytes = size_bytes * wish.restore_amplification
    alone = tuple(
        storage_seconds(storage, cluster, size, num_nodes, write=write)
        for size, write in ((size_bytes, True), (read_bytes, False))
    )
    if storage.per_node:
        return alone[0], alone[1]
    rate = storage.write_bytes_per_second
    others = sum(job.save_bytes / job.every_seconds for job in wish.other_jobs) / rate + data_share
    if others == 0:
        return alone[0], alone[1]
    own = size_bytes / interval_seconds / rate
    if others + own >= 1:
        return math.inf, math.inf
    if others + own <= QUIET_LOAD and not any(job.in_phase for job in wish.other_jobs):
        return alone[0] / (1 - others), alone[1] / (1 - others)
    of_node = node_bytes_per_second(cluster)
    phase = any(job.in_phase for job in wish.other_jobs)
    mine = Sharer(
        save_bytes=size_bytes,
        every_seconds=interval_seconds,
        cap_bytes_per_second=num_nodes * of_node,
        mtbf_seconds=10_800.0,  # restores often enough for a mean; they are rare beside saves
        in_phase=phase,
    )
    rest = tuple(
        Sharer(
            save_bytes=job.save_bytes,
            every_seconds=job.every_seconds,
            cap_bytes_per_second=job.nodes * of_node,
            in_phase=job.in_phase,
        )
        for job in wish.other_jobs
    )
    seen = play_storage((mine, *rest), rate, storage.read_bytes_per_second, busy_share=data_share)[0]
    return seen.write_seconds, seen.read_seconds * wish.restore_amplification


def restore_storm_seconds(sizes_bytes: Sequence[float], read_bytes_per_second: float) -> float:
    """Seconds until the last of several jobs has read its checkpoint, all starting at once (a power event)."""
    return sum(sizes_bytes) / read_bytes_per_second


# ---- data


@dataclass(frozen=True, slots=True, kw_only=True)
class DataPath:
    """What training reads, against what can be read."""

    needed_bytes_per_second: float
    available_bytes_per_second: float
    """Infinite where no storage is stated."""
    speed: float
    """Of the step: below 1, training waits for data."""
    fill_seconds: float
    """To fill the caches on the local disks from shared storage; 0 without a cache."""
    storage_share: float
    """Of the shared storage's time that reading takes."""


def data_path(cluster: Cluster, data: DataReading, tokens_per_second: float, num_nodes: int) -> DataPath:
    """Compare the rate at which a job eats tokens with what shared storage, or a cache on local disks, delivers."""
    needed = tokens_per_second * data.bytes_per_token
    shared = max((one.read_bytes_per_second for one in cluster.storage if not one.per_node), default=math.inf)
    from_store = data.storage_share * min(shared, num_nodes * node_bytes_per_second(cluster))
    fits = data.dataset_bytes <= num_nodes * cluster.node.local_storage_bytes
    cached = data.local_cache and data.dataset_bytes > 0 and fits
    local = num_nodes * cluster.node.local_read_bytes_per_second
    available = local if cached and local > 0 else from_store
    return DataPath(
        needed_bytes_per_second=needed,
        available_bytes_per_second=available,
        speed=min(1.0, available / needed) if needed > 0 else 1.0,
        fill_seconds=data.dataset_bytes / from_store if cached else 0.0,
        storage_share=0.0 if cached or math.isinf(shared) else min(needed, available) / shared,
    )


# ---- rules of thumb beside the simulated need


def bandwidth_estimates(
    num_params: float, save_bytes: float, window_seconds: float, mtbf_seconds: float
) -> dict[str, float]:
    """Write bandwidth (bytes/s) for checkpoints by common rules, beside what the model asks for.

    ``size_x_8_over_window`` is the rule "bandwidth in GB/s = size of the bf16 weights in GB x 8 / window in s"; it
    moves 16 bytes a parameter. ``drain_costs_1_percent`` is what asynchronous saves need to lose 1 % of the goodput
    to their drain (bytes / (0.01 mtbf)), ``keep_up`` what completes a save within the window, ``sync_costs_5_percent``
    what synchronous saves need for a waste of 5 % (stall = waste^2 mtbf / 2).
    """
    return {
        "size_x_8_over_window": 2 * num_params * 8 / window_seconds,
        "keep_up": save_bytes / window_seconds,
        "drain_costs_1_percent": 0.0 if math.isinf(mtbf_seconds) else save_bytes / (0.01 * mtbf_seconds),
        "sync_costs_5_percent": 0.0 if math.isinf(mtbf_seconds) else save_bytes / (0.05**2 * mtbf_seconds / 2),
    }
