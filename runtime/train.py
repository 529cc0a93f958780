"""The training loop of one rank: build what it holds, step, and time the phases of each step."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from runtime.batches import Batches, batches_of
from runtime.clipping import clip
from runtime.context import SequencePart
from runtime.course import Course
from runtime.environment import CpuClock, reset_peak_memory, resident_bytes, usable_cores
from runtime.initial import fill, sketch_decoder
from runtime.mesh import Meshes, build_meshes
from runtime.optimizer import ReplicaOptimizer, build_optimizer
from runtime.parallelize import parallelize
from runtime.pipeline import StepRunner, build_runner, sum_tied_gradients
from runtime.profiling import profiled_seconds
from runtime.ranks import shares, stages_of
from runtime.request import TrainRequest
from runtime.routing import Balance, correct
from runtime.session import Session
from runtime.torch_context import torchs_attention
from runtime.transformer import Decoder
from scenarios.model import Moe

PHASES = ("forward_backward", "gradient_reduction", "optimizer")
"""The phases of a step, in order; their seconds add up to the step on each rank."""
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass(slots=True, kw_only=True)
class TrainReport:
    """What all ranks saw together. Lists have one entry per step, warm-up included."""

    losses: list[float] = field(default_factory=list)
    step_seconds: list[float] = field(default_factory=list)
    """Of the slowest rank."""
    phases_seconds: dict[str, list[float]] = field(default_factory=lambda: {phase: [] for phase in PHASES})
    """Mean over the ranks."""
    cpu_seconds: list[float] = field(default_factory=list)
    """CPU time of a rank, mean over the ranks."""
    communication_seconds: float | None = None
    """Inside collectives, waiting included, mean over the ranks, of one profiled step."""
    product_seconds: float | None = None
    """Inside matrix products and attention on a CPU, mean over the ranks, of the same step."""
    foreign_cpu_share: float | None = None
    """Of the measured steps."""
    peak_memory_bytes: list[float] = field(default_factory=list)
    """By rank."""
    baseline_memory_bytes: list[float] = field(default_factory=list)
    """By rank: resident before the model was built (interpreter and libraries)."""
    stopped_at: int | None = None
    """Steps done when somebody asked to stop; None: all were done."""


@dataclass(slots=True, kw_only=True)
class Replica:
    """What a rank holds of the model, and what drives it."""

    request: TrainRequest
    meshes: Meshes
    decoders: list[Decoder]
    runner: StepRunner
    optimizer: ReplicaOptimizer
    batches: Batches
    on_mark: Callable[[], None] = lambda: None
    """Told after each phase."""

    def batch(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The sequences of this replica in a global batch, and of these the part of this rank."""
        job, layout, device = self.request.job, self.request.layout, self.meshes.device
        count = job.global_batch_size // layout.dp
        tokens, targets = self.batches.at(index, self.meshes.place["dp"] * count, count)
        if self.meshes.cp is not None:
            part = SequencePart(kind=layout.cp_comm, group=self.meshes.cp.get_group())
            here = part.positions(job.seq_length // layout.cp)
            tokens, targets = tokens[:, here], targets[:, here]
        return tokens.to(device), targets.to(device)

    def step(
        self, step: int, batch: tuple[torch.Tensor, torch.Tensor] | None = None
    ) -> tuple[torch.Tensor, list[float]]:
        """Run one optimizer step; return the loss on this rank and the seconds of each phase."""
        tokens, targets = self.batch(step) if batch is None else batch
        dist.barrier(self.meshes.world)
        marks = [self._clock()]
        with torchs_attention(self.request.layout, self.meshes, self.request.recipe):
            loss = self.runner.forward_backward(tokens, targets)
        marks.append(self._clock())
        sum_tied_gradients(self.decoders, self.meshes)
        self.optimizer.reduce_gradients()
        marks.append(self._clock())
        recipe = self.request.recipe
        if recipe.clip_norm is not None:
            clip(self.optimizer, self.decoders, self.meshes, recipe.clip_norm)
        self.optimizer.set_rate(recipe.rate(step, self.request.steps))
        self.optimizer.update()
        self.optimizer.clear()
        self._correct_routers()
        marks.append(self._clock())
        return loss, [after - before for before, after in itertools.pairwise(marks)]

    def _correct_routers(self) -> None:
        routers = [router for decoder in self.decoders for router in decoder.routers()]
        groups = (self.meshes.tp.get_group(), *self.meshes.dp.get_all_groups())
        correct(routers, groups, self.request.layout.num_microbatches(self.request.job))

    def _clock(self) -> float:
        if self.meshes.device.type == "cuda":
            torch.cuda.synchronize(self.meshes.device)
        self.on_mark()
        return time.perf_counter()


def build_replica(request: TrainRequest, device: torch.device, meshes: Meshes) -> Replica:
    """Build this rank's stages of the model under the layout, with their optimizer."""
    job, layout, recipe = request.job, request.layout, request.recipe
    balance = Balance(coefficient=recipe.balance_loss, global_batch_size=job.global_batch_size)
    indices = stages_of(layout, meshes.place["pp"])
    divided = shares(job.model, layout)
    decoders = []
    for index in indices:
        sketch = sketch_decoder(
            job.model,
            divided[index],
            dtype=DTYPES[job.precision],
            recompute_modules=layout.recompute_modules,
            balance=balance,
        )
        parallelize(sketch, layout, meshes, recipe)
        decoders.append(fill(sketch, device, request.seed))
    return Replica(
        request=request,
        meshes=meshes,
        decoders=decoders,
        runner=build_runner(decoders, indices, request, meshes),
        optimizer=build_optimizer(decoders, layout, meshes, recipe.learning_rate),
        batches=batches_of(request),
    )


def meshes_of(request: TrainRequest, device: torch.device) -> Meshes | None:
    """Make the meshes of a request; every rank of the job calls it, and None is for those outside the layout."""
    model = request.job.model
    return build_meshes(
        request.layout,
        device,
        tied_embeddings=model.tied_embeddings,
        experts=any(isinstance(layer.feed_forward, Moe) for layer in model.layers),
    )


def train(request: TrainRequest, device: torch.device, session: Session | None = None) -> TrainReport:
    """Train on this rank, with all others of the world.

    Args:
        request: what to train, in which layout, for how long; with checkpoints, from the newest that is whole.
        device: of this rank.
        session: hears of every step, and may ask to stop.

    Returns:
        The same report on every rank.

    Raises:
        RunFailed: the loss is not finite, or no checkpoint can be used.
    """
    report = TrainReport()
    reset_peak_memory()
    baseline = resident_bytes("VmRSS")
    meshes = meshes_of(request, device)
    assert meshes is not None
    replica = build_replica(request, device, meshes)
    course = Course(request=request, replica=replica, session=session, report=report)
    with session.saving_on_sigterm() if session is not None and request.checkpoint else nullcontext():
        course.begin()
        while course.progress.step < request.steps and report.stopped_at is None:
            course.one_step()
        course.end()
    now = CpuClock.now()
    own = torch.tensor([now.own_seconds - course.measured_from.own_seconds], dtype=torch.float64)
    dist.all_reduce(own)
    report.foreign_cpu_share = now.foreign_share(course.measured_from, own.item(), usable_cores())
    peak = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else resident_bytes()
    report.peak_memory_bytes = gathered(float(peak))
    report.baseline_memory_bytes = gathered(0.0 if device.type == "cuda" else baseline)
    if request.profile and report.stopped_at is None:
        folder = request.profile_directory
        trace = None if folder is None else Path(folder) / f"rank{dist.get_rank()}.trace.json.gz"
        inside, products = profiled_seconds(lambda: replica.step(course.progress.batch_index(request.steps)), trace)
        ranks = dist.get_world_size()
        report.communication_seconds = sum(gathered(inside)) / ranks
        report.product_seconds = sum(gathered(products)) / ranks if device.type == "cpu" else None
    return report


def gathered(value: float) -> list[float]:
    """Collect one number of each rank."""
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return [float(one) for one in found]
