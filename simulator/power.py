"""Power by what the nodes do, caps and what they cost in speed, and the bill of a run."""

from __future__ import annotations

from dataclasses import dataclass, replace

from scenarios.prices import Prices
from simulator.outcome import RunOutcome, StepTime
from topologies.cluster import Cluster
from topologies.errors import Infeasible

SHARE_OF_RANGE = {"compute": 0.95, "communication": 0.6, "checkpoint": 0.35, "hung": 0.45, "down": 0.1}
"""Draw of a node between idle (0) and its largest (1). Assumed, in line with what is published: matrix multiplication
runs at the power limit and communication well below it (Patel et al., POLCA, ASPLOS 2024); ranks that hang in a
collective spin at full clock; loading and waiting is close to idle."""

DOING = {
    "rework": "work",
    "checkpoint": "checkpoint",
    "detection": "hung",
    "degraded": "communication",
    "data": "communication",
    "power cap": "work",
}
"""What nodes do in each lost second; everything that is not here is down."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodePower:
    """Draw of one node in watts, by what it does; ``work`` is the mean over a step."""

    watts: dict[str, float]
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


def node_power(cluster: Cluster, step: StepTime | None, num_nodes: int) -> NodePower:
    """Return the draw of a node by phase, under the cluster's cap and facility limit.

    Under a cap, compute slows down: dynamic power goes with ``speed ** cap_exponent`` (3: voltage follows frequency);
    communication does not. ``step`` gives the share of compute; without it all of a step is compute.

    Raises:
        Infeasible: the limit is not even enough for idle nodes.
    """
    node, power = cluster.node, cluster.power
    largest = node.power_watts or node.gpus_per_node * node.gpu.power_watts
    idle = node.idle_power_watts or node.gpus_per_node * node.gpu.idle_power_watts
    watts = {doing: idle + share * (largest - idle) for doing, share in SHARE_OF_RANGE.items()}
    limits = [power.node_cap_watts] if power.node_cap_watts else []
    if power.facility_watts:
        limits.append(power.facility_watts / power.pue / num_nodes)
    cap = min(limits, default=None)
    compute = 1.0 if step is None else (step.compute_seconds + step.optimizer_seconds) / step.total_seconds
    speed = 1.0
    if cap is not None and cap < watts["compute"]:
        if cap <= idle:
            raise Infeasible(
                f"power for {num_nodes} nodes",
                needed=f"more than {idle:.0f} W a node (idle)",
                available=f"{cap:.0f} W a node",
                relax=("a larger facility or cap", "fewer nodes"),
            )
        slow = ((cap - idle) / (watts["compute"] - idle)) ** (1 / power.cap_exponent)
        speed = 1 / (compute / slow + 1 - compute)
        compute = compute / slow * speed
    if cap is not None:
        watts = {doing: min(draw, cap) for doing, draw in watts.items()}
    watts["work"] = compute * watts["compute"] + (1 - compute) * watts["communication"]
    return NodePower(watts=watts, idle_watts=idle, cap_watts=cap, speed=speed)


def billed(outcome: RunOutcome, bill: Bill) -> RunOutcome:
    """Add energy and cost: each second at the draw of what was done in it, spares idle, everything times the PUE."""
    watts = bill.power.watts
    joules = outcome.useful_seconds * watts["work"] + sum(
        seconds * watts[DOING.get(cause, "down")] for cause, seconds in outcome.lost_seconds.items()
    )
    total = (bill.nodes * joules + bill.spares * bill.power.idle_watts * outcome.wall_seconds) * bill.pue
    gpus = (bill.nodes + bill.spares) * bill.gpus_per_node
    rent = gpus * bill.prices.gpu_usd_per_second * outcome.wall_seconds
    return replace(outcome, energy_joules=total, cost_usd=rent + total * bill.prices.electricity_usd_per_joule)
