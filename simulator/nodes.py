"""The nodes of a run: those that the job has lost, those that wait warm or cold for it, and the repair shop."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable
from typing import Literal

from scenarios.faults import Faults

OWN = -1
"""This job in the queue for nodes."""


def idle_replicas(faults: Faults, missing: int, replicas: float, replica_nodes: int) -> float:
    """Replicas that cannot run: as few as possible where nodes are re-ranked, else the expected number hit."""
    if faults.elastic is None or faults.elastic.gather:
        return math.ceil(missing / replica_nodes)
    return round(replicas * (1 - (1 - 1 / replicas) ** missing)) if replicas > 1 else min(missing, 1)


class NodePool:
    """Counts of nodes; which node is which does not matter, except for lemons and those that are still broken."""

    __slots__ = (
        "_crews", "_in_use", "_luck", "_replica_nodes", "broken", "empty", "faults", "lemons", "lemons_left", "missing",
        "most_used", "needed", "num_nodes", "planted", "queue", "spares", "warm",
    )  # fmt: skip

    def __init__(self, faults: Faults, num_nodes: int, replica_nodes: int, luck: Callable[[], float]) -> None:
        """Start complete; ``luck`` says which of the idle nodes is taken where some of them are still broken."""
        self.faults, self.num_nodes, self._replica_nodes, self._luck = faults, num_nodes, replica_nodes, luck
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
        self.broken: list[int] = []
        """What is still wrong with some of the idle nodes: the source of their failure."""
        self.planted: list[int] = []
        """The same of nodes that the job took and that it does not know yet."""
        self.empty = 0
        """Nodes that the job took since the last look, with nothing on their disks."""
        self.queue: list[int] = []
        """Jobs that wait for a node, in order."""
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
        """Replace what is needed: by warm standbys, else by spares, else go on smaller, else wait in the queue."""
        needed = self.needed
        left = needed - self.warm - self.spares
        if left > 0 and (self.faults.elastic is None or self.speed(self.missing + left) == 0):
            if OWN not in self.queue:
                self.queue.append(OWN)
            return "wait"
        found: Literal["standby", "spare", "smaller"] = "standby" if needed <= self.warm else "spare"
        taken = needed
        if left > 0:
            found, taken = "smaller", int(needed - left)
            self.missing += int(left)
        self.empty += max(0, taken - self.warm)
        self.planted += self._take(taken)
        self.needed = 0
        if OWN in self.queue:
            self.queue.remove(OWN)
            self._serve()
        return found

    def _take(self, nodes: int) -> list[int]:
        """Idle nodes leave, the cold ones only where the warm ones do not suffice; return what is wrong with them."""
        idle = self.warm + self.spares
        wrong = [
            self.broken.pop(int(self._luck() * len(self.broken)))
            for taken in range(nodes if self.broken else 0)
            if self._luck() * (idle - taken) < len(self.broken)
        ]
        warm = min(self.warm, nodes)
        self.warm -= warm
        self.spares -= nodes - warm
        self._in_use += nodes
        self.most_used = max(self.most_used, self._in_use)
        return wrong

    def withdraw(self, nodes: int, *, running: bool) -> int:
        """Capacity goes away: from a running job first. Return how many of its nodes that were."""
        hit = min(nodes, self.num_nodes - self.missing - self.needed) if running else 0
        idle = int(min(nodes - hit, self.warm + self.spares))
        self._take(idle)
        if not running:
            self.needed += nodes - hit - idle
        return hit

    def give_back(self, nodes: int, wrong: int | None = None) -> None:
        """Repaired nodes: to jobs that wait longest, into an elastic job, to the warm standbys, to the spares.

        ``wrong`` is what the last of them still has: it was not mended.
        """
        while nodes and self.queue and self.queue[0] != OWN:
            self.queue.pop(0)
            nodes -= 1
        back = min(nodes, self.missing)
        self.missing -= back
        self.empty += back
        self._in_use = max(0, self._in_use - nodes + back)
        warm = max(0, min(nodes - back, self.faults.standbys - self.warm))
        self.warm += warm
        self.spares += nodes - back - warm
        if wrong is not None and nodes:
            (self.broken if nodes > back else self.planted).append(wrong)

    # ---- other jobs that take from the same spares

    def lose_elsewhere(self, job: int) -> bool:
        """A node of another job breaks, which takes a spare or waits; False: it waits already and loses none."""
        if job in self.queue:
            return False
        self.queue.append(job)
        self._serve()
        return True

    def _serve(self) -> None:
        while self.queue and self.queue[0] != OWN and self.spares >= 1:
            self.queue.pop(0)
            warm, self.warm = self.warm, 0  # the standbys are this job's own
            self._take(1)
            self.warm = warm

    # ---- the repair shop

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
