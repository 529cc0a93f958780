"""The storage side of a run whose transfers are played: its saves and restores, its data, and what other jobs do."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import simpy

from simulator.shared_storage import OtherJobs, SharedStorage, Sharer

SAVE, RESTORE, DATA = "save", "restore", "data"


@dataclass(frozen=True, slots=True, kw_only=True)
class PlayedStorage:
    """What is played on the shared storage of a run. Rates in bytes per second."""

    tier: int | None
    """Index of the tier of checkpoints that lies there; None: only data come from it."""
    write: float
    read: float
    nodes_cap: float
    """Of all nodes of the job together."""
    save_bytes: float = 0.0
    save_cap: float = math.inf
    """Of the nodes that write together."""
    restore_bytes: float = 0.0
    stops: bool = False
    """Training stops until a save is complete (synchronous), instead of going on beside it."""
    others: tuple[Sharer, ...] = ()
    data: float = 0.0
    """Read by training at full speed; with a cache only until it is full."""
    data_cap: float = 0.0
    data_speed: float = 1.0
    """Speed that this reading leaves on average, for closed forms."""
    cache_bytes: float = 0.0
    """Of the dataset on all local disks together; 0: no cache."""


class Traffic:
    """Transfers of one run on its storage."""

    def __init__(
        self,
        environment: simpy.Environment,
        played: PlayedStorage,
        num_nodes: int,
        random: np.random.Generator,
        slower: Callable[[], None],
    ) -> None:
        """``slower`` is called when the data path lets training run at another speed than it does."""
        self.played, self.num_nodes, self._slower = played, num_nodes, slower
        self.storage = SharedStorage(environment, played.write, played.read, changed=self._on_rates)
        self._speed = self.allowed = 0.0
        self.skipped = 0
        """Saves that were left out because the last one was not yet complete."""
        self._empty = num_nodes if played.cache_bytes else 0
        """Nodes whose part of the cache is not full."""
        self._unread = played.cache_bytes
        self.others = OtherJobs(self.storage, played.others, random)

    # ---- data

    def read_for(self, speed: float) -> float:
        """Training goes on at this speed; return the share of it that the data path allows."""
        self._speed, self.allowed = 0.0, 0.0
        if self._empty and DATA not in self.storage.transfers:
            cap = min(self._empty / self.num_nodes * self.played.nodes_cap, self.played.data_cap)
            self.storage.start(DATA, self._unread, cap, self._filled, read=True)
        elif not self.played.cache_bytes:
            self.storage.stream(DATA, min(self.played.data * speed, self.played.data_cap))
        self._speed, self.allowed = speed, self._allows(speed)
        return self.allowed

    def _allows(self, speed: float) -> float:
        if self.played.cache_bytes and not self._empty:
            return 1.0
        part = self._empty / self.num_nodes if self.played.cache_bytes else 1.0
        needed = self.played.data * speed * part
        rate = self.storage.rate(DATA)
        return 1.0 if rate >= needed * (1 - 1e-9) else rate / needed

    def rest(self) -> None:
        """Training stops, and reads nothing; what the caches have got they keep."""
        self._speed = 0.0
        if self._empty and DATA in self.storage.transfers:
            self._unread = self.storage.left(DATA)
        self.storage.stop(DATA)

    def _filled(self) -> None:
        self._empty, self._unread = 0, 0.0
        self._on_rates()

    def add_empty(self, nodes: int) -> None:
        """Nodes join the job with nothing on their disks."""
        if nodes and self.played.cache_bytes:
            self._empty = min(self.num_nodes, self._empty + nodes)
            share = self.played.cache_bytes / self.num_nodes
            self._unread = min(self._unread + nodes * share, self._empty * share)

    def _on_rates(self) -> None:
        if self._speed and self._allows(self._speed) != self.allowed:
            self._slower()

    # ---- checkpoints

    def save(self, done: Callable[[], None]) -> bool:
        """Begin to write a save, unless the last one is still under way."""
        if SAVE in self.storage.transfers:
            self.skipped += 1
            return False
        self.storage.start(SAVE, self.played.save_bytes, self.played.save_cap, done, read=False)
        return True

    def restore(self, times: int, done: Callable[[], None]) -> None:
        """Read a checkpoint, or first one that turns out to be damaged."""
        self.storage.start(RESTORE, times * self.played.restore_bytes, self.played.nodes_cap, done, read=True)

    def drop(self) -> None:
        """A failure ends the save or the restore under way."""
        self.storage.stop(SAVE)
        self.storage.stop(RESTORE)

    def storm(self, _: object) -> None:
        """Every other job comes back at once and reads."""
        for index in range(len(self.played.others)):
            self.others.restore(index)
