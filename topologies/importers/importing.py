"""Tell a format by its content, read it, and build a cluster where that is possible."""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from topologies.cluster import Cluster
from topologies.complaints import did_you_mean
from topologies.errors import InputError
from topologies.importers.assemble import (
    Choices,
    FabricFacts,
    NodeFacts,
    cluster_of_fabric,
    cluster_of_node,
    cluster_with_measured,
    load_named,
)
from topologies.importers.ibnetdiscover import IbFabric, import_ibnetdiscover
from topologies.importers.kubernetes import KubernetesNodes, import_kubernetes_nodes
from topologies.importers.nccl_curve import NcclRun, explain_wire, import_nccl_tests, measured
from topologies.importers.nccl_debug import NcclDebugLog, import_nccl_debug
from topologies.importers.nccl_xml import NcclTopology, import_nccl_xml
from topologies.importers.products import gpu_of_product
from topologies.importers.slurm_topology import SlurmTopologies, import_slurm_topology
from topologies.importers.text import read_text, read_yaml
from topologies.importers.topo import GpuList, import_gpu_list, import_topo
from topologies.importers.topo_matrix import TopologyMatrix
from topologies.importers.topograph import TopographModel, import_topograph
from topologies.importers.tree import SwitchTree, level_name

Content = (
    TopologyMatrix
    | GpuList
    | NcclTopology
    | SlurmTopologies
    | TopographModel
    | IbFabric
    | KubernetesNodes
    | NcclRun
    | NcclDebugLog
)

_MARKS: tuple[tuple[str, str], ...] = (
    ("nccl-xml", r"<system\b|\A\s*<(?:\?xml|!DOCTYPE)"),
    ("nccl-tests", r"\balgbw\s+busbw\b|#\s*nThread \d+ nGpus|Collective test starting"),
    ("slurm-topology", r"^\s*(?:SwitchName|BlockName)\s*="),
    ("ibnetdiscover", r"^(?:switchguid|caguid)=|^Switch\s+\d+\s+\""),
    ("nccl-debug", r"\bNCCL (?:INFO|WARN)\b"),
    ("gpu-list", r"^\s*GPU \d+: .*\(UUID: "),
    ("gpu-matrix", r"\bGPU0\b.*(?:\n|\r).*\bGPU0\b|ROCm System Management Interface"),
)
READERS: dict[str, Callable[[str, str | Path | None], Content]] = {
    "nccl-xml": import_nccl_xml,
    "slurm-topology": import_slurm_topology,
    "ibnetdiscover": import_ibnetdiscover,
    "nccl-debug": import_nccl_debug,
    "gpu-list": import_gpu_list,
    "gpu-matrix": import_topo,
    "topograph": import_topograph,
    "kubernetes": import_kubernetes_nodes,
}
"""By format, all but the logs of nccl-tests, which take more than the text."""
FORMATS = ("nccl-tests", *READERS)
"""Names of the formats."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Imported:
    """What a file gave."""

    file: str
    format: str
    content: Content
    warnings: tuple[str, ...]
    cluster: dict[str, Any] | None
    """Raw mapping of a cluster; None where the file and the choices determine none."""
    undetermined: InputError | None
    """Why there is no cluster."""


def import_file(path: str | Path, choices: Choices | None = None) -> Imported:
    """Read a file of any known format.

    Raises:
        InputError: unreadable, of no known format, or broken.
    """
    choices = choices or Choices()
    text, file = read_text(path), str(path)
    name = format_of(text, path)
    if name == "nccl-tests":
        content: Content = import_nccl_tests(text, path, collective=choices.collective, claimed_ranks=choices.ranks)
    else:
        content = READERS[name](text, path)
    cluster: dict[str, Any] | None = None
    notes: list[str] = []
    trouble: InputError | None = None
    try:
        cluster, notes = build_cluster(content, choices, file)
    except InputError as error:
        trouble = error
    return Imported(
        file=file,
        format=name,
        content=content,
        warnings=(*content.warnings, *notes),
        cluster=cluster,
        undetermined=trouble,
    )


def format_of(text: str, file: str | Path | None = None) -> str:
    """Tell the format of a text.

    Raises:
        InputError: none that is known.
    """
    for name, pattern in _MARKS:
        if re.search(pattern, text, re.MULTILINE):
            return name
    try:
        content = read_yaml(text, file)
    except InputError:
        content = None
    if isinstance(content, list) and content and all(isinstance(one, Mapping) and "topology" in one for one in content):
        return "slurm-topology"
    if isinstance(content, Mapping):
        if "items" in content or content.get("kind") == "Node":
            return "kubernetes"
        if "switches" in content or "instances" in content:
            return "topograph"
        if "results" in content:
            return "nccl-tests"
    raise InputError("is of no format that headway reads", hint=f"known formats: {', '.join(FORMATS)}", file=file)


def build_cluster(content: Content, choices: Choices, file: str) -> tuple[dict[str, Any], list[str]]:
    """Return the raw mapping of a cluster and notes on what was assumed.

    Raises:
        InputError: the file and the choices do not determine one.
    """
    match content:
        case TopologyMatrix():
            return cluster_of_node(_matrix_facts(content, file), choices)
        case NcclTopology():
            return cluster_of_node(_xml_facts(content, file), choices)
        case GpuList():
            raise InputError("a list of GPUs does not say what joins them", hint="give nvidia-smi topo -m", file=file)
        case NcclDebugLog():
            raise InputError("a debug log determines no cluster", hint="give a topology file", file=file)
        case NcclRun():
            return _measured_cluster(content, choices, file)
        case SlurmTopologies():
            return cluster_of_fabric(_slurm_facts(content, choices, file), choices)
        case TopographModel():
            return cluster_of_fabric(_tree_facts(content.tree, choices.part, file), choices)
        case KubernetesNodes():
            return cluster_of_fabric(_kubernetes_facts(content, choices, file), choices)
        case IbFabric():
            return cluster_of_fabric(_ib_facts(content, file), choices)


def _matrix_facts(matrix: TopologyMatrix, file: str) -> NodeFacts:
    if len({len(island) for island in matrix.islands}) > 1 or any("incomplete" in word for word in matrix.warnings):
        raise InputError("the GPUs of the matrix do not form equal groups, or rows lack", file=file)
    links = set(matrix.nvlinks.values())
    return NodeFacts(
        source=f"{matrix.tool} ({Path(file).name})",
        gpus=len(matrix.gpus),
        links=min(links) if links else None,
        link=matrix.link if matrix.link in ("nvlink", "xgmi") else None,
        switched=matrix.switched,
        domain_size=len(matrix.islands[0]),
        nics=len(matrix.compute_nics),
    )


def _xml_facts(topology: NcclTopology, file: str) -> NodeFacts:
    gpus = topology.gpus
    products = {gpu.product for gpu in gpus}
    rates = {port.bytes_per_second for port in topology.ports}
    links = {sum(gpu.nvlinks.values()) for gpu in gpus}
    buses = {gpu.bus_id for gpu in gpus}
    islands = {len(island) for island in topology.islands}
    if len(islands) > 1:
        raise InputError("the GPUs do not form islands of equal size", file=file)
    return NodeFacts(
        source=f"NCCL topology ({Path(file).name})",
        gpus=len(gpus),
        gpu=products.pop() if len(products) == 1 else None,
        links=min(links) or None,
        link="nvlink" if any(links) else "xgmi" if any(gpu.xgmi for gpu in gpus) else None,
        switched=not any(set(gpu.nvlinks) & buses for gpu in gpus),
        domain_size=min(islands),
        nics=len(topology.ports),
        nic_bytes_per_second=rates.pop() if len(rates) == 1 else None,
    )


def _measured_cluster(run: NcclRun, choices: Choices, file: str) -> tuple[dict[str, Any], list[str]]:
    raw = cluster_with_measured(measured(run, file), choices, file)
    cluster: Cluster = load_named(choices.cluster or "", "clusters", Cluster)
    node, notes = cluster.node, []
    reason = explain_wire(
        run,
        num_nodes=run.hosts or math.ceil((run.ranks or 1) / cluster.domain_size),
        node_network_bytes_per_second=node.network_bytes_per_second_per_gpu * node.gpus_per_node,
        scale_up_bytes_per_second=node.scale_up.bandwidth_bytes_per_second,
        nvls=node.scale_up.kind == "nvswitch" and node.gpu.architecture in ("hopper", "blackwell"),
    )
    if reason is not None:
        notes.append(reason)
    if run.ranks is not None and run.ranks > cluster.num_gpus:
        notes.append(f"{run.ranks} ranks were measured, and {cluster.name} has {cluster.num_gpus} GPUs")
    told = gpu_of_product(run.product) if run.product else None
    if told is not None and load_named(told, "gpus", type(cluster.gpu)).name != cluster.gpu.name:
        notes.append(f"measured on {run.product}, and {cluster.name} has {cluster.gpu.name}")
    return raw, notes


def _tree_facts(tree: SwitchTree, part: str | None, file: str) -> FabricFacts:
    if part is not None and part not in tree.switches:
        raise InputError(f"there is no switch {part!r}", hint=did_you_mean(part, tree.switches), file=file)
    filled = [root for root in tree.roots if tree.nodes_below(root)]
    if part is None and len(filled) != 1:
        sizes = ", ".join(f"{root} {len(tree.nodes_below(root))}" for root in filled)
        raise InputError(
            f"{len(filled)} trees without a common root ({sizes} nodes) are no one fabric",
            hint="give --part SWITCH to take one of them",
            file=file,
        )
    root = part or filled[0]
    return FabricFacts(source=file, num_nodes=len(tree.nodes_below(root)), tiers=tree.tiers(root))


def _slurm_facts(content: SlurmTopologies, choices: Choices, file: str) -> FabricFacts:
    names = {one.name for one in content.topologies}
    topology = content.choose(choices.part if choices.part in names else None)
    if topology.tree is not None:
        return _tree_facts(topology.tree, None if choices.part in names else choices.part, file)
    if topology.plugin != "block":
        raise InputError(
            f"the plugin {topology.plugin} of {topology.name} describes no fabric of levels",
            hint="give --part NAME to take another topology" if len(names) > 1 else None,
            file=file,
        )
    total = len(topology.nodes)
    sizes = sorted(
        {*topology.block_sizes, *(() if topology.block_sizes else {max(map(len, topology.groups.values()))})}
    )
    sizes = [size for size in sizes if size < total] + [total]
    tiers = [{"name": level_name(level), "nodes": size} for level, size in enumerate(sizes, 1)]
    return FabricFacts(source=file, num_nodes=total, tiers=tiers)


def _kubernetes_facts(content: KubernetesNodes, choices: Choices, file: str) -> FabricFacts:
    kinds = {(node.product, node.gpus) for node in content.nodes}
    if len(kinds) > 1:
        raise InputError(
            "nodes of different kinds", hint="give the nodes of one kind (kubectl get nodes -l ...)", file=file
        )
    if content.tree is None:
        raise InputError(
            "no label tells of switches", hint="label the nodes with topograph, or write the fabric by hand", file=file
        )
    facts = _tree_facts(content.tree, choices.part, file)
    return FabricFacts(source=file, num_nodes=facts.num_nodes, tiers=facts.tiers, gpus_per_node=content.nodes[0].gpus)


def _ib_facts(fabric: IbFabric, file: str) -> FabricFacts:
    if any("disconnected" in warning for warning in fabric.warnings):
        raise InputError("parts without a path between them are no one fabric", file=file)
    rates = {adapter.bytes_per_second for adapter in fabric.adapters}
    ports = statistics.mode(len(adapters) for adapters in fabric.hosts.values())
    return FabricFacts(
        source=file,
        num_nodes=len(fabric.hosts),
        tiers=fabric.tiers(),
        kind="rail-optimized" if fabric.rails > 1 else "fat-tree",
        rails=fabric.rails,
        nics_per_node=ports,
        nic_bytes_per_second=rates.pop() if len(rates) == 1 else None,
    )
