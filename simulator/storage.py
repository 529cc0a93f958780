"""Storage of checkpoints and data: what a save or a restore takes, alone and beside other jobs, and the data path."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from scenarios.operations import Checkpointing, DataReading
from simulator.shared_storage import Sharer, play_storage
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

    Beside data alone, or with a load up to 0.2, the closed form ``alone / (1 - load of the others)``; else flows are
    played. Infinite where the others leave nothing. Per-node storage is not shared.
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
    if others >= 1:
        return math.inf, math.inf
    interval_seconds = max(interval_seconds, alone[0] / (1 - others))  # the next save waits for the last
    own = size_bytes / interval_seconds / rate
    if not wish.other_jobs or (others + own <= QUIET_LOAD and not any(job.in_phase for job in wish.other_jobs)):
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
    cached: bool = False
    """Local disks hold the dataset once it was read."""
    store_bytes_per_second: float = math.inf
    """What shared storage gives this job."""


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
        cached=cached,
        store_bytes_per_second=from_store,
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
