"""Power by what the nodes do, caps and what they cost in speed, and the bill of a run.

Draws by phase and the curve of a cap are data with a source for each number: ``power.yaml``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from scenarios.prices import Prices
from simulator.outcome import RunOutcome, StepTime
from topologies.cluster import Cluster
from topologies.document import Document, FileDocument, load
from topologies.errors import Infeasible

SHIPPED = Path(__file__).parent / "power.yaml"

DOING = {
    "rework": "work",
    "checkpoint": "checkpoint",
    "detection": "hung",
    "degraded": "communication",
    "data": "communication",
    "power cap": "work",
}
"""What nodes do in each lost second; everything that is not here is down."""


class Draw(Document):
    """What nodes with some family of GPUs draw in a phase, between idle (0) and rated power (1)."""

    gpus: tuple[str, ...]
    """Beginnings of the GPUs' names; empty: any."""
    share: float
    band: tuple[float, float]
    source: str


class CapCurve(Document):
    """Speed of compute, and its draw between idle (0) and free (1)."""

    curve: tuple[tuple[float, float], ...]
    source: str


class PowerData(FileDocument):
    """The shipped figures."""

    phases: dict[str, tuple[Draw, ...]]
    cap: CapCurve


@dataclass(frozen=True, slots=True, kw_only=True)
class NodePower:
    """Draw of one node in watts, by what it does; ``work`` is the mean over a step."""

    watts: dict[str, float]
    band_watts: dict[str, tuple[float, float]]
    """Within which each of them is known."""
    sources: dict[str, str]
    idle_watts: float
    cap_watts: float | None
    """None: nothing caps it."""
    speed: float
    """Of the step under the cap."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bill:
    """What a second of a run draws and costs."""

    power: NodePower
    nodes: int
    spares: int
    gpus_per_node: int
    pue: float
    prices: Prices


@cache
def power_data() -> PowerData:
    """Return the shipped figures."""
    return load(SHIPPED, PowerData)


def draws(gpu: str) -> dict[str, Draw]:
    """Return the draw of each phase for a GPU of this name."""
    return {
        phase: next(one for one in listed if not one.gpus or gpu.startswith(one.gpus))
        for phase, listed in power_data().phases.items()
    }


def capped_speed(share: float, exponent: float | None = None) -> float:
    """Speed of compute where its draw above idle is held to a share of what it is free to take.

    By the measured curve, or dynamic power as ``speed ** exponent`` (3: voltage follows frequency).
    """
    if exponent is not None:
        return float(share ** (1 / exponent))
    speeds, shares = zip(*power_data().cap.curve, strict=True)
    return float(np.interp(share, shares, speeds))


def node_power(cluster: Cluster, step: StepTime | None, num_nodes: int) -> NodePower:
    """Return the draw of a node by phase, under the cluster's cap and facility limit.

    Under a cap, compute slows down (``capped_speed``); communication does not. ``step`` gives the share of compute;
    without it all of a step is compute.

    Raises:
        Infeasible: the limit is not even enough for idle nodes.
    """
    node, power = cluster.node, cluster.power
    largest = node.power_watts or node.gpus_per_node * node.gpu.power_watts
    idle = node.idle_power_watts or node.gpus_per_node * node.gpu.idle_power_watts
    found = draws(node.gpu.name)
    limits = [power.node_cap_watts] if power.node_cap_watts else []
    if power.facility_watts:
        limits.append(power.facility_watts / power.pue / num_nodes)
    cap = min(limits, default=None)
    if cap is not None and cap <= idle:
        raise Infeasible(
            f"power for {num_nodes} nodes",
            needed=f"more than {idle:.0f} W a node (idle)",
            available=f"{cap:.0f} W a node",
            relax=("a larger facility or cap", "fewer nodes"),
        )
    compute = 1.0 if step is None else (step.compute_seconds + step.optimizer_seconds) / step.total_seconds

    def by_phase(shares: Mapping[str, float]) -> tuple[dict[str, float], float]:
        """Watts of each phase, and the speed that the cap leaves."""
        watts = {doing: idle + share * (largest - idle) for doing, share in shares.items()}
        speed, busy = 1.0, compute
        if cap is not None and cap < watts["compute"]:
            slow = capped_speed((cap - idle) / (watts["compute"] - idle), power.cap_exponent)
            speed = 1 / (compute / slow + 1 - compute)
            busy = compute / slow * speed
        if cap is not None:
            watts = {doing: min(draw, cap) for doing, draw in watts.items()}
        watts["work"] = busy * watts["compute"] + (1 - busy) * watts["communication"]
        return watts, speed

    watts, speed = by_phase({doing: one.share for doing, one in found.items()})
    low, high = (by_phase({doing: one.band[end] for doing, one in found.items()})[0] for end in (0, 1))
    sources = {doing: one.source for doing, one in found.items()}
    if speed < 1:
        exponent = power.cap_exponent
        sources["cap"] = power_data().cap.source if exponent is None else f"asked for: speed ** {exponent:g}"
    return NodePower(
        watts=watts,
        band_watts={doing: (low[doing], high[doing]) for doing in watts},
        sources=sources,
        idle_watts=idle,
        cap_watts=cap,
        speed=speed,
    )


def billed(outcome: RunOutcome, bill: Bill) -> RunOutcome:
    """Add energy and cost: each second at the draw of what was done in it, spares idle, everything times the PUE."""
    total = _joules(outcome.useful_seconds, outcome.lost_seconds, bill.power.watts, power_json(bill))
    gpus = (bill.nodes + bill.spares) * bill.gpus_per_node
    rent = gpus * bill.prices.gpu_usd_per_second * outcome.wall_seconds
    return replace(outcome, energy_joules=total, cost_usd=rent + total * bill.prices.electricity_usd_per_joule)


def _joules(
    useful_seconds: float, lost_seconds: Mapping[str, float], watts: Mapping[str, float], told: Mapping[str, Any]
) -> float:
    busy = useful_seconds * watts["work"] + sum(
        seconds * watts[DOING.get(cause, "down")] for cause, seconds in lost_seconds.items()
    )
    idle = told["spares"] * told["idle_watts"] * (useful_seconds + sum(lost_seconds.values()))
    return float((told["nodes"] * busy + idle) * told["pue"])


def energy_band_kwh(
    useful_seconds: float, lost_seconds: Mapping[str, float], told: Mapping[str, Any]
) -> tuple[float, float]:
    """Energy of a run if every phase drew the least, or the most, of its band; ``told`` is from ``power_json``."""
    ends = ({doing: band[end] for doing, band in told["node_watts_band"].items()} for end in (0, 1))
    low, high = (_joules(useful_seconds, lost_seconds, watts, told) / 3.6e6 for watts in ends)
    return low, high


def power_json(bill: Bill) -> dict[str, Any]:
    """What is told about the draw of the nodes; ``assumed`` names the phases for which no measurement was found."""
    power = bill.power
    return {
        "node_watts": power.watts,
        "node_watts_band": {doing: list(band) for doing, band in power.band_watts.items()},
        "sources": power.sources,
        "assumed": sorted(doing for doing, source in power.sources.items() if source.startswith("assumed")),
        "idle_watts": power.idle_watts,
        "nodes": bill.nodes,
        "spares": bill.spares,
        "pue": bill.pue,
        "cap_watts": power.cap_watts,
        "speed": power.speed,
    }
