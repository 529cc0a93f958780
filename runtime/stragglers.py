"""Ranks that are slower than the others, by the time that each spends alone: with its data, and computing."""

from __future__ import annotations

import statistics
import time
from collections import deque
from dataclasses import dataclass

import torch

from scenarios.layout import Layout

WINDOW = 6
"""Steps that are judged together: a slow rank is slow even in its fastest step."""
RATIO = 1.5
"""So many times the median of the others is slow."""
LEAST_SHARE = 0.1
"""Of the step that the excess must be, so that noise of something short is not told."""
PROBE_SIZE = {"cpu": 256, "cuda": 4096}
"""Side of the matrix product that every rank times in every step, about a third of a millisecond."""


@dataclass(frozen=True, slots=True)
class Straggler:
    """A slow rank."""

    rank: int
    ratio: float
    """Its time over the median of the others."""
    what: str


class Stragglers:
    """Judges the last steps of all ranks."""

    def __init__(self, world_size: int) -> None:
        self.own: deque[list[float]] = deque(maxlen=WINDOW)
        self.probes: deque[list[float]] = deque(maxlen=WINDOW)
        self.steps: deque[float] = deque(maxlen=WINDOW)
        self.known: set[int] = set()
        self.world_size = world_size

    def judge(self, own_seconds: list[float], probe_seconds: list[float], step_seconds: float) -> list[Straggler]:
        """Take in a step; return the ranks that are found slow now and were not before."""
        self.own.append(own_seconds)
        self.probes.append(probe_seconds)
        self.steps.append(step_seconds)
        if self.world_size < 2 or len(self.own) < WINDOW:
            return []
        step = statistics.median(self.steps)
        found = []
        for rank in set(range(self.world_size)) - self.known:
            for what, times, least in (
                ("its data and computing", self.own, LEAST_SHARE * step),
                ("a matrix product of fixed size", self.probes, 0.0),
            ):
                mine = min(one[rank] for one in times)
                others = statistics.median(
                    statistics.median(one[other] for one in times) for other in range(self.world_size) if other != rank
                )
                if mine > RATIO * others and mine - others > least:
                    found.append(Straggler(rank, mine / others if others > 0 else float("inf"), what))
                    self.known.add(rank)
                    break
        return found


class Probe:
    """A small matrix product, timed: slow cores, throttled GPUs and busy hosts show in any layout."""

    def __init__(self, device: torch.device) -> None:
        size = PROBE_SIZE[device.type]
        dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
        self.device = device
        self.matrix = torch.ones(size, size, dtype=dtype, device=device)

    def seconds(self) -> float:
        """Time one product."""
        before = time.perf_counter()
        self.matrix @ self.matrix
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter() - before


def computes_alone(layout: Layout) -> bool:
    """Tell whether forward and backward need no other rank, so that their time is the rank's own."""
    whole = layout.optimizer_sharding in ("none", "zero1") or layout.dp == 1
    return whole and layout.tp == layout.pp == layout.cp == layout.ep == 1
