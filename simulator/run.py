"""A whole training run, event by event: failures, detection, spares, repair, restart, the work done twice.

Failures, ends of phases, repairs and changes of speed are events on simpy's queue; steps, saves and drains between them
are arithmetic (``progress``). A job RUNs, is DOWN (coming back: a failure may hit that too), or is IDLE (waiting for a
node, a person, storage or a maintenance window: nothing runs, so nothing fails).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import simpy

from simulator.books import Books, Phases
from simulator.failures import FailureEvent, Source, failure_events, generator, rate_factor
from simulator.nodes import NodePool
from simulator.outcome import RunOutcome
from simulator.progress import FILE_SYSTEM, PROCESS
from simulator.run_setup import RunSetup

RUN, DOWN, IDLE, OVER = range(4)

PATIENCE_FAILURES = 1_000
"""A run is given up after this many failures in a row without a new complete save between them,"""
LARGEST_SLOWDOWN = 20.0
"""or after this many times the wall time that it would take without failures,"""
MOST_FAILURES = 200_000
"""or after this many failures: every simulation ends."""


class _Call(simpy.Event):
    """A call at a later time: an event that is its own callback."""

    __slots__ = ("argument", "function")

    def __init__(self, environment: simpy.Environment, function: Callable[[Any], None], argument: Any) -> None:
        self.env = environment
        self.callbacks = [_invoke]
        self._ok, self._value = True, None
        self.function, self.argument = function, argument


def _invoke(call: Any) -> None:
    call.function(call.argument)


def simulate_run(setup: RunSetup, seed: int, run: int = 0, *, record: bool = False) -> RunOutcome:
    """Play one run to its end, its horizon, or until it is clear that it gets nowhere (``completed`` is then False).

    Args:
        setup: the run.
        seed: of the ensemble; the same seed and run give the same failures under any checkpoint policy.
        run: index in the ensemble.
        record: keep what the job did when, for pictures; memory then grows with the number of failures.
    """
    return _Run(setup, seed, run, record=record).play()


class _Run:
    """The state of one run."""

    def __init__(self, setup: RunSetup, seed: int, run: int, *, record: bool) -> None:
        faults = setup.faults
        self.setup, self.faults, self.seed, self.number = setup, faults, seed, run
        self.environment = simpy.Environment()
        self.done = self.environment.event()
        self.books = Books(setup, record=record)
        self.progress = self.books.progress
        self.nodes = NodePool(faults, setup.num_nodes, setup.replica_nodes)
        self.sources: tuple[Source, ...] = setup.sources
        self.factor = rate_factor(faults.rate_spread, seed, run) if self.sources else 1.0
        window = min(setup.horizon_seconds, 1.3 * setup.undisturbed_seconds)
        self.failures: Iterator[FailureEvent] = failure_events(
            self.sources, seed, run, factor=self.factor, window_seconds=window
        )
        self.event = next(self.failures, None)
        self.state, self.epoch = IDLE, 0
        self.counts = [0] * len(self.sources)
        self.thinned = self.without_progress = 0
        self.best = self.load = 0.0
        self.later = (0.0, 0.0)
        """What follows the detection: a person's time, an outage."""
        self.everything = False
        """More than processes must come back."""
        self.slow_nodes: dict[int, float] = {}
        self.completed, self.useful = False, 0.0

    # ---- the story

    def play(self) -> RunOutcome:
        """Start, let everything happen, and close the books."""
        setup, faults = self.setup, self.faults
        limit = LARGEST_SLOWDOWN * setup.undisturbed_seconds
        self._after(min(limit, setup.horizon_seconds), self._stop, setup.horizon_seconds <= limit)
        if faults.stragglers is not None and faults.stragglers.rate_per_second > 0:
            self.luck = generator("stragglers", self.seed, self.number)
            self.straggler_gap = 1 / (faults.stragglers.rate_per_second * setup.num_nodes * self.factor)
            self._after(self.luck.exponential(self.straggler_gap), self._on_straggler, 0)
        if faults.maintenance is not None:
            self._after(faults.maintenance.every_seconds / 2, self._on_maintenance, None)
        if faults.clock == "wall":
            self._schedule_failure()
        if self.nodes.needed:  # a record of capacity that starts with too few nodes
            self._gather_nodes()
        else:
            self._train()
        self.environment.run(until=self.done)
        return self._outcome()

    @property
    def now(self) -> float:
        return self.environment.now

    def _after(self, seconds: float, function: Callable[[Any], None], argument: Any) -> None:
        self.environment.schedule(_Call(self.environment, function, argument), delay=seconds)

    # ---- failures

    def _schedule_failure(self) -> None:
        if self.event is None:
            return
        if self.faults.clock == "wall":
            self._after(max(0.0, self.event.time_seconds - self.now), self._on_failure, -1)
        elif self.state == RUN:
            self._after(max(0.0, self.event.time_seconds - self.books.operated), self._on_failure, self.epoch)

    def _on_failure(self, epoch: int) -> None:
        if self.state == OVER or epoch not in (-1, self.epoch) or self.event is None:
            return
        event, self.event = self.event, next(self.failures, None)
        source = self.sources[event.source]
        if self._of_another_node(event, source):
            pass
        elif source.trace is not None and source.trace.kind == "capacity":
            self._change_capacity(event, source)
        elif self.state == IDLE:
            self.thinned += 1
        else:
            self._fail(event, source, event.nodes)
        if self.thinned + sum(self.counts) > MOST_FAILURES:
            self._stop(False)
        if self.faults.clock == "wall":
            self._schedule_failure()

    def _of_another_node(self, event: FailureEvent, source: Source) -> bool:
        """Thinning: the failure of a lemon that is gone, or of a good node in a place where a lemon still is."""
        if source.lemon:
            return event.lemon * self.nodes.lemons >= self.nodes.lemons_left
        return source.counted < 1 and event.lemon * self.setup.num_nodes < self.nodes.lemons_left

    def _change_capacity(self, event: FailureEvent, source: Source) -> None:
        """A record of capacity: nodes come, or go (those of the job before idle ones)."""
        if event.nodes <= 0:
            self._on_repaired(-event.nodes)
            return
        hit = self.nodes.withdraw(event.nodes, running=self.state != IDLE)
        if hit:
            self._fail(event, source, hit)

    def _fail(self, event: FailureEvent, source: Source, nodes: int) -> None:
        """A failure that hits the job: lost work, and the way back from the start."""
        self.counts[event.source] += 1
        self.without_progress += 1
        self.nodes.lemons_left -= source.lemon
        detection = source.detection_seconds * _drawn(event.detection, self.faults.detection_law)
        if nodes and math.isfinite(source.repair_seconds):
            repair = source.repair_seconds * _drawn(event.repair, self.faults.repair_law)
            self._send_to_repair(nodes, detection + repair)
        running = self.state == RUN
        if running and source.notice_seconds and source.notice_seconds >= self._save_seconds(source.loss):
            self._pause(nodes)
            return
        if running:
            self.books.leave(self.now)
        else:
            self.books.close(self.now)
        self.state = DOWN
        self.nodes.needed += nodes
        self.everything |= nodes > 0
        self._fall_back(event, source, running)
        if self.without_progress >= PATIENCE_FAILURES:
            self._stop(False)
            return
        manual, person = self.faults.manual, 0.0
        if manual is not None and event.manual < manual.share:
            person = -manual.takes_seconds * math.log1p(-event.manual / manual.share)
        self.later = (person, source.outage_seconds)
        phases = (("detection", detection), ("diagnosis", self.faults.diagnosis_seconds))
        self._begin(DOWN, phases, self._on_detected)

    def _fall_back(self, event: FailureEvent, source: Source, running: bool) -> None:
        """Find the newest good save in a tier that outlives the failure; what came after it is lost."""
        progress, now = self.progress, self.now
        reached = progress.position()
        if self._live_replicas_hold(source):
            position, load = reached, 0.0
        else:
            limit = reached - source.poisoned_seconds / progress.interval if running else reached
            position, load = progress.newest_save(source.loss, now, limit) or (0.0, 0.0)
            if event.corrupt < self.faults.corrupt_checkpoints:
                older, again = progress.newest_save(source.loss, now, position - 1e-9) or (0.0, 0.0)
                position, load = older, load + again
        self.books.lost["rework"] += (reached - position) * progress.interval
        if position > self.best + 1e-12:
            self.best, self.without_progress = position, 1
        progress.restore(position, source.loss, now)
        self.load = load

    def _live_replicas_hold(self, source: Source) -> bool:
        elastic = self.faults.elastic
        if elastic is None or not elastic.keeps_state or source.poisoned_seconds or source.loss == FILE_SYSTEM:
            return False
        return self.nodes.speed(self.nodes.missing + self.nodes.needed) > 0

    def _save_seconds(self, loss: int) -> float:
        """Time for an extra save to the quickest tier that outlives a loss."""
        fit = [tier.stall_seconds + tier.drain_seconds for tier in self.setup.tiers if loss in tier.survives]
        return min(fit, default=math.inf)

    # ---- coming back

    def _on_detected(self, epoch: int) -> None:
        if epoch != self.epoch:
            return
        (person, outage), self.later = self.later, (0.0, 0.0)
        if person or outage:
            self.books.close(self.now)
            self._begin(IDLE, (("manual", person), ("outage", outage)), self._on_ready)
        else:
            self._gather_nodes()

    def _on_ready(self, epoch: int) -> None:
        if epoch == self.epoch:
            self._gather_nodes()

    def _gather_nodes(self) -> None:
        """Replace lost nodes and restart, or wait for one."""
        self.books.close(self.now)
        faults, lost = self.faults, self.nodes.needed > 0
        found = self.nodes.fill()
        if found == "wait":
            self._begin(IDLE, (("waiting", math.inf),), None)
            return
        phases: Phases = tuple(faults.phases_seconds.items())
        if faults.elastic is not None and (faults.elastic.keeps_state or found == "smaller"):
            phases = (("restart", faults.elastic.reconfigure_seconds),)
        elif lost and found == "standby":
            phases = (("restart", faults.standby_restart_seconds),)
        elif not lost and not self.everything and faults.in_job_restart_seconds is not None:
            phases = (("restart", faults.in_job_restart_seconds),)
        self._begin(DOWN, (*phases, ("load", self.load)), self._on_up)

    def _on_up(self, epoch: int) -> None:
        if epoch == self.epoch and self.state != OVER:
            self.books.close(self.now)
            self.everything = False
            self._train()

    def _send_to_repair(self, nodes: int, seconds: float) -> None:
        for ready, count in self.nodes.repaired_at(self.now, seconds, nodes):
            self._after(ready - self.now, self._on_repaired, count)

    def _on_repaired(self, nodes: int) -> None:
        if self.state == OVER:
            return
        before = self.nodes.speed(self.nodes.missing)
        self.nodes.give_back(nodes)
        if self.state == RUN and self.faults.elastic is not None and self.nodes.speed(self.nodes.missing) != before:
            self._pause(0, DOWN, (("restart", self.faults.elastic.reconfigure_seconds),))
        elif self.state == IDLE and self.books.plan and self.books.plan[0][0] == "waiting":
            self._gather_nodes()

    # ---- stops that lose no work, and changes of speed

    def _pause(self, nodes: int, state: int = DOWN, phases: Phases = ()) -> None:
        """Save and stop: to give nodes back, for maintenance, or to grow again."""
        self.books.leave(self.now)
        self.progress.save_here(self.now)
        self.load = 0.0
        self.nodes.needed += nodes
        self.everything = True
        if nodes:
            self._gather_nodes()
        else:
            self._begin(state, phases, self._on_up)

    def _on_maintenance(self, _: None) -> None:
        maintenance = self.faults.maintenance
        if self.state == OVER or maintenance is None:
            return
        if self.state == RUN:
            self._pause(0, IDLE, (("maintenance", maintenance.takes_seconds),))
        self._after(maintenance.every_seconds, self._on_maintenance, None)

    def _on_straggler(self, number: int) -> None:
        stragglers = self.faults.stragglers
        if self.state == OVER or stragglers is None:
            return
        lasts = float(self.luck.exponential(stragglers.lasts_seconds))
        self._after(self.luck.exponential(self.straggler_gap), self._on_straggler, number + 1)
        if self.state != RUN:
            return
        self.books.leave(self.now)
        self.slow_nodes[number] = stragglers.speed
        self._train()
        found = math.inf if stragglers.found_seconds is None else stragglers.found_seconds
        self._after(min(lasts, found), self._on_straggler_gone, (number, lasts > found))

    def _on_straggler_gone(self, which: tuple[int, bool]) -> None:
        number, evicted = which
        running = self.state == RUN
        if running and evicted:
            del self.slow_nodes[number]
            self._send_to_repair(1, self.faults.repair_seconds)
            self._pause(1)
            return
        if running:
            self.books.leave(self.now)
        del self.slow_nodes[number]
        if running:
            self._train()

    # ---- states

    def _train(self) -> None:
        """Training goes on, at the speed that missing and slow nodes leave."""
        slowest = min(self.slow_nodes.values(), default=1.0)
        speed = self.setup.lasting_speed * self.nodes.speed(self.nodes.missing) * slowest
        self.state = RUN
        self.epoch += 1
        self._after(self.books.enter(self.now, speed), self._on_end, self.epoch)
        if self.faults.clock == "operating":
            self._schedule_failure()

    def _begin(self, state: int, phases: Phases, then: Callable[[int], None] | None) -> None:
        self.state = state
        self.epoch += 1
        self.books.begin(self.now, phases)
        if then is not None:
            self._after(sum(seconds for _, seconds in phases), then, self.epoch)

    def _on_end(self, epoch: int) -> None:
        if epoch == self.epoch and self.state == RUN:
            self.books.leave(self.now)
            self.books.finish()
            self._finish(completed=True, useful=self.setup.work_seconds)

    def _stop(self, at_horizon: bool) -> None:
        """End before the work is done: at the horizon unsaved work counts, a hopeless run keeps what is saved."""
        if self.state == OVER:
            return
        running = self.state == RUN
        if running:
            self.books.leave(self.now)
        else:
            self.books.close(self.now)
        position = self.progress.position()
        if running and not at_horizon:
            kept, _ = self.progress.newest_save(PROCESS, self.now) or (0.0, 0.0)
            self.books.lost["rework"] += (position - kept) * self.progress.interval
            position = kept
        self._finish(completed=at_horizon, useful=position * self.progress.interval)

    def _finish(self, *, completed: bool, useful: float) -> None:
        self.completed, self.useful, self.state = completed, useful, OVER
        self.done.succeed()

    def _outcome(self) -> RunOutcome:
        setup, books = self.setup, self.books
        failures: dict[str, int] = {}
        for source, count in zip(self.sources, self.counts, strict=True):
            failures[source.component] = failures.get(source.component, 0) + count
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
                tier.name: saves * setup.checkpoint_bytes for tier, saves in zip(setup.tiers, books.saves, strict=True)
            },
            spans=tuple(books.spans or ()),
        )


def _drawn(luck: float, law: str) -> float:
    """Of a time with mean 1."""
    return 1.0 if law == "fixed" else -math.log1p(-luck)
