"""What a whole run starts from: the job in seconds and steps, its checkpoints, its faults; and the closed form."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from scenarios.faults import Faults
from scenarios.job import Job
from scenarios.layout import Layout
from simulator.checkpoints import CheckpointPolicy
from simulator.expected import expected_run_goodput
from simulator.failures import Source, failure_rates, sources
from simulator.run_traffic import PlayedStorage
from simulator.tiers import SaveTier
from topologies.cluster import Cluster

CUSTOMARY_RUN_SECONDS = 30 * 86400.0
"""Useful seconds of a run whose job names no target_tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSetup:
    """What a whole run consists of."""

    step_seconds: float
    num_steps: int
    tokens_per_step: int
    interval_steps: int
    tiers: tuple[SaveTier, ...]
    """From near to far; the stall of the first includes the wait for an earlier save that is not yet complete."""
    faults: Faults
    num_gpus: int
    num_nodes: int
    replica_nodes: int = 1
    """Nodes of one model replica, for going on with fewer of them."""
    checkpoint_bytes: float = 0.0
    slow: dict[str, float] = field(default_factory=dict)
    """Lasting reasons why steps take longer, with the speed that each leaves (data, power cap)."""
    played: PlayedStorage | None = None
    """The shared storage, where its transfers are played one by one instead of taking their mean times."""
    horizon_seconds: float = math.inf
    """The run is cut here, and unsaved work counts."""

    @property
    def interval_seconds(self) -> float:
        """Useful seconds between saves."""
        return self.interval_steps * self.step_seconds

    @property
    def work_seconds(self) -> float:
        """Useful seconds of the whole run."""
        return self.num_steps * self.step_seconds

    @property
    def lasting_speed(self) -> float:
        """Speed that the lasting reasons leave."""
        return math.prod(self.slow.values())

    @property
    def mean_speed(self) -> float:
        """The same with what a played data path leaves on average."""
        return self.lasting_speed * (self.played.data_speed if self.played is not None else 1.0)

    @property
    def sources(self) -> tuple[Source, ...]:
        """What fails."""
        return sources(self.faults, self.num_gpus, self.num_nodes)

    @property
    def rates_per_second(self) -> dict[str, float]:
        """Failures of the whole job by component."""
        return failure_rates(self.faults, self.num_gpus, self.num_nodes)

    @property
    def node_losses_per_second(self) -> float:
        """Nodes that leave the job for repair."""
        return sum(one.rate_per_second * one.lost_nodes for one in self.sources if math.isfinite(one.repair_seconds))

    @property
    def mtbf_seconds(self) -> float:
        """Mean time between failures of the job; infinite without failures."""
        rate = sum(self.rates_per_second.values())
        return 1 / rate if rate > 0 else math.inf

    @property
    def undisturbed_seconds(self) -> float:
        """Wall seconds of the run without failures; it ends with a save."""
        saves = math.ceil(self.num_steps / self.interval_steps)
        stalls = sum(tier.stall_seconds * (saves // tier.every) for tier in self.tiers)
        return self.work_seconds / self.mean_speed + stalls

    def expected_goodput(self) -> float:
        """The closed form for the same run, see ``expected_run_goodput``."""
        product = expected_run_goodput(
            self.faults, self.sources, self.tiers, self.interval_seconds, self.num_nodes, self.replica_nodes
        )
        return product * self.mean_speed


def run_setup(
    cluster: Cluster,
    job: Job,
    layout: Layout,
    faults: Faults,
    policy: CheckpointPolicy,
    step_seconds: float,
    *,
    slow: dict[str, float] | None = None,
    played: PlayedStorage | None = None,
) -> RunSetup:
    """Collect what a run of this job needs; without target_tokens it has 30 days of useful work.

    ``slow``: lasting reasons for longer steps, with the speed that each leaves; ``played``: a storage to be played.
    """
    if job.target_tokens is None:
        num_steps = math.ceil(CUSTOMARY_RUN_SECONDS / step_seconds)
    else:
        num_steps = math.ceil(job.target_tokens / job.tokens_per_step)
    per_node = cluster.node.gpus_per_node
    return RunSetup(
        step_seconds=step_seconds,
        num_steps=max(1, num_steps),
        tokens_per_step=job.tokens_per_step,
        interval_steps=policy.interval_steps,
        tiers=policy.levels,
        faults=faults,
        num_gpus=layout.world_size,
        num_nodes=math.ceil(layout.world_size / per_node),
        replica_nodes=math.ceil(layout.world_size / layout.dp / per_node),
        checkpoint_bytes=policy.bytes,
        slow=slow or {},
        played=played,
    )
