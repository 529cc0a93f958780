"""The states of a run, its clock and its books: training and its end, everything else phase by phase.

A job RUNs, is DOWN (coming back: a failure may hit that too), SAVES (training stops for a played transfer: as running),
or is IDLE (waiting for a node, a person, storage or a maintenance window: nothing runs, so nothing fails).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import simpy

from simulator.books import Books, Phases
from simulator.calls import call_after
from simulator.failures import Source, generator, rate_factor
from simulator.nodes import NodePool
from simulator.outcome import RunOutcome
from simulator.run_setup import RunSetup
from simulator.run_traffic import Traffic
from simulator.tiers import PROCESS, PlayedSaves

RUN, SAVES, DOWN, IDLE, OVER = range(5)


class RunState:
    """The state of one run. Every change of state raises the epoch; what was scheduled in an earlier one is stale."""

    def __init__(self, setup: RunSetup, seed: int, run: int, *, record: bool) -> None:
        faults = setup.faults
        self.setup, self.faults, self.seed, self.number = setup, faults, seed, run
        self.environment = simpy.Environment()
        self.done = self.environment.event()
        self.books = Books(setup, record=record)
        self.progress = self.books.progress
        self.nodes = NodePool(faults, setup.num_nodes, setup.replica_nodes, self.generator("repairs").random)
        self.sources: tuple[Source, ...] = setup.sources
        self.factor = rate_factor(faults.rate_spread, seed, run) if self.sources else 1.0
        self.state, self.epoch = IDLE, 0
        self.counts = [0] * len(self.sources)
        self.slow_nodes: dict[int, float] = {}
        self.completed, self.useful = False, 0.0
        self.ends = self.looks = math.inf
        """When training ends if nothing happens, and when the next look at that is due."""
        self.traffic: Traffic | None = None
        if setup.played is not None:
            self.traffic = Traffic(
                self.environment, setup.played, setup.num_nodes, self.generator("storage"), self._on_other_speed
            )

    def generator(self, name: str) -> Any:
        """Random numbers of one part of this run."""
        return generator(name, self.seed, self.number)

    @property
    def now(self) -> float:
        """Seconds since the start."""
        return self.environment.now

    def after(self, seconds: float, function: Callable[[Any], None], argument: Any) -> None:
        """Call a function later."""
        call_after(self.environment, seconds, function, argument)

    def on_training(self) -> None:
        """Training goes on: what may end it is scheduled here."""

    # ---- training

    def train(self) -> None:
        """Training goes on, at the speed that missing and slow nodes and the data path leave."""
        self.state = RUN
        self.epoch += 1
        wanted = self.setup.lasting_speed
        if self.nodes.missing:
            wanted *= self.nodes.speed(self.nodes.missing)
        if self.slow_nodes:
            wanted *= min(self.slow_nodes.values())
        now, played, allowed = self.environment.now, self.setup.played, 1.0
        if self.traffic is not None:
            if self.nodes.empty:
                self.traffic.add_empty(self.nodes.empty)
                self.nodes.empty = 0
            allowed = self.traffic.read_for(wanted)
        self.ends = now + self.books.enter(now, wanted, allowed)
        if self.ends < self.looks:
            self._look_for_end()
        if played is not None and played.tier is not None:
            seconds, save = self.progress.seconds_to_save(self.progress.tiers[played.tier].every)
            if save < self.progress.target * (1 - 1e-12):
                self.after(max(0.0, seconds), self._on_save, (self.epoch, save))
        self.on_training()

    def leave(self, arrives: int | None = None) -> None:
        """Training stops here, or goes on otherwise; book it."""
        self.books.leave(self.environment.now, arrives)
        if self.traffic is not None:
            self.traffic.rest()

    def begin(self, state: int, phases: Phases, then: Callable[[int], None] | None) -> None:
        """The job does something else than training."""
        self.state = state
        self.epoch += 1
        self.books.begin(self.environment.now, phases)
        if then is not None:
            seconds = 0.0
            for _, one in phases:
                seconds += one
            self.after(seconds, then, self.epoch)

    def _on_other_speed(self) -> None:
        """The data path lets training run at another speed."""
        if self.state == RUN:
            self.books.leave(self.now)
            self.train()

    # ---- saves that are played

    def _on_save(self, which: tuple[int, int]) -> None:
        """The stall of a save to the played storage is over: it is on its way, or training waits for it."""
        epoch, save = which
        played, traffic = self.setup.played, self.traffic
        if epoch != self.epoch or played is None or traffic is None:
            return
        self.leave(save)
        if played.stops:
            self.begin(SAVES, (("checkpoint", math.inf),), None)
        if not traffic.save(lambda: self._on_saved(save)):
            self.books.skip(played.tier)
        if not played.stops:
            self.train()

    def _on_saved(self, save: int) -> None:
        """A save to the played storage is complete."""
        assert self.setup.played is not None
        held = self.progress.held[self.setup.played.tier or 0]
        assert isinstance(held, PlayedSaves)
        held.add(float(save))
        if self.traffic is not None:
            self.traffic.archive(save, lambda: self._on_archived(save))
        if self.state == SAVES:
            self.books.close(self.now)
            if save >= self.progress.target:
                self._finish(completed=True, useful=self.setup.work_seconds)
            else:
                self.train()

    def _on_archived(self, save: int) -> None:
        """A save has arrived in the archive, whatever the job does meanwhile."""
        assert self.setup.played is not None
        assert self.setup.played.archive is not None
        held = self.progress.held[self.setup.played.archive.tier]
        assert isinstance(held, PlayedSaves)
        held.add(float(save))

    # ---- the end

    def _look_for_end(self) -> None:
        """One event waits for the end, however often it moves on: a queue of stale ones would grow with the run."""
        self.looks = self.ends
        if math.isfinite(self.ends):
            self.after(max(0.0, self.ends - self.now), self._on_end, self.ends)

    def _on_end(self, looked: float) -> None:
        if looked != self.looks:
            return
        self.looks = math.inf
        if self.state != RUN:
            return
        if self.ends > looked:
            self._look_for_end()
            return
        self.leave()
        self.books.finish()
        if self.traffic is not None and self.traffic.played.stops:
            self.begin(SAVES, (("checkpoint", math.inf),), None)
            self.traffic.save(lambda: self._on_saved(math.ceil(self.progress.target)))
        else:
            self._finish(completed=True, useful=self.setup.work_seconds)

    def stop(self, at_horizon: bool) -> None:
        """End before the work is done: at the horizon unsaved work counts, a hopeless run keeps what is saved."""
        if self.state == OVER:
            return
        running = self.state in (RUN, SAVES)
        if self.state == RUN:
            self.leave()
        else:
            self.books.close(self.now)
        position = self.progress.position()
        if running and not at_horizon:
            kept, _ = self.progress.newest_save(PROCESS, self.now) or (0.0, 0)
            self.books.lost["rework"] += (position - kept) * self.progress.interval
            position = kept
        self._finish(completed=at_horizon, useful=position * self.progress.interval)

    def _finish(self, *, completed: bool, useful: float) -> None:
        self.completed, self.useful, self.state = completed, useful, OVER
        self.epoch += 1
        self.done.succeed()

    def outcome(self) -> RunOutcome:
        """What came of it."""
        setup, books = self.setup, self.books
        failures: dict[str, int] = {}
        for source, count in zip(self.sources, self.counts, strict=True):
            failures[source.component] = failures.get(source.component, 0) + count
        saves = list(books.saves)
        if self.traffic is not None and (archive := self.traffic.played.archive) is not None:
            saves[archive.tier] = self.traffic.archived
        return RunOutcome(
            source="simulated",
            seed=self.seed,
            wall_seconds=self.now,
            useful_seconds=self.useful,
            tokens=self.useful / setup.step_seconds * setup.tokens_per_step,
            lost_seconds=books.lost,
            failures=failures,
            checkpoints=books.saves[0],
            completed=self.completed,
            rate_factor=self.factor,
            spares_used=self.nodes.most_used,
            checkpoint_bytes={
                tier.name: count * tier.copies * setup.checkpoint_bytes
                for tier, count in zip(setup.tiers, saves, strict=True)
            },
            skipped_saves=self.traffic.skipped if self.traffic is not None else 0,
            spans=tuple(books.spans or ()),
        )
