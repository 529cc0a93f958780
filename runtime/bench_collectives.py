"""Collectives by kind, group size and bytes, as the slowest rank sees them."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from runtime.clocks import summary
from runtime.collectives import all_gather, reduce_scatter
from runtime.environment import usable_cores

SIZES = (2**10, 2**14, 2**17, 2**20, 2**23, 2**26)
"""Bytes of the whole buffer."""
CROWDED_BYTES = 2**23
"""Largest size where ranks share cores: there the scheduler is measured more than the network."""
KINDS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send_recv")


def collective_points(ranks: tuple[int, ...], budget_seconds: float) -> tuple[list[dict[str, Any]], float]:
    """Measure all kinds in groups of the first ranks; every rank of the job calls it.

    Returns:
        Points in the form of topologies.cluster.CollectivePoint and the worst spread among those of 1 MiB and more.
    """
    points: list[dict[str, Any]] = []
    worst = 0.0
    sizes = sorted(set(ranks))
    each = budget_seconds / len(sizes) / len(KINDS) / len(SIZES)
    for count in sizes:
        group = dist.new_group(list(range(count)))
        if dist.get_rank() < count:
            for kind in KINDS:
                if kind == "send_recv" and count > 2:
                    continue
                for size in SIZES if count <= usable_cores() else [one for one in SIZES if one <= CROWDED_BYTES]:
                    seconds, spread = _collective(kind, count, size, group, each)
                    points.append({"kind": kind, "ranks": count, "size_bytes": float(size), "time_seconds": seconds})
                    worst = max(worst, spread if size >= 2**20 else 0.0)
        dist.barrier()
    return points, worst


def _collective(
    kind: str, count: int, size: int, group: dist.ProcessGroup | None, budget_seconds: float
) -> tuple[float, float]:
    assert group is not None
    run = _operation(kind, count, size, group)
    run()
    times: list[float] = []
    agreed = torch.tensor([1.0])
    while agreed.item() > 0:
        dist.barrier(group)
        before = time.perf_counter()
        run()
        times.append(time.perf_counter() - before)
        go_on = len(times) < 3 or (sum(times) < budget_seconds and len(times) < 30)
        agreed[0] = float(go_on)
        dist.all_reduce(agreed, dist.ReduceOp.MAX, group=group)
    slowest = torch.tensor(times, dtype=torch.float64)
    dist.all_reduce(slowest, dist.ReduceOp.MAX, group=group)
    timing = summary(slowest.tolist())
    halves = 2.0 if kind == "send_recv" else 1.0  # there and back
    return timing.seconds / halves, timing.spread


def _operation(kind: str, count: int, size: int, group: dist.ProcessGroup) -> Callable[[], object]:
    elements = max(size // 4 // count, 1) * count
    whole, part, other = torch.ones(elements), torch.ones(elements // count), torch.empty(elements)

    def there_and_back() -> None:
        if dist.get_rank(group) == 0:
            dist.send(whole, 1, group)
            dist.recv(other, 1, group)
        else:
            dist.recv(other, 0, group)
            dist.send(whole, 0, group)

    operations: dict[str, Callable[[], object]] = {
        "all_reduce": lambda: dist.all_reduce(whole, group=group),
        "all_gather": lambda: all_gather(other, part, group),
        "reduce_scatter": lambda: reduce_scatter(part, whole, group),
        "all_to_all": lambda: dist.all_to_all_single(other, whole, group=group),
        "send_recv": there_and_back,
    }
    return operations[kind]
