"""From the hardware that a published row names to a Cluster."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from topologies.catalog import find
from topologies.cluster import Cluster, Fabric, Pool, Tier
from topologies.errors import InputError
from topologies.hardware import Gpu, Nic, Node

NODES = {
    "A100": "dgx-a100",
    "A800": "hgx-a800",
    "H100": "dgx-h100",
    "H200": "dgx-h200",
    "H800": "dgx-h800",
    "H20": "hgx-h20",
    "H100-NVL": "dgx-h100",
    "H200-NVL": "dgx-h200",
    "GH200": "dgx-h100",
    "B200": "dgx-b200",
    "B300": "dgx-b300",
    "GB200": "gb200-nvl72-tray",
    "GB300": "gb300-nvl72-tray",
    "MI300X": "mi300x-node",
    "MI325X": "mi325x-node",
    "MI350X": "mi355x-node",
    "MI355X": "mi355x-node",
}
"""Catalog node that carries each GPU."""

GPUS = {"MI350X": "mi350x", "GH200": "gh200"}
"""Catalog GPU where the node above carries another one."""

VARIANTS: tuple[tuple[str, str, dict[str, Any]], ...] = (
    (
        "H100",
        "hbm2e",
        {"memory_bandwidth_bytes_per_second": 2.4e12, "power_limit_watts": 500.0},
    ),
    ("B200", "power limited", {"power_limit_watts": 750.0}),
    (
        "H100-NVL",
        "",
        {
            "peak_flop_per_second": {"fp16": 835e12, "bf16": 835e12, "fp8": 1671e12},
            "memory_bandwidth_bytes_per_second": 3.9e12,
            "power_watts": 400.0,
        },
    ),
    (
        "H200-NVL",
        "",
        {
            "peak_flop_per_second": {"fp16": 835e12, "bf16": 835e12, "fp8": 1671e12},
            "power_watts": 600.0,
        },
    ),
)
"""GPU, words in its SKU, and how it differs from the catalog. H100 with HBM2e: torchtitan's performance notes
(2.4 TB/s, 500 W). B200 with a limit that is not told: 750 W of 1,000 assumed. NVL cards: NVIDIA data sheets."""

SCALE_UP: dict[str, dict[str, Any]] = {
    "H100-NVL": {"bus_bandwidth_bytes_per_second": 220e9, "bandwidth_bytes_per_second": 300e9, "domain_size": 2},
    "H200-NVL": {"bus_bandwidth_bytes_per_second": 300e9, "bandwidth_bytes_per_second": 450e9, "domain_size": 4},
}
"""NVLink bridges of PCIe cards (NVIDIA data sheets; bus bandwidth: the share of H100 SXM)."""

DOMAINS = {
    "jean zay": (4, "NVLink domains of 4 GPUs (BLOOM's model card: 4 NVLinks between GPUs, as on four-GPU A100 boards)")
}
"""Systems whose NVLink domain is known better than the row's product sheet."""

LEAF = Tier(name="leaf", nodes=32, latency_seconds=0.3e-6)
SPINE = Tier(name="spine", nodes=1024, latency_seconds=1.2e-6)


def cluster_of(hardware: Mapping[str, Any]) -> tuple[Cluster, list[str]]:
    """Build the cluster of a row, and say what was assumed.

    Raises:
        InputError: the GPU is not known, or the number of GPUs is missing.
    """
    name = hardware.get("gpu")
    if name not in NODES:
        raise InputError(
            "the GPU is not stated" if name is None else f"the GPU {name!r} is not in the catalog", key="hardware.gpu"
        )
    gpus = hardware.get("gpus")
    if not isinstance(gpus, int) or isinstance(gpus, bool) or gpus < 1:
        raise InputError("the number of GPUs is not stated", key="hardware.gpus")
    assumed = []
    nic = hardware.get("nic_gbps_per_gpu")
    node = _node(name, str(hardware.get("sku") or "").lower())
    per_node = hardware.get("gpus_per_node") or node.gpus_per_node
    domain = hardware.get("nvlink_domain") or SCALE_UP.get(name, {}).get("domain_size") or node.scale_up.domain_size
    known = next((value for words, value in DOMAINS.items() if words in str(hardware.get("system")).lower()), None)
    if known is not None:
        domain = known[0]
        assumed.append(known[1])
    if nic is None and gpus > max(domain, per_node):
        rate = node.network_bytes_per_second_per_gpu * 8 / 1e9
        assumed.append(f"NIC rate {rate:.0f} Gbit/s per GPU (not stated; {node.name})")
    if domain == 72 and gpus > 72 and gpus % 72:
        domain = 64
        assumed.append(f"64 GPUs of each NVLink domain of 72 (not stated; {gpus} is no multiple of 72)")
    return _cluster(node.name, name, node, int(gpus), int(per_node), int(domain), nic), assumed


@lru_cache(maxsize=64)
def _node(name: str, sku: str) -> Node:
    node = find(NODES[name])
    assert isinstance(node, Node)
    gpu = node.gpu
    if name in GPUS or (name == "A100" and "40g" in sku):
        other = find(GPUS.get(name, "a100-40gb"))
        assert isinstance(other, Gpu)
        gpu = other
    for gpu_name, words, differences in VARIANTS:
        if gpu_name == name and words in sku:
            gpu = gpu.model_copy(update={**differences, "name": f"{gpu.name} ({words or name})"})
    return node.model_copy(update={"gpu": gpu})


def _cluster(title: str, gpu: str, node: Node, gpus: int, per_node: int, domain: int, nic: float | None) -> Cluster:
    differences = {**SCALE_UP.get(gpu, {}), "domain_size": domain}
    update: dict[str, Any] = {
        "gpus_per_node": per_node,
        "scale_up": node.scale_up.model_copy(update=differences),
    }
    rate = node.network_bytes_per_second_per_gpu if nic is None else nic * 1e9 / 8
    base = node.nic
    update["nic"] = Nic(
        name=f"{rate * 8 / 1e9:g} Gbit/s",
        bandwidth_bytes_per_second=rate,
        latency_seconds=base.latency_seconds if base else 0.0,
    )
    update["nics_per_node"] = per_node
    fabric = Fabric(kind="fat-tree", efficiency=0.95, tiers=(LEAF, SPINE))
    nodes = -(-gpus // per_node)
    return Cluster(
        name=f"{gpus} x {node.gpu.name} in {title}",
        pools=(Pool(node=node.model_copy(update=update), num_nodes=nodes),),
        fabric=fabric,
    )
