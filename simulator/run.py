"""A whole training run, event by event: failures, detection, spares, repair, restart, the work done twice.

Failures, ends of phases, repairs and changes of speed are events on simpy's queue; steps, saves and drains between them
are arithmetic (``progress``), unless the transfers of a busy storage are played (``run_traffic``).
"""

from __future__ import annotations

import math
from bisect import insort
from collections.abc import Iterator

from simulator.books import Phases
from simulator.failures import MARKS, FailureEvent, Source, failure_events
from simulator.outcome import RunOutcome
from simulator.run_setup import RunSetup
from simulator.run_state import DOWN, IDLE, OVER, RUN, SAVES, RunState
from simulator.tiers import FILE_SYSTEM

PATIENCE_FAILURES = 1_000
"""A run is given up after this many failures in a row without a new complete save between them,"""
LARGEST_SLOWDOWN = 20.0
"""or after this many times the wall time that it would take without failures,"""
MOST_FAILURES = 200_000
"""or after this many failures: every simulation ends."""


def simulate_run(setup: RunSetup, seed: int, run: int = 0, *, record: bool = False) -> RunOutcome:
    """Play one run to its end, its horizon, or until it is clear that it gets nowhere (``completed`` is then False).

    Args:
        setup: the run.
        seed: of the ensemble; the same seed and run give the same failures under any checkpoint policy.
        run: index in the ensemble.
        record: keep what the job did when, for pictures; memory then grows with the number of failures.
    """
    return _Run(setup, seed, run, record=record).play()


class _Run(RunState):
    """What happens to a run."""

    def __init__(self, setup: RunSetup, seed: int, run: int, *, record: bool) -> None:
        super().__init__(setup, seed, run, record=record)
        window = min(setup.horizon_seconds, 1.3 * setup.undisturbed_seconds)
        self.failures: Iterator[FailureEvent] = failure_events(
            self.sources, seed, run, factor=self.factor, window_seconds=window
        )
        self.event = next(self.failures, None)
        self.thinned = self.without_progress = 0
        self.best = self.load = 0.0
        self.reads = (0, 0)
        """Restores from the played storage and from its archive before training goes on."""
        self.later = (0.0, 0.0)
        """What follows the detection: a person's time, an outage."""
        self.everything = False
        """More than processes must come back."""
        self.recurrences: list[tuple[float, int]] = []
        """When (in seconds of training) nodes that are still broken fail again, and with what."""
        self.relapses = self.generator("recurrences")
        self.restart: Phases = tuple(self.faults.phases_seconds.items())
        self.restart_seconds = sum(seconds for _, seconds in self.restart)

    # ---- the story

    def play(self) -> RunOutcome:
        """Start, let everything happen, and close the books."""
        setup, faults = self.setup, self.faults
        limit = LARGEST_SLOWDOWN * setup.undisturbed_seconds
        self.after(min(limit, setup.horizon_seconds), self.stop, setup.horizon_seconds <= limit)
        if faults.stragglers is not None and faults.stragglers.rate_per_second > 0:
            self.luck = self.generator("stragglers")
            self.straggler_gap = 1 / (faults.stragglers.rate_per_second * setup.num_nodes * self.factor)
            self.after(self.luck.exponential(self.straggler_gap), self._on_straggler, 0)
        if faults.maintenance is not None:
            self.after(faults.maintenance.every_seconds / 2, self._on_maintenance, None)
        if faults.spares_shared_with:
            self.elsewhere = self.generator("other jobs")
            for job in range(len(faults.spares_shared_with)):
                self._expect_loss_elsewhere(job)
        if faults.clock == "wall":
            self._schedule_failure()
        if self.nodes.needed:  # a record of capacity that starts with too few nodes
            self._gather_nodes()
        else:
            self.train()
        self.environment.run(until=self.done)
        return self.outcome()

    def on_training(self) -> None:
        """What may end training: a failure, or one that recurs."""
        if self.nodes.planted:
            for source in self.nodes.planted:
                due = self.books.operated + self.relapses.exponential(self.faults.recurs_seconds)
                insort(self.recurrences, (due, source))
            self.nodes.planted.clear()
        if self.recurrences:
            self.after(max(0.0, self.recurrences[0][0] - self.books.operated), self._on_recurrence, self.epoch)
        if self.faults.clock == "operating":
            self._schedule_failure()

    # ---- failures

    def _schedule_failure(self) -> None:
        if self.event is None:
            return
        if self.faults.clock == "wall":
            self.after(max(0.0, self.event.time_seconds - self.now), self._on_failure, -1)
        elif self.state == RUN:
            self.after(max(0.0, self.event.time_seconds - self.books.operated), self._on_failure, self.epoch)

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
            self.stop(False)
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
            self._on_repaired((-event.nodes, None))
            return
        hit = self.nodes.withdraw(event.nodes, running=self.state != IDLE)
        if hit:
            self._fail(event, source, hit)

    def _fail(self, event: FailureEvent, source: Source, nodes: int) -> None:
        """A failure that hits the job: lost work, and the way back from the start."""
        self.counts[event.source] += 1
        self.without_progress += 1
        detection = source.detection_seconds * _drawn(event.detection, self.faults.detection_law)
        mistaken = self._is_mistaken(event, source)
        if mistaken:
            self.nodes.planted.append(event.source)
        else:
            self.nodes.lemons_left -= source.lemon
        if nodes and math.isfinite(source.repair_seconds):
            repair = source.repair_seconds * _drawn(event.repair, self.faults.repair_law)
            unmended = not mistaken and _more(event.detection) < self.faults.failed_repairs
            self._send_to_repair(nodes, detection + repair, event.source if unmended else None)
        running = self.state in (RUN, SAVES)
        if self.state == RUN and source.notice_seconds and source.notice_seconds >= self._save_seconds(source.loss):
            self._pause(nodes)
            return
        if self.state == RUN:
            self.leave()
        else:
            self.books.close(self.now)
        if self.traffic is not None:
            self.traffic.drop()
        self.state = DOWN
        self.nodes.needed += nodes
        self.everything |= nodes > 0
        self._fall_back(event, source, running)
        if self.without_progress >= PATIENCE_FAILURES:
            self.stop(False)
            return
        manual, person = self.faults.manual, 0.0
        if manual is not None and event.manual < manual.share:
            person = -manual.takes_seconds * math.log1p(-event.manual / manual.share)
        self.later = (person, source.outage_seconds)
        if self.traffic is not None and source.outage_seconds:  # it stopped every job, and all of them come back
            back = detection + self.faults.diagnosis_seconds + source.outage_seconds + self.restart_seconds
            self.after(back, self.traffic.storm, None)
        phases = (("detection", detection), ("diagnosis", self.faults.diagnosis_seconds))
        self.begin(DOWN, phases, self._on_detected)

    def _fall_back(self, event: FailureEvent, source: Source, running: bool) -> None:
        """Find the newest good save in a tier that outlives the failure; what came after it is lost."""
        progress, now = self.progress, self.now
        reached = position = progress.position()
        self.load, self.reads = 0.0, (0, 0)
        if not self._live_replicas_hold(source):
            limit = reached - source.poisoned_seconds / progress.interval if running else reached
            position = self._read_from(progress.newest_save(source.loss, now, limit))
            if event.corrupt < self.faults.corrupt_checkpoints:
                position = self._read_from(progress.newest_save(source.loss, now, position - 1e-9))
        self.books.lost["rework"] += (reached - position) * progress.interval
        if position > self.best + 1e-12:
            self.best, self.without_progress = position, 1
        progress.restore(position, source.loss, now)
        if self.traffic is not None and (tier := self.traffic.played.tier) is not None:
            self.traffic.fall_back(position, lost=source.loss not in self.setup.tiers[tier].survives)

    def _read_from(self, save: tuple[float, int] | None) -> float:
        """Plan to load a save, given with its tier; return its position. Without a save the run starts again."""
        if save is None:
            return 0.0
        position, tier = save
        played, (here, archived) = self.setup.played, self.reads
        if played is not None and played.tier == tier:
            self.reads = (here + 1, archived)
        elif played is not None and played.archive is not None and played.archive.tier == tier:
            self.reads = (here, archived + 1)
        else:
            self.load += self.setup.tiers[tier].load_seconds
        return position

    def _is_mistaken(self, event: FailureEvent, source: Source) -> bool:
        """Whether the wrong node is sent away."""
        found = source.lost_nodes and not source.notice_seconds
        return bool(found) and _more(event.repair) < self.faults.wrong_diagnoses

    def _on_recurrence(self, epoch: int) -> None:
        """A node that is still broken fails again."""
        if epoch == self.epoch and self.state == RUN:
            _, index = self.recurrences.pop(0)
            source = self.sources[index]
            event = FailureEvent._make((self.now, index, *self.relapses.random(MARKS).tolist(), source.lost_nodes))
            self._fail(event, source, source.lost_nodes)

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
            self.begin(IDLE, (("manual", person), ("outage", outage)), self._on_ready)
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
            self.begin(IDLE, (("waiting", math.inf),), None)
            return
        phases = self.restart
        if faults.elastic is not None and (faults.elastic.keeps_state or found == "smaller"):
            phases = (("restart", faults.elastic.reconfigure_seconds),)
        elif lost and found == "standby":
            phases = (("restart", faults.standby_restart_seconds),)
        elif not lost and not self.everything and faults.in_job_restart_seconds is not None:
            phases = (("restart", faults.in_job_restart_seconds),)
        self.begin(DOWN, (*phases, ("load", self.load)), self._on_restarted if any(self.reads) else self._on_up)

    def _on_restarted(self, epoch: int) -> None:
        """What is left is to read the checkpoint from the played storage."""
        if epoch == self.epoch and self.traffic is not None:
            self.books.close(self.now)
            self.begin(DOWN, (("load", math.inf),), None)
            self.traffic.restore(self.reads, lambda: self._on_up(self.epoch))

    def _on_up(self, epoch: int) -> None:
        if epoch == self.epoch and self.state != OVER:
            self.books.close(self.now)
            self.everything = False
            self.train()

    def _send_to_repair(self, nodes: int, seconds: float, wrong: int | None = None) -> None:
        """Nodes are away for some time; ``wrong`` is what one of them still has when it is back."""
        for ready, count in self.nodes.repaired_at(self.now, seconds, nodes):
            self.after(ready - self.now, self._on_repaired, (count, wrong))
            wrong = None

    def _on_repaired(self, what: tuple[int, int | None]) -> None:
        if self.state == OVER:
            return
        before = self.nodes.speed(self.nodes.missing)
        self.nodes.give_back(*what)
        if self.state == RUN and self.faults.elastic is not None and self.nodes.speed(self.nodes.missing) != before:
            self._pause(0, DOWN, (("restart", self.faults.elastic.reconfigure_seconds),))
        elif self.state == RUN and self.nodes.planted:
            self.leave()
            self.train()
        elif self.state == IDLE and self.books.plan and self.books.plan[0][0] == "waiting":
            self._gather_nodes()

    # ---- other jobs that take from the same spares

    def _expect_loss_elsewhere(self, job: int) -> None:
        nodes = self.faults.spares_shared_with[job]
        rate = self.factor * nodes * self.setup.node_losses_per_second / self.setup.num_nodes
        if rate > 0:
            self.after(self.elsewhere.exponential(1 / rate), self._on_loss_elsewhere, job)

    def _on_loss_elsewhere(self, job: int) -> None:
        if self.nodes.lose_elsewhere(job):
            self._send_to_repair(
                1, self.faults.repair_seconds * _drawn(self.elsewhere.random(), self.faults.repair_law)
            )
        if self.state != OVER:
            self._expect_loss_elsewhere(job)

    # ---- stops that lose no work, and changes of speed

    def _pause(self, nodes: int, state: int = DOWN, phases: Phases = ()) -> None:
        """Save and stop: to give nodes back, for maintenance, or to grow again."""
        self.leave()
        if self.traffic is not None:
            self.traffic.drop()
        self.progress.save_here(self.now)
        self.load, self.reads = 0.0, (0, 0)
        self.nodes.needed += nodes
        self.everything = True
        if nodes:
            self._gather_nodes()
        else:
            self.begin(state, phases, self._on_up)

    def _on_maintenance(self, _: None) -> None:
        maintenance = self.faults.maintenance
        if self.state == OVER or maintenance is None:
            return
        if self.state == RUN:
            self._pause(0, IDLE, (("maintenance", maintenance.takes_seconds),))
        self.after(maintenance.every_seconds, self._on_maintenance, None)

    def _on_straggler(self, number: int) -> None:
        stragglers = self.faults.stragglers
        if self.state == OVER or stragglers is None:
            return
        lasts = float(self.luck.exponential(stragglers.lasts_seconds))
        self.after(self.luck.exponential(self.straggler_gap), self._on_straggler, number + 1)
        if self.state != RUN:
            return
        self.leave()
        self.slow_nodes[number] = stragglers.speed
        self.train()
        found = math.inf if stragglers.found_seconds is None else stragglers.found_seconds
        self.after(min(lasts, found), self._on_straggler_gone, (number, lasts > found))

    def _on_straggler_gone(self, which: tuple[int, bool]) -> None:
        number, evicted = which
        running = self.state == RUN
        if running and evicted:
            del self.slow_nodes[number]
            self._send_to_repair(1, self.faults.repair_seconds)
            self._pause(1)
            return
        if running:
            self.leave()
        del self.slow_nodes[number]
        if running:
            self.train()


def _drawn(luck: float, law: str) -> float:
    """Of a time with mean 1."""
    return 1.0 if law == "fixed" else -math.log1p(-luck)


def _more(luck: float) -> float:
    """Another uniform number out of one: its digits from the 21st bit on, which no time that it stands for feels."""
    return luck * 2**20 % 1.0
