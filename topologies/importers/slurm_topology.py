"""Slurm's topology.conf(5) and topology.yaml(5): trees of switches, blocks, rings, tori."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from topologies.complaints import did_you_mean
from topologies.errors import InputError
from topologies.importers.hostlist import expand
from topologies.importers.text import line_of, numbered_lines, read_yaml
from topologies.importers.tree import Switch, SwitchTree, make_tree

Plugin = Literal["tree", "block", "flat", "ring", "torus3d"]
PLUGINS: tuple[Plugin, ...] = ("tree", "block", "flat", "ring", "torus3d")

_CONF_KEYS = {"switchname", "switches", "nodes", "linkspeed", "blockname", "blocksizes"}
_PAIR = re.compile(r"(\w+)\s*=\s*(\S+)")
_ALIAS = re.compile(r"#\s*([^\s=]+)=([^\s=]+)\s*")


@dataclass(frozen=True, slots=True, kw_only=True)
class SlurmTopology:
    """One topology of a Slurm cluster."""

    name: str
    plugin: Plugin
    default: bool = False
    tree: SwitchTree | None = None
    """Plugin tree."""
    groups: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """Nodes by block, ring or torus."""
    block_sizes: tuple[int, ...] = ()
    """Plugin block: nodes of a base block and of the aggregates of it that Slurm may allocate."""
    dims: dict[str, tuple[int, int, int]] = field(default_factory=dict)
    """Plugin torus3d: x, y, z by torus."""
    aliases: dict[str, str] = field(default_factory=dict)
    """Real names of switches, from comments such as ``# switch.2.1=spine-1``."""
    warnings: tuple[str, ...] = ()

    @property
    def nodes(self) -> tuple[str, ...]:
        """All nodes, each once; none where the plugin is flat, which does not list them."""
        if self.tree is not None:
            return self.tree.nodes
        return tuple(dict.fromkeys(node for nodes in self.groups.values() for node in nodes))


@dataclass(frozen=True, slots=True, kw_only=True)
class SlurmTopologies:
    """All topologies of a file."""

    topologies: tuple[SlurmTopology, ...]
    warnings: tuple[str, ...] = ()

    def choose(self, name: str | None) -> SlurmTopology:
        """Return the topology of this name, or the cluster's default.

        Raises:
            InputError: no such topology.
        """
        known = {one.name: one for one in self.topologies}
        if name is None:
            return next((one for one in self.topologies if one.default), self.topologies[0])
        if name not in known:
            raise InputError(
                f"there is no topology {name!r}", hint=did_you_mean(name, known) or f"known: {', '.join(known)}"
            )
        return known[name]


def import_slurm_topology(text: str, file: str | Path | None = None) -> SlurmTopologies:
    """Read topology.conf or topology.yaml.

    Raises:
        InputError: not such a file, an unknown key, a switch that leads nowhere or in a circle.
    """
    if re.search(r"^\s*(SwitchName|BlockName)\s*=", text, re.IGNORECASE | re.MULTILINE):
        topologies: tuple[SlurmTopology, ...] = (_read_conf(text, file),)
    else:
        topologies = _read_yaml(text, file)
    warnings = tuple(
        f"{one.name}: {warning}" if len(topologies) > 1 else warning for one in topologies for warning in one.warnings
    )
    return SlurmTopologies(topologies=topologies, warnings=warnings)


def _read_conf(text: str, file: str | Path | None) -> SlurmTopology:
    switches: list[Switch] = []
    blocks: dict[str, tuple[str, ...]] = {}
    sizes: tuple[int, ...] = ()
    aliases: dict[str, str] = {}
    for number, line in _logical_lines(text, file):
        alias = _ALIAS.fullmatch(line.strip())
        if alias is not None:
            aliases[alias[1]] = alias[2]
        content = line.partition("#")[0].strip()
        if not content:
            continue
        values = _values(content, number, file)
        if "switchname" in values:
            nodes = expand(values["nodes"], file=file, line=number) if "nodes" in values else ()
            children = expand(values["switches"], file=file, line=number) if "switches" in values else ()
            switches += [
                Switch(name=name, switches=children, nodes=nodes, line=number)
                for name in expand(values["switchname"], file=file, line=number)
            ]
        elif "blockname" in values:
            if values["blockname"] in blocks:
                raise InputError(f"the block {values['blockname']} is given twice", file=file, line=number)
            blocks[values["blockname"]] = expand(values["nodes"], file=file, line=number) if "nodes" in values else ()
        elif "blocksizes" in values:
            sizes = _sizes(values["blocksizes"].split(","), file, number)
        else:
            raise InputError(
                f"{content!r} names neither a switch nor a block",
                hint="write SwitchName=... or BlockName=...",
                file=file,
                line=number,
            )
    if switches and blocks:
        raise InputError("describes both switches and blocks", hint="keep one plugin a file", file=file)
    if blocks:
        return _block_topology("topology.conf", True, blocks, sizes)
    tree = make_tree(switches, file)
    return SlurmTopology(
        name="topology.conf", plugin="tree", default=True, tree=tree, aliases=aliases, warnings=tree.warnings
    )


def _logical_lines(text: str, file: str | Path | None) -> Iterable[tuple[int, str]]:
    """Join lines that end in a backslash; the number is that of the first."""
    start, joined = 0, ""
    for number, line in numbered_lines(text, file):
        start = start or number
        if line.rstrip().endswith("\\"):
            joined += line.rstrip()[:-1] + " "
            continue
        yield start, joined + line
        start, joined = 0, ""
    if joined:
        yield start, joined


def _values(content: str, number: int, file: str | Path | None) -> dict[str, str]:
    values = {match[1].lower(): match[2] for match in _PAIR.finditer(content)}
    rest = _PAIR.sub("", content).strip()
    if not values or rest:
        raise InputError(
            f"{rest or content!r} is not of the form Key=Value",
            hint="write lines such as SwitchName=leaf1 Nodes=node[1-8]",
            file=file,
            line=number,
        )
    for key in values:
        if key not in _CONF_KEYS:
            raise InputError(
                f"{key!r} is not a key of topology.conf",
                hint=did_you_mean(key, _CONF_KEYS) or "known: SwitchName, Switches, Nodes, BlockName, BlockSizes",
                file=file,
                line=number,
            )
    return values


def _sizes(texts: Iterable[Any], file: str | Path | None, line: int | None) -> tuple[int, ...]:
    try:
        return tuple(int(text) for text in texts)
    except (TypeError, ValueError):
        raise InputError("block sizes are whole numbers of nodes", file=file, line=line) from None


def _block_topology(
    name: str, default: bool, blocks: dict[str, tuple[str, ...]], sizes: tuple[int, ...]
) -> SlurmTopology:
    counts = sorted({len(nodes) for nodes in blocks.values()})
    warnings = []
    if len(counts) > 1:
        warnings.append(f"irregular: blocks hold {counts[0]} to {counts[-1]} nodes")
    if sizes and counts[0] < sizes[0]:
        warnings.append(f"a block holds {counts[0]} nodes, fewer than the base block size {sizes[0]}")
    return SlurmTopology(
        name=name, plugin="block", default=default, groups=blocks, block_sizes=sizes, warnings=tuple(warnings)
    )


def _read_yaml(text: str, file: str | Path | None) -> tuple[SlurmTopology, ...]:
    content = read_yaml(text, file)
    if not isinstance(content, list) or not content:
        raise InputError("is no topology.yaml", hint="its top level is a list of '- topology: NAME'", file=file)
    return tuple(_one_topology(entry, file) for entry in content)


def _one_topology(entry: Any, file: str | Path | None) -> SlurmTopology:
    if not isinstance(entry, Mapping) or "topology" not in entry:
        raise InputError("an entry has no 'topology' key", file=file, line=line_of(entry))
    plugin = next((name for name in PLUGINS if name in entry), None)
    name, line = str(entry["topology"]), line_of(entry)
    if plugin is None:
        raise InputError(
            f"{name} names no plugin", hint=f"give one of {', '.join(PLUGINS)}", file=file, line=line, key="topology"
        )
    default, settings = bool(entry.get("cluster_default", False)), entry[plugin]
    if plugin == "flat":
        return SlurmTopology(
            name=name, plugin=plugin, default=default, warnings=("flat: lists no nodes and says nothing of the fabric",)
        )
    if not isinstance(settings, Mapping):
        raise InputError(f"{plugin} of {name} is not a mapping", file=file, line=line)
    if plugin == "tree":
        switches = [
            Switch(
                name=str(_need(one, "switch", file)),
                switches=_hosts(one, "children", file),
                nodes=_hosts(one, "nodes", file),
                line=line_of(one),
            )
            for one in _entries(settings, "switches", file, line)
        ]
        tree = make_tree(switches, file)
        return SlurmTopology(name=name, plugin=plugin, default=default, tree=tree, warnings=tree.warnings)
    listed, label = {"block": ("blocks", "block"), "ring": ("rings", "ring"), "torus3d": ("toruses", "name")}[plugin]
    entries = _entries(settings, listed, file, line)
    groups = {str(_need(one, label, file)): _hosts(one, "nodes", file) for one in entries}
    if plugin == "block":
        return _block_topology(name, default, groups, _sizes(settings.get("block_sizes", ()), file, line))
    dims = {str(one[label]): _dims(one, file) for one in entries} if plugin == "torus3d" else {}
    for torus, (x, y, z) in dims.items():
        if x * y * z != len(groups[torus]):
            raise InputError(
                f"torus {torus} of {x} x {y} x {z} has {len(groups[torus])} nodes",
                hint="the product of its dims is its number of nodes",
                file=file,
                line=line,
            )
    return SlurmTopology(name=name, plugin=plugin, default=default, groups=groups, dims=dims)


def _entries(settings: Mapping[str, Any], key: str, file: str | Path | None, line: int | None) -> list[Any]:
    entries = settings.get(key)
    if not isinstance(entries, list) or not entries or not all(isinstance(one, Mapping) for one in entries):
        raise InputError(f"{key!r} must be a list of entries", file=file, line=line_of(settings, key) or line, key=key)
    return list(entries)


def _need(entry: Mapping[str, Any], key: str, file: str | Path | None) -> Any:
    if key not in entry:
        raise InputError(f"an entry lacks {key!r}", file=file, line=line_of(entry), key=key)
    return entry[key]


def _hosts(entry: Mapping[str, Any], key: str, file: str | Path | None) -> tuple[str, ...]:
    value = entry.get(key)
    return () if value is None else expand(str(value), file=file, line=line_of(entry, key))


def _dims(entry: Mapping[str, Any], file: str | Path | None) -> tuple[int, int, int]:
    dims = _need(entry, "dims", file)
    try:
        return int(dims["x"]), int(dims["y"]), int(dims["z"])
    except (KeyError, TypeError, ValueError):
        raise InputError("dims are whole numbers x, y and z", file=file, line=line_of(entry, "dims")) from None
