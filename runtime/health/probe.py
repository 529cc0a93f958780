"""What each rank can do right now: a matrix product, a copy, the way to every other rank, an all-reduce of all."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist

from runtime.clocks import summary, timed
from runtime.faults import strike
from runtime.request import HealthRequest

GEMM_SIZE = {"cpu": 512, "cuda": 8192}
"""Side of the matrices."""
PRECISION = {"cpu": ("fp32", torch.float32), "cuda": ("bf16", torch.bfloat16)}
COPY_BYTES = {"cpu": 2**25, "cuda": 2**30}
PAIR_BYTES = {"cpu": 2**20, "cuda": 2**26}
GROUP_BYTES = {"cpu": 2**23, "cuda": 2**28}
REPEATS = 7
"""Of each exchange; the fast end is what counts."""


def examine(request: HealthRequest, device: torch.device, tell: Callable[[str], None]) -> dict[str, Any]:
    """Measure this rank with all others; all ranks of the job call it, and all compute at the same time."""
    tell("matrix products and memory of every rank")
    dist.barrier()
    own = {
        "rank": dist.get_rank(),
        "host": socket.gethostname(),
        "gemm_flop_per_second": gemm_rate(device, request.seconds / 4),
        "memory_bytes_per_second": copy_rate(device, request.seconds / 4),
    }
    ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, own)
    tell("every pair of ranks")
    pairs = pair_rates(device)
    tell("all ranks together")
    return {
        "precision": PRECISION[device.type][0],
        "ranks": ranks,
        "pairs": pairs,
        "pair_bytes": PAIR_BYTES[device.type],
        "group": group_rate(device),
    }


def gemm_rate(device: torch.device, budget_seconds: float) -> float:
    """FLOP/s of one square matrix product."""
    size, dtype = GEMM_SIZE[device.type], PRECISION[device.type][1]
    one, other = (torch.ones(size, size, dtype=dtype, device=device) for _ in range(2))
    out = torch.empty_like(one)

    def run() -> None:
        strike("health", 0)
        torch.matmul(one, other, out=out)
        _settle(device)

    return 2.0 * size**3 / timed(run, budget_seconds=budget_seconds, clock=time.perf_counter).seconds


def copy_rate(device: torch.device, budget_seconds: float) -> float:
    """Bytes read and written per second by a copy that no cache holds."""
    source = torch.ones(COPY_BYTES[device.type], dtype=torch.uint8, device=device)
    target = torch.empty_like(source)

    def run() -> None:
        target.copy_(source)
        _settle(device)

    return 2.0 * source.numel() / timed(run, budget_seconds=budget_seconds, clock=time.perf_counter).seconds


def pair_rates(device: torch.device) -> list[dict[str, Any]]:
    """Time a message there and back between every two ranks, as many pairs at once as there can be.

    Returns:
        On every rank: ``a``, ``b`` and the bytes per second of one direction.
    """
    rank, size = dist.get_rank(), dist.get_world_size()
    buffer = torch.ones(PAIR_BYTES[device.type], dtype=torch.uint8, device=device)
    own = []
    for matches in tournament(size):
        other = matches.get(rank)
        dist.barrier()
        if other is None:
            continue
        times = []
        for _ in range(REPEATS):
            before = time.perf_counter()
            there_and_back(buffer, other, first=rank < other)
            _settle(device)
            times.append((time.perf_counter() - before) / 2)
        if rank < other:
            own.append({"a": rank, "b": other, "bytes_per_second": buffer.numel() / summary(times).seconds})
    every: list[Any] = [None] * size
    dist.all_gather_object(every, own)
    return [pair for pairs in every for pair in pairs]


def there_and_back(buffer: torch.Tensor, other: int, *, first: bool) -> None:
    """Send and receive, or the other way round."""
    if first:
        dist.send(buffer, other)
        dist.recv(buffer, other)
    else:
        dist.recv(buffer, other)
        dist.send(buffer, other)


def tournament(size: int) -> Iterator[dict[int, int]]:
    """Yield rounds in which everyone has at most one partner, until everyone met everyone (the circle method).

    >>> [sorted(one.items()) for one in tournament(3)]
    [[(0, 1), (1, 0)], [(1, 2), (2, 1)], [(0, 2), (2, 0)]]
    """
    seats = size + size % 2
    for turn in range(seats - 1):
        circle = [seats - 1, *((turn + place) % (seats - 1) for place in range(seats - 1))]
        pairs = [(circle[place], circle[seats - 1 - place]) for place in range(seats // 2)]
        yield {one: other for pair in pairs for one, other in (pair, pair[::-1]) if max(pair) < size}


def group_rate(device: torch.device) -> dict[str, Any]:
    """Time an all-reduce over all ranks, as the slowest rank sees it."""
    size, ranks = GROUP_BYTES[device.type], dist.get_world_size()
    buffer = torch.ones(size // 4, device=device)
    times = []
    for _ in range(REPEATS):
        dist.barrier()
        before = time.perf_counter()
        dist.all_reduce(buffer)
        _settle(device)
        times.append(time.perf_counter() - before)
    slowest = torch.tensor([summary(times[1:]).seconds], dtype=torch.float64, device=device)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    seconds = slowest.item()
    busbw = 2 * (ranks - 1) / ranks * size / seconds
    return {
        "kind": "all_reduce",
        "ranks": ranks,
        "size_bytes": size,
        "seconds": seconds,
        "busbw_bytes_per_second": busbw,
    }


def _settle(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
