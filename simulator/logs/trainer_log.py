"""What a trainer's log states about one run, with the iterations that tell its steady pace."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

import numpy as np


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """One logged iteration; None is what the log does not print."""

    step: int
    """As the log counts, from 0 or from 1."""
    seconds: float | None = None
    samples: float | None = None
    """Sequences of the iteration, over all GPUs."""
    tokens: float | None = None
    """Of the iteration, over all GPUs."""
    loss: float | None = None
    """None in an iteration whose update was skipped."""
    tflops_per_gpu: float | None = None
    """As printed, in the log's own count of FLOPs."""
    mfu: float | None = None
    """As printed, over the log's own peak."""
    tokens_per_second_per_gpu: float | None = None
    samples_per_second: float | None = None
    """Over all GPUs."""
    memory_bytes: float | None = None
    skipped: int = 0
    """Iterations that this record covers whose update was skipped: forward and backward ran, the optimizer did not."""
    clock_seconds: float | None = None
    """Time of day at which the line was written, in seconds since 1970 of its own time zone."""

    @property
    def pace(self) -> float | None:
        """A figure that grows with the time of the iteration, whatever the log prints."""
        rate = self.tokens_per_second_per_gpu or self.samples_per_second
        return self.seconds or (1.0 / rate if rate else None)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerLog:
    """One run as its log states it."""

    format: str
    """The trainer or tool that wrote it."""
    steps: tuple[StepRecord, ...]
    run: str = ""
    """Name of the run where one file holds several."""
    averaged: bool = False
    """The records are averages over whole runs, not single iterations."""
    steady: tuple[StepRecord, ...] = ()
    """Without first iterations, restarts, outliers and, where others remain, skipped updates."""
    timed_by_clock: bool = False
    """Seconds are differences of the times at which lines were written: the log prints none itself."""
    global_batch_size: int | None = None
    seq_length: int | None = None
    tokens_per_sample: float | None = None
    """Mean of real tokens; below the sequence length where samples are shorter."""
    micro_batch_size: int | None = None
    gpus: int | None = None
    layout: dict[str, int] = field(default_factory=dict)
    """tp, pp, cp, dp ... as far as the log states them."""
    num_params: float | None = None
    device: str | None = None
    device_memory_bytes: float | None = None
    peak_memory_bytes: float | None = None
    """Of the fullest rank that the log shows."""
    memory_kind: Literal["reserved", "allocated", "device"] | None = None
    """reserved or allocated by torch, or used of the whole device."""
    flops: Literal["model", "hardware"] | None = None
    """What the printed TFLOP/s count: model FLOPs, or recomputed ones too; None: that depends on the run."""
    weight_and_optimizer_bytes: float | None = None
    """What the trainer itself expects of the fullest rank."""
    peak_is_guess: bool = False
    """The log's peak is that of another GPU: its MFU means nothing."""
    warnings: tuple[str, ...] = ()

    @property
    def step_seconds(self) -> float | None:
        """Median of the steady iterations; None without steady iterations, or without times."""
        return self._median(lambda one: one.seconds)

    @property
    def step_seconds_p10_p90(self) -> tuple[float, float] | None:
        """How far the steady iterations spread."""
        return quantiles([one.seconds for one in self.steady if one.seconds is not None])

    @property
    def samples_per_second(self) -> float | None:
        """Over all GPUs."""
        printed = self._median(lambda one: one.samples_per_second)
        samples, seconds = self._median(lambda one: one.samples) or self.global_batch_size, self.step_seconds
        return samples / seconds if samples and seconds and not self.timed_by_clock else printed

    @property
    def tokens_per_step(self) -> float | None:
        """Over all GPUs."""
        per_sample = self.seq_length or self.tokens_per_sample
        known = self._median(lambda one: one.tokens)
        return known or (self.global_batch_size * per_sample if self.global_batch_size and per_sample else None)

    @property
    def tokens_per_second(self) -> float | None:
        """Over all GPUs."""
        per_gpu = self._median(lambda one: one.tokens_per_second_per_gpu)
        if per_gpu and self.gpus:
            return per_gpu * self.gpus
        tokens, seconds = self.tokens_per_step, self.step_seconds
        return tokens / seconds if tokens and seconds and not self.timed_by_clock else None

    @property
    def tokens_per_second_per_gpu(self) -> float | None:
        """As printed, else from the time of a step."""
        printed = self._median(lambda one: one.tokens_per_second_per_gpu)
        total = self.tokens_per_second
        return printed or (total / self.gpus if total and self.gpus else None)

    @property
    def tflops_per_gpu(self) -> float | None:
        """Median of what the log prints, in its own count of FLOPs; see ``flops``."""
        return self._median(lambda one: one.tflops_per_gpu)

    @property
    def flops_per_token(self) -> float | None:
        """What the printed TFLOP/s count for one token."""
        tflops, rate = self.tflops_per_gpu, self.tokens_per_second_per_gpu
        return tflops * 1e12 / rate if tflops and rate else None

    @property
    def peak_flop_per_second(self) -> float | None:
        """The peak that the printed MFU rests on."""
        mfu = self._median(lambda one: one.mfu)
        return self.tflops_per_gpu * 1e12 / mfu if mfu and self.tflops_per_gpu else None

    @property
    def losses(self) -> list[float]:
        """Of the iterations that print one."""
        return [one.loss for one in self.steps if one.loss is not None]

    def _median(self, value: Callable[[StepRecord], float | None]) -> float | None:
        known = [number for one in self.steady if (number := value(one)) is not None]
        return statistics.median(known) if known else None


def quantiles(values: list[float]) -> tuple[float, float] | None:
    """Return the 10 % and the 90 % quantile; None without values."""
    if not values:
        return None
    low, high = np.quantile(values, [0.1, 0.9])
    return float(low), float(high)
