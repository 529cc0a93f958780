"""The nodes of a run: those that the job has lost, those that wait warm or cold for it, and the repair shop."""

from __future__ import annotations

import heapq
import math
from typing import Literal

from scenarios.faults import Faults


def idle_replicas(faults: Faults, missing: int, replicas: float, replica_nodes: int) -> float:
    """Replicas that cannot run: as few as possible where nodes are re-ranked, else the expected number hit."""
    if faults.elastic is None or faults.elastic.gather:
        return math.ceil(missing / replica_nodes)
    return round(replicas * (1 - (1 - 1 / replicas) ** missing)) if replicas > 1 else min(missing, 1)


class NodePool:
    """Counts of nodes; which node is which does not matter, except for lemons."""

    __slots__ = (
        "_crews", "_in_use", "_replica_nodes", "faults", "lemons", "lemons_left", "missing", "most_used", "needed",
        "num_nodes", "spares", "warm",
    )  # fmt: skip

    def __init__(self, faults: Faults, num_nodes: int, replica_nodes: int) -> None:
        self.faults, self.num_nodes, self._replica_nodes = faults, num_nodes, replica_nodes
        self.warm = faults.standbys
        self.spares: float = math.inf if faults.spares is None else faults.spares
        self.needed = 0
        """Lost since the job went down, and not yet replaced."""
        self.missing = 0
        """That an elastic job goes on without."""
        self.lemons = self.lemons_left = round(faults.lemons.share * num_nodes) if faults.lemons else 0
        self._in_use = self.most_used = 0
        self._crews: list[float] = []
        """When each repair crew at work is free again."""
        trace = faults.trace
        if trace is not None and trace.kind == "capacity":  # what is there is what the record says
            self.warm, self.spares = 0, max(0, trace.start_nodes - num_nodes)
            self.needed = max(0, num_nodes - trace.start_nodes)

    def speed(self, missing: float) -> float:
        """Share of the replicas that run without so many nodes."""
        if missing <= 0 or self.faults.elastic is None:
            return 1.0
        replicas = self.num_nodes / self._replica_nodes
        idle = idle_replicas(self.faults, int(missing), replicas, self._replica_nodes)
        return max(0.0, replicas - idle) / replicas

    def fill(self) -> Literal["standby", "spare", "smaller", "wait"]:
        """Replace what is needed: by warm standbys, else by spares, else go on smaller, else wait."""
        needed = self.needed
        if needed <= self.warm + self.spares:
            from_warm = needed <= self.warm
            self.take(needed)
            self.needed = 0
            return "standby" if from_warm else "spare"
        left = needed - self.warm - self.spares
        if self.faults.elastic is None or self.speed(self.missing + left) == 0:
            return "wait"
        self.take(int(needed - left))
        self.missing += int(left)
        self.needed = 0
        return "smaller"

    def take(self, nodes: int) -> None:
        """Idle nodes leave, for the job or altogether: the cold ones only where the warm ones do not suffice."""
        warm = min(self.warm, nodes)
        self.warm -= warm
        self.spares -= nodes - warm
        self._in_use += nodes
        self.most_used = max(self.most_used, self._in_use)

    def withdraw(self, nodes: int, *, running: bool) -> int:
        """Capacity goes away: from a running job first. Return how many of its nodes that were."""
        hit = min(nodes, self.num_nodes - self.missing - self.needed) if running else 0
        idle = int(min(nodes - hit, self.warm + self.spares))
        self.take(idle)
        if not running:
            self.needed += nodes - hit - idle
        return hit

    def give_back(self, nodes: int) -> None:
        """Repaired nodes: into an elastic job, then to the warm standbys, then to the spares."""
        back = min(nodes, self.missing)
        self.missing -= back
        warm = max(0, min(nodes - back, self.faults.standbys - self.warm))
        self.warm += warm
        self.spares += nodes - back - warm
        self._in_use = max(0, self._in_use - nodes + back)

    def repaired_at(self, now: float, seconds: float, nodes: int) -> list[tuple[float, int]]:
        """When how many nodes are back: together, or as the repair crews get to them."""
        crews = self.faults.repair_crews
        if crews is None:
            return [(now + seconds, nodes)]
        ends = []
        for _ in range(nodes):
            free = heapq.heappop(self._crews) if len(self._crews) >= crews else now
            ends.append((max(now, free) + seconds, 1))
            heapq.heappush(self._crews, ends[-1][0])
        return ends
