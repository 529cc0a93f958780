"""When to checkpoint and where to: what a save holds, what it costs, and the policy that keeps the most work."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace

from scenarios.faults import Faults
from scenarios.job import Job
from scenarios.layout import Layout
from scenarios.operations import Checkpointing, CheckpointMode
from simulator.checkpoint_policy import (
    CUSTOMARY_INTERVAL_SECONDS,
    Candidate,
    SaveCosts,
    archive_place,
    spelled_out,
)
from simulator.checkpoint_policy import CheckpointPolicy as CheckpointPolicy
from simulator.expected import expected_run_goodput
from simulator.failures import Source, sources
from simulator.goodput_theory import expected_goodput as expected_goodput
from simulator.goodput_theory import optimum_interval, two_level_optimum, two_level_slowdown
from simulator.storage import choose_storage, contended_seconds, known_storage, storage_seconds
from simulator.tiers import SURVIVES
from topologies.cluster import Cluster, Storage

SNAPSHOT_SECONDS = 0.5
"""Fixed part of an asynchronous stall. ByteCheckpoint reports 0.34-0.59 s on 8,960 GPUs (arXiv 2407.20143)."""
EVERY_STEP_SECONDS = 0.02
"""The same where each step is saved and the copy hides behind it. ByteRobust reports 0.01-0.04 s of blocking, less
than 0.9 % in all (arXiv 2509.16293)."""
SNAPSHOT_BYTES_PER_SECOND = 25e9
"""Device-to-host copy of one GPU into pinned memory: what PCIe 4.0 x16 carries of its 32 GB/s."""
EVERY_STEP_FILE_SYSTEM_SHARE = 0.1
"""With a save each step, the file system would be written all the time: it gets at most this share (assumed)."""


def checkpoint_bytes(job: Job) -> float:
    """Bytes of one save: weights in the training format, fp32 master weights, and the moments of the optimizer.

    AdamW: 2 + 4 + 4 + 4 = 14 bytes per parameter in mixed precision, 4 + 4 + 4 = 12 in fp32 (weights are their own
    master). BLOOM's 2.3 TB for 176.25e9 parameters agrees with 14. SGD here has no momentum. Gradients are not saved.
    """
    weights = 4 if job.precision == "fp32" else 2 + 4
    return float(job.model.num_params * (weights + (8 if job.optimizer == "adamw" else 0)))


def writing_gpus(layout: Layout) -> int:
    """GPUs that write: all where the optimizer is sharded, otherwise those of one replica."""
    return layout.world_size if layout.optimizer_sharding != "none" else layout.world_size // layout.dp


def choose_interval(
    cluster: Cluster,
    job: Job,
    layout: Layout,
    faults: Faults,
    step_seconds: float,
    *,
    mode: CheckpointMode | None = None,
    interval_steps: int | None = None,
    wish: Checkpointing | None = None,
    data_share: float = 0.0,
) -> CheckpointPolicy:
    """Choose mode, tiers and interval of the checkpoints for the largest expected goodput.

    One tier: the exact optimum. Two tiers (a peer's memory and the file system): the optimum of the exact two-level
    form. Never below the drain (a save never starts before the last one is complete), in whole steps. ``mode``,
    ``interval_steps`` and ``wish`` pin choices; ``data_share`` of the storage's time is taken by data loading.

    Raises:
        ValueError: a step without duration, or an interval below one step.
    """
    if not step_seconds > 0 or (interval_steps is not None and interval_steps < 1):
        raise ValueError(f"step_seconds {step_seconds} and interval_steps {interval_steps} must be positive")
    wish = wish or Checkpointing()
    mode = mode or wish.mode
    if interval_steps is None and wish.interval_seconds is not None:
        interval_steps = max(1, round(wish.interval_seconds / step_seconds))
    gpus, nodes = layout.world_size, math.ceil(layout.world_size / cluster.node.gpus_per_node)
    found = sources(faults, gpus, nodes)
    near, far = usual_storage(cluster, job, layout, wish)
    seconds = None if interval_steps is None else interval_steps * step_seconds
    costs = save_costs(
        cluster, job, layout, faults, found, step_seconds, wish, near, far, interval=seconds, data_share=data_share
    )
    best = max(_candidates(costs, mode, interval_steps, wish), key=lambda one: one.goodput)
    policy = spelled_out(cluster, costs, best, found, wish, pinned=interval_steps is not None)
    replica_nodes = math.ceil(gpus / layout.dp / cluster.node.gpus_per_node)
    whole = expected_run_goodput(faults, found, policy.levels, policy.interval_seconds, nodes, replica_nodes)
    return replace(policy, expected_goodput=whole)


def usual_storage(
    cluster: Cluster, job: Job, layout: Layout, wish: Checkpointing
) -> tuple[Storage | None, Storage | None]:
    """A peer's memory, where it may come before a shared storage, and the storage that takes what must outlive more."""
    per_node = cluster.node.gpus_per_node
    far = choose_storage(cluster, checkpoint_bytes(job), math.ceil(writing_gpus(layout) / per_node), wish)
    if far is None or far.per_node or layout.world_size <= per_node or wish.peer_memory is False:
        return None, far
    return next((one for one in known_storage(cluster, wish) if one.kind == "peer-memory"), None), far


def save_costs(
    cluster: Cluster,
    job: Job,
    layout: Layout,
    faults: Faults,
    found: tuple[Source, ...],
    step_seconds: float,
    wish: Checkpointing,
    near: Storage | None,
    far: Storage | None,
    *,
    interval: float | None = None,
    data_share: float = 0.0,
) -> SaveCosts:
    """What saving to one pair of storages rests on.

    Args:
        cluster: its network bounds what a node writes.
        job: what is saved.
        layout: who writes.
        faults: how the job comes back.
        found: what fails.
        step_seconds: of one step.
        wish: other jobs, bandwidth and amplification.
        near: storage of every save, which some failures do not leave intact; None: there is one storage only.
        far: storage that outlives more; None: saves are free.
        interval: seconds between saves as far as known, for what other jobs make of shared storage.
        data_share: of the storage's time that data loading takes.
    """
    size, gpus = checkpoint_bytes(job), writing_gpus(layout)
    nodes, all_nodes = (math.ceil(n / cluster.node.gpus_per_node) for n in (gpus, layout.world_size))
    writes, loads, archive_load = [0.0, 0.0], [0.0, 0.0], 0.0
    interval = interval or CUSTOMARY_INTERVAL_SECONDS
    if near is not None:
        writes[0] = storage_seconds(near, cluster, size, nodes)
        loads[0] = storage_seconds(near, cluster, size, all_nodes, write=False)
    if far is not None:
        archive = archive_place(cluster, far)
        copied = size * (wish.replicas - 1 if archive is far else 1)  # read there by the archive
        data_share += copied / wish.archive_every_seconds / far.read_bytes_per_second
        if archive is not far:
            read = size * wish.restore_amplification
            archive_load = storage_seconds(archive, cluster, read, all_nodes, write=False)
        writes[1] = contended_seconds(far, cluster, size, nodes, wish, interval, data_share)[0]
        loads[1] = contended_seconds(far, cluster, size, all_nodes, wish, interval, data_share)[1]
    kind = "peer-memory" if near is None else near.kind
    near_rate = sum(one.rate_per_second for one in found if one.loss in SURVIVES[kind] and not one.poisoned_seconds)
    rate = sum(one.rate_per_second for one in found)
    detection = sum(one.rate_per_second * one.detection_seconds for one in found) / rate if rate > 0 else 0.0
    return SaveCosts(
        size=size,
        near=near,
        far=far,
        snapshot=size / gpus / SNAPSHOT_BYTES_PER_SECOND,
        writes=(writes[0], writes[1]),
        loads=(loads[0], loads[1]),
        archive_load=archive_load,
        rates=(near_rate, rate - near_rate),
        back=detection + faults.recovery_seconds - faults.detection_seconds,
        step_seconds=step_seconds,
    )


def _candidates(
    costs: SaveCosts, mode: CheckpointMode | None, interval_steps: int | None, wish: Checkpointing
) -> Iterator[Candidate]:
    """Every allowed way to save, each with its best interval."""
    write, free = costs.writes[1], costs.far is None
    stall = snapshot_stall(costs)
    if mode in (None, "sync"):
        yield _one_tier(costs, "sync", write, 0.0, interval_steps)
    two = costs.near is not None and math.isfinite(costs.mtbf)
    if mode in (None, "async"):
        if not (two and wish.peer_memory):
            yield _one_tier(costs, "async", stall, write, interval_steps)
        if two:
            yield _two_tiers(costs, "async", stall, interval_steps, wish.file_system_every)
    if mode == "every-step":
        stall = 0.0 if free else EVERY_STEP_SECONDS + costs.snapshot
        if costs.near is None:
            yield _one_tier(costs, mode, min(stall, write), write, 1)
        else:
            yield _two_tiers(costs, mode, stall, 1, wish.file_system_every)


def snapshot_stall(costs: SaveCosts) -> float:
    """Seconds that an asynchronous save stops training: the copy off the GPU, never more than the write itself."""
    return 0.0 if costs.far is None else min(SNAPSHOT_SECONDS + costs.snapshot, costs.writes[1])


def _one_tier(
    costs: SaveCosts, mode: CheckpointMode, stall: float, drain: float, interval_steps: int | None
) -> Candidate:
    mtbf, step = costs.mtbf, costs.step_seconds
    known = costs.far is not None and math.isfinite(mtbf)
    wanted = optimum_interval(stall, mtbf) if known else CUSTOMARY_INTERVAL_SECONDS

    def goodput(interval: float, stalled: float) -> float:
        return expected_goodput(interval, stalled, mtbf, costs.back + costs.loads[1], drain)

    least = max(drain - stall, 0.0)
    steps = interval_steps or _whole_steps(max(wanted, least), least, step, lambda tau: goodput(tau, stall))
    # a pinned interval below the drain is stretched in effect: the next save waits for the last
    waits = stall + max(0.0, drain - steps * step - stall)
    return Candidate(mode=mode, steps=steps, every=0, stall=waits, goodput=goodput(steps * step, waits))


def _two_tiers(
    costs: SaveCosts, mode: CheckpointMode, stall: float, interval_steps: int | None, every: int | None
) -> Candidate:
    step = costs.step_seconds
    rates = (costs.rates[0], max(costs.rates[1], 1e-6 * costs.rates[0]))
    restarts = (costs.back + costs.loads[0], costs.back + costs.loads[1])
    drains = costs.writes
    share = EVERY_STEP_FILE_SYSTEM_SHARE if mode == "every-step" else 1.0

    def judged(steps: int) -> tuple[float, int, float]:
        """Slowdown, ``every`` and the stall with the wait for the last save to a peer."""
        waits = stall + max(0.0, drains[0] - steps * step - stall)
        period = steps * step + waits
        least = max(1, math.ceil(drains[1] / share / period * (1 - 1e-12)))
        if every is not None:
            chosen = max(every, least)
        elif costs.rates[1] > 0:
            chosen = max(two_level_optimum((waits, 0.0), rates, restarts, drains, interval=steps * step)[1], least)
        else:
            chosen = max(least, round(CUSTOMARY_INTERVAL_SECONDS / period))
        back = (restarts[0] + drains[0], restarts[1] + drains[1])
        slow = float(two_level_slowdown(steps * step, chosen, (waits, 0.0), rates, back))
        return slow, chosen, waits

    if interval_steps is None:
        tau = two_level_optimum((stall, 0.0), rates, restarts, drains)[0]
        below = max(1, math.ceil((drains[0] - stall) / step - 1e-9), math.floor(tau / step))
        interval_steps = min((below, below + 1), key=lambda steps: judged(steps)[0])
    slow, chosen, waits = judged(interval_steps)
    return Candidate(mode=mode, steps=interval_steps, every=chosen, stall=waits, goodput=1 / slow)


def _whole_steps(wanted: float, least: float, step_seconds: float, goodput: Callable[[float], float]) -> int:
    """Round to the better whole number of steps that is not below ``least`` seconds."""
    if not math.isfinite(max(wanted, least)):
        return max(1, math.ceil(CUSTOMARY_INTERVAL_SECONDS / step_seconds))
    lowest = max(1, math.ceil(least / step_seconds - 1e-9))
    below = max(lowest, math.floor(wanted / step_seconds))
    return max((below, below + 1), key=lambda steps: goodput(steps * step_seconds))
