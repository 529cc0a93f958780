"""What one GPU does: matrix multiplications by shape, memory-bound operations, casts, head and optimizer.

Every function takes ``Rates`` (scalars of one cluster and job) and arrays over layouts, and returns seconds.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from scenarios.job import Job
from simulator.arrays import Bools, Floats
from simulator.parameters import Efficiency, Parameters
from simulator.software import Software, software
from topologies.cluster import AttentionPoint, Cluster, GemmPoint
from topologies.errors import InputError
from topologies.hardware import Gpu, Precision

CAST_WEIGHT = {"fp8": 1.0, "mxfp8": 1.5, "nvfp4": 2.5}
"""Traffic of quantisation against plain fp8: block scales and a second copy cost more (fit of published runs)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GemmRate:
    """Rate of large GEMMs, and the FLOP per byte at which a GEMM turns from memory-bound to compute-bound."""

    flop_per_second: float
    ridge_flop_per_byte: float
    points: tuple[GemmPoint, ...] = ()
    """Measured GEMMs of the precision; they take the place of the two numbers above."""
    slowdown: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """One GPU under one stack: FLOP/s and bytes/s after all efficiencies."""

    gemm: GemmRate
    """In the job's precision."""
    wide_gemm: GemmRate
    """In 16 bits (32 for an fp32 job): head, router, score matrices."""
    attention_flop_per_second: float
    attention_points: tuple[AttentionPoint, ...]
    memory_bytes_per_second: float
    update_bytes_per_second: float
    """Of the optimizer."""
    element_bytes: float
    """Of an activation outside the GEMMs."""
    cast_weight: float
    """0 unless the GEMMs run in 8 or 4 bits."""
    ampere: bool
    cpu: bool
    slowdown: float
    """Ranks that share one core."""
    host_seconds: dict[str, float]
    """Measured fixed costs on a CPU."""
    software: Software
    parameters: Parameters
    facts: tuple[str, ...]
    """Efficiencies and their sources, in words."""

    @property
    def product_factor(self) -> float:
        """Seconds for each calibrated second of matrix products and attention."""
        return self.host_seconds.get("products", 1.0)

    def fixed_seconds(self, name: str) -> float:
        """A measured fixed cost of the software, where ranks share cores multiplied; 0 if it was not measured."""
        return self.host_seconds.get(name, 0.0) * self.slowdown


def rates(cluster: Cluster, job: Job, parameters: Parameters) -> Rates:
    """Gather what one GPU of a cluster does for a job.

    Raises:
        InputError: the GPU lacks the job's precision, or nothing is known about its efficiency.
    """
    gpu, measured = cluster.gpu, cluster.measured
    wide: Precision = job.precision if job.precision in ("fp32", "fp16", "bf16") else "bf16"
    stack = software(cluster, job, parameters)
    factor = parameters.gpu_factor[gpu.name].value if gpu.name in parameters.gpu_factor else 1.0
    factor = factor * clock_share(gpu, parameters)
    slowdown = cluster.oversubscribed_cores
    host = dict(measured.host_seconds) if measured and gpu.architecture == "cpu" else {}
    facts: list[str] = []

    def gemm_rate(precision: Precision) -> GemmRate:
        points = tuple(point for point in measured.gemms if point.precision == precision) if measured else ()
        if points:
            facts.append(f"{precision} GEMM rates: {len(points)} measured points of {cluster.name}")
            best = max(point.rate_flop_per_second for point in points)
            slower = slowdown * host.get("products", 1.0)
            return GemmRate(flop_per_second=best, ridge_flop_per_byte=0.0, points=points, slowdown=slower)
        peak = gpu.peak(precision)
        if peak is None:
            raise InputError(
                f"{gpu.name} has no {precision} peak, so a {precision} job cannot be predicted on it",
                hint=f"choose a precision of {', '.join(gpu.peak_flop_per_second)}",
                key="job.precision",
            )
        efficiency = _efficiency(gpu.architecture, precision, parameters)
        facts.append(f"{gpu.name} {precision} GEMM efficiency {shown(efficiency.value)}: {efficiency.source}")
        return GemmRate(
            flop_per_second=peak * efficiency.value * factor * stack.efficiency,
            ridge_flop_per_byte=parameters.shape.value * peak / gpu.memory_bandwidth_bytes_per_second,
            slowdown=slowdown,
        )

    gemm = gemm_rate(job.precision)
    wide_gemm = gemm if wide == job.precision else gemm_rate(wide)
    attention = parameters.attention_efficiency[gpu.architecture]
    points = tuple(point for point in measured.attention if point.precision == wide) if measured else ()
    facts.append(
        f"attention: {len(points)} measured points of {cluster.name}"
        if points
        else f"{gpu.name} attention efficiency {shown(attention.value * stack.kernel_factor)} of the {wide} peak "
        f"({stack.attention_kernel}): {attention.source}"
    )
    bandwidth = gpu.memory_bandwidth_bytes_per_second * parameters.memory_efficiency.value
    if measured and measured.memory_bandwidth_bytes_per_second > 0:
        bandwidth = measured.memory_bandwidth_bytes_per_second
    update = measured.update_bandwidth_bytes_per_second if measured else 0.0
    updated = (update or bandwidth) / host.get("update", 1.0)
    return Rates(
        gemm=gemm,
        wide_gemm=wide_gemm,
        attention_flop_per_second=(gpu.peak(wide) or 0.0) * attention.value * stack.kernel_factor * factor,
        attention_points=points,
        memory_bytes_per_second=bandwidth / slowdown,
        update_bytes_per_second=updated / slowdown,
        element_bytes=4.0 if job.precision == "fp32" else 2.0,
        cast_weight=CAST_WEIGHT.get(job.precision, 0.0),
        ampere=gpu.architecture == "ampere",
        cpu=gpu.architecture == "cpu",
        slowdown=slowdown,
        host_seconds=host,
        software=stack,
        parameters=parameters,
        facts=tuple(facts),
    )


def clock_share(gpu: Gpu, parameters: Parameters) -> float:
    """Clocks that a board power limit leaves, against those at full power: the ratio of the powers to an exponent.

    Dynamic power goes with the frequency and the square of a voltage that follows it, so that clocks fall with
    its cube root at least; leakage and memory, which do not slow down, make it a little more.
    """
    if gpu.power_limit_watts is None:
        return 1.0
    share: float = (gpu.power_limit_watts / gpu.power_watts) ** parameters.power.value
    return share


def shown(value: Floats | float) -> str:
    """Three digits; an array of values under trial has no one value to show."""
    return f"{value:.3g}" if np.ndim(value) == 0 else "under trial"


def _efficiency(architecture: str, precision: str, parameters: Parameters) -> Efficiency:
    known = parameters.gemm_efficiency[architecture]
    for name in (precision, {"mxfp8": "fp8", "nvfp4": "fp8"}.get(precision, "bf16")):
        if name in known:
            return known[name]
    raise InputError(f"no {precision} GEMM efficiency is known for {architecture}", key="job.precision")


def gemm_seconds(rate: GemmRate, m: Floats | float, n: Floats | float, k: Floats | float) -> Floats:
    """Time of a matrix multiplication (m,k) x (k,n).

    Roofline with compute and traffic added, so that the rate saturates in every dimension: 2mnk / rate x (1 + ridge x
    (1/m + 1/n + 1/k)). The three products of one layer (forward, input gradient, weight gradient) cost the same. With
    measured points the rate is interpolated instead.
    """
    if rate.points:
        return 2.0 * m * n * k / _measured_gemm_rate(rate.points, m, n, k) * rate.slowdown
    traffic = rate.ridge_flop_per_byte * (m * n + m * k + n * k)
    return np.asarray((m * n * k + traffic) * (2.0 * rate.slowdown / rate.flop_per_second))


def memory_seconds(rates: Rates, moved_bytes: Floats | float) -> Floats:
    """Time of operations that only move data: bytes over the bandwidth that kernels reach."""
    return np.asarray(moved_bytes / rates.memory_bytes_per_second)


def cast_seconds(rates: Rates, elements: Floats | float) -> Floats:
    """Time to quantise the operands of the GEMMs of a layer, forward and backward: 4 bytes per element.

    A read in 16 bits and a write in 8, in both orientations; block formats cost more (CAST_WEIGHT).
    """
    return memory_seconds(rates, rates.parameters.cast.value * rates.cast_weight * 4.0 * elements)


def accumulate_seconds(rates: Rates, weights: Floats, num_microbatches: Floats, fsdp: Bools) -> Floats:
    """Time to add weight gradients to fp32 buffers, per micro-batch.

    Read and write 8 bytes, 4 in the first micro-batch; 2 under FSDP, whose reduce-scatter does the sum.
    """
    width = np.where(fsdp, 2.0, 8.0 - 4.0 / num_microbatches)
    return memory_seconds(rates, rates.parameters.accumulate.value * width * weights)


def optimizer_seconds(rates: Rates, job: Job, weights: Floats) -> Floats:
    """Time of the update of local weights.

    Mixed-precision AdamW moves 34 bytes: gradient, master weight and both moments read, the last three and the 16-bit
    weight written, and the gradient norm read once more. In fp32 28 bytes, SGD 14 and 12.
    """
    mixed = job.precision != "fp32"
    width = (34.0 if mixed else 28.0) if job.optimizer == "adamw" else (14.0 if mixed else 12.0)
    return np.asarray(width * weights / rates.update_bytes_per_second)


def head_seconds(
    rates: Rates, tokens: Floats, vocab: Floats, hidden: float, norm_tokens: Floats, split: Bools
) -> tuple[Floats, Floats]:
    """GEMM and memory time of the output head, forward and backward of one micro-batch.

    Three GEMMs (T, V/tp, h) in 16 bits; logits in fp32 through the cross entropy: 14 bytes per logit, and what a
    calibration measured beyond that, also where the vocabulary is split.
    """
    passes = 1.0 + rates.parameters.lora_backward.value if rates.software.lora else 3.0
    gemm = passes * gemm_seconds(rates.wide_gemm, tokens, vocab, hidden)
    norm = 2.0 * rates.element_bytes * norm_tokens * hidden
    beyond = rates.fixed_seconds("head_mebibyte") + split * rates.fixed_seconds("tp_head_mebibyte")
    logits = 4.0 * tokens * vocab / 2.0**20
    return gemm, memory_seconds(rates, rates.software.memory_ops * 14.0 * tokens * vocab + norm) + beyond * logits


def embedding_seconds(rates: Rates, norm_tokens: Floats, hidden: float) -> Floats:
    """Look-up, and the scatter of its gradient: five passes of the hidden state."""
    return memory_seconds(rates, 5.0 * rates.element_bytes * norm_tokens * hidden)


def saturating_max(first: Floats, second: Floats) -> Floats:
    """Larger of two times that run beside each other, rounded where they are alike: the 4-norm."""
    a, b = first * first, second * second
    return np.asarray(np.sqrt(np.sqrt(a * a + b * b)))


def _measured_gemm_rate(
    points: tuple[GemmPoint, ...], m: Floats | float, n: Floats | float, k: Floats | float
) -> Floats:
    return inverse_distance(
        np.array([(point.m, point.n, point.k) for point in points], dtype=np.float64),
        np.array([point.rate_flop_per_second for point in points]),
        (m, n, k),
    )


def inverse_distance(places: Floats, values: Floats, at: tuple[Floats | float, ...]) -> Floats:
    """Interpolate positive values between scattered points, by the inverse fourth power of the distance of the logs."""
    where = np.stack([np.log(one) for one in np.broadcast_arrays(*at)], axis=-1)[..., None, :]
    distance = ((where - np.log(places)) ** 2).sum(axis=-1)
    weight = 1.0 / (distance * distance + 1e-12)
    return np.asarray(np.exp((weight * np.log(values)).sum(axis=-1) / weight.sum(axis=-1)))
