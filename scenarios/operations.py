"""How a run is operated: what the user fixes about checkpoints, who else uses the storage, and the data path."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from topologies.document import Document
from topologies.units import Bytes, BytesPerSecond, Ratio, Seconds

CheckpointMode = Literal["sync", "async", "every-step"]


class OtherJob(Document):
    """Another job that saves to the same shared storage."""

    save_bytes: Bytes = Field(gt=0)
    """Of one save."""
    every_seconds: Seconds = Field(gt=0)
    nodes: int = Field(ge=1)
    in_phase: bool = False
    """It saves at the same moments as this job (started together, or on the clock)."""
    mtbf_seconds: Seconds | None = Field(default=None, gt=0)
    """Mean time between its failures, after each of which it reads its last save; None: only what stops all jobs (an
    outage) makes it read."""


class Checkpointing(Document):
    """What is fixed about checkpoints; everything that is left out is chosen for the largest goodput."""

    mode: CheckpointMode | None = None
    """sync: training stops for the write; async: for a snapshot; every-step: each step into a peer's memory."""
    interval_seconds: Seconds | None = Field(default=None, gt=0)
    """Useful seconds between saves to the first tier; rounded to whole steps."""
    file_system_every: int | None = Field(default=None, ge=1)
    """Every how many of those saves also goes to the shared file system."""
    peer_memory: bool | None = None
    """Whether saves also go to the memory of a peer node; None: where it pays."""
    archive_every_seconds: Seconds = Field(default=21_600.0, gt=0)
    """Saves this far apart are copied to the object store, where the cluster has one."""
    keep: int | None = Field(default=None, ge=2)
    """Saves kept on the file system; None: as many as a rollback needs, at least 2."""
    replicas: int = Field(default=1, ge=1)
    """Sites that hold each archived save; it is complete when all of them do."""
    site_bytes_per_second: BytesPerSecond | None = Field(default=None, gt=0)
    """Between the sites; None: as fast as the first one reads."""
    write_bytes_per_second: BytesPerSecond | None = Field(default=None, gt=0)
    """Of the shared file system, instead of what the cluster says."""
    read_bytes_per_second: BytesPerSecond | None = Field(default=None, gt=0)
    other_jobs: tuple[OtherJob, ...] = ()
    play_transfers: bool | None = None
    """Whether whole runs play each save, restore, copy to the archive and the data loading as transfers that share the
    storage; None: where they ask for more than a fifth of its time, or are in phase. Otherwise mean times are taken."""
    restore_amplification: float = Field(default=1.0, ge=1.0)
    """Bytes read at a restore over those of a save: 1 where each rank reads its shard (or one replica reads and
    broadcasts), dp where each replica reads everything."""

    @model_validator(mode="after")
    def _every_step_has_its_interval(self) -> Checkpointing:
        if self.mode == "every-step" and self.interval_seconds is not None:
            raise ValueError("mode every-step saves at each step; leave 'interval' out")
        return self


class DataReading(Document):
    """How training reads its data."""

    bytes_per_token: float = Field(default=4.0, ge=0)
    """4: token numbers of 32 bits; far more for images and video."""
    dataset_bytes: Bytes = 0.0
    """0: not stated, so no cache is considered."""
    local_cache: bool = False
    """Local disks hold the dataset after its first reading; each restart on a new node fills its own again."""
    storage_share: Ratio = Field(default=0.5, gt=0, le=1)
    """Of the shared storage's read bandwidth that this job may use for data."""
