"""Nodes by number: counted through the pools from 0, written as ``3, 17-20`` or by name where the cluster has names."""

from __future__ import annotations

import re
from collections.abc import Iterable

from topologies.cluster import Cluster
from topologies.errors import InputError

_RANGE = re.compile(r"(\d+)(?:\s*-\s*(\d+))?")


def node_names(cluster: Cluster) -> tuple[str, ...]:
    """Names of all nodes in the order of their numbers; empty where the cluster does not say.

    Raises:
        InputError: the list names another number of nodes than the pools hold.
    """
    if not cluster.node_names:
        return ()
    from topologies.importers.hostlist import expand

    names = expand(cluster.node_names)
    if len(names) != cluster.num_nodes or len(set(names)) != len(names):
        raise InputError(
            f"names {len(set(names))} different nodes, {cluster.name} has {cluster.num_nodes}",
            hint="name every node of the pools once, in order",
            key="cluster.node_names",
        )
    return names


def node_numbers(text: str, cluster: Cluster, *, key: str = "exclude_nodes") -> frozenset[int]:
    """Read numbers and ranges of nodes, or their names.

    Raises:
        InputError: no number, range or name, or one that the cluster does not have.

    >>> from topologies.catalog import load_cluster
    >>> sorted(node_numbers("3, 17-20", load_cluster("h100-512")))
    [3, 17, 18, 19, 20]
    """
    places = {name: number for number, name in enumerate(node_names(cluster))}
    if places and not re.fullmatch(r"[\d\s,-]*", text):
        from topologies.importers.hostlist import expand

        asked = expand(text)
        unknown = [name for name in asked if name not in places]
        if unknown:
            raise InputError(f"{cluster.name} has no node {unknown[0]!r}", hint="see its node_names", key=key)
        return frozenset(places[name] for name in asked)
    found: set[int] = set()
    for piece in filter(None, (one.strip() for one in text.split(","))):
        match = _RANGE.fullmatch(piece)
        if match is None or int(match[2] or match[1]) < int(match[1]):
            raise InputError(f"{piece!r} is no node", hint="write numbers and ranges such as '3, 17-20'", key=key)
        low, high = int(match[1]), int(match[2] or match[1])
        if high >= cluster.num_nodes:
            raise InputError(
                f"{cluster.name} has no node {high}", hint=f"its nodes count from 0 to {cluster.num_nodes - 1}", key=key
            )
        found |= set(range(low, high + 1))
    return frozenset(found)


def without_nodes(cluster: Cluster, excluded: Iterable[int]) -> Cluster:
    """The cluster with fewer nodes in its pools; the others keep their fabric.

    Raises:
        InputError: no node is left.
    """
    gone, pools, first = set(excluded), [], 0
    if not gone:
        return cluster
    for pool in cluster.pools:
        left = pool.num_nodes - sum(first <= number < first + pool.num_nodes for number in gone)
        pools += [pool.model_copy(update={"num_nodes": left})] if left else []
        first += pool.num_nodes
    if not pools:
        raise InputError(f"all {cluster.num_nodes} nodes of {cluster.name} are excluded", key="exclude_nodes")
    return cluster.model_copy(update={"pools": tuple(pools), "node_names": ""})


def ranges_text(numbers: Iterable[int]) -> str:
    """Write numbers with their runs drawn together.

    >>> ranges_text([3, 4, 5, 9])
    '3-5, 9'
    """
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ", ".join(str(low) if low == high else f"{low}-{high}" for low, high in runs)
