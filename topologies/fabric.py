"""The scale-out fabric as built: switches and cables by arithmetic.

``wiring`` turns a Fabric into whole switches and cables, ``count`` multiplies them up; ``topologies.fabric_graph`` lays
them out as a graph. Leaves stand in groups (a rack, or a scalable unit with one leaf a rail); groups that share spines
are a pod; spine j of every pod leads to core group j. Cables from one switch to the level above are spread evenly, so
the switches of that level are a divisor of the cables: 24 leaves of 32 uplinks need 12 spines of 64 ports and get 16.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from topologies.cluster import Cluster, Tier
from topologies.errors import InputError

LEVELS = ("leaf", "spine", "core")
"""What the switches of each level are called, from near to far."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wiring:
    """A fabric in whole switches and cables. ``networks`` are disjoint: the rails of rail-only, the planes of two."""

    networks: int
    groups: int
    leaves_per_group: int
    """Of one network."""
    cables_per_leaf: int
    """From one node to each of its leaves."""
    uplinks_per_leaf: int
    groups_per_pod: int
    pods: int
    spines_per_pod: int
    """Of one network."""
    uplinks_per_spine: int
    cores_per_group: int
    """Core switches that spine j of every pod leads to."""
    ports_used: tuple[int, ...]
    """By level, on the fullest switch."""
    ports: tuple[int, ...]
    """By level, that a switch has."""
    link_bytes_per_second: float
    """One cable, one direction."""

    @property
    def levels(self) -> int:
        """Levels of switches."""
        return len(self.ports_used)


@dataclass(frozen=True, slots=True, kw_only=True)
class Level:
    """The switches of one level, and the cables that lead to them from below."""

    name: str
    switches: int
    links: int
    ports_used: int
    ports: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FabricCounts:
    """What a fabric is made of."""

    levels: tuple[Level, ...]
    link_bytes_per_second: float
    optics: int
    """Transceivers: two a cable, none inside a rack of a fat tree, where copper reaches."""
    bisection_bytes_per_second: float
    """One direction between two halves of the nodes, split along the top level, as the stated oversubscription says."""

    @property
    def switches(self) -> int:
        """Switches of all levels."""
        return sum(level.switches for level in self.levels)

    @property
    def links(self) -> int:
        """Cables of all levels."""
        return sum(level.links for level in self.levels)


def wiring(cluster: Cluster) -> Wiring | None:
    """Return the switches and cables of a cluster's fabric; None where nodes stand alone.

    The counts of NVIDIA's DGX SuperPOD reference architectures (H100 table 4, B200 table of larger sizes) follow.

    Raises:
        InputError: the NICs do not divide over the rails, or the fabric has more than three levels.
    """
    fabric, node = cluster.fabric, cluster.node
    if fabric.kind == "none" or not fabric.tiers or node.nic is None:
        return None
    if len(fabric.tiers) > len(LEVELS):
        raise InputError(
            f"the fabric of {cluster.name} has {len(fabric.tiers)} levels", hint="describe at most leaf, spine and core"
        )
    by_rail = fabric.kind != "fat-tree"
    if by_rail and node.nics_per_node % fabric.rails:
        raise InputError(
            f"{node.nics_per_node} NICs of {node.name} cannot be spread evenly over {fabric.rails} rails",
            hint="let fabric.rails divide nics_per_node",
        )
    planes = 2 if fabric.kind == "dual-plane" else 1
    networks = fabric.rails if fabric.kind == "rail-only" else planes
    leaves = fabric.rails if by_rail and fabric.kind != "rail-only" else 1
    cables = node.nics_per_node // fabric.rails if by_rail else node.nics_per_node
    ports = tuple(tier.switch_ports or fabric.switch_ports for tier in fabric.tiers)

    near = fabric.tiers[0].nodes
    groups = math.ceil(cluster.num_nodes / near)
    used = [min(near, cluster.num_nodes) * cables]
    uplinks = spines = spine_uplinks = cores = 0
    groups_per_pod, pods = groups, 1
    if len(fabric.tiers) > 1 and groups * leaves > 1:
        uplinks = math.ceil(near * cables / fabric.tiers[1].oversubscription)
        used[0] = near * cables + uplinks
        groups_per_pod = groups if len(fabric.tiers) == 2 else min(groups, max(1, fabric.tiers[1].nodes // near))
        pods = math.ceil(groups / groups_per_pod)
        over = _crossing(fabric.tiers[2:], pods)
        below = groups_per_pod * leaves * uplinks
        spines = _fewest(uplinks, lambda switches: below // switches + over(below // switches), ports[1])
        spine_uplinks = over(below // spines)
        used.append(below // spines + spine_uplinks)
        if pods > 1 and spine_uplinks:
            cores = _fewest(spine_uplinks, lambda switches: pods * spine_uplinks // switches, ports[2])
            used.append(pods * spine_uplinks // cores)
    return Wiring(
        networks=networks,
        groups=groups,
        leaves_per_group=leaves,
        cables_per_leaf=cables,
        uplinks_per_leaf=uplinks,
        groups_per_pod=groups_per_pod,
        pods=pods,
        spines_per_pod=spines,
        uplinks_per_spine=spine_uplinks,
        cores_per_group=cores,
        ports_used=tuple(used),
        ports=ports[: len(used)],
        link_bytes_per_second=node.nic.bandwidth_bytes_per_second / planes,
    )


def _crossing(above: tuple[Tier, ...], pods: int) -> Callable[[int], int]:
    """Return the uplinks of a spine as a function of its downlinks."""
    if pods == 1 or not above:
        return lambda down: 0
    return lambda down: math.ceil(down / above[0].oversubscription)


def _fewest(cables: int, ports_needed: Callable[[int], int], ports: int) -> int:
    """Return the smallest divisor of ``cables`` with which a switch has enough ports (else ``cables`` itself)."""
    divisors = [number for number in range(1, cables + 1) if cables % number == 0]
    return next((number for number in divisors if ports_needed(number) <= ports), cables)


def count(cluster: Cluster) -> FabricCounts | None:
    """Return switches, cables, optics and bisection bandwidth; None where nodes stand alone."""
    wires = wiring(cluster)
    if wires is None:
        return None
    leaves = wires.networks * wires.groups * wires.leaves_per_group
    spines = wires.networks * wires.pods * wires.spines_per_pod
    cores = wires.networks * wires.spines_per_pod * wires.cores_per_group
    node_links = cluster.num_nodes * wires.networks * wires.leaves_per_group * wires.cables_per_leaf
    switches = (leaves, spines, cores)
    links = (node_links, leaves * wires.uplinks_per_leaf, spines * wires.uplinks_per_spine)
    levels = tuple(
        Level(name=name, switches=built, links=cables, ports_used=used, ports=ports)
        for name, built, cables, used, ports in zip(
            LEVELS, switches, links, wires.ports_used, wires.ports, strict=False
        )
    )
    copper = node_links if cluster.fabric.kind == "fat-tree" and wires.levels > 1 else 0
    injected = (cluster.num_nodes // 2) * node_links / cluster.num_nodes * wires.link_bytes_per_second
    return FabricCounts(
        levels=levels,
        link_bytes_per_second=wires.link_bytes_per_second,
        optics=2 * (sum(level.links for level in levels) - copper),
        bisection_bytes_per_second=injected / cluster.fabric.oversubscription(cluster.num_nodes),
    )
