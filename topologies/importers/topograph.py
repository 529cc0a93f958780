"""Models and graphs of topograph (github.com/NVIDIA/topograph): switches, and nodes by accelerated domain.

Three forms: the model with ``blocks`` (each on a switch), the older model with ``capacity_blocks`` and nodes on
switches, and the JSON of the graph engine (``instances`` with ``network_layers`` from leaf to root).
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from topologies.errors import InputError
from topologies.importers.hostlist import expand
from topologies.importers.text import line_of, read_yaml
from topologies.importers.tree import Switch, SwitchTree, make_tree


@dataclass(frozen=True, slots=True, kw_only=True)
class TopographModel:
    """Nodes below switches, and the accelerated (NVLink) domain of each node."""

    tree: SwitchTree
    domains: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """Nodes by accelerated domain; empty where the file names none."""
    sub_domains: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """Nodes by part of a domain (a rack of a larger one)."""
    products: dict[str, str] = field(default_factory=dict)
    """GPU product by node, where the file says it."""
    warnings: tuple[str, ...] = ()

    @property
    def nodes(self) -> tuple[str, ...]:
        """All nodes, each once."""
        return self.tree.nodes


def import_topograph(text: str, file: str | Path | None = None) -> TopographModel:
    """Read a topograph model (YAML) or graph (JSON).

    Raises:
        InputError: not such a file, or switches that lead nowhere or in a circle.
    """
    content = read_yaml(text, file)
    if isinstance(content, Mapping) and isinstance(content.get("instances"), list):
        return _from_graph(content["instances"], file)
    if not isinstance(content, Mapping) or not isinstance(content.get("switches"), Mapping):
        raise InputError("is no topograph model", hint="it has the keys switches and blocks, or instances", file=file)
    below: dict[str, list[str]] = {str(name): [] for name in content["switches"]}
    children: dict[str, tuple[str, ...]] = {}
    lines = {str(name): line_of(content["switches"], name) for name in content["switches"]}
    for name, settings in content["switches"].items():
        settings = settings or {}
        children[str(name)] = tuple(str(child) for child in settings.get("switches", ()))
        below[str(name)] += _nodes(settings, file)
    domains: dict[str, list[str]] = {}
    sub_domains: dict[str, list[str]] = {}
    _read_blocks(content.get("blocks"), below, lines, domains, sub_domains, file)
    _read_capacity_blocks(content, domains, file)
    placed = set(below)
    childless = [child for under in children.values() for child in under if child not in placed]
    switches = [
        Switch(name=name, switches=children.get(name, ()), nodes=tuple(nodes), line=lines.get(name))
        for name, nodes in below.items()
    ] + [Switch(name=name) for name in dict.fromkeys(childless)]
    return _model(make_tree(switches, file), domains, sub_domains, {})


def _read_blocks(
    blocks: Any,
    below: dict[str, list[str]],
    lines: dict[str, int | None],
    domains: dict[str, list[str]],
    sub_domains: dict[str, list[str]],
    file: str | Path | None,
) -> None:
    if blocks is None:
        return
    if not isinstance(blocks, list):
        raise InputError("blocks is not a list", file=file, key="blocks")
    for block in blocks:
        if not isinstance(block, Mapping) or "switch" not in block:
            raise InputError("a block has no switch", hint="add 'switch: NAME'", file=file, line=line_of(block))
        name = str(block["switch"])
        if name not in below and lines:
            below[name], lines[name] = [], line_of(block)
        nodes = _nodes(block, file)
        below[name] += nodes
        said = {**(block.get("labels") or {}), **(block.get("annotations") or {})}
        for key, value in said.items():
            if key.endswith("/sub-domain"):
                sub_domains.setdefault(str(value), []).extend(nodes)
            elif key.endswith(("/domain", "/level-0", "/accelerator")):
                domains.setdefault(str(value), []).extend(nodes)


def _read_capacity_blocks(content: Mapping[str, Any], domains: dict[str, list[str]], file: str | Path | None) -> None:
    blocks = content.get("capacity_blocks") or {}
    for settings in blocks.values() if isinstance(blocks, Mapping) else ():
        settings = settings or {}
        domain = (settings.get("attributes") or {}).get("nvlink")
        if domain is not None:
            domains.setdefault(str(domain), []).extend(_nodes(settings, file))
    nodes = content.get("nodes") or {}
    for name, settings in nodes.items() if isinstance(nodes, Mapping) else ():
        domain = ((settings or {}).get("attributes") or {}).get("nvlink")
        if domain is not None and str(name) not in domains.get(str(domain), ()):
            domains.setdefault(str(domain), []).append(str(name))


def _nodes(entry: Mapping[str, Any], file: str | Path | None) -> list[str]:
    listed = entry.get("nodes") or ()
    texts = [listed] if isinstance(listed, str) else listed
    return [host for text in texts for host in expand(str(text), file=file, line=line_of(entry, "nodes"))]


def _from_graph(instances: list[Any], file: str | Path | None) -> TopographModel:
    below: dict[str, dict[str, None]] = {}
    nodes: dict[str, list[str]] = {}
    domains: dict[str, list[str]] = {}
    products: dict[str, str] = {}
    for instance in instances:
        if not isinstance(instance, Mapping) or not instance.get("id") or not instance.get("network_layers"):
            raise InputError("an instance has no id or no network_layers", file=file, line=line_of(instance))
        name, layers = str(instance["id"]), [str(layer) for layer in instance["network_layers"]]
        nodes.setdefault(layers[0], []).append(name)
        for child, parent in itertools.pairwise(layers):
            below.setdefault(parent, {})[child] = None
        labels = {**(instance.get("attributes") or {}), **(instance.get("labels") or {})}
        domain = labels.get("nvlink") or labels.get("network.topology.nvidia.com/accelerator")
        if domain is not None:
            domains.setdefault(str(domain), []).append(name)
        product = labels.get("nvidia.com/gpu.product") or instance.get("type")
        if product:
            products[name] = str(product)
    names = dict.fromkeys([*nodes, *below, *(child for children in below.values() for child in children)])
    switches = [
        Switch(name=name, switches=tuple(below.get(name, ())), nodes=tuple(nodes.get(name, ()))) for name in names
    ]
    return _model(make_tree(switches, file), domains, {}, products)


def _model(
    tree: SwitchTree,
    domains: dict[str, list[str]],
    sub_domains: dict[str, list[str]],
    products: dict[str, str],
) -> TopographModel:
    warnings = list(tree.warnings)
    sizes = sorted({len(nodes) for nodes in domains.values()})
    if len(sizes) > 1:
        warnings.append(f"accelerated domains hold {sizes[0]} to {sizes[-1]} nodes")
    return TopographModel(
        tree=tree,
        domains={name: tuple(nodes) for name, nodes in domains.items()},
        sub_domains={name: tuple(nodes) for name, nodes in sub_domains.items()},
        products=products,
        warnings=tuple(warnings),
    )
