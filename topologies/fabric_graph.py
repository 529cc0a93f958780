"""The scale-out fabric as a graph for networkx: nodes, switches and the cables between them."""

from __future__ import annotations

from collections.abc import Iterator

import networkx as nx

from topologies.cluster import Cluster
from topologies.fabric import LEVELS, Wiring, wiring


def graph(cluster: Cluster) -> nx.Graph[str]:
    """Return nodes and switches as an undirected graph; parallel cables are one edge.

    Vertices carry ``kind`` (node, leaf, spine, core). Edges carry ``links`` (cables), ``capacity_bytes_per_second``
    (all cables, one direction, line rate), ``latency_seconds`` (along a shortest path they add up to the latency of
    the tier that it crosses), ``tier`` (its name), ``rail`` (None above the leaves, and in a fat tree) and ``plane``
    (None unless there are two).
    """
    result: nx.Graph[str] = nx.Graph(name=cluster.name)
    result.add_nodes_from((f"node{index}" for index in range(cluster.num_nodes)), kind="node")
    wires = wiring(cluster)
    if wires is None:
        return result
    tiers = cluster.fabric.tiers

    def connect(level: int, below: str, above: str, links: int, rail: int | None, network: int) -> None:
        nearer = tiers[level - 1].latency_seconds if level else 0.0
        result.add_node(above, kind=LEVELS[level])
        result.add_edge(
            below,
            above,
            links=links,
            capacity_bytes_per_second=links * wires.link_bytes_per_second,
            latency_seconds=(tiers[level].latency_seconds - nearer) / 2,
            tier=tiers[level].name,
            rail=rail,
            plane=network if cluster.fabric.kind == "dual-plane" else None,
        )

    for network, group, leaf in _leaves(wires):
        here = f"leaf{network}.{group}.{leaf}"
        rail = {"fat-tree": None, "rail-only": network}.get(cluster.fabric.kind, leaf)
        near = tiers[0].nodes
        for index in range(group * near, min((group + 1) * near, cluster.num_nodes)):
            connect(0, f"node{index}", here, wires.cables_per_leaf, rail, network)
        pod = group // wires.groups_per_pod
        for spine in range(wires.spines_per_pod):
            cables = wires.uplinks_per_leaf // wires.spines_per_pod
            connect(1, here, f"spine{network}.{pod}.{spine}", cables, None, network)
    for network in range(wires.networks):
        for spine in range(wires.spines_per_pod):
            for core in range(wires.cores_per_group):
                cables = wires.uplinks_per_spine // wires.cores_per_group
                for pod in range(wires.pods):
                    below, above = f"spine{network}.{pod}.{spine}", f"core{network}.{spine}.{core}"
                    connect(2, below, above, cables, None, network)
    return result


def _leaves(wires: Wiring) -> Iterator[tuple[int, int, int]]:
    for network in range(wires.networks):
        for group in range(wires.groups):
            for leaf in range(wires.leaves_per_group):
                yield network, group, leaf
