"""What breaks, how often, how far it reaches, and how a job comes back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import Field, model_validator

from scenarios.failure_traces import FailureTrace, read_trace_file
from topologies.document import Document, FileDocument, Reference
from topologies.hardware import CATALOG
from topologies.units import PerSecond, Ratio, Seconds

Law = Literal["fixed", "exponential"]


class Failure(Document):
    """Failures of one kind of component that stop the job, with what they take away."""

    component: str
    rate_per_second: PerSecond
    """Of one component, as an annual or daily rate ("6.11 %/year"); the mean over the fleet."""
    per: Literal["gpu", "node", "group", "job"] = "gpu"
    """How the components are counted: one per GPU, per node, per group of nodes, or one for the job."""
    group_nodes: int = Field(default=1, ge=1)
    """Nodes that one component serves, where counted per group: those of a leaf switch, of a rack's power supply."""
    pool: str | None = None
    """Only nodes of this name have it, in a cluster of several kinds; None: all nodes."""
    lost_nodes: int = Field(default=1, ge=0)
    """Nodes that leave the job until they are repaired; 0: only the processes die."""
    poisoned_seconds: Seconds = 0.0
    """Work before the detection that is wrong (silent data corruption, loss spike): an older checkpoint is needed."""
    loses_file_system: bool = False
    """The shared file system and its checkpoints are gone; only an object store keeps its own."""
    outage_seconds: Seconds = 0.0
    """The job cannot restart this long after the detection (storage, network core or power is away)."""
    notice_seconds: Seconds = 0.0
    """Warning before it happens (spot preemption): long enough for a save, no work is lost."""
    detection_seconds: Seconds | None = None
    """None: as for all failures."""
    repair_seconds: Seconds | None = None
    """None: as for all failures; for spot capacity the time until it is offered again."""
    weibull_shape: float = Field(default=1.0, gt=0)
    """Of the life of one node's component: 1 exponential, below 1 infant mortality, above 1 wear."""
    age_seconds: Seconds = 0.0
    """Age of the nodes at the start, for a Weibull life; replaced nodes start at 0."""
    burst_share: Ratio = Field(default=0.0, ge=0, lt=1)
    """Share of the failures that follow another one of this kind closely (a flapping link); the rate counts all."""
    burst_seconds: Seconds = Field(default=300.0, gt=0)
    """Mean time from a failure to the one that follows it closely."""

    def count(self, num_gpus: int, num_nodes: int) -> float:
        """Components of a job on this many GPUs and nodes."""
        return {"gpu": num_gpus, "node": num_nodes, "group": num_nodes / self.group_nodes, "job": 1}[self.per]

    @model_validator(mode="after")
    def _one_law(self) -> Failure:
        if self.weibull_shape != 1 and (self.burst_share or self.per in ("group", "job")):
            raise ValueError("a Weibull life is for one component per gpu or node, without bursts; leave one out")
        return self


class Manual(Document):
    """The tail of failures that a person has to look at."""

    share: Ratio = Field(ge=0, le=1)
    """Of all failures."""
    takes_seconds: Seconds
    """Mean, exponentially distributed; nothing runs meanwhile, so nothing fails."""


class Elastic(Document):
    """Going on with fewer replicas while nodes are missing."""

    reconfigure_seconds: Seconds
    """From the detection to the first step in the new size."""
    gather: bool = True
    """Healthy nodes are re-ranked, so that broken ones share as few replicas as possible."""
    keeps_state: bool = False
    """The live replicas hold the whole state: a failure that takes no more than some nodes loses no work."""


class Stragglers(Document):
    """Nodes that slow the whole job down without stopping it (fail-slow)."""

    rate_per_second: PerSecond
    """Of one node."""
    speed: Ratio = Field(gt=0, le=1)
    """Of the job while one of them is slow."""
    lasts_seconds: Seconds = Field(gt=0)
    """Mean, exponentially distributed."""
    found_seconds: Seconds | None = None
    """It is found and its node replaced after this time; None: never."""


class Maintenance(Document):
    """Planned stops: a save, then down; the first after half a period."""

    every_seconds: Seconds = Field(gt=0)
    takes_seconds: Seconds
    """From the last step before to the first step after it, the save and the restart included."""


class Lemons(Document):
    """Few nodes that fail far more often; the rates of the failures stay the mean of the fleet."""

    share: Ratio = Field(gt=0, lt=1)
    factor: float = Field(ge=1)
    """Failure rate of a lemon over that of another node."""
    retired: bool = True
    """A lemon that failed does not come back; False: its place is taken by a node from the same mix."""


class Faults(FileDocument):
    """Failure rates and the phases of recovery."""

    failures: tuple[Failure, ...] = ()
    trace: Annotated[FailureTrace, Reference(CATALOG, read_raw=read_trace_file)] | None = None
    """Recorded events that are played beside the failures above."""
    stragglers: Stragglers | None = None
    maintenance: Maintenance | None = None
    lemons: Lemons | None = None
    corrupt_checkpoints: Ratio = Field(default=0.0, ge=0, lt=1)
    """Share of the restores whose checkpoint turns out to be unreadable, so that the one before is taken."""
    rate_spread: Ratio = 0.3
    """Standard deviation over mean of what is known about the rates: each run draws one factor for all of them from a
    gamma distribution. Rates of another cluster are rarely known better than to a third; 0: known exactly."""
    clock: Literal["wall", "operating"] = "wall"
    """wall: failures also hit a job that is coming back; operating: only a job that trains."""

    detection_seconds: Seconds = 0.0
    """From the failure until the job is stopped."""
    detection_law: Law = "fixed"
    diagnosis_seconds: Seconds = 0.0
    """Finding the node to cordon."""
    manual: Manual | None = None
    restart_seconds: Seconds = 0.0
    """From the stop until training goes on, without reading the checkpoint."""
    restart_phases: dict[str, Seconds] = Field(default_factory=dict)
    """Instead of ``restart``: its parts by name, such as requeue, rendezvous, warm-up."""
    in_job_restart_seconds: Seconds | None = None
    """Restart in place where no node is lost; None: as any restart."""
    repair_seconds: Seconds = Field(default=0.0)
    """A broken node is back after this time (mean)."""
    repair_law: Law = "exponential"
    wrong_diagnoses: Ratio = Field(default=0.0, ge=0, lt=1)
    """Share of the failures of nodes after which a healthy node is sent away; the broken one stays, to fail again."""
    failed_repairs: Ratio = Field(default=0.0, ge=0, lt=1)
    """Share of the repairs that mend nothing: once such a node is back in the job, it fails again. Only where the
    number of ``spares`` is stated, since otherwise a sound one is always at hand."""
    recurs_seconds: Seconds = Field(default=600.0, gt=0)
    """Mean training time until a node that is still broken fails again."""
    repair_crews: int | None = Field(default=None, ge=1)
    """Repairs that go on at the same time, others queue; None: as many as there are broken nodes."""
    spares: int | None = Field(default=None, ge=0)
    """Idle nodes that take the place of broken ones; None: there is always one at hand."""
    spares_shared_with: tuple[int, ...] = ()
    """Nodes of each other job that takes from the same spares and repair shop, first come, first served; its nodes
    break as often as those of this job, and a job that waits loses none."""
    standbys: int = Field(default=0, ge=0)
    """Warm standbys: idle nodes with the job's processes up."""
    standby_restart_seconds: Seconds = 60.0
    """Instead of the restart, where standbys suffice."""
    elastic: Elastic | None = None

    @model_validator(mode="after")
    def _restart_is_said_once(self) -> Faults:
        if self.restart_phases and self.restart_seconds:
            raise ValueError("both 'restart' and 'restart_phases' are given; keep one")
        return self

    @model_validator(mode="after")
    def _sharers_have_nodes(self) -> Faults:
        if any(nodes < 1 for nodes in self.spares_shared_with):
            raise ValueError("a job that shares the spares has at least 1 node; correct 'spares_shared_with'")
        if self.spares_shared_with and self.spares is None:
            raise ValueError("'spares_shared_with' needs a number of 'spares'; state it")
        return self

    @property
    def phases_seconds(self) -> dict[str, float]:
        """The parts of a full restart, in order."""
        return dict(self.restart_phases) if self.restart_phases else {"restart": self.restart_seconds}

    @property
    def recovery_seconds(self) -> float:
        """Expected time from a failure to the first step after it, without reading the checkpoint and waiting."""
        manual = self.manual.share * self.manual.takes_seconds if self.manual else 0.0
        return self.detection_seconds + self.diagnosis_seconds + manual + sum(self.phases_seconds.values())

    def at_work(self, pools: Mapping[str, tuple[int, int]]) -> Faults:
        """Return the faults of a job that works on so many nodes and GPUs of each pool, per component of the whole job.

        A failure of one pool keeps its rate in all, spread over the components of all pools.
        """
        nodes, gpus = (sum(counts[which] for counts in pools.values()) for which in (0, 1))
        failures = []
        for failure in self.failures:
            if failure.pool is not None:
                own = pools.get(failure.pool, (0, 0))
                share = (
                    float(own[0] > 0)
                    if failure.per == "job"
                    else failure.count(own[1], own[0]) / failure.count(gpus, nodes)
                )
                failure = failure.model_copy(update={"rate_per_second": share * failure.rate_per_second})
            failures.append(failure)
        return self.model_copy(update={"failures": tuple(failures)})

    def rate_per_second(self, num_gpus: int, num_nodes: int) -> float:
        """Failures per second of a job on this many GPUs and nodes, those of the trace included."""
        stated = sum(failure.rate_per_second * failure.count(num_gpus, num_nodes) for failure in self.failures)
        return stated + (self.trace.rate_per_second(num_gpus, num_nodes) if self.trace else 0.0)
