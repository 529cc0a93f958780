"""Small and large clusters of every kind of fabric, for tests of routes and flows."""

from topologies.cluster import Cluster, Fabric, Pool, Tier
from topologies.hardware import Gpu, Nic, Node, ScaleUp

LATENCY = 1e-6


def node(gpus=8, nics=None, *, nic_rate=50e9, scale_up=400e9, kind="nvswitch", domain=None):
    nics = gpus if nics is None else nics
    gpu = Gpu(
        name="test GPU",
        vendor="none",
        architecture="hopper",
        peak_flop_per_second={"bf16": 1e15},
        memory_bytes=80e9,
        usable_memory_bytes=79e9,
        memory_bandwidth_bytes_per_second=3e12,
        power_watts=700,
    )
    return Node(
        name="test node",
        gpu=gpu,
        gpus_per_node=gpus,
        scale_up=ScaleUp(
            kind=kind,
            bandwidth_bytes_per_second=scale_up,
            bus_bandwidth_bytes_per_second=scale_up,
            latency_seconds=LATENCY,
            domain_size=domain or gpus,
        ),
        nic=Nic(name="test NIC", bandwidth_bytes_per_second=nic_rate) if nics else None,
        nics_per_node=nics,
    )


def cluster(nodes, *sizes, kind="rail-optimized", of=None, over=(), ports=64, rails=None, **fabric):
    of = of or node()
    over = (*over, *[1.0] * len(sizes))
    tiers = tuple(
        Tier(name=name, nodes=size, oversubscription=factor, latency_seconds=LATENCY * (level + 1))
        for level, (name, size, factor) in enumerate(zip(("leaf", "spine", "core"), sizes, over, strict=False))
    )
    if rails is None:
        rails = 1 if kind == "fat-tree" else of.nics_per_node
    described = (
        Fabric(kind=kind, rails=rails, tiers=tiers, switch_ports=ports, **fabric) if sizes else Fabric(kind="none")
    )
    return Cluster(name="test", pools=(Pool(node=of, num_nodes=nodes),), fabric=described)


def rail_16k(**fabric):
    """16,384 GPUs under three tiers: 32 nodes a scalable unit, 4 units a pod, 16 pods."""
    return cluster(2048, 32, 128, 2048, **fabric)


SMALL = {
    "rail, one leaf": cluster(4, 4, ports=8),
    "rail, two tiers": cluster(16, 4, 16, ports=16),
    "rail, partly filled": cluster(13, 4, 32, ports=16),
    "rail, three tiers": cluster(16, 2, 4, 64, ports=8),
    "rail, tapered": cluster(16, 4, 8, 64, ports=16, over=(1, 2, 2)),
    "rail-only": cluster(16, 4, 16, kind="rail-only", ports=8),
    "rail-only, three tiers": cluster(16, 2, 4, 64, kind="rail-only", ports=4),
    "dual-plane": cluster(8, 4, 16, kind="dual-plane", ports=16),
    "fat tree": cluster(16, 2, 8, 64, kind="fat-tree", ports=32, over=(1, 1, 4)),
    "half the NICs": cluster(8, 4, 16, of=node(nics=4), ports=16),
    "twice the NICs": cluster(8, 4, 16, of=node(nics=16), ports=16),
    "NVL16 of trays": cluster(16, 4, 16, of=node(gpus=4, domain=16), ports=16),
    "mesh": cluster(8, 4, 16, of=node(kind="infinity-fabric"), ports=16),
    "two islands": cluster(8, 4, 16, of=node(domain=4), ports=16),
    "lone GPUs": cluster(8, 4, 16, of=node(gpus=1, scale_up=0, kind="none"), ports=16),
}
