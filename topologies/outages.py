"""What is left of a fabric when a switch is down: its links are dead, or bundles that pass it are thinner."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import numpy as np

from topologies.errors import InputError
from topologies.fabric import LEVELS
from topologies.link_map import Ints, LinkMap


def without_switch(network: LinkMap, level: Literal["leaf", "spine", "core"], number: int) -> LinkMap:
    """Return the links without one switch, numbered as ``topologies.fabric.count`` counts its level.

    A dead leaf takes the NIC ports on it along: traffic of those ports needs another plane, or has no way. Where
    uplinks are bundled, a dead spine or core takes its share of each bundle.

    Raises:
        InputError: there is no such switch.
    """
    wires = network.wires
    sizes = (0, 0, 0)
    if wires is not None:
        spines = wires.networks * wires.pods * wires.spines_per_pod
        cores = wires.networks * wires.spines_per_pod * wires.cores_per_group
        sizes = (wires.networks * wires.groups * wires.leaves_per_group, spines, cores)
    total = sizes[LEVELS.index(level)]
    if not 0 <= number < total:
        raise InputError(f"{network.cluster.name} has {total} {level} switches, and none is number {number}")
    if level == "leaf":
        return _without_leaf(network, number)
    return _without_spine(network, number) if level == "spine" else _without_core(network, number)


def _scaled(network: LinkMap, block: str, places: Ints, factor: float) -> LinkMap:
    """Multiply the capacity of links of a block, upwards and downwards."""
    capacities = network.capacities_bytes_per_second.copy()
    for way in ("up", "down"):
        capacities[network.first[f"{block}_{way}"] + places] *= factor
    return replace(network, capacities_bytes_per_second=capacities)


def _without_leaf(network: LinkMap, leaf: int) -> LinkMap:
    nodes, nics = network.cluster.num_nodes, network.cluster.node.nics_per_node
    ports = np.arange(nodes * nics * network.planes)
    port, plane = ports // network.planes, ports % network.planes
    leads_to = np.zeros(len(ports), np.int64)
    for one in range(network.planes):
        mine = plane == one
        leads_to[mine] = network.leaf_of(port[mine] // nics, port[mine] % nics, one)
    dead = _scaled(network, "nic", ports[leads_to == leaf], 0.0)
    return _scaled(dead, "leaf", leaf * network.uplinks + np.arange(network.uplinks), 0.0)


def _without_spine(network: LinkMap, spine: int) -> LinkMap:
    wires = network.wires
    assert wires is not None
    pod, place = divmod(spine, wires.spines_per_pod)
    leaves = np.arange(wires.networks * wires.groups * wires.leaves_per_group)
    leaves = leaves[network.pod_of(leaves) == pod]
    if network.bundled:
        share = 1 - 1 / wires.spines_per_pod
        return _scaled(_scaled(network, "leaf", leaves, share), "spine", _own_uplinks(network, pod), share)
    uplinks = np.arange(place, network.uplinks, network.spines)
    dead = _scaled(network, "leaf", (leaves[:, None] * network.uplinks + uplinks).ravel(), 0.0)
    return _scaled(dead, "spine", _own_uplinks(network, spine), 0.0)


def _own_uplinks(network: LinkMap, spine: int) -> Ints:
    return spine * network.spine_uplinks + np.arange(network.spine_uplinks)


def _without_core(network: LinkMap, core: int) -> LinkMap:
    wires = network.wires
    assert wires is not None
    group, place = divmod(core, wires.cores_per_group)
    plane, spine = divmod(group, wires.spines_per_pod)
    pods = plane * wires.pods + np.arange(wires.pods)
    if network.bundled:
        return _scaled(network, "spine", pods, 1 - 1 / (wires.spines_per_pod * wires.cores_per_group))
    uplinks = np.arange(place, network.spine_uplinks, wires.cores_per_group)
    spines = pods * wires.spines_per_pod + spine
    return _scaled(network, "spine", (spines[:, None] * network.spine_uplinks + uplinks).ravel(), 0.0)
