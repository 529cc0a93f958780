"""Published logs of collectives: what one machine took, by size, where a tuning model does not say it.

The transports of clouds and the software of older GPUs start later than NCCL's tuning table has it. A node names the
logs that speak for it; other numbers of ranks are scaled from them (``simulator.log_curves``).
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field, field_validator

from topologies.document import Document, FileDocument
from topologies.units import Seconds, parse_quantity

CollectiveKind = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "send_recv"]


class Curve(Document):
    """One log of nccl-tests."""

    kind: CollectiveKind
    ranks: int = Field(ge=2)
    origin: str = Field(min_length=1)
    """Where the log was published."""
    times_seconds: dict[str, Seconds] = Field(min_length=2)
    """By size of the whole buffer, such as ``1 MiB``."""

    @field_validator("times_seconds")
    @classmethod
    def _grow(cls, times: dict[str, float]) -> dict[str, float]:
        sizes = [parse_quantity(size, "bytes") for size in times]
        if sorted(set(sizes)) != sizes or min(times.values()) <= 0:
            raise ValueError("sizes must grow, and each has a time above 0")
        return times

    @property
    def sizes_bytes(self) -> tuple[float, ...]:
        """The sizes, in order."""
        return tuple(parse_quantity(size, "bytes") for size in self.times_seconds)


class Curves(FileDocument):
    """Logs of one kind of machine."""

    curves: tuple[Curve, ...] = Field(min_length=1)
