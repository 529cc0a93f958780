"""The way of traffic through a cluster, by arithmetic: no search, hundreds of thousands of routes in milliseconds.

A pair of GPUs of one scale-up domain uses it. Otherwise the sender hands its data over the scale-up network to the GPU
whose NIC stands on the receiver's rail (what NCCL calls PXN), so that it needs no spine to change rails; from there it
goes NIC, leaf, and as far up as the two leaves are apart. Where the fabric hashes (ECMP), the uplinks follow from a
seeded hash of the pair and the label of the connection, and flows on dead cables are hashed again while all others
stay (resilient hashing).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from topologies.errors import InputError
from topologies.link_map import Floats, Ints, LinkMap

ATTEMPTS = 64
"""Hashes that are tried for a flow on a dead cable before the live cables are searched one by one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Routes:
    """The links of flow k are ``links[starts[k]:starts[k + 1]]``; one byte of it puts ``loads`` bytes on each."""

    starts: Ints
    links: Ints
    loads: Floats

    @property
    def rows(self) -> Ints:
        """The flow of each entry."""
        return np.repeat(np.arange(len(self.starts) - 1), np.diff(self.starts))


def routes(
    network: LinkMap,
    sources: ArrayLike,
    targets: ArrayLike,
    *,
    labels: ArrayLike = 0,
    seed: int = 0,
    relay: bool = True,
) -> Routes:
    """Route flows between GPUs.

    A flow is spread evenly over the lanes of its GPUs (NICs, planes; a lane without a live port is left out) and over
    the queue pairs of the fabric where it hashes.

    Args:
        network: the links.
        sources: GPU numbers; sources equal to their targets use no link.
        targets: GPU numbers.
        labels: tells apart connections between the same GPUs (a channel) for the hash.
        seed: of the hash.
        relay: change rails over the scale-up network (PXN) instead of over the spine.

    Raises:
        InputError: two GPUs have no way to each other.
    """
    source, target, label = (
        np.ascontiguousarray(values, np.int64) for values in np.broadcast_arrays(sources, targets, labels)
    )
    same = network.domain[source] == network.domain[target]
    inside = _inside(network, source, target, same & (source != target))
    far = np.flatnonzero(~same)
    if not len(far):
        return _packed([(inside, np.ones(len(source)))])
    if network.wires is None:
        raise InputError(
            f"GPU {source[far[0]]} and GPU {target[far[0]]} are in different domains and {network.cluster.name} has no "
            "fabric",
            hint="describe one, or use fewer GPUs",
        )
    fabric = network.cluster.fabric
    pairs = fabric.queue_pairs if not network.bundled else 1
    alive = _alive_lanes(network, source[far], target[far], relay)
    parts = [(inside, np.ones(len(source)))]
    for lane in range(network.lanes):
        on = far[alive[:, lane] > 0]
        share = np.zeros(len(source))
        share[far] = alive[:, lane] / pairs
        for pair in range(pairs):
            paths = np.full((len(source), 8), -1, np.int64)
            hashed = label[on] * 64 + pair
            paths[on] = _outside(network, source[on], target[on], lane, hashed, seed, relay)
            parts.append((paths, share))
    return _packed(parts)


def storage_routes(network: LinkMap, nodes: ArrayLike, store: int, *, write: bool, seed: int = 0) -> Routes:
    """Route one flow per node to (``write``) or from a storage tier of the cluster.

    Over the storage network where there is one; else over the node's NICs and up to the top of the training fabric,
    where the storage servers are taken to stand. A tier that every node has of its own uses no link.
    """
    node = np.atleast_1d(np.asarray(nodes, np.int64))
    cluster, first = network.cluster, network.first
    way = "up" if write else "down"
    if cluster.storage[store].per_node:
        return _packed([(np.full((len(node), 1), -1), np.ones(len(node)))])
    end = np.full(len(node), first["store_write" if write else "store_read"] + store)
    if cluster.storage_network is not None:
        block = first[f"storage_{way}"]
        return _packed([(np.stack([block + node, np.full(len(node), block + cluster.num_nodes), end], axis=1), 1.0)])
    wires = network.wires
    if wires is None:
        return _packed([(end[:, None], np.ones(len(node)))])
    parts = []
    ports = cluster.node.nics_per_node * network.planes
    for port in range(ports):
        nic, plane = np.full(len(node), port // network.planes), port % network.planes
        columns = [first[f"nic_{way}"] + (node * cluster.node.nics_per_node + nic) * network.planes + plane]
        leaf = network.leaf_of(node, nic, plane)
        key = hash64(hash64(node * 64 + port) + np.uint64(seed))
        if network.uplinks:
            uplink = (key % np.uint64(network.uplinks)).astype(np.int64)
            columns.append(first[f"leaf_{way}"] + leaf * network.uplinks + uplink)
            if network.spine_uplinks:
                spine = network.pod_of(leaf) * network.spines + uplink % network.spines
                core = (hash64(key) % np.uint64(network.spine_uplinks)).astype(np.int64)
                columns.append(first[f"spine_{way}"] + spine * network.spine_uplinks + core)
        parts.append((np.stack([*columns, end], axis=1), 1.0 / ports))
    return _packed(parts)


def per_lane(flows: Routes, size_bytes: Floats) -> tuple[Routes, Floats]:
    """Return flows that are spread over lanes by the part on their thinnest lane, which is what shares links fairly."""
    thinnest = np.minimum.reduceat(flows.loads, flows.starts[:-1])
    loads = flows.loads / thinnest[flows.rows]
    return Routes(starts=flows.starts, links=flows.links, loads=loads), size_bytes * thinnest


def _packed(parts: list[tuple[Ints, Any]]) -> Routes:
    """Join padded paths (-1: no link) and their shares, flow by flow."""
    paths = np.concatenate([path for path, _ in parts], axis=1)
    shares = np.concatenate(
        [np.broadcast_to(np.broadcast_to(share, len(path))[:, None], path.shape) for path, share in parts], axis=1
    )
    used = (paths >= 0) & (shares > 0)
    starts = np.concatenate([[0], np.cumsum(used.sum(axis=1))]).astype(np.int64)
    return Routes(starts=starts, links=paths[used], loads=shares[used].astype(np.float64))


def _inside(network: LinkMap, source: Ints, target: Ints, moves: NDArray[np.bool_]) -> Ints:
    """Links of the scale-up network between GPUs of one domain; -1 where nothing moves."""
    first = network.first
    paths = np.full((len(source), 2), -1, np.int64)
    if network.cluster.scale_up.kind == "none":
        if moves.any():
            raise InputError(f"the GPUs of {network.cluster.node.name} have no scale-up network between them")
        return paths
    if network.mesh:
        pair = first["scale_up_out"] + source * network.cluster.scale_up.domain_size + network.place[target]
        paths[:, 0] = np.where(moves, pair, -1)
        return paths
    paths[:, 0] = np.where(moves, first["scale_up_out"] + source, -1)
    paths[:, 1] = np.where(moves, first["scale_up_in"] + target, -1)
    return paths


def _ends(network: LinkMap, source: Ints, target: Ints, lane: int, relay: bool) -> tuple[Ints, Ints, Ints, int]:
    """Return the GPU that sends over the fabric, the NICs at both ends, and the plane, for one lane."""
    into, plane = network.nic_of(target, lane)
    own, _ = network.nic_of(source, lane)
    if not relay or network.cluster.scale_up.kind == "none":
        return source, own, into, plane
    node = source // network.gpus_per_node
    middle = network.gpu_near(node, into)
    near = (own == into) | (network.domain[middle] != network.domain[source])
    return np.where(near, source, middle), np.where(near, own, into), into, plane


def _ports(network: LinkMap, gpus: Ints, nic: Ints, plane: int) -> Ints:
    node = gpus // network.gpus_per_node
    return (node * network.cluster.node.nics_per_node + nic) * network.planes + plane


def _alive_lanes(network: LinkMap, source: Ints, target: Ints, relay: bool) -> Floats:
    """Return the share of each lane in each flow: even over the lanes whose two ports and leaves are alive."""
    capacities, first = network.capacities_bytes_per_second, network.first
    alive = np.zeros((len(source), network.lanes))
    for lane in range(network.lanes):
        sender, nic, into, plane = _ends(network, source, target, lane, relay)
        up = capacities[first["nic_up"] + _ports(network, sender, nic, plane)]
        down = capacities[first["nic_down"] + _ports(network, target, into, plane)]
        alive[:, lane] = (up > 0) & (down > 0)
    lost = np.flatnonzero(alive.sum(axis=1) == 0)
    if len(lost):
        raise InputError(
            f"GPU {source[lost[0]]} has no live NIC towards GPU {target[lost[0]]} ({len(lost)} connections are cut)",
            hint="leave those nodes out, or give up the rail",
        )
    return np.asarray(alive / alive.sum(axis=1, keepdims=True))


def _outside(
    network: LinkMap, source: Ints, target: Ints, lane: int, label: Ints, seed: int, relay: bool
) -> NDArray[np.int64]:
    """Links of flows that cross the fabric on one lane: (flows, 8), -1 where a stage is not used."""
    first = network.first
    sender, nic, into, plane = _ends(network, source, target, lane, relay)
    paths = np.full((len(source), 8), -1, np.int64)
    paths[:, :2] = _inside(network, source, sender, sender != source)
    paths[:, 2] = first["nic_up"] + _ports(network, sender, nic, plane)
    paths[:, 7] = first["nic_down"] + _ports(network, target, into, plane)
    low = network.leaf_of(sender // network.gpus_per_node, nic, plane)
    high = network.leaf_of(target // network.gpus_per_node, into, plane)
    climbs = low != high
    if not climbs.any():
        return paths
    cut = climbs & ((network.network_of(low) != network.network_of(high)) | (network.uplinks == 0))
    if cut.any():
        k = int(np.flatnonzero(cut)[0])
        raise InputError(
            f"GPU {source[k]} and GPU {target[k]} are on rails that do not meet in {network.cluster.name}",
            hint="let the sender relay over its scale-up network, or describe a level of spines",
        )
    key = hash64(hash64(source * 1000003 + target) + hash64(label + 7919 * seed))
    middle = _climb(network, low, high, climbs, key)
    _hash_again(network, low, high, climbs, key, middle)
    paths[:, 3:7] = middle
    return paths


def _climb(network: LinkMap, low: Ints, high: Ints, climbs: NDArray[np.bool_], key: Any) -> Ints:
    """Links above the leaves for one hash of each flow: leaf up, spine up, spine down, leaf down."""
    assert network.wires is not None
    first, uplinks, spines = network.first, network.uplinks, network.spines
    middle = np.full((len(low), 4), -1, np.int64)
    up = (key % np.uint64(uplinks)).astype(np.int64)
    spine = up % spines
    parallel = uplinks // spines
    down = spine + spines * (hash64(key + np.uint64(1)) % np.uint64(parallel)).astype(np.int64)
    middle[:, 0] = np.where(climbs, first["leaf_up"] + low * uplinks + up, -1)
    middle[:, 3] = np.where(climbs, first["leaf_down"] + high * uplinks + down, -1)
    here, there = network.pod_of(low), network.pod_of(high)
    far = climbs & (here != there)
    if far.any():
        above = network.spine_uplinks
        cores = 1 if network.bundled else network.wires.cores_per_group
        leave = (hash64(key + np.uint64(2)) % np.uint64(above)).astype(np.int64)
        enter = leave % cores + cores * (hash64(key + np.uint64(3)) % np.uint64(above // cores)).astype(np.int64)
        middle[:, 1] = np.where(far, first["spine_up"] + (here * spines + spine) * above + leave, -1)
        middle[:, 2] = np.where(far, first["spine_down"] + (there * spines + spine) * above + enter, -1)
    return middle


def _hash_again(network: LinkMap, low: Ints, high: Ints, climbs: NDArray[np.bool_], key: Any, middle: Ints) -> None:
    """Move the flows that met a dead cable, in place; all others stay where they are."""
    dead = network.capacities_bytes_per_second <= 0
    if not dead.any():
        return

    def stuck(rows: Ints) -> Ints:
        hit = np.where(middle[rows] >= 0, dead[middle[rows]], False).any(axis=1)
        return rows[hit]

    bad = stuck(np.arange(len(low)))
    for attempt in range(1, ATTEMPTS):
        if not len(bad):
            return
        again = hash64(key[bad] + np.uint64(0x5851F42D * attempt))
        middle[bad] = _climb(network, low[bad], high[bad], climbs[bad], again)
        bad = stuck(bad)
    for k in bad:
        middle[k] = _live_path(network, int(low[k]), int(high[k]), int(key[k]), dead)


def _live_path(network: LinkMap, low: int, high: int, key: int, dead: NDArray[np.bool_]) -> Ints:
    """Pick one of the live paths between two leaves by the hash; they are few where hashing kept failing."""
    assert network.wires is not None
    first, uplinks, spines, above = network.first, network.uplinks, network.spines, network.spine_uplinks
    here, there = (int(pod) for pod in network.pod_of(np.array([low, high])))
    cores = 1 if network.bundled else network.wires.cores_per_group
    ups = [u for u in range(uplinks) if not dead[first["leaf_up"] + low * uplinks + u]]
    downs = [v for v in range(uplinks) if not dead[first["leaf_down"] + high * uplinks + v]]
    found: list[list[int]] = []
    for u in ups:
        for v in (v for v in downs if v % spines == u % spines):
            ends = [first["leaf_up"] + low * uplinks + u, first["leaf_down"] + high * uplinks + v]
            if here == there:
                found.append([ends[0], -1, -1, ends[1]])
                continue
            leave, enter = ((pod * spines + u % spines) * above for pod in (here, there))
            found.extend(
                [ends[0], first["spine_up"] + leave + w, first["spine_down"] + enter + x, ends[1]]
                for w in range(above)
                for x in range(w % cores, above, cores)
                if not dead[first["spine_up"] + leave + w] and not dead[first["spine_down"] + enter + x]
            )
    if not found:
        raise InputError(
            f"every path between {network.ends(first['leaf_up'] + low * uplinks)[0]} and "
            f"{network.ends(first['leaf_up'] + high * uplinks)[0]} is dead",
            hint="leave their nodes out",
        )
    return np.array(found[key % len(found)])


def hash64(values: Any) -> Any:
    """Return a 64-bit hash of each value (the finaliser of splitmix64, Steele, Lea and Flood 2014)."""
    x = np.asarray(values).astype(np.uint64)
    with np.errstate(over="ignore"):
        x = x + np.uint64(0x9E3779B97F4A7C15)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
