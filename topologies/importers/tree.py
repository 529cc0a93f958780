"""A tree of switches with nodes below, as schedulers and discovery tools describe a fabric."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from topologies.errors import InputError

LEVEL_NAMES = ("leaf", "spine", "core")
"""By height above the nodes; a fourth level is called level-4."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Switch:
    """One switch (or rack, or block): what hangs below it."""

    name: str
    switches: tuple[str, ...] = ()
    nodes: tuple[str, ...] = ()
    line: int | None = None
    """Where the file says so."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SwitchTree:
    """Switches by name. ``heights``: 1 for a switch without switches below, else one more than the highest below."""

    switches: dict[str, Switch]
    heights: dict[str, int]
    roots: tuple[str, ...]
    """Switches that hang below none, largest tree first."""
    warnings: tuple[str, ...] = ()

    @property
    def nodes(self) -> tuple[str, ...]:
        """All nodes, in the order of the file, each once."""
        return tuple(dict.fromkeys(node for switch in self.switches.values() for node in switch.nodes))

    @property
    def leaves(self) -> tuple[Switch, ...]:
        """Switches with nodes."""
        return tuple(switch for switch in self.switches.values() if switch.nodes)

    def nodes_below(self, name: str) -> tuple[str, ...]:
        """All nodes under a switch, each once."""
        found: dict[str, None] = {}
        waiting = [name]
        while waiting:
            switch = self.switches[waiting.pop()]
            found |= dict.fromkeys(switch.nodes)
            waiting += switch.switches
        return tuple(found)

    def below(self, root: str) -> tuple[str, ...]:
        """A switch and all switches under it."""
        found: dict[str, None] = {}
        waiting = [root]
        while waiting:
            name = waiting.pop()
            found[name] = None
            waiting += self.switches[name].switches
        return tuple(found)

    def tiers(self, root: str) -> list[dict[str, Any]]:
        """Raw tiers of the tree under ``root``, near to far: the most nodes under a switch of each height.

        Levels that join no more nodes than the one below are left out.
        """
        tiers: list[dict[str, Any]] = []
        most: dict[int, int] = {}
        for name in self.below(root):
            height = self.heights[name]
            most[height] = max(most.get(height, 0), len(self.nodes_below(name)))
        for height in sorted(most):
            if most[height] > (tiers[-1]["nodes"] if tiers else 0):
                tiers.append({"name": level_name(height), "nodes": most[height]})
        return tiers


def level_name(height: int) -> str:
    """Name a level by its height above the nodes."""
    return LEVEL_NAMES[height - 1] if height <= len(LEVEL_NAMES) else f"level-{height}"


def make_tree(switches: Iterable[Switch], file: str | Path | None = None) -> SwitchTree:
    """Check that switches form trees and return them.

    Raises:
        InputError: a switch is described twice, hangs below itself, or leads to a switch that nobody describes.
    """
    by_name: dict[str, Switch] = {}
    for switch in switches:
        if switch.name in by_name:
            raise InputError(
                f"the switch {switch.name} is described twice", hint="join both lines", file=file, line=switch.line
            )
        by_name[switch.name] = switch
    if not by_name:
        raise InputError("describes no switch", file=file)
    for switch in by_name.values():
        for child in switch.switches:
            if child not in by_name:
                raise InputError(
                    f"the switch {switch.name} leads to {child}, which is not described",
                    hint=f"add a line for {child} or correct the name",
                    file=file,
                    line=switch.line,
                )
    heights = _heights(by_name, file)
    parents: dict[str, list[str]] = {name: [] for name in by_name}
    for switch in by_name.values():
        for child in switch.switches:
            parents[child].append(switch.name)
    tree = SwitchTree(switches=by_name, heights=heights, roots=tuple(name for name in by_name if not parents[name]))
    roots = tuple(sorted(tree.roots, key=lambda name: -len(tree.nodes_below(name))))
    return SwitchTree(switches=by_name, heights=heights, roots=roots, warnings=tuple(_warnings(tree, roots, parents)))


def _heights(switches: dict[str, Switch], file: str | Path | None) -> dict[str, int]:
    """Heights by depth-first search without recursion, so that a deep chain is no crash; a cycle is refused."""
    heights: dict[str, int] = {}
    for start in switches:
        path: list[str] = [] if start in heights else [start]
        on_path = set(path)
        while path:
            children = switches[path[-1]].switches
            unknown = next((child for child in children if child not in heights), None)
            if unknown is None:
                heights[path[-1]] = 1 + max((heights[child] for child in children), default=0)
                on_path.discard(path.pop())
            elif unknown in on_path:
                cycle = " -> ".join([*path[path.index(unknown) :], unknown])
                raise InputError(
                    f"the switches run in a circle: {cycle}",
                    hint="a switch cannot hang below itself; correct one of these lines",
                    file=file,
                    line=switches[path[-1]].line,
                )
            else:
                path.append(unknown)
                on_path.add(unknown)
    return heights


def _warnings(tree: SwitchTree, roots: tuple[str, ...], parents: dict[str, list[str]]) -> list[str]:
    warnings = []
    sizes = {root: len(tree.nodes_below(root)) for root in roots}
    if len(roots) > 1:
        listed = ", ".join(f"{root} {size}" for root, size in sizes.items())
        warnings.append(
            f"disconnected: {len(roots)} trees without a common root ({listed} nodes); "
            f"a job of more than {max(sizes.values())} nodes cannot be placed in one tree"
        )
    homes: dict[str, int] = {}
    for leaf in tree.leaves:
        for node in leaf.nodes:
            homes[node] = homes.get(node, 0) + 1
    shared = [node for node, count in homes.items() if count > 1]
    if shared:
        warnings.append(f"{len(shared)} nodes hang below several switches, such as {shared[0]}: rails or a mistake")
    several = [name for name, above in parents.items() if len(above) > 1]
    if several:
        warnings.append(f"{len(several)} switches have several parents, such as {several[0]}: not a tree")
    filled: dict[str, bool] = {}
    for name in sorted(tree.switches, key=lambda name: tree.heights[name]):
        switch = tree.switches[name]
        filled[name] = bool(switch.nodes) or any(filled[child] for child in switch.switches)
    empty = [name for name in tree.switches if not filled[name]]
    if empty:
        warnings.append(f"{len(empty)} switches have no node below: {', '.join(empty[:4])}")
    counts = sorted({len(leaf.nodes) for leaf in tree.leaves})
    if len(counts) > 1:
        warnings.append(f"irregular: leaves hold {counts[0]} to {counts[-1]} nodes; a tier takes the fullest")
    return warnings
