"""What is predicted and what is measured: the results that flow out of the simulator and the runtime."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, NamedTuple

from topologies.errors import InputError
from topologies.result_file import read_result_file


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTime:
    """One optimizer step. The parts are EXPOSED seconds: they add up to the step.

    ``compute_parts_seconds`` splits ``compute_seconds`` by cause (gemm, attention, memory_bound,
    recompute, head, host).
    ``low_seconds`` and ``high_seconds`` bound the step with a probability of 80 %; ``basis`` says where the bound and
    the efficiencies come from.
    """

    compute_seconds: float
    tp_comm_seconds: float
    cp_comm_seconds: float
    ep_comm_seconds: float
    pp_bubble_seconds: float
    pp_comm_seconds: float
    dp_comm_seconds: float
    optimizer_seconds: float
    straggler_seconds: float
    mfu: float | None
    """Model FLOP utilisation of the dense peak of the job's precision; None: the peak is unknown."""
    hfu: float | None
    """The same with recomputed FLOPs counted."""
    tokens_per_second_per_gpu: float
    tflops_per_gpu: float
    """Model TFLOP/s per GPU, causal attention counted once."""
    low_seconds: float
    high_seconds: float
    compute_parts_seconds: dict[str, float] = field(default_factory=dict)
    basis: tuple[str, ...] = ()

    @property
    def breakdown_seconds(self) -> dict[str, float]:
        """The parts by name."""
        return {name: getattr(self, f"{name}_seconds") for name in BREAKDOWN}

    @property
    def total_seconds(self) -> float:
        """The whole step."""
        return sum(self.breakdown_seconds.values())


BREAKDOWN = ("compute", "tp_comm", "cp_comm", "ep_comm", "pp_bubble", "pp_comm", "dp_comm", "optimizer", "straggler")
"""Names of the parts of a step, in the order in which they are told."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageMemory:
    """Peak bytes of one rank of one pipeline stage, by part."""

    weights_bytes: float
    gradients_bytes: float
    optimizer_bytes: float
    activations_bytes: float
    logits_bytes: float
    buffers_bytes: float
    """Communication buffers and gathered weights."""
    reserve_bytes: float
    """Allocator fragmentation, CUDA context and workspaces."""
    in_flight_microbatches: float

    @property
    def total_bytes(self) -> float:
        """All parts."""
        return float(sum(getattr(self, f"{part}_bytes") for part in MEMORY_PARTS))


MEMORY_PARTS = ("weights", "gradients", "optimizer", "activations", "logits", "buffers", "reserve")


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryUse:
    """Peak memory of every pipeline stage against what a GPU can hold."""

    stages: tuple[StageMemory, ...]
    capacity_bytes: float
    not_included: tuple[str, ...]

    @property
    def peak_bytes(self) -> float:
        """Of the fullest stage."""
        return max(stage.total_bytes for stage in self.stages)

    @property
    def headroom_bytes(self) -> float:
        """Capacity less peak; negative where the layout does not fit."""
        return self.capacity_bytes - self.peak_bytes

    def as_json(self) -> dict[str, Any]:
        """Plain data: peak, capacity and the parts of each stage."""
        stages = [{**asdict(stage), "total_bytes": stage.total_bytes} for stage in self.stages]
        return {
            "peak": self.peak_bytes,
            "capacity": self.capacity_bytes,
            "per_stage": stages,
            "not_included": list(self.not_included),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """Something that a rank does on one of its streams."""

    rank: int
    """Pipeline rank: ranks of one stage do the same."""
    stream: Literal["compute", "communication"]
    name: str
    kind: str
    """forward, backward, p2p, tp_comm, dp_comm, optimizer ..."""
    start_seconds: float
    duration_seconds: float
    bytes: float = 0.0
    group: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Counter:
    """A quantity in time: ``values[k]`` holds from ``start_seconds[k]`` to the next."""

    name: str
    start_seconds: tuple[float, ...]
    values: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimeline:
    """One step, event by event."""

    spans: tuple[Span, ...]
    step_seconds: float
    rank_names: tuple[str, ...] = ()
    """Of the ranks in the spans; empty: "pipeline rank" and the number."""
    counters: tuple[Counter, ...] = ()
    """Share of the links of each kind that is used."""


class RunSpan(NamedTuple):
    """A stretch of a whole run."""

    start_seconds: float
    end_seconds: float
    doing: str
    """training, training slowly, or the cause of the loss."""
    work: float
    """Checkpoint intervals of work done in it, those that are lost later included."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOutcome:
    """A whole run: where the wall time went. ``lost_seconds`` and the useful seconds add up to ``wall_seconds``."""

    source: Literal["simulated", "measured"]
    seed: int | None
    wall_seconds: float
    useful_seconds: float
    tokens: float
    lost_seconds: dict[str, float]
    failures: dict[str, int]
    checkpoints: int
    completed: bool = True
    """False: the run was given up, because it made hardly any progress."""
    rate_factor: float = 1.0
    """What this run's failure rates were multiplied by: rates are not known exactly."""
    spares_used: int = 0
    """Largest number of spare nodes in use at the same time."""
    checkpoint_bytes: dict[str, float] = field(default_factory=dict)
    """Written to each tier."""
    skipped_saves: int = 0
    """Saves to the shared storage that were left out because the last one was still on its way."""
    energy_joules: float = 0.0
    """Of the facility; 0: not asked for."""
    cost_usd: float = 0.0
    """Rent of all nodes, spares included, and electricity; 0: no prices."""
    spans: tuple[RunSpan, ...] = ()
    """What the job did when, where it was recorded."""

    @property
    def goodput(self) -> float:
        """Share of the wall time that became progress (effective training time ratio)."""
        return self.useful_seconds / self.wall_seconds if self.wall_seconds > 0 else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """What a real job showed. Seconds are of steady steps: warm-up is dropped."""

    plan_sha256: str
    world_size: int
    steps: int
    step_seconds: dict[str, float]
    """median, p10, p90."""
    mfu: float | None
    tokens_per_second_per_gpu: float
    peak_memory_bytes: float
    losses: list[float]
    phases_seconds: dict[str, float]
    environment: dict[str, Any]
    """Software versions, hostname class, share of the CPU that others took (``foreign_cpu_share``), ``contended``."""
    run: dict[str, Any] = field(default_factory=dict)
    """The whole job as a RunOutcome, with its ``goodput`` and its ``incidents``; empty where it was not recorded."""
    format_version: int = 1


def read_measurement(path: str | Path) -> Measurement:
    """Read a measurement file; keys that are not known are ignored within a format version.

    Raises:
        InputError: unreadable, truncated, not a measurement, a value of the wrong type, or of a newer format version.
    """
    content = read_result_file(path, kind="measurement", command="headway run plan.json -o measurement.json")
    known = {one.name: content[one.name] for one in fields(Measurement) if one.name in content}
    for one in fields(Measurement):
        if one.name not in known and one.name != "run":
            other = "; this is a plan" if {"layout", "predicted"} <= content.keys() else ""
            raise InputError(f"is missing{other}", hint="give a measurement file", file=path, key=one.name)
    _check_measurement(known, path)
    return Measurement(**known)


def _check_measurement(content: dict[str, Any], path: str | Path) -> None:
    def expect(right: bool, key: str, what: str) -> None:
        if not right:
            raise InputError(f"is not {what}", hint="make the measurement again", file=path, key=key)

    expect(isinstance(content["plan_sha256"], str), "plan_sha256", "a text")
    for key in ("world_size", "steps"):
        expect(isinstance(content[key], int) and content[key] >= 1, key, "a whole number of at least 1")
    for key in ("step_seconds", "phases_seconds", "environment"):
        expect(isinstance(content[key], dict), key, "a mapping")
    for key in ("median", "p10", "p90"):
        value = content["step_seconds"].get(key)
        expect(_number(value) and value > 0, f"step_seconds.{key}", "a number above 0")
    for key, value in content["phases_seconds"].items():
        expect(_number(value) and value >= 0, f"phases_seconds.{key}", "a number of seconds")
    for key in ("tokens_per_second_per_gpu", "peak_memory_bytes"):
        expect(_number(content[key]) and content[key] >= 0, key, "a number of at least 0")
    expect(content["mfu"] is None or _number(content["mfu"]), "mfu", "a number or null")
    expect(isinstance(content["losses"], list), "losses", "a list")


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def plain(outcome: Any) -> dict[str, Any]:
    """Return the stored fields of a result as plain data for JSON."""
    return {one.name: getattr(outcome, one.name) for one in fields(outcome)}
