"""The storage side of a run whose transfers are played: its saves and restores, its data, and what other jobs do."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import simpy

from simulator.shared_storage import ARCHIVE, MAIN, OtherJobs, SharedStorage, Sharer

SAVE, RESTORE, DATA, COPY, REPLICATE = "save", "restore", "data", "copy", "replicate"


@dataclass(frozen=True, slots=True, kw_only=True)
class PlayedArchive:
    """Complete saves that stay: copied to a storage of their own, then read from there for further sites."""

    tier: int
    every: int
    """Every how many base saves one is archived; a copy that is still under way lets the next one pass."""
    write: float | None = None
    """Bytes per second of the archive's own storage; None: archived saves stay where they are."""
    read: float | None = None
    copy_bytes: float = 0.0
    replicate_bytes: float = 0.0
    """Read for the further sites, after which the save is complete."""
    site_cap: float = math.inf
    """Bytes per second towards them."""


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
    data_store: str = MAIN
    """Where data lie."""
    data_speed: float = 1.0
    """Speed that this reading leaves on average, for closed forms."""
    cache_bytes: float = 0.0
    """Of the dataset on all local disks together; 0: no cache."""
    archive: PlayedArchive | None = None

    @property
    def tiers(self) -> tuple[int, ...]:
        """Indices of the tiers of checkpoints that are played."""
        found = (self.tier, None if self.archive is None else self.archive.tier)
        return tuple(one for one in found if one is not None)


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
        own = played.archive
        rates = None if own is None or own.write is None or own.read is None else (own.write, own.read)
        self.storage = SharedStorage(
            environment, played.write, played.read, archive_bytes_per_second=rates, changed=self._on_rates
        )
        self._archive_store = MAIN if rates is None else ARCHIVE
        self._archiving = -math.inf
        """Position of the save that is being archived."""
        self.archived = 0
        """Saves of which archiving was begun."""
        self._speed = self.allowed = 0.0
        self.skipped = 0
        """Saves and copies to the archive that were left out because the last one was not yet complete."""
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
            self.storage.start(DATA, self._unread, cap, self._filled, read=True, store=self.played.data_store)
        elif not self.played.cache_bytes:
            self.storage.stream(DATA, min(self.played.data * speed, self.played.data_cap), self.played.data_store)
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

    def restore(self, times: tuple[int, int], done: Callable[[], None]) -> None:
        """Read a checkpoint, or first one that turns out to be damaged: so many from the storage, then the archive."""
        here, archived = times
        if not here:
            self._read(archived, done, self._archive_store)
        elif not archived:
            self._read(here, done, MAIN)
        else:
            self._read(here, lambda: self._read(archived, done, self._archive_store), MAIN)

    def _read(self, times: int, done: Callable[[], None], store: str) -> None:
        size = times * self.played.restore_bytes
        self.storage.start(RESTORE, size, self.played.nodes_cap, done, read=True, store=store)

    def drop(self) -> None:
        """A failure ends the save or the restore under way."""
        self.storage.stop(SAVE)
        self.storage.stop(RESTORE)

    # ---- the archive

    def archive(self, save: int, done: Callable[[], None]) -> None:
        """Archive a complete save: copy it, send it to further sites, and say when it is there."""
        own = self.played.archive
        if own is None or save % own.every:
            return
        if COPY in self.storage.transfers or REPLICATE in self.storage.transfers:
            self.skipped += 1
            return
        self._archiving = save
        self.archived += 1

        def replicate() -> None:
            if own.replicate_bytes:
                self.storage.start(
                    REPLICATE, own.replicate_bytes, own.site_cap, done, read=True, store=self._archive_store
                )
            else:
                done()

        if own.copy_bytes:
            self.storage.copy(COPY, own.copy_bytes, replicate)
        else:
            replicate()

    def fall_back(self, position: float, *, lost: bool) -> None:
        """The job is back at a position, and what the storage held may be lost: what is newer is not archived."""
        if lost or self._archiving > position:
            self.storage.stop(COPY)
        if self._archiving > position or (lost and self._archive_store == MAIN):
            self.storage.stop(REPLICATE)

    def storm(self, _: object) -> None:
        """Every other job comes back at once and reads."""
        for index in range(len(self.played.others)):
            self.others.restore(index)
