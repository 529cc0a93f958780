"""Every directed link of a cluster as a number, by arithmetic: its capacity, its ends, and what a failure leaves of it.

Blocks of ids stand one after the other: the scale-up links of each GPU, the NIC ports, the uplinks of leaves and of
spines, the way to storage; each block exists once upwards and once downwards. A fabric that spreads packets over all
equal paths is ``bundled``: the uplinks of a leaf are one link of their joint capacity, the core uplinks of a pod
another. That is exact for even spreading. Otherwise each cable is a link and ``routes`` picks one by a hash.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from topologies.cluster import Cluster
from topologies.errors import InputError
from topologies.fabric import Wiring, wiring

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

MESHES = ("infinity-fabric", "nvlink-mesh")
"""Scale-up networks of one link per pair of GPUs; in the others a GPU has one link into a switch and one out of it."""

BLOCKS = (
    "scale_up_out",
    "scale_up_in",
    "nic_up",
    "nic_down",
    "leaf_up",
    "leaf_down",
    "spine_up",
    "spine_down",
    "storage_up",
    "storage_down",
    "store_write",
    "store_read",
)
"""Order of the blocks of ids. A mesh has its pairs under ``scale_up_out`` and nothing under ``scale_up_in``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkMap:
    """The directed links of a cluster.

    ``capacities_bytes_per_second`` is what large transfers reach: the measured bus bandwidth inside a scale-up domain,
    line rate times the fabric's efficiency outside. A dead link has capacity 0.
    """

    cluster: Cluster
    wires: Wiring | None
    bundled: bool
    first: dict[str, int]
    """First id of each block."""
    capacities_bytes_per_second: Floats
    domain: Ints
    """Scale-up domain of each GPU."""
    place: Ints
    """Position of each GPU in its domain."""
    lanes: int
    """Ports over which the traffic of one GPU is spread: its NICs times the planes."""

    @property
    def num_links(self) -> int:
        """Directed links."""
        return len(self.capacities_bytes_per_second)

    @property
    def gpus_per_node(self) -> int:
        """GPUs of a node, equal in all pools."""
        return self.cluster.node.gpus_per_node

    @property
    def planes(self) -> int:
        """Ports of a NIC."""
        return 2 if self.cluster.fabric.kind == "dual-plane" else 1

    @property
    def mesh(self) -> bool:
        """One scale-up link per pair of GPUs."""
        return self.cluster.scale_up.kind in MESHES

    @property
    def uplinks(self) -> int:
        """Ids per leaf: its uplinks, or one where they are bundled."""
        return 0 if self.wires is None or not self.wires.uplinks_per_leaf else self._or_one(self.wires.uplinks_per_leaf)

    @property
    def spines(self) -> int:
        """Spines per pod that have ids of their own."""
        return 0 if self.wires is None else self._or_one(self.wires.spines_per_pod)

    @property
    def spine_uplinks(self) -> int:
        """Ids per spine: its uplinks, or one where those of the pod are bundled."""
        far = self.wires is not None and self.wires.uplinks_per_spine > 0
        return self._or_one(self.wires.uplinks_per_spine) if self.wires is not None and far else 0

    def _or_one(self, count: int) -> int:
        return min(count, 1) if self.bundled else count

    def nic_of(self, gpus: Ints, lane: int) -> tuple[Ints, int]:
        """Return the index in its node of the NIC that serves each GPU on a lane, and the plane."""
        nics, per_node = self.cluster.node.nics_per_node, self.gpus_per_node
        nic = gpus % per_node * max(nics // per_node, 1) if nics >= per_node else gpus % per_node * nics // per_node
        return nic + lane // self.planes, lane % self.planes

    def gpu_near(self, nodes: Ints, nic: Ints) -> Ints:
        """Return the first GPU of a node that a NIC serves."""
        nics, per_node = self.cluster.node.nics_per_node, self.gpus_per_node
        return nodes * per_node + (nic // (nics // per_node) if nics >= per_node else nic * (per_node // nics))

    def leaf_of(self, nodes: Ints, nic: Ints, plane: int) -> Ints:
        """Return the number of the leaf that a NIC port leads to."""
        assert self.wires is not None
        kind, wires = self.cluster.fabric.kind, self.wires
        rail = nic // wires.cables_per_leaf if kind != "fat-tree" else nic * 0
        network = rail if kind == "rail-only" else plane
        leaf = 0 if kind in ("rail-only", "fat-tree") else rail
        group = nodes // self.cluster.fabric.tiers[0].nodes
        return (network * wires.groups + group) * wires.leaves_per_group + leaf

    def pod_of(self, leaves: Ints) -> Ints:
        """Return the pod of each leaf, numbered over all networks."""
        assert self.wires is not None
        group = leaves // self.wires.leaves_per_group
        return group // self.wires.groups * self.wires.pods + group % self.wires.groups // self.wires.groups_per_pod

    def network_of(self, leaves: Ints) -> Ints:
        """Return the network (rail or plane, where these are disjoint) of each leaf."""
        assert self.wires is not None
        return leaves // (self.wires.groups * self.wires.leaves_per_group)

    def block(self, link: int) -> tuple[str, int]:
        """Return the block of a link and its position there."""
        if not 0 <= link < self.num_links:
            raise ValueError(f"link {link} is not one of the {self.num_links} links")
        name = max((name for name in BLOCKS if self.first[name] <= link), key=lambda name: self._order(name))
        return name, link - self.first[name]

    def _order(self, name: str) -> tuple[int, int]:
        return self.first[name], BLOCKS.index(name)

    def ends(self, link: int) -> tuple[str, str]:
        """Return the names of the two ends of a link, as ``topologies.fabric.graph`` calls them."""
        name, index = self.block(link)
        lower, upper = self._cable(name, index)
        return (lower, upper) if name.rpartition("_")[2] in ("up", "out", "write") else (upper, lower)

    def name(self, link: int) -> str:
        """Say which link it is."""
        source, target = self.ends(link)
        return f"{source} to {target}"

    def _cable(self, name: str, index: int) -> tuple[str, str]:
        if name.startswith("scale_up"):
            if not self.mesh:
                return f"gpu{index}", f"scale-up{self.domain[index]}"
            gpu, place = divmod(index, self.cluster.scale_up.domain_size)
            return f"gpu{gpu}", f"gpu{gpu - int(self.place[gpu]) + place}"
        if name.startswith("nic"):
            port, plane = divmod(index, self.planes)
            node, nic = divmod(port, self.cluster.node.nics_per_node)
            leaf = int(self.leaf_of(np.array([node]), np.array([nic]), plane)[0])
            return f"node{node}.nic{nic}", self._leaf_name(leaf)
        if name.startswith("leaf"):
            leaf, uplink = divmod(index, self.uplinks)
            pod = int(self.pod_of(np.array([leaf]))[0])
            return self._leaf_name(leaf), self._spine_name(pod, uplink % self.spines)
        if name.startswith("spine"):
            assert self.wires is not None
            spine, uplink = divmod(index, self.spine_uplinks)
            pod, spine = divmod(spine, self.spines)
            if self.bundled:
                return self._spine_name(pod, spine), f"cores{pod // self.wires.pods}"
            core = f"core{pod // self.wires.pods}.{spine}.{uplink % self.wires.cores_per_group}"
            return self._spine_name(pod, spine), core
        if name.startswith("storage"):
            return (f"node{index}" if index < self.cluster.num_nodes else "storage network"), "storage network"
        return "network", f"storage {index}: {self.cluster.storage[index].name}"

    def _leaf_name(self, leaf: int) -> str:
        assert self.wires is not None
        group, position = divmod(leaf, self.wires.leaves_per_group)
        return f"leaf{group // self.wires.groups}.{group % self.wires.groups}.{position}"

    def _spine_name(self, pod: int, spine: int) -> str:
        assert self.wires is not None
        where = f"{pod // self.wires.pods}.{pod % self.wires.pods}"
        return f"spines{where}" if self.bundled else f"spine{where}.{spine}"

    def degraded(self, links: Sequence[int] | Ints, factor: float) -> LinkMap:
        """Return the map with the capacity of some links multiplied by ``factor``; 0 is a dead link."""
        if not 0 <= factor <= 1:
            raise ValueError(f"a link keeps between 0 and 1 of its capacity, not {factor}")
        capacities = self.capacities_bytes_per_second.copy()
        capacities[np.asarray(links, np.int64)] *= factor
        return replace(self, capacities_bytes_per_second=capacities)


def link_map(cluster: Cluster, *, bundled: bool | None = None) -> LinkMap:
    """Number the links of a cluster.

    Args:
        cluster: what is built.
        bundled: uplinks as bundles; None: as the fabric routes (adaptive: bundled, ecmp: cable by cable).

    Raises:
        InputError: the pools differ in GPUs or NICs a node, or NICs and GPUs do not divide each other.
    """
    wires = wiring(cluster)
    _check(cluster)
    if bundled is None:
        bundled = cluster.fabric.routing == "adaptive"
    per_node = cluster.node.gpus_per_node
    domain, place = _domains(cluster)
    planes = 2 if cluster.fabric.kind == "dual-plane" else 1
    shell = LinkMap(
        cluster=cluster,
        wires=wires,
        bundled=bundled,
        first={},
        capacities_bytes_per_second=np.zeros(0),
        domain=domain,
        place=place,
        lanes=planes * max(1, cluster.node.nics_per_node // per_node),
    )
    sizes = _capacities(shell)
    ends = np.cumsum([0, *(len(sizes[name]) for name in BLOCKS)])
    return replace(
        shell,
        first=dict(zip(BLOCKS, ends.tolist(), strict=False)),
        capacities_bytes_per_second=np.concatenate([sizes[name] for name in BLOCKS]),
    )


def _check(cluster: Cluster) -> None:
    nodes = [pool.node for pool in cluster.pools]
    for what in ("gpus_per_node", "nics_per_node"):
        if len({getattr(node, what) for node in nodes}) > 1:
            raise InputError(
                f"the pools of {cluster.name} differ in {what}, and links are numbered by it",
                hint="describe pools of equal nodes, or one cluster per pool",
            )
    gpus, nics = cluster.node.gpus_per_node, cluster.node.nics_per_node
    if nics and gpus % nics and nics % gpus:
        raise InputError(
            f"{nics} NICs of {cluster.node.name} cannot be shared evenly by {gpus} GPUs",
            hint="give the NICs of the training fabric only",
        )


def _domains(cluster: Cluster) -> tuple[Ints, Ints]:
    domains, places, before = [], [], 0
    for pool in cluster.pools:
        gpus = np.arange(pool.num_nodes * pool.node.gpus_per_node)
        size = max(1, pool.node.scale_up.domain_size)
        domains.append(before + gpus // size)
        places.append(gpus % size)
        before += int(domains[-1][-1]) + 1
    return np.concatenate(domains), np.concatenate(places)


def _capacities(links: LinkMap) -> dict[str, Floats]:
    """Return the capacities of each block."""
    cluster, wires = links.cluster, links.wires
    scale_up = np.concatenate(
        [
            np.full(pool.num_nodes * pool.node.gpus_per_node, pool.node.scale_up.bus_bandwidth_bytes_per_second)
            for pool in cluster.pools
        ]
    )
    sizes: dict[str, Floats] = dict.fromkeys(BLOCKS, np.zeros(0))
    size = cluster.scale_up.domain_size
    if links.mesh and size > 1:
        sizes["scale_up_out"] = np.repeat(scale_up / (size - 1), size)
    elif cluster.scale_up.kind != "none":
        sizes["scale_up_out"] = sizes["scale_up_in"] = scale_up
    if wires is not None:
        share = cluster.fabric.efficiency
        ports = np.concatenate(
            [
                np.full(pool.num_nodes * pool.node.nics_per_node * links.planes, _rate(pool.node.nic) / links.planes)
                for pool in cluster.pools
            ]
        )
        sizes["nic_up"] = sizes["nic_down"] = ports * share
        cable = wires.link_bytes_per_second * share
        leaves = wires.networks * wires.groups * wires.leaves_per_group
        pods = wires.networks * wires.pods
        bundle = wires.uplinks_per_leaf if links.bundled else 1
        sizes["leaf_up"] = sizes["leaf_down"] = np.full(leaves * links.uplinks, cable * bundle)
        bundle = wires.uplinks_per_spine * wires.spines_per_pod if links.bundled else 1
        sizes["spine_up"] = sizes["spine_down"] = np.full(pods * links.spines * links.spine_uplinks, cable * bundle)
    if cluster.storage_network is not None:
        network, nodes = cluster.storage_network, cluster.num_nodes
        rates = np.full(nodes + 1, network.bandwidth_bytes_per_second)
        rates[nodes] *= nodes / network.oversubscription
        sizes["storage_up"] = sizes["storage_down"] = rates
    sizes["store_write"] = np.array([store.write_bytes_per_second for store in cluster.storage])
    sizes["store_read"] = np.array([store.read_bytes_per_second for store in cluster.storage])
    return sizes


def _rate(nic: object) -> float:
    rate = getattr(nic, "bandwidth_bytes_per_second", 0.0)
    return float(rate)
