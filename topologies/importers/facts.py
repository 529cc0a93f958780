"""What a file says, as plain data: for ``--json`` and for the table on the terminal."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from topologies.importers.ibnetdiscover import IbFabric
from topologies.importers.importing import Content
from topologies.importers.kubernetes import KubernetesNodes
from topologies.importers.nccl_curve import NcclRun
from topologies.importers.nccl_debug import NcclDebugLog
from topologies.importers.nccl_xml import NcclTopology
from topologies.importers.slurm_topology import SlurmTopologies, SlurmTopology
from topologies.importers.topo import GpuList
from topologies.importers.topo_matrix import TopologyMatrix
from topologies.importers.topograph import TopographModel
from topologies.importers.tree import SwitchTree
from topologies.units import format_quantity


def facts(content: Content) -> dict[str, Any]:
    """Return what a file says as numbers, texts, lists and mappings; None where it does not say."""
    match content:
        case TopologyMatrix():
            return _matrix(content)
        case GpuList():
            mig = {str(gpu.index): list(gpu.mig_profiles) for gpu in content.gpus if gpu.mig_profiles}
            products = [gpu.product for gpu in content.gpus]
            return {"gpus": content.physical, "whole_gpus": content.whole, "products": products, "mig": mig}
        case NcclTopology():
            return _xml(content)
        case SlurmTopologies():
            return {"topologies": {one.name: _slurm(one) for one in content.topologies}}
        case TopographModel():
            domains = {name: len(nodes) for name, nodes in content.domains.items()}
            return _tree(content.tree) | {"nodes_by_domain": domains, "sub_domains": len(content.sub_domains)}
        case IbFabric():
            return _ib(content)
        case KubernetesNodes():
            found: dict[str, Any] = {"gpu_nodes": len(content.nodes), "gpus": sum(node.gpus for node in content.nodes)}
            found |= {"products": content.products, "labelled_by": content.labelled_by}
            domains = {name: len(nodes) for name, nodes in content.domains.items()}
            return found | {"nodes_by_domain": domains} | (_tree(content.tree) if content.tree else {})
        case NcclRun():
            return _run(content)
        case NcclDebugLog():
            return _debug(content)


def flat(found: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Return facts as lines of text, by dotted name; quantities keep the unit of their name.

    >>> flat({"gpus": 8, "near_nics": {"GPU0": ("NIC2", "NIC3")}, "switched": True})
    {'gpus': '8', 'near_nics.GPU0': 'NIC2, NIC3', 'switched': 'yes'}
    """
    lines: dict[str, str] = {}
    for key, value in found.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping):
            lines |= flat(value, f"{name}.")
        elif isinstance(value, list | tuple) and any(isinstance(one, Mapping) for one in value):
            for one in value:
                lines |= flat(
                    {inner: entry for inner, entry in one.items() if inner != "name"}, f"{name}.{one['name']}."
                )
        else:
            lines[name] = _text(value, str(key))
    return lines


def _text(value: Any, key: str) -> str:
    if value is None:
        return "not in the file"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list | tuple):
        joiner = "; " if any(isinstance(one, list | tuple) for one in value) else ", "
        return joiner.join(_text(one, key) for one in value) or "none"
    dimension = next((unit for unit in ("bytes_per_second", "seconds", "bytes") if key.endswith(unit)), None)
    if dimension and isinstance(value, int | float):
        return f"{value:,} B" if isinstance(value, int) else format_quantity(value, dimension, digits=4)
    return str(value)


def _matrix(matrix: TopologyMatrix) -> dict[str, Any]:
    return {
        "tool": matrix.tool,
        "gpus": len(matrix.gpus),
        "link": matrix.link,
        "nvlinks_per_gpu": sorted(set(matrix.nvlinks.values())),
        "switched": matrix.switched,
        "islands": matrix.islands,
        "nics": len(matrix.nics),
        "rails": matrix.rails,
        "near_nics": {gpu: nics for gpu, nics in matrix.near_nics.items() if nics},
        "numa": {gpu: nodes[0] for gpu, nodes in matrix.numa.items() if nodes},
        "pairs_without_p2p": matrix.no_p2p,
    }


def _xml(topology: NcclTopology) -> dict[str, Any]:
    return {
        "gpus": len(topology.gpus),
        "gpu": next(iter({gpu.product for gpu in topology.gpus})),
        "numa_nodes": topology.numa_nodes,
        "cpu": topology.cpu,
        "nvlinks_per_gpu": sorted({sum(gpu.nvlinks.values()) for gpu in topology.gpus}),
        "xgmi_links_per_gpu": sorted({sum(gpu.xgmi.values()) for gpu in topology.gpus}),
        "island_sizes": [len(island) for island in topology.islands],
        "ports": len(topology.ports),
        "cards": len(topology.cards),
        "node_bytes_per_second": topology.node_bytes_per_second,
        "near_ports": {
            gpu.bus_id: [port.name or port.bus_id for port in topology.near_ports(gpu)] for gpu in topology.gpus_by_bus
        },
    }


def _slurm(topology: SlurmTopology) -> dict[str, Any]:
    found: dict[str, Any] = {"plugin": topology.plugin, "default": topology.default, "nodes": len(topology.nodes)}
    if topology.tree is not None:
        return found | _tree(topology.tree)
    groups = {name: len(nodes) for name, nodes in topology.groups.items()}
    return found | {"groups": groups, "block_sizes": topology.block_sizes, "dims": topology.dims}


def _tree(tree: SwitchTree) -> dict[str, Any]:
    return {
        "nodes": len(tree.nodes),
        "switches": len(tree.switches),
        "leaves": len(tree.leaves),
        "roots": {root: len(tree.nodes_below(root)) for root in tree.roots},
        "tiers": tree.tiers(tree.roots[0]),
    }


def _ib(fabric: IbFabric) -> dict[str, Any]:
    rates = sorted({one.bytes_per_second for one in fabric.adapters if one.bytes_per_second is not None})
    return {
        "hosts": len(fabric.hosts),
        "switches": len(fabric.switches),
        "cables_between_switches": len(fabric.links),
        "rails": fabric.rails,
        "port_bytes_per_second": rates,
        "tiers": fabric.tiers(),
    }


def _run(run: NcclRun) -> dict[str, Any]:
    return {
        "collective": run.collective,
        "ranks": run.ranks,
        "ranks_low": run.ranks_low,
        "ranks_high": run.ranks_high,
        "hosts": run.hosts,
        "gpu": run.product,
        "rows": len(run.rows),
        "latency_seconds": run.latency_seconds,
        "peak_busbw_bytes_per_second": run.peak.busbw,
        "peak_algbw_bytes_per_second": run.peak.algbw,
        "peak_size_bytes": run.peak.size_bytes,
        "half_peak_size_bytes": run.first_size_at(0.5),
        "most_of_peak_size_bytes": run.first_size_at(0.9),
        "outliers_bytes": [row.size_bytes for row in run.outliers],
    }


def _debug(log: NcclDebugLog) -> dict[str, Any]:
    return {
        "version": log.version,
        "hosts": len(log.hosts),
        "ranks": log.ranks,
        "channels": log.channels,
        "rings": {channel: list(ring) for channel, ring in sorted(log.rings.items())},
        "network": log.network,
        "nics": log.nics,
        "used_nics": log.used_nics,
        "nics_by_gpu": log.gpu_nics,
        "gpudirect_rdma": log.gdr,
        "nvls": log.nvls,
        "sends_through_another_gpu": len(log.pxn_hops),
        "rail_crossings": len(log.crossings),
        "settings": log.settings,
    }
