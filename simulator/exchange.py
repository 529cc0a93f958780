"""What an all-to-all puts on each link, by counting: pairs of leaves instead of pairs of GPUs.

Every GPU sends an equal part to every other. The way of a pair depends on the sender's node and the receiver's NIC
alone, so loads follow from how many senders and receivers stand on each leaf; only pairs inside a scale-up domain,
which do not use the fabric, are listed one by one. Where the fabric hashes, many small flows fill its cables evenly:
the cables of a leaf are taken to share its load.
"""

from __future__ import annotations

import numpy as np

from topologies.errors import InputError
from topologies.link_map import Floats, Ints, LinkMap


def exchange_loads(network: LinkMap, gpus: Ints, size_bytes: float, *, relay: bool = True) -> Floats:
    """Return the bytes on each link when each GPU spreads ``size_bytes`` over all (its own part stays at home).

    Args:
        network: the links.
        gpus: the group.
        size_bytes: whole buffer of one GPU, as nccl-tests counts it.
        relay: change rails over the scale-up network (PXN).

    Raises:
        InputError: rails that do not meet, and no relay.
    """
    part = size_bytes / len(gpus)
    loads = np.zeros(network.num_links)
    sender, receiver = _same_domain(network, gpus)
    _scale_up(network, loads, sender, receiver, part)
    if len(sender) == len(gpus) ** 2:
        return loads
    for lane in range(network.lanes):
        _lane(network, gpus, sender, receiver, part / network.lanes, relay, lane, loads)
    return loads


def _same_domain(network: LinkMap, gpus: Ints) -> tuple[Ints, Ints]:
    """All ordered pairs (a GPU with itself included) of one domain."""
    domain = network.domain[gpus]
    order = np.argsort(domain, kind="stable")
    _, start, count = np.unique(domain[order], return_index=True, return_counts=True)
    senders = [np.repeat(gpus[order[a : a + n]], n) for a, n in zip(start, count, strict=True)]
    receivers = [np.tile(gpus[order[a : a + n]], n) for a, n in zip(start, count, strict=True)]
    return np.concatenate(senders), np.concatenate(receivers)


def _scale_up(network: LinkMap, loads: Floats, sender: Ints, receiver: Ints, part: Floats | float) -> None:
    """Add transfers inside domains, in place."""
    moves = sender != receiver
    amount = np.broadcast_to(part, sender.shape)[moves]
    sender, receiver = sender[moves], receiver[moves]
    if network.mesh:
        pair = network.first["scale_up_out"] + sender * network.cluster.scale_up.domain_size + network.place[receiver]
        np.add.at(loads, pair, amount)
        return
    np.add.at(loads, network.first["scale_up_out"] + sender, amount)
    np.add.at(loads, network.first["scale_up_in"] + receiver, amount)


def _lane(
    network: LinkMap,
    gpus: Ints,
    same_sender: Ints,
    same_receiver: Ints,
    part: float,
    relay: bool,
    lane: int,
    loads: Floats,
) -> None:
    """Add one lane's share of all pairs of different domains, in place."""
    assert network.wires is not None
    per_node, nics, planes = network.gpus_per_node, network.cluster.node.nics_per_node, network.planes
    into, plane = network.nic_of(gpus, lane)
    leaves = network.wires.networks * network.wires.groups * network.wires.leaves_per_group
    between = np.zeros((leaves, leaves))
    target_leaf = network.leaf_of(gpus // per_node, into, plane)
    same_into, _ = network.nic_of(same_receiver, lane)
    for nic in np.unique(into):
        here = into == nic
        inside = np.bincount(same_sender[same_into == nic], minlength=int(gpus.max()) + 1)[gpus]
        # receivers of each sender on this NIC, outside its domain
        count = (np.count_nonzero(here) - inside).astype(np.float64)
        out, port = _sender(network, gpus, int(nic), lane, relay)
        _scale_up(network, loads, gpus, out, count * part)
        np.add.at(loads, network.first["nic_up"] + ((out // per_node) * nics + port) * planes + plane, count * part)
        source_leaf = network.leaf_of(out // per_node, port, plane)
        receivers = np.bincount(target_leaf[here], minlength=leaves)
        between += np.outer(np.bincount(source_leaf, minlength=leaves), receivers)
        pairs = same_into == nic
        out, port = _sender(network, same_sender[pairs], int(nic), lane, relay)
        low = network.leaf_of(out // per_node, port, plane)
        high = network.leaf_of(same_receiver[pairs] // per_node, same_into[pairs], plane)
        np.subtract.at(between, (low, high), 1.0)
    outside = len(gpus) - np.bincount(same_receiver, minlength=int(gpus.max()) + 1)[gpus]
    np.add.at(loads, network.first["nic_down"] + ((gpus // per_node) * nics + into) * planes + plane, outside * part)
    _climb(network, between * part, loads)


def _sender(network: LinkMap, gpus: Ints, nic: int, lane: int, relay: bool) -> tuple[Ints, Ints]:
    """The GPU and NIC that carry what each GPU sends to receivers on a NIC."""
    own, _ = network.nic_of(gpus, lane)
    if not relay or network.cluster.scale_up.kind == "none":
        return gpus, own
    middle = network.gpu_near(gpus // network.gpus_per_node, np.full(len(gpus), nic))
    near = (own == nic) | (network.domain[middle] != network.domain[gpus])
    return np.where(near, gpus, middle), np.where(near, own, nic)


def _climb(network: LinkMap, between: Floats, loads: Floats) -> None:
    """Add what passes between leaves, and between pods, evenly over their uplinks; in place."""
    np.fill_diagonal(between, 0.0)
    part = network.network_of(np.arange(len(between)))
    if not network.uplinks or between[part[:, None] != part[None, :]].any():
        if between.any():
            raise InputError(
                f"rails do not meet in {network.cluster.name}",
                hint="let senders relay over the scale-up network, or describe a level of spines",
            )
        return
    first, uplinks = network.first, network.uplinks
    above = network.spines * network.spine_uplinks
    size = len(between)
    for axis, way in ((1, "up"), (0, "down")):
        start = first[f"leaf_{way}"]
        loads[start : start + size * uplinks] += np.repeat(between.sum(axis=axis) / uplinks, uplinks)
    if not above:
        return
    pod = network.pod_of(np.arange(size))
    pods = int(pod.max()) + 1
    grouped = np.zeros((pods, pods))
    np.add.at(grouped, (pod[:, None], pod[None, :]), between)
    np.fill_diagonal(grouped, 0.0)
    for axis, way in ((1, "up"), (0, "down")):
        start = first[f"spine_{way}"]
        loads[start : start + pods * above] += np.repeat(grouped.sum(axis=axis) / above, above)
