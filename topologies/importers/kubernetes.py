"""Kubernetes nodes (``kubectl get nodes -o json``): GPUs, their product, and the switches and domains in the labels."""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from topologies.errors import InputError
from topologies.importers.text import line_of, read_yaml
from topologies.importers.tree import Switch, SwitchTree, make_tree

LAYERS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("topograph", tuple(f"fabric.topograph.run/tier-{tier}" for tier in range(6))),
    ("topograph", tuple(f"network.topology.nvidia.com/tier-{tier}" for tier in range(6))),
    ("topograph", tuple(f"network.topology.nvidia.com/{layer}" for layer in ("leaf", "spine", "core"))),
    (
        "topograph, older",
        tuple(f"network.topology.nvidia.com/{layer}" for layer in ("block", "spine", "datacenter")),
    ),
    ("AWS", tuple(f"topology.k8s.aws/network-node-layer-{layer}" for layer in (3, 2, 1))),
    ("GKE", ("cloud.google.com/gce-topology-subblock", "cloud.google.com/gce-topology-block")),
    ("OCI", ("oci.oraclecloud.com/host.rack_id", "oci.oraclecloud.com/host.network_block_id")),
)
"""Who writes them, and the labels from the node outwards (topograph's docs/reference/node-labels.md); first match."""

DOMAINS = (
    "nvidia.com/gpu.clique",
    "accelerator.topograph.run/domain",
    "network.topology.nvidia.com/accelerator",
    "accelerated.topology.nvidia.com/level-0",
)
"""Labels of the accelerated (NVLink) domain."""

_PRODUCTS = ("nvidia.com/gpu.product", "amd.com/gpu.product-name", "beta.amd.com/gpu.product-name")
_RESOURCES = ("nvidia.com/gpu", "amd.com/gpu")


@dataclass(frozen=True, slots=True, kw_only=True)
class KubernetesNode:
    """One node as its labels and status say."""

    name: str
    gpus: int
    product: str | None
    memory_bytes: float | None
    """Of one GPU."""
    layers: tuple[str, ...]
    """Switches from leaf to root."""
    domain: str | None
    ready: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class KubernetesNodes:
    """All nodes with GPUs."""

    nodes: tuple[KubernetesNode, ...]
    tree: SwitchTree | None
    """None where no label tells of switches."""
    labelled_by: str | None
    warnings: tuple[str, ...] = ()

    @property
    def products(self) -> dict[str, int]:
        """Nodes by GPU product."""
        counts: dict[str, int] = {}
        for node in self.nodes:
            counts[node.product or "unknown"] = counts.get(node.product or "unknown", 0) + 1
        return counts

    @property
    def domains(self) -> dict[str, tuple[str, ...]]:
        """Nodes by accelerated domain."""
        found: dict[str, tuple[str, ...]] = {}
        for node in self.nodes:
            if node.domain is not None:
                found[node.domain] = (*found.get(node.domain, ()), node.name)
        return found


def import_kubernetes_nodes(text: str, file: str | Path | None = None) -> KubernetesNodes:
    """Read a list of nodes, JSON or YAML.

    Raises:
        InputError: not a list of nodes, or none of them has a GPU.
    """
    content = read_yaml(text, file)
    items = content.get("items") if isinstance(content, Mapping) else None
    if items is None and isinstance(content, Mapping) and content.get("kind") == "Node":
        items = [content]
    if not isinstance(items, list):
        raise InputError("is no list of nodes", hint="give the output of 'kubectl get nodes -o json'", file=file)
    labels = {_name(item, file): _mapping(item, "metadata", "labels") for item in items}
    writer, keys = _family(list(labels.values()))
    found = [_node(item, labels[_name(item, file)], keys) for item in items]
    nodes = tuple(node for node in found if node.gpus)
    if not nodes:
        raise InputError(
            f"none of {len(found)} nodes has GPUs", hint="is the GPU operator or device plugin installed?", file=file
        )
    tree = _tree(nodes, file)
    warnings = _warnings(nodes, labels, len(found)) + list(tree.warnings if tree else ())
    return KubernetesNodes(nodes=nodes, tree=tree, labelled_by=writer, warnings=tuple(warnings))


def _mapping(item: Any, *path: str) -> dict[str, Any]:
    for key in path:
        item = item.get(key) if isinstance(item, Mapping) else None
    return dict(item) if isinstance(item, Mapping) else {}


def _name(item: Any, file: str | Path | None) -> str:
    name = _mapping(item, "metadata").get("name")
    if not name or (isinstance(item, Mapping) and item.get("kind", "Node") != "Node"):
        raise InputError("an item is no node", hint="give nodes only", file=file, line=line_of(item))
    return str(name)


def _family(labels: list[dict[str, Any]]) -> tuple[str | None, tuple[str, ...]]:
    for writer, keys in LAYERS:
        present = tuple(key for key in keys if any(key in one for one in labels))
        if present and present[0] == keys[0]:
            return writer, present
    return None, ()


def _node(item: Any, labels: dict[str, Any], keys: tuple[str, ...]) -> KubernetesNode:
    status = _mapping(item, "status", "allocatable") or _mapping(item, "status", "capacity")
    said = labels.get("nvidia.com/gpu.count") or next((status[key] for key in _RESOURCES if key in status), 0)
    memory = labels.get("nvidia.com/gpu.memory")
    conditions = _mapping(item, "status").get("conditions") or []
    ready = all(one.get("status") == "True" for one in conditions if one.get("type") == "Ready")
    return KubernetesNode(
        name=str(_mapping(item, "metadata")["name"]),
        gpus=int(said) if str(said).isdigit() else 0,
        product=next((str(labels[key]) for key in _PRODUCTS if key in labels), None),
        memory_bytes=float(memory) * 2**20 if memory and str(memory).isdigit() else None,
        layers=tuple(str(labels[key]) for key in keys if key in labels),
        domain=next((str(labels[key]) for key in DOMAINS if key in labels), None),
        ready=ready and not _mapping(item, "spec").get("unschedulable", False),
    )


def _tree(nodes: tuple[KubernetesNode, ...], file: str | Path | None) -> SwitchTree | None:
    """Build switches from the labels; the level is part of a switch's identity, since values repeat across levels."""
    below: dict[tuple[int, str], dict[tuple[int, str], None]] = {}
    attached: dict[tuple[int, str], list[str]] = {}
    for node in nodes:
        path = list(enumerate(node.layers))
        for child, parent in itertools.pairwise(path):
            below.setdefault(parent, {})[child] = None
        if path:
            attached.setdefault(path[0], []).append(node.name)
    if not attached:
        return None
    switches = dict.fromkeys([*attached, *below])
    values = [name for _, name in switches]

    def shown(switch: tuple[int, str]) -> str:
        return switch[1] if values.count(switch[1]) == 1 else f"{switch[1]} (level {switch[0] + 1})"

    return make_tree(
        (
            Switch(
                name=shown(switch),
                switches=tuple(shown(child) for child in below.get(switch, ())),
                nodes=tuple(attached.get(switch, ())),
            )
            for switch in switches
        ),
        file,
    )


def _warnings(nodes: tuple[KubernetesNode, ...], labels: dict[str, dict[str, Any]], total: int) -> list[str]:
    warnings = []
    away = [node.name for node in nodes if not node.ready]
    if away:
        warnings.append(f"{len(away)} of {len(nodes)} GPU nodes are not ready or cordoned, such as {away[0]}")
    if total > len(nodes):
        warnings.append(f"{total - len(nodes)} nodes without GPUs are left out")
    partitioned = [node for node in nodes if re.search(r"-MIG-", node.product or "")]
    if partitioned:
        warnings.append(
            f"{len(partitioned)} nodes offer MIG slices, such as {partitioned[0].name}: no use for NCCL jobs"
        )
    shared = [node for node in nodes if str(labels[node.name].get("nvidia.com/gpu.replicas", "1")) not in {"0", "1"}]
    if shared:
        warnings.append(f"{len(shared)} nodes share each GPU in time, such as {shared[0].name}: no use for training")
    if len({(node.product, node.gpus) for node in nodes}) > 1:
        kinds = sorted({f"{node.gpus} x {node.product or 'unknown GPU'}" for node in nodes})
        warnings.append(f"nodes of different kinds: {', '.join(kinds)}")
    without = [node.name for node in nodes if not node.layers]
    if len(without) == len(nodes):
        warnings.append("no label tells of switches: the fabric is unknown (topograph or the cloud writes such labels)")
    elif without:
        warnings.append(f"{len(without)} nodes carry no switch label, such as {without[0]}")
    return warnings
