"""Measure this machine into a cluster document: its cores as GPUs, with the points that the step model interpolates."""

from __future__ import annotations

import datetime
import hashlib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from runtime.environment import CONTENDED_SHARE, usable_cores, versions
from runtime.fixed_costs import with_fixed_costs
from runtime.launch import launch
from runtime.request import CalibrateRequest
from topologies.cluster import AttentionPoint, Cluster, CollectivePoint, GemmPoint, Measured, Pool
from topologies.cluster_file import to_yaml
from topologies.document import LoadContext, load, resolve, write_atomically
from topologies.errors import InputError
from topologies.hardware import CATALOG, ScaleUp

REVISION = "7"
"""Of what is measured and how; a profile of another revision is measured anew."""
TIMEOUT_SECONDS = 240.0
MEMORY_SHARE = 0.8
"""Of the host's memory that ranks may use; the rest is the system's."""


def calibrate_machine(
    output: Path | None,
    *,
    ranks: tuple[int, ...] | None = None,
    force: bool = False,
    on_progress: Callable[[str], None] | None = None,
) -> tuple[Cluster, bool]:
    """Measure this machine, or take the profile that is already there for it.

    Args:
        output: file that receives the cluster document; one for the same machine and software is used again.
        ranks: group sizes in which collectives are measured; None: pairs, and as many as this process has cores.
        force: measure although there is a profile.
        on_progress: receives lines about what is being measured.

    Returns:
        The cluster, and whether it was measured now.

    Raises:
        InputError: bad ``ranks``, or the file cannot be written.
        RunFailed: a rank failed.
    """
    if ranks is None:
        ranks = tuple(sorted({2, max(2, usable_cores())}))
    if 2 not in ranks or min(ranks) < 2:
        raise InputError("--ranks needs group sizes of 2 and more", hint="include 2, for example --ranks 2,4")
    known = None if force or output is None else _known(output, fingerprint(ranks))
    if known is not None:
        return known, False
    cores = usable_cores()
    request = CalibrateRequest(ranks=ranks, busy_ranks=min(cores, max(ranks)))
    cluster = describe(launch(request, timeout_seconds=TIMEOUT_SECONDS, on_progress=on_progress), ranks, cores)
    if output is not None:
        write_atomically(output, to_yaml(cluster))
        load(output, Cluster)
    return cluster, True


def fingerprint(ranks: Iterable[int]) -> str:
    """Identify machine, software and what was asked: a profile holds for one fingerprint."""
    facts = [*versions().values(), usable_cores(), *sorted(ranks), REVISION]
    return hashlib.sha256("/".join(map(str, facts)).encode()).hexdigest()[:16]


def _known(path: Path, wanted: str) -> Cluster | None:
    if not path.exists():
        return None
    try:
        cluster = load(path, Cluster)
    except InputError:
        return None
    same = cluster.measured is not None and cluster.measured.environment.get("fingerprint") == wanted
    return cluster if same else None


def describe(result: dict[str, Any], ranks: tuple[int, ...], cores: int) -> Cluster:
    """Turn what the workers measured into a cluster of the shape of the shipped laptop."""
    base = load(resolve("laptop", CATALOG / "clusters", LoadContext(Path())), Cluster)
    measured = measured_from(result, ranks)
    gemms = {point.precision for point in measured.gemms}
    peak = {
        precision: max(point.rate_flop_per_second for point in measured.gemms if point.precision == precision)
        for precision in sorted(gemms)
    }
    memory = float(f"{MEMORY_SHARE * host_memory_bytes() / cores:.4g}")
    source = f"measured by 'headway calibrate' on {measured.date}"
    gpu = base.gpu.model_copy(
        update={
            "name": f"core of {versions()['cpu']}",
            "peak_flop_per_second": peak,
            "memory_bytes": memory,
            "usable_memory_bytes": memory,
            "memory_bandwidth_bytes_per_second": measured.memory_bandwidth_bytes_per_second,
            "source": base.gpu.source
            | {
                "peak": f"best matrix product, {source}",
                "memory": f"{100 * MEMORY_SHARE:.0f} % of the host's memory over its cores",
                "usable_memory": f"{100 * MEMORY_SHARE:.0f} % of the host's memory over its cores",
                "memory_bandwidth": f"elementwise operations of a layer, {source}",
            },
        }
    )
    node = base.node.model_copy(
        update={
            "gpu": gpu,
            "gpus_per_node": cores,
            "scale_up": shared_memory(measured, cores),
            "host_memory_bytes": host_memory_bytes(),
            "source": base.node.source
            | {
                "gpus_per_node": "cores that this process may use",
                "scale_up": f"gloo all-reduce between two processes, {source}",
                "host_memory": "the kernel's MemTotal",
            },
        }
    )
    cluster = base.model_copy(
        update={
            "pools": (Pool(node=node, num_nodes=1),),
            "measured": measured,
            "source": base.source | {"measured": source},
        }
    )
    return cluster.model_copy(update={"measured": with_fixed_costs(cluster, result["trials"])})


def measured_from(result: dict[str, Any], ranks: tuple[int, ...]) -> Measured:
    """Check and date the points."""
    share = result["foreign_cpu_share"]
    environment = versions() | {
        "cores": str(usable_cores()),
        "threads_per_rank": "1",
        "backend": "gloo",
        "clock": "CPU time where a rank works alone (lower deciles), wall time where ranks meet (faster half)",
        "spread": ", ".join(f"{name} {100 * value:.0f} %" for name, value in _spreads(result)),
        "foreign_cpu_share": "unknown" if share is None else f"{100 * share:.0f} %",
        "contended": "unknown" if share is None else str(share > CONTENDED_SHARE).lower(),
        "fingerprint": fingerprint(ranks),
    }
    return Measured(
        date=datetime.datetime.now(tz=datetime.UTC).date().isoformat(),
        environment=environment,
        gemms=tuple(GemmPoint.model_validate(point) for point in result["gemms"]),
        attention=tuple(AttentionPoint.model_validate(point) for point in result["attention"]),
        collectives=tuple(CollectivePoint.model_validate(point) for point in result["collectives"]),
        memory_bandwidth_bytes_per_second=result["memory_bandwidth_bytes_per_second"],
        update_bandwidth_bytes_per_second=result["optimizer_bytes_per_second"],
    )


def _spreads(result: dict[str, Any]) -> list[tuple[str, float]]:
    return [*result["spread"].items(), ("collectives", result["collective_spread"])]


def shared_memory(measured: Measured, cores: int) -> ScaleUp:
    """Describe the network between ranks of this machine by its all-reduce over two ranks."""
    points = sorted(
        (point for point in measured.collectives if point.kind == "all_reduce" and point.ranks == 2),
        key=lambda point: point.size_bytes,
    )
    busbw = points[-1].size_bytes / points[-1].time_seconds
    return ScaleUp(
        kind="shared-memory",
        bandwidth_bytes_per_second=busbw,
        bus_bandwidth_bytes_per_second=busbw,
        latency_seconds=points[0].time_seconds / 2,
        domain_size=cores,
    )


def host_memory_bytes() -> float:
    """Memory of this machine."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return 4e9  # a small machine; the layout check needs some limit
    return next((float(line.split()[1]) * 1024 for line in lines if line.startswith("MemTotal:")), 4e9)
