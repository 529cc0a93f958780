"""The course of a training: where it begins, what each step leaves behind, when it saves, when it ends."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from runtime.checkpoint import Checkpointer, Progress
from runtime.environment import CpuClock, node_name
from runtime.faults import strike
from runtime.layers import local
from runtime.request import TrainRequest
from runtime.session import Session
from runtime.stragglers import Probe, Stragglers, computes_alone
from topologies.errors import RunFailed

if TYPE_CHECKING:
    from runtime.train import Replica, TrainReport

MOST_ROLLBACKS = 3
"""More batches that make the loss NaN are no accident."""


class LossNotFinite(RunFailed):
    """The loss is NaN or infinite, and the training ends."""

    cause = "nan loss"


@dataclass(slots=True, kw_only=True)
class Course:
    """One attempt of one rank."""

    request: TrainRequest
    replica: Replica
    session: Session | None
    report: TrainReport
    progress: Progress = field(default_factory=Progress)
    keeper: Checkpointer | None = field(init=False, default=None)
    stragglers: Stragglers = field(init=False)
    probe: Probe = field(init=False)
    measured_from: CpuClock = field(init=False)
    told_saves: int = 0
    hosts: list[str] = field(init=False)

    def begin(self) -> None:
        """Resume from the newest checkpoint where there is one; all ranks call it."""
        request, began = self.request, time.perf_counter()
        self.stragglers = Stragglers(dist.get_world_size())
        self.probe = Probe(self.replica.meshes.device)
        hosts: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(hosts, node_name())
        self.hosts = [str(host) for host in hosts]
        if request.checkpoint is not None:
            self.keeper = Checkpointer(
                request=request,
                settings=request.checkpoint,
                decoders=self.replica.decoders,
                optimizer=self.replica.optimizer,
                tell=self._tell,
            )
            found = self.keeper.load_newest()
            if found is not None:
                self.progress = found
                self._tell(f"resumed from step {found.step} in {time.perf_counter() - began:.2f} s")
        loaded = time.perf_counter() - began if self.progress.step > 0 else 0.0
        self._note("begin", step=self.progress.step, load_seconds=loaded)
        self.measured_from = CpuClock.now()
        self.replica.on_mark = self._mark

    def one_step(self) -> None:
        """Do one step, tell what it showed, and save if it is time."""
        step, began = self.progress.step, time.perf_counter()
        if len(self.report.losses) == self.request.warmup_steps:
            self.measured_from = CpuClock.now()
        self._mark()
        if strike("step", step) == "nan":
            self._spoil()
        cpu = time.process_time()
        batch = self.replica.batch(self.progress.batch_index(step))
        alone = time.perf_counter() - began
        self._mark()
        loss, phases = self.replica.step(step, batch)
        cpu = time.process_time() - cpu
        if computes_alone(self.request.layout):
            alone += phases[0]
        stop = self._share(step, loss.item(), cpu, phases, alone)
        if not math.isfinite(self.report.losses[-1]):
            self._fall_back(step)
            return
        self.progress = replace(self.progress, step=step + 1)
        last = step + 1 == self.request.steps
        if self.keeper is not None and (stop or last or (step + 1) % self.keeper.settings.interval_steps == 0):
            self._save(wait=stop or last)
        if stop:
            self.report.stopped_at = step + 1

    def end(self) -> None:
        """Wait for the last save; all ranks call it."""
        if self.keeper is not None:
            self.keeper.finish()
            self._tell_saves()
        self._note("end", step=self.progress.step)

    def _share(self, step: int, loss: float, cpu: float, phases: list[float], alone: float) -> bool:
        """Let all ranks know of the step of all; return whether one of them wants to stop."""
        layout, world_size, rank, report = self.request.layout, dist.get_world_size(), dist.get_rank(), self.report
        by_rank = [0.0] * (2 * world_size)
        by_rank[rank], by_rank[world_size + rank] = alone, self.probe.seconds()
        told = torch.tensor([loss / layout.tp, cpu, *phases, *by_rank], dtype=torch.float64)
        wants = self.session is not None and self.session.wants_to_stop()
        most = torch.tensor([sum(phases), float(wants)], dtype=torch.float64)
        dist.all_reduce(told)
        dist.all_reduce(most, dist.ReduceOp.MAX)
        values = told.tolist()
        report.losses.append(values[0])
        report.step_seconds.append(most[0].item())
        report.cpu_seconds.append(values[1] / world_size)
        means = {name: total / world_size for name, total in zip(report.phases_seconds, values[2:], strict=False)}
        for phase, seconds in means.items():
            report.phases_seconds[phase].append(seconds)
        own = values[2 + len(phases) :]
        self._tell_step(step, means, own[:world_size], own[world_size:])
        return bool(most[1].item())

    def _tell_step(self, step: int, phases: dict[str, float], own: list[float], probes: list[float]) -> None:
        report = self.report
        loss, seconds = report.losses[-1], report.step_seconds[-1]
        if math.isfinite(loss):
            self._tell(f"step {step + 1}/{self.request.steps}  loss {loss:.4f}  {seconds:.3f} s")
            self._note(
                "step", step=step, loss=loss, seconds=seconds, cpu_seconds=report.cpu_seconds[-1], phases_seconds=phases
            )
        if len(report.losses) <= self.request.warmup_steps:
            return
        for slow in self.stragglers.judge(own, probes, seconds):
            host = self.hosts[slow.rank]
            self._note("straggler", step=step, rank=slow.rank, host=host, ratio=slow.ratio, what=slow.what)
            self._tell(f"rank {slow.rank} on {host} is slow: {slow.ratio:.1f} times the others for {slow.what}")

    def _save(self, *, wait: bool) -> None:
        assert self.keeper is not None
        save = self.keeper.save(self.progress, wait=wait)
        self._note("save", step=save.step, stall_seconds=save.stall_seconds)
        self._tell_saves()

    def _tell_saves(self) -> None:
        """Note the saves that have come to an end."""
        assert self.keeper is not None
        ended = len(self.keeper.saves) - (self.keeper.pending is not None)
        for save in self.keeper.saves[self.told_saves : ended]:
            self._note(
                "saved",
                step=save.step,
                stall_seconds=save.stall_seconds,
                seconds=save.seconds,
                bytes=save.bytes,
                error=save.error,
            )
            if save.error is None:
                self._tell(
                    f"saved step-{save.step} in {save.seconds:.2f} s; it held the training {save.stall_seconds:.3f} s"
                )
        self.told_saves = ended

    def _fall_back(self, step: int) -> None:
        """The loss is not finite: go back to the newest checkpoint and leave this batch out, or give up."""
        loss, keeper = self.report.losses[-1], self.keeper
        for values in (self.report.losses, self.report.step_seconds, self.report.cpu_seconds):
            values.pop()
        for seconds in self.report.phases_seconds.values():
            seconds.pop()
        if keeper is None or keeper.settings.on_nan == "stop":
            hint = "" if keeper is None else "; go on without this batch with --on-nan rollback --resume"
            raise LossNotFinite(f"the loss is {loss} in step {step + 1}: the training ends{hint}")
        if len(self.progress.skipped) >= MOST_ROLLBACKS:
            raise LossNotFinite(
                f"the loss is {loss} in step {step + 1}, after {MOST_ROLLBACKS} rollbacks: the training ends"
            )
        began = time.perf_counter()
        bad = self.progress.batch_index(step)
        found = keeper.load_newest()
        self._tell_saves()
        if found is None:
            raise LossNotFinite(f"the loss is {loss} in step {step + 1}, and there is no checkpoint to go back to")
        self.progress = Progress(step=found.step, skipped=tuple(sorted({*found.skipped, *self.progress.skipped, bad})))
        self._note(
            "rollback", cause="nan loss", step=step, to_step=found.step, seconds=time.perf_counter() - began, batch=bad
        )
        self._tell(f"the loss is {loss} in step {step + 1}: back to step {found.step}, batch {bad} is left out")

    def _spoil(self) -> None:
        with torch.no_grad():
            local(next(self.replica.decoders[0].parameters())).fill_(float("nan"))

    def _mark(self) -> None:
        if self.session is not None:
            self.session.heart.mark(self.progress.step)

    def _note(self, event: str, **details: object) -> None:
        if self.session is not None:
            self.session.note(event, **details)

    def _tell(self, text: str) -> None:
        if self.session is not None:
            self.session.tell(text)
