"""Cables that a discovered fabric lacks or has in the wrong place: what a switch or host has against its peers."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

import networkx as nx

MOSTLY = 0.5
"""Share of the pairs of two levels that must be joined before a pair without a cable counts as a gap."""
RAIL_SHARE = 0.7
"""Share of a leaf's adapters that must be of one device before it counts as the leaf of a rail."""
NAMED = 3


def missing_links(graph: nx.Graph[str], levels: Mapping[str, int], names: Mapping[str, str]) -> Iterator[str]:
    """Find pairs of switches of neighbouring levels with fewer cables than the pairs around them.

    Args:
        graph: hosts and switches; edges carry ``cables``.
        levels: of switches, 1 next to hosts.
        names: of switches.
    """
    for level in range(1, max(levels.values(), default=0)):
        between = graph.subgraph([one for one, at in levels.items() if at in (level, level + 1)])
        gaps: list[tuple[str, str, int, int]] = []
        pairs = 0
        for part in nx.connected_components(between):
            lower, upper = (sorted(one for one in part if levels[one] == at) for at in (level, level + 1))
            cables = {
                (low, high): graph.edges[low, high]["cables"] if graph.has_edge(low, high) else 0
                for low in lower
                for high in upper
            }
            there = [count for count in cables.values() if count]
            if len(there) < 3 or len(there) < MOSTLY * len(cables):
                continue
            usual = statistics.mode(there)
            pairs += len(cables)
            gaps += [(low, high, count, usual) for (low, high), count in cables.items() if count < usual]
        if gaps:
            shown = ", ".join(f"{names[a]} to {names[b]} has {has} of {usual}" for a, b, has, usual in gaps[:NAMED])
            more = f" and {len(gaps) - NAMED} more" if len(gaps) > NAMED else ""
            told = f"{len(gaps)} of {pairs} pairs of switches have fewer cables than others"
            yield f"missing links: {told}: {shown}{more}"


def crossed_rails(adapters: Sequence[tuple[str, str, str]], names: Mapping[str, str]) -> Iterator[str]:
    """Find adapters that lead to the leaf of another rail.

    Args:
        adapters: host, device and switch of each port.
        names: of switches.
    """
    on_leaf: dict[str, Counter[str]] = {}
    for _, device, switch in adapters:
        on_leaf.setdefault(switch, Counter())[device] += 1
    rail = {}
    for switch, devices in on_leaf.items():
        device, count = devices.most_common(1)[0]
        if count >= RAIL_SHARE * devices.total() and devices.total() > 1:
            rail[switch] = device
    if len(set(rail.values())) < 2:
        return
    crossed = [one for one in adapters if one[2] in rail and rail[one[2]] != one[1] and one[1] in rail.values()]
    if crossed:
        shown = ", ".join(f"{host} {device} to {names[switch]}" for host, device, switch in crossed[:NAMED])
        more = f" and {len(crossed) - NAMED} more" if len(crossed) > NAMED else ""
        yield f"rails crossed: {len(crossed)} adapters lead to the leaf of another rail: {shown}{more}"


def missing_adapters(adapters: Sequence[tuple[str, str, str]]) -> Iterator[str]:
    """Find hosts without the port that nearly all others have: its link is down."""
    hosts: dict[str, set[str]] = {}
    for host, device, _ in adapters:
        hosts.setdefault(host, set()).add(device)
    having = Counter(device for devices in hosts.values() for device in devices)
    usual = [device for device, count in having.items() if RAIL_SHARE * len(hosts) <= count < len(hosts)]
    lacking = [(host, device) for device in usual for host, devices in hosts.items() if device not in devices]
    if lacking:
        shown = ", ".join(f"{host} {device}" for host, device in lacking[:NAMED])
        more = f" and {len(lacking) - NAMED} more" if len(lacking) > NAMED else ""
        yield f"missing links: {len(lacking)} ports that other hosts have are not there: {shown}{more}"
