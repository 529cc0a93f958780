"""InfiniBand fabrics as ``ibnetdiscover`` prints them: switches, host channel adapters, every link with its rate."""

from __future__ import annotations

import re
import statistics
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import networkx as nx

from topologies.errors import InputError
from topologies.importers.cabling import crossed_rails, missing_adapters, missing_links
from topologies.importers.text import numbered_lines
from topologies.importers.tree import level_name

LANE_GBIT_PER_SECOND = {
    "SDR": 2.5,
    "DDR": 5.0,
    "QDR": 10.0,
    "FDR10": 10.3125,
    "FDR": 14.0625,
    "EDR": 25.0,
    "HDR": 50.0,
    "NDR": 100.0,
    "XDR": 200.0,
}
"""Nominal rate of one lane (InfiniBand Trade Association roadmap): 4xHDR is 200 Gbit/s."""

_HEAD = re.compile(r'(Switch|Ca|Rt)\s+(\d+)\s+"([^"]+)"\s*#\s*"([^"]*)"')
_PORT = re.compile(r'\[(\d+)\](?:\([0-9a-fA-F]+\))?\s*"([^"]+)"\[(\d+)\](?:\([0-9a-fA-F]+\))?\s*(?:#\s*(.*))?')
_RATE = re.compile(r"\b(\d+)x(\w+)\b")
_QUOTED = re.compile(r'"([^"]*)"')
_AGGREGATION = re.compile(r"aggregation node", re.IGNORECASE)
_NAMELESS = re.compile(r"MT\d+\s|.*Mellanox Technologies")
"""What an adapter calls itself where no host gave it a name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapter:
    """One port of a host, and the switch that it leads to."""

    host: str
    device: str
    switch: str
    bytes_per_second: float | None


@dataclass(frozen=True, kw_only=True)
class IbFabric:
    """A discovered subnet. Switches go by their GUID; ``links`` joins two switches, once for each cable."""

    switches: dict[str, str]
    """Name by GUID."""
    adapters: tuple[Adapter, ...]
    links: tuple[tuple[str, str, float | None], ...]
    aggregation_nodes: int
    """In-network reduction engines, which are no hosts."""
    nameless_adapters: int = 0
    """Adapters that do not name their host; left out of ``adapters``."""
    warnings: tuple[str, ...] = ()

    @cached_property
    def hosts(self) -> dict[str, tuple[Adapter, ...]]:
        """Adapters by host."""
        found: dict[str, tuple[Adapter, ...]] = {}
        for adapter in self.adapters:
            found[adapter.host] = (*found.get(adapter.host, ()), adapter)
        return found

    @cached_property
    def graph(self) -> nx.Graph[str]:
        """Hosts (by name) and switches (by GUID); edges carry the number of cables."""
        graph: nx.Graph[str] = nx.Graph()
        graph.add_nodes_from(self.switches)
        ends = [(adapter.host, adapter.switch) for adapter in self.adapters]
        for one, other in ends + [(one, other) for one, other, _ in self.links]:
            cables = graph.edges[one, other]["cables"] if graph.has_edge(one, other) else 0
            graph.add_edge(one, other, cables=cables + 1)
        return graph

    @cached_property
    def levels(self) -> dict[str, int]:
        """Switches by GUID: 1 with hosts, else one more than the nearest such switch."""
        leaves = {adapter.switch for adapter in self.adapters}
        between = self.graph.subgraph(self.switches)
        distance = nx.multi_source_dijkstra_path_length(between, leaves, weight=None) if leaves else {}
        return {guid: int(steps) + 1 for guid, steps in distance.items()}

    @property
    def rails(self) -> int:
        """Ports of a host that lead to different leaf switches, as most hosts have them."""
        return statistics.mode(len({one.switch for one in adapters}) for adapters in self.hosts.values())

    def switches_between(self, one: str, other: str) -> tuple[str, ...]:
        """Return the names of the switches on a shortest path between two hosts.

        Raises:
            InputError: an unknown host, or no path.
        """
        for host in (one, other):
            if host not in self.hosts:
                raise InputError(f"there is no host {host!r} in the fabric")
        try:
            path = nx.shortest_path(self.graph, one, other)
        except nx.NetworkXNoPath:
            raise InputError(f"no path leads from {one} to {other}") from None
        return tuple(self.switches[guid] for guid in path if guid in self.switches)

    def hosts_below(self, guid: str) -> set[str]:
        """Return the hosts that a switch reaches by going down only."""
        found: set[str] = set()
        seen, waiting = {guid}, [guid]
        while waiting:
            here = waiting.pop()
            for neighbour in self.graph.neighbors(here):
                if neighbour not in self.switches:
                    found.add(neighbour)
                elif neighbour not in seen and self.levels.get(neighbour, 0) < self.levels[here]:
                    seen.add(neighbour)
                    waiting.append(neighbour)
        return found

    def tiers(self) -> list[dict[str, Any]]:
        """Raw tiers, near to far: most hosts below a switch, worst ratio of cables below to cables above."""
        tiers: list[dict[str, Any]] = []
        for level in range(1, max(self.levels.values(), default=0) + 1):
            here = [guid for guid, at in self.levels.items() if at == level]
            tier: dict[str, Any] = {"name": level_name(level), "nodes": max(len(self.hosts_below(one)) for one in here)}
            if level > 1:
                ratios = [ratio for guid, at in self.levels.items() if at == level - 1 and (ratio := self.ratio(guid))]
                tier["oversubscription"] = max(1.0, max(ratios, default=1.0))
            tiers.append(tier)
        return tiers

    def ratio(self, guid: str) -> float | None:
        """Return cables below over cables above of a switch; None where none lead up."""
        down = up = 0
        for neighbour in self.graph.neighbors(guid):
            cables = self.graph.edges[guid, neighbour]["cables"]
            if self.levels.get(neighbour, 0) < self.levels[guid]:
                down += cables
            elif self.levels[neighbour] > self.levels[guid]:
                up += cables
        return down / up if up else None


def import_ibnetdiscover(text: str, file: str | Path | None = None) -> IbFabric:
    """Read the output of ``ibnetdiscover``.

    Raises:
        InputError: no switch or no host with a link (truncated), or a link to something that is not described.
    """
    blocks = _read_blocks(text, file)
    names = {guid: name for kind, guid, name, _, _ in blocks if kind == "Switch"}
    adapters: list[Adapter] = []
    nameless: set[str] = set()
    links: dict[tuple[tuple[str, int], tuple[str, int]], float | None] = {}
    described = {guid: name for _, guid, name, _, _ in blocks}
    skipped: set[str] = {guid for guid, name in described.items() if _AGGREGATION.search(name)}
    for kind, guid, name, head_line, ports in blocks:
        if kind == "Ca" and guid not in skipped and not ports:
            raise InputError(
                f"{name or guid} has no port with a link",
                hint="the output is truncated; run ibnetdiscover again",
                file=file,
                line=head_line,
            )
        for port, peer, peer_port, rest, line in ports:
            quoted = _QUOTED.search(rest)
            if _AGGREGATION.search(quoted[1] if quoted else ""):
                skipped.add(peer)
            if guid in skipped or peer in skipped:
                continue
            if peer not in described:
                raise InputError(
                    f"port {port} of {name or guid} leads to {peer}, which is not described",
                    hint="the output is truncated; run ibnetdiscover again",
                    file=file,
                    line=line,
                )
            rate = _rate(rest)
            if kind == "Ca":
                if _NAMELESS.match(name) or not name.strip():
                    nameless.add(guid)
                elif peer in names:
                    host, _, device = name.partition(" ")
                    adapters.append(Adapter(host=host, device=device, switch=peer, bytes_per_second=rate))
            elif peer in names:
                one, other = sorted([(guid, port), (peer, peer_port)])
                links[one, other] = rate
    if not names or not adapters:
        raise InputError("holds no switch with a host on it", hint="the output is truncated", file=file)
    fabric = IbFabric(
        switches=names,
        adapters=tuple(adapters),
        links=tuple((one, other, rate) for ((one, _), (other, _)), rate in links.items()),
        aggregation_nodes=len(skipped),
        nameless_adapters=len(nameless),
    )
    return replace(fabric, warnings=tuple(_warnings(fabric)))


_Port = tuple[int, str, int, str, int]


def _read_blocks(text: str, file: str | Path | None) -> list[tuple[str, str, str, int, list[_Port]]]:
    blocks: list[tuple[str, str, str, int, list[_Port]]] = []
    for number, line in numbered_lines(text, file):
        head, port = _HEAD.match(line), _PORT.match(line)
        if head is not None:
            blocks.append((head[1], head[3], head[4], number, []))
        elif port is not None:
            if not blocks:
                raise InputError("a port before any switch or adapter", file=file, line=number)
            blocks[-1][4].append((int(port[1]), port[2], int(port[3]), port[4] or "", number))
        elif line.startswith("["):
            raise InputError(
                f"{line.strip()[:60]!r} is not a port", hint="the output is truncated", file=file, line=number
            )
    if not blocks:
        raise InputError("holds no switch and no adapter", hint="give the output of ibnetdiscover", file=file)
    return blocks


def _rate(rest: str) -> float | None:
    found = [(int(width), lane) for width, lane in _RATE.findall(rest) if lane in LANE_GBIT_PER_SECOND]
    return found[-1][0] * LANE_GBIT_PER_SECOND[found[-1][1]] * 1e9 / 8 if found else None


def _warnings(fabric: IbFabric) -> list[str]:
    warnings = []
    if fabric.aggregation_nodes:
        warnings.append(f"{fabric.aggregation_nodes} aggregation nodes skipped: they reduce in the network, no hosts")
    if fabric.nameless_adapters:
        warnings.append(
            f"{fabric.nameless_adapters} adapters do not name their host (node description) and are left out"
        )
    parts = nx.number_connected_components(fabric.graph)
    if parts > 1:
        warnings.append(f"disconnected: {parts} parts without a path between them")
    rates = {rate for _, _, rate in fabric.links} | {adapter.bytes_per_second for adapter in fabric.adapters}
    if len(rates) > 1:
        shown = ", ".join("unknown" if rate is None else f"{rate * 8e-9:g} Gbit/s" for rate in sorted(rates, key=str))
        warnings.append(f"links of different rates: {shown}")
    ports = [(adapter.host, adapter.device, adapter.switch) for adapter in fabric.adapters]
    warnings += missing_links(fabric.graph, fabric.levels, fabric.switches)
    warnings += missing_adapters(ports)
    warnings += crossed_rails(ports, fabric.switches)
    counts = sorted({len(adapters) for adapters in fabric.hosts.values()})
    if len(counts) > 1:
        warnings.append(f"hosts have {counts[0]} to {counts[-1]} ports: some links may be down")
    ratios = {fabric.switches[guid]: fabric.ratio(guid) for guid in fabric.levels}
    over = {name: ratio for name, ratio in ratios.items() if ratio is not None and ratio > 1}
    if over:
        worst = max(over, key=lambda name: over[name])
        warnings.append(f"{len(over)} switches are oversubscribed, at worst {worst} with {over[worst]:g}:1")
    return warnings
