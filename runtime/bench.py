"""What one core does, measured while its neighbours work too: GEMMs, attention, elementwise operations."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch.nn import functional

from runtime.bench_collectives import collective_points
from runtime.bench_host import trial_seconds
from runtime.clocks import timed
from runtime.environment import CpuClock, usable_cores
from runtime.layers import RmsNorm, rotary_angles, rotate
from runtime.request import CalibrateRequest
from runtime.train import DTYPES, gathered

PRECISIONS = ("fp32", "bf16")
GEMM_ROWS = (64, 128, 512, 2048)
"""Tokens of a micro-batch."""
GEMM_WEIGHTS = ((256, 256), (256, 512), (512, 256), (512, 512), (1024, 512), (512, 1024), (4096, 512))
"""Outputs and inputs of the projections of small models, whole and divided by a tp of 2, and a part of a vocabulary."""
LARGEST_GEMM_FLOP = 5e9
"""Forward and backward of a point; larger ones run at the rate of this one."""
ATTENTION_SHAPES = (
    (1, 128, 4, 64),
    (1, 128, 8, 64),
    (4, 128, 8, 64),
    (2, 256, 8, 64),
    (1, 512, 8, 64),
    (1, 1024, 8, 64),
)
"""Batch, sequence, heads, head size."""


@dataclass(slots=True)
class Rates:
    """Points in the form of topologies.cluster, and the worst spread of each family."""

    gemms: list[dict[str, Any]] = field(default_factory=list)
    attention: list[dict[str, Any]] = field(default_factory=list)
    memory_bandwidth_bytes_per_second: float = 0.0
    optimizer_bytes_per_second: float = 0.0
    spread: dict[str, float] = field(default_factory=dict)


def measure(request: CalibrateRequest, tell: Callable[[str], None]) -> dict[str, Any]:
    """Measure everything that a calibration holds; all ranks of the job call it.

    The order: what cores compute, all ``busy_ranks`` at once; collectives by group size; small models in
    real layouts.
    """
    before = CpuClock.now()
    tell("rates of matrix products, attention and elementwise operations")
    rates = core_rates(request.seconds * 0.45) if dist.get_rank() < request.busy_ranks else None
    dist.barrier()
    tell("collectives")
    collectives, spread = collective_points(request.ranks, request.seconds * 0.4)
    tell("small models in real layouts")
    trials = trial_seconds()
    now = CpuClock.now()
    own = sum(gathered(now.own_seconds - before.own_seconds))
    assert rates is not None or dist.get_rank() > 0
    return {
        **(asdict(rates) if rates else {}),
        "collectives": collectives,
        "collective_spread": spread,
        "trials": trials,
        "foreign_cpu_share": now.foreign_share(before, own, usable_cores()),
    }


def core_rates(budget_seconds: float) -> Rates:
    """Measure what this core computes."""
    rates = Rates()
    shapes = [*gemm_shapes()]
    each = budget_seconds * 0.8 / len(shapes) / len(PRECISIONS)
    for precision in PRECISIONS:
        for m, n, k in shapes:
            _gemm(rates, m, n, k, precision, each)
    each = budget_seconds * 0.15 / len(ATTENTION_SHAPES) / len(PRECISIONS)
    for precision in PRECISIONS:
        for shape in ATTENTION_SHAPES:
            _attention(rates, shape, precision, each)
    _memory(rates, budget_seconds * 0.05)
    return rates


def gemm_shapes() -> Iterator[tuple[int, int, int]]:
    """The grid, less what takes too long."""
    for n, k in GEMM_WEIGHTS:
        for m in GEMM_ROWS:
            if 6.0 * m * n * k <= LARGEST_GEMM_FLOP:
                yield m, n, k


def _gemm(rates: Rates, m: int, n: int, k: int, precision: str, budget_seconds: float) -> None:
    """One linear map of m tokens from k to n, forward and backward: the three products that a layer makes of it."""
    dtype = DTYPES[precision]
    tokens = torch.randn(m, k, dtype=dtype, requires_grad=True)
    weight = torch.randn(n, k, dtype=dtype, requires_grad=True)
    gradient = torch.randn(m, n, dtype=dtype)

    def run() -> None:
        tokens.grad = weight.grad = None
        functional.linear(tokens, weight).backward(gradient)

    timing = timed(run, budget_seconds=budget_seconds, least=3)
    rates.gemms.append(
        {"m": m, "n": n, "k": k, "precision": precision, "rate_flop_per_second": 6.0 * m * n * k / timing.seconds}
    )
    rates.spread["gemms"] = max(rates.spread.get("gemms", 0.0), timing.spread)


def _attention(rates: Rates, shape: tuple[int, int, int, int], precision: str, budget_seconds: float) -> None:
    batch, seq_length, heads, head_dim = shape
    make = [torch.randn(batch, heads, seq_length, head_dim, dtype=DTYPES[precision]) for _ in range(4)]
    query, key, value = (one.requires_grad_() for one in make[:3])

    def forward() -> torch.Tensor:
        return functional.scaled_dot_product_attention(query, key, value, is_causal=True)

    def both() -> None:
        query.grad = key.grad = value.grad = None
        forward().backward(make[3])

    first = timed(forward, budget_seconds=budget_seconds / 3, least=3)
    whole = timed(both, budget_seconds=budget_seconds / 1.5, least=3)
    rates.attention.append(
        {
            "batch": batch,
            "seq_length": seq_length,
            "heads": heads,
            "head_dim": head_dim,
            "precision": precision,
            "forward_seconds": first.seconds,
            "backward_seconds": max(whole.seconds - first.seconds, first.seconds),
        }
    )
    rates.spread["attention"] = max(rates.spread.get("attention", 0.0), whole.spread)


def _memory(rates: Rates, budget_seconds: float) -> None:
    """Time the elementwise work of a layer in fp32, and AdamW, over the bytes that the step model counts for them."""
    batch, seq_length, hidden, heads, head_dim, ffn = 4, 128, 512, 8, 64, 1024
    norm = RmsNorm(hidden)
    stream, up, gate = (torch.randn(batch * seq_length, size, requires_grad=True) for size in (hidden, ffn, ffn))
    query = torch.randn(batch, heads, seq_length, head_dim, requires_grad=True)
    angles = rotary_angles(torch.arange(seq_length), head_dim)
    ones = torch.ones_like(stream)
    wide, turned = torch.randn(batch * seq_length, ffn), torch.randn_like(query)

    def layer() -> None:
        for leaf in (stream, up, gate, query):
            leaf.grad = None
        normed = norm(stream) + stream
        (norm(normed) + normed).backward(ones)
        (functional.silu(gate) * up).backward(wide)
        rotate(query, angles).backward(turned)
        rotate(query, angles).backward(turned)

    # forward and backward, counted as simulator.layers does: 3 passes of 1.3 times the tensors that are moved
    tokens = batch * seq_length
    moved = 3 * 1.3 * 4.0 * tokens * (10.0 * hidden + 2.0 * 2.0 * heads * head_dim + 3.0 * ffn)
    rates.memory_bandwidth_bytes_per_second = moved / timed(layer, budget_seconds=budget_seconds / 2).seconds
    weights = [torch.nn.Parameter(torch.randn(1000, 1000)) for _ in range(8)]
    for weight in weights:
        weight.grad = torch.randn_like(weight)
    optimizer = torch.optim.AdamW(weights, fused=True)
    update = timed(optimizer.step, budget_seconds=budget_seconds / 2)
    rates.optimizer_bytes_per_second = 28.0 * 8e6 / update.seconds
