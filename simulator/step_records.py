"""What the player of a step is given beside ops and streams, and what it writes down."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from simulator.network import Counters
from topologies.link_map import Floats

LATE = 1e-9
"""Share of a transfer's time below which it counts as in time: rounding of the fluid."""


class Activity(NamedTuple):
    """Something that took time, and what it waited for."""

    kind: str
    """forward, backward ..., p2p, tp_comm ..., dp_comm, optimizer."""
    name: str
    rank: int
    """Pipeline rank; -1: all."""
    unit: int
    """Class of units of replicas; -1: all."""
    start_seconds: float
    end_seconds: float
    cause: int
    """Number of the activity that let it start; -1: the start of the step."""
    op: int = -1
    stream: int = -1
    """Of the problem; the slowest of those that ran."""
    alone_seconds: float = 0.0
    """What traffic would have taken with its links to itself, at its pace."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EndCosts:
    """What a step ends with, alone: seconds, and the part that is not hidden."""

    reduce_seconds: float
    reduce_exposed_seconds: float
    gather_seconds: float
    gather_exposed_seconds: float
    optimizer_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class OpTraffic:
    """Traffic of ops, alone: the closed form's, for every class of units the same."""

    p2p_seconds: float = 0.0
    inner_share: dict[str, float] = field(default_factory=dict)
    """Seconds of each kind of traffic for each second of an op's work."""
    fsdp_seconds: tuple[float, ...] = ()
    """Of shards of weights and gradients in each op; empty: there are none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Background:
    """Other traffic on the links of the problem: from a moment on, again and again or once; nobody waits for it."""

    name: str
    streams: tuple[int, ...]
    size_bytes: tuple[float, ...]
    again: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Played:
    """What happened."""

    activities: tuple[Activity, ...]
    step_seconds: float
    begin_seconds: float
    """When the rank that took longest began; 0 where all wait for each other."""
    end_seconds: float
    """When the last of all ended."""
    last: int
    """The activity that ended it."""
    moved: tuple[tuple[int, float, float, float], ...]
    """Traffic that could not be held up: stream, start, end, bytes of a flow."""
    record: list[tuple[float, tuple[int | None, ...], Floats]]
    """Rates of all other traffic in time, see ``Network.record``."""
    counters: Counters
    rounds: dict[str, int]
    """How often each background ended."""
