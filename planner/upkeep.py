"""What a second of the run costs and draws: nodes at work, and spares that idle beside them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from scenarios.scenario import Scenario
from simulator.power import node_power
from topologies.cluster import Cluster

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Upkeep:
    """Of a job with some number of spares: one number, or one entry for each number of spares."""

    usd_per_second: Floats
    watts: Floats
    """At the meter: nodes in use as while they compute, spares idle, times the PUE."""
    nodes: Floats
    """Work and spares together."""


def upkeep(scenario: Scenario, gpus: int, nodes: int, spares: npt.NDArray[np.int64] | int) -> Upkeep:
    """Rent of the GPUs in use and of whole spare nodes, electricity of both."""
    cluster, prices, idle = scenario.cluster, scenario.prices, np.asarray(spares, np.float64)
    node = cluster.node
    idle_watts = node.idle_power_watts or node.gpus_per_node * node.gpu.idle_power_watts
    watts = working_watts(cluster, nodes) + idle * idle_watts * cluster.power.pue
    rent = prices.gpu_usd_per_second * (gpus + idle * node.gpus_per_node)
    return Upkeep(
        usd_per_second=rent + prices.electricity_usd_per_joule * watts, watts=np.asarray(watts), nodes=nodes + idle
    )


def working_watts(cluster: Cluster, nodes: int) -> float:
    """Draw of some nodes at the meter as while they compute, under the cluster's cap (``simulator.power``)."""
    return nodes * node_power(cluster, None, max(nodes, 1)).watts["work"] * cluster.power.pue


def value(objective: str, step_seconds: float, goodput: Floats | float, kept: Upkeep) -> Floats:
    """What the objective minimises, per step: wall seconds, US dollars, joules, or (goodput) the lost share.

    Without prices the cost is told in node-seconds.
    """
    share = np.asarray(goodput, np.float64)
    if objective == "goodput":
        return 1 - share
    with np.errstate(divide="ignore"):
        wall = step_seconds / share
    if objective == "energy":
        return wall * kept.watts
    if objective == "cost":
        return wall * (kept.usd_per_second if np.any(kept.usd_per_second) else kept.nodes)
    return wall
