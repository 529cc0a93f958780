"""Whether the shared storage of a run is busy enough to be played transfer by transfer, and what is played on it."""

from __future__ import annotations

import math

from scenarios.layout import Layout
from scenarios.scenario import Scenario
from simulator.checkpoint_policy import CheckpointPolicy, archive_place
from simulator.checkpoints import writing_gpus
from simulator.run_traffic import PlayedArchive, PlayedStorage
from simulator.shared_storage import ARCHIVE, MAIN, Sharer
from simulator.storage import QUIET_LOAD, DataPath, choose_storage, node_bytes_per_second
from topologies.cluster import Storage


def played_storage(
    scenario: Scenario, layout: Layout, policy: CheckpointPolicy, data: DataPath
) -> PlayedStorage | None:
    """Return what is to be played on the storage that takes the run's checkpoints; None where mean times do.

    Played are saves and restores of this job and of others, copies to the archive and to further sites, and the reading
    of data where they lie on one of these storages, if together they ask for more than ``QUIET_LOAD`` of the time of
    the one that takes the checkpoints, if saves are in phase, if caches fill more slowly than training reads, or if the
    scenario says so.
    """
    cluster, wish = scenario.cluster, scenario.checkpoint
    of_node, per_node = node_bytes_per_second(cluster), cluster.node.gpus_per_node
    nodes, writing = (math.ceil(gpus / per_node) for gpus in (layout.world_size, writing_gpus(layout)))
    store = choose_storage(cluster, policy.bytes, writing, wish)
    if store is None or store.per_node or wish.play_transfers is False:
        return None
    tier = next(index for index, level in enumerate(policy.levels) if level.name == store.name)
    write, read = store.write_bytes_per_second, store.read_bytes_per_second
    archive = _archive(scenario, policy, tier, store)
    fastest = max(one.read_bytes_per_second for one in cluster.storage if not one.per_node)
    here = read >= fastest
    there = not here and archive is not None and archive.read is not None and archive.read >= fastest
    needed = data.needed_bytes_per_second if here or there else 0.0
    own = policy.bytes / (policy.interval_seconds * policy.levels[tier].every) / write
    others = sum(job.save_bytes / job.every_seconds for job in wish.other_jobs) / write
    load = own + others + (0.0 if data.cached or there else needed / read)
    if archive is not None:
        copied = archive.replicate_bytes if archive.write is None else archive.copy_bytes
        load += copied / (policy.interval_seconds * archive.every) / read
    slow_fill = data.cached and needed > data.store_bytes_per_second
    phase = any(job.in_phase for job in wish.other_jobs)
    alone = not wish.other_jobs and not needed  # mean times are exact then
    if not wish.play_transfers and (alone or not (load > QUIET_LOAD or phase or slow_fill)):
        return None
    return PlayedStorage(
        tier=tier,
        write=write,
        read=read,
        nodes_cap=nodes * of_node,
        save_bytes=policy.bytes,
        save_cap=writing * of_node,
        restore_bytes=policy.bytes * wish.restore_amplification,
        stops=policy.mode == "sync",
        others=tuple(
            Sharer(
                save_bytes=job.save_bytes,
                every_seconds=job.every_seconds,
                cap_bytes_per_second=job.nodes * of_node,
                mtbf_seconds=job.mtbf_seconds or math.inf,
                in_phase=job.in_phase,
            )
            for job in wish.other_jobs
        ),
        data=needed,
        data_cap=data.store_bytes_per_second,
        data_speed=data.speed if needed and not data.cached else 1.0,
        data_store=ARCHIVE if there else MAIN,
        cache_bytes=scenario.data.dataset_bytes if data.cached and needed else 0.0,
        archive=archive,
    )


def _archive(scenario: Scenario, policy: CheckpointPolicy, tier: int, store: Storage) -> PlayedArchive | None:
    """What archiving moves, if the policy archives."""
    wish, place = scenario.checkpoint, archive_place(scenario.cluster, store)
    if len(policy.levels) == tier + 1:
        return None
    moves = place is not store
    return PlayedArchive(
        tier=tier + 1,
        every=policy.levels[tier + 1].every,
        write=place.write_bytes_per_second if moves else None,
        read=place.read_bytes_per_second if moves else None,
        copy_bytes=policy.bytes if moves else 0.0,
        replicate_bytes=policy.bytes * (wish.replicas - 1),
        site_cap=wish.site_bytes_per_second or math.inf,
    )
