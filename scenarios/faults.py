"""What breaks, how often, and how long a job needs to come back."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from topologies.document import Document, FileDocument
from topologies.units import PerSecond, Seconds


class Failure(Document):
    """Failures of one kind of component that stop the job."""

    component: str
    rate_per_second: PerSecond
    """Of one component, as an annual or daily rate ("6.11 %/year")."""
    per: Literal["gpu", "node"] = "gpu"
    """How the components are counted."""


class Faults(FileDocument):
    """Failure rates and the phases of recovery."""

    failures: tuple[Failure, ...] = ()
    detection_seconds: Seconds = 0.0
    """From the failure until the job is stopped."""
    restart_seconds: Seconds = 0.0
    """From the stop until training goes on, without reading the checkpoint."""
    repair_seconds: Seconds = Field(default=0.0)
    """A broken node is back after this time."""

    def rate_per_second(self, num_gpus: int, num_nodes: int) -> float:
        """Failures per second of a job on this many GPUs and nodes."""
        count = {"gpu": num_gpus, "node": num_nodes}
        return sum(failure.rate_per_second * count[failure.per] for failure in self.failures)
