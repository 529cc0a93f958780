"""What the launcher asks of its workers: one JSON file in the working directory of the job."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, TypeAdapter

from scenarios.job import Job
from scenarios.layout import Layout
from topologies.document import Document, to_json, write_atomically

REQUEST_FILE = "request.json"
RESULT_FILE = "result.json"


class CheckpointSettings(Document):
    """Where and how often a training is saved."""

    directory: str
    """Folder of the checkpoints; the newest complete one in it is resumed from."""
    interval_steps: int = Field(ge=1)
    """Steps between saves; the end of the training is saved too."""
    keep: int = Field(default=2, ge=1)
    """Complete checkpoints that stay."""
    mode: Literal["async", "sync"] = "async"
    archive: str | None = None
    """Folder of durable copies, which are never deleted."""
    archive_every: int = Field(default=1, ge=1)
    """Copy every so manieth save there."""
    on_nan: Literal["stop", "rollback"] = "stop"
    """What a loss that is not finite means: an end, or back to the newest checkpoint and on without that batch."""


class DataSettings(Document):
    """Tokens from files, instead of synthetic ones."""

    prefix: str
    """Of a .bin and an .idx file."""
    cache: str | None = None
    """Folder on a local disk, to which the files are copied before the training."""


class Recipe(Document):
    """How a training goes where neither job nor layout says it."""

    learning_rate: float = Field(default=3e-4, gt=0)
    """The highest of the schedule; 3e-4 is what Llama 7B took (arXiv 2302.13971, table 2)."""
    warmup_steps: int = Field(default=0, ge=0)
    """Steps in which the learning rate rises from 0 on a straight line."""
    decay: Literal["constant", "cosine", "linear"] = "constant"
    """How the learning rate falls after the warm-up, until the last step."""
    lowest_share: float = Field(default=0.1, ge=0, le=1)
    """Where a decay ends, as a share of the learning rate."""
    clip_norm: float | None = Field(default=None, gt=0)
    """Longest gradient, all parameters together; None: gradients are taken as they are."""
    balance_loss: float = Field(default=0.001, ge=0)
    """Coefficient of the load-balance loss of routed experts (Mixtral's and Qwen's router_aux_loss_coef)."""
    compile: Literal["default", "reduce-overhead"] | None = None
    """Mode of torch.compile for each layer; reduce-overhead replays CUDA graphs."""
    v_order: Literal["zbv", "dualpipev"] = "zbv"
    """In which order the V of stages of the schedule zbv runs: that of ZB-V (Qi et al. 2024, arXiv 2405.15362), or that
    of DualPipeV, where a forward and a backward go together (DeepSeek's DualPipe, cut in half)."""
    split_attention: Literal["own", "torch"] = "own"
    """Who attends over sequences that are split between ranks: ``runtime.context``, or torch's ``context_parallel``,
    which is experimental and knows kernels for CUDA only."""

    def rate(self, step: int, steps: int) -> float:
        """Learning rate of a step out of ``steps``.

        >>> recipe = Recipe(learning_rate=1.0, warmup_steps=2, decay="linear", lowest_share=0.0)
        >>> [recipe.rate(step, 6) for step in range(6)]
        [0.5, 1.0, 1.0, 0.75, 0.5, 0.25]
        """
        if step < self.warmup_steps:
            return self.learning_rate * (step + 1) / self.warmup_steps
        if self.decay == "constant":
            return self.learning_rate
        done = (step - self.warmup_steps) / max(1, steps - self.warmup_steps)
        falling = 1 - done if self.decay == "linear" else (1 + math.cos(math.pi * done)) / 2
        return self.learning_rate * (self.lowest_share + (1 - self.lowest_share) * falling)


class TrainRequest(Document):
    """Train for a number of steps and measure."""

    task: Literal["train"] = "train"
    job: Job
    layout: Layout
    device: Literal["cpu", "cuda"] = "cpu"
    steps: int = Field(default=12, ge=1)
    warmup_steps: int = Field(default=2, ge=0)
    """Steps at the start that are not measured."""
    seed: int = 0
    recipe: Recipe = Recipe()
    profile: bool = True
    """Run one more step under the profiler, for the time inside collectives."""
    profile_directory: str | None = None
    """Folder that receives the trace of that step of each rank."""
    timeout_seconds: float = 300.0
    """How long a collective may wait for the other ranks."""
    launcher_pid: int = 0
    """The worker ends when this process is gone; 0: nobody is watched."""
    checkpoint: CheckpointSettings | None = None
    data: DataSettings | None = None
    """None: synthetic tokens."""
    max_restarts: int = Field(default=0, ge=0)
    """How often the job may start again after a failure."""
    heartbeat_timeout_seconds: float = Field(default=10.0, gt=0)
    """A rank that shows no sign of life for so long is killed."""
    progress_timeout_seconds: float = Field(default=120.0, gt=0)
    """A rank that is behind all others for so long is killed."""

    @property
    def world_size(self) -> int:
        """Ranks to start."""
        return self.layout.world_size


class CalibrateRequest(Document):
    """Measure what the machine can do."""

    task: Literal["calibrate"] = "calibrate"
    ranks: tuple[int, ...]
    """Group sizes in which collectives are measured; the largest is the world."""
    busy_ranks: int = Field(ge=1)
    """Ranks that compute at the same time while rates are measured: as many as there are cores."""
    seconds: float = Field(default=6.0, gt=0)
    """What rates and collectives may take, the start of the processes and small models not counted."""
    timeout_seconds: float = 120.0
    launcher_pid: int = 0

    @property
    def world_size(self) -> int:
        """Ranks to start."""
        return max(self.ranks)


class HealthRequest(Document):
    """Find out what each rank can do right now."""

    task: Literal["health"] = "health"
    ranks: int = Field(ge=1)
    device: Literal["cpu", "cuda"] = "cpu"
    seconds: float = Field(default=4.0, gt=0)
    """About what it may take, the start of the processes not counted."""
    timeout_seconds: float = 60.0
    launcher_pid: int = 0

    @property
    def world_size(self) -> int:
        """Ranks to start."""
        return self.ranks


Request = TrainRequest | CalibrateRequest | HealthRequest
_ADAPTER: TypeAdapter[Request] = TypeAdapter(Annotated[Request, Field(discriminator="task")])


def write_request(request: Request, directory: Path) -> None:
    """Leave a request where the workers look for it."""
    write_atomically(directory / REQUEST_FILE, to_json(request.model_dump(mode="json")))


def read_request(directory: Path) -> Request:
    """Read the request of a job."""
    return _ADAPTER.validate_json((directory / REQUEST_FILE).read_text(encoding="utf-8"))
