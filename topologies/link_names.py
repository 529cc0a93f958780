"""Links and switches by the names that ``topologies.fabric.graph`` and a bottleneck carry, and what a fault leaves."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import replace

import numpy as np

from topologies.errors import InputError
from topologies.link_map import Ints, LinkMap
from topologies.outages import without_switch

FORMS = "gpu5, node3.nic2, leaf0.1.2, spine0.0.3, core0.3.1, leaf0.1.2-spine0.0.3, spine0.0.3-core0.3.1"
HINT = f"links and switches are named like {FORMS}; 'headway collective --flows' names the one that binds"
LENGTHS = {"gpu": 1, "node": 1, "leaf": 3, "spine": 3, "core": 3}


def with_faults(network: LinkMap, faults: Iterable[tuple[str, float]]) -> LinkMap:
    """Return the links with some of them slower (a share of their capacity) or dead (0), both directions.

    Args:
        network: the links.
        faults: name of a link or a switch, and what is left of it. A switch can only be dead.

    Raises:
        InputError: no such link, or a switch that is to keep a part.
    """
    for name, share in faults:
        network = _with_fault(network, name, share)
    return network


def _with_fault(network: LinkMap, name: str, share: float) -> LinkMap:
    if not 0 <= share < 1:
        raise InputError(f"{name} keeps {share:g} of its capacity; give a share from 0 to below 1")
    if name.startswith("node") and ".nic" in name:
        node, _, nic = name.removeprefix("node").partition(".nic")
        return _scaled(network, "nic", _nic_ports(network, name, node, nic), share)
    lower, joined, upper = name.partition("-")
    kind, numbers = _parsed(name, lower)
    if joined:
        return _scaled(network, *_cables(network, name, (kind, numbers), _parsed(name, upper), share))
    if kind == "gpu":
        return _scale_up(network, name, numbers[0], share)
    if share > 0:
        raise InputError(f"the switch {name} can be dead, but not slow", hint="slow its links one by one")
    if kind not in ("leaf", "spine", "core") or network.wires is None:
        raise _unknown(network, name)
    return without_switch(network, kind, _switch(network, name, kind, numbers))  # type: ignore[arg-type]


def _unknown(network: LinkMap, name: str) -> InputError:
    return InputError(f"{network.cluster.name} has no link or switch {name!r}", hint=HINT)


def _parsed(name: str, text: str) -> tuple[str, tuple[int, ...]]:
    found = re.fullmatch(r"(gpu|node|leaf|spine|core)(\d+(?:\.\d+)*)", text)
    numbers = tuple(map(int, found[2].split("."))) if found else ()
    if found is None or len(numbers) != LENGTHS[found[1]] or max(numbers) > 10**9:
        raise InputError(f"{name!r} is no link and no switch", hint=HINT)
    return found[1], numbers


def _nic_ports(network: LinkMap, name: str, node: str, nic: str) -> Ints:
    nics = network.cluster.node.nics_per_node
    if not (node.isdecimal() and nic.isdecimal()) or network.wires is None:
        raise _unknown(network, name)
    if int(node) >= network.cluster.num_nodes or int(nic) >= nics:
        raise InputError(
            f"{network.cluster.name} has no {name}: its nodes are 0 to {network.cluster.num_nodes - 1}, with NICs 0 to "
            f"{nics - 1}"
        )
    return (int(node) * nics + int(nic)) * network.planes + np.arange(network.planes)


def _switch(network: LinkMap, name: str, kind: str, numbers: tuple[int, ...]) -> int:
    """Number a switch as ``topologies.outages`` does."""
    wires = network.wires
    assert wires is not None
    sizes = {
        "leaf": (wires.networks, wires.groups, wires.leaves_per_group),
        "spine": (wires.networks, wires.pods, wires.spines_per_pod),
        "core": (wires.networks, wires.spines_per_pod, wires.cores_per_group),
    }[kind]
    if any(number >= size for number, size in zip(numbers, sizes, strict=True)):
        last = ".".join(str(size - 1) for size in sizes)
        there = f"the last {kind} is {kind}{last}" if min(sizes) > 0 else f"it has no {kind} switches"
        raise InputError(f"{network.cluster.name} has no {name}: {there}")
    return int(np.ravel_multi_index(numbers, sizes))


def _cables(
    network: LinkMap, name: str, low: tuple[str, tuple[int, ...]], high: tuple[str, tuple[int, ...]], share: float
) -> tuple[str, Ints, float]:
    """The cables between two switches; where uplinks are one bundle, they are a part of it."""
    wires = network.wires
    if wires is None or (low[0], high[0]) not in (("leaf", "spine"), ("spine", "core")):
        raise _unknown(network, name)
    below, above = (_switch(network, name, kind, numbers) for kind, numbers in (low, high))
    if low[0] == "leaf":
        pod, place = divmod(above, wires.spines_per_pod)
        if int(network.pod_of(np.array([below]))[0]) != pod:
            raise InputError(f"there is no cable {name}: the two stand in different pods")
        if network.bundled:
            return "leaf", np.array([below]), 1 - (1 - share) / wires.spines_per_pod
        return "leaf", below * network.uplinks + np.arange(place, network.uplinks, network.spines), share
    pod, place = divmod(below, wires.spines_per_pod)
    group, core = divmod(above, wires.cores_per_group)
    if group != pod // wires.pods * wires.spines_per_pod + place:
        raise InputError(f"there is no cable {name}: spine j of every pod leads to core group j")
    if network.bundled:
        return "spine", np.array([pod]), 1 - (1 - share) / (wires.spines_per_pod * wires.cores_per_group)
    own = np.arange(core, network.spine_uplinks, wires.cores_per_group)
    return "spine", below * network.spine_uplinks + own, share


def _scaled(network: LinkMap, block: str, places: Ints, share: float) -> LinkMap:
    capacities = network.capacities_bytes_per_second.copy()
    for way in ("up", "down"):
        capacities[network.first[f"{block}_{way}"] + places] *= share
    return replace(network, capacities_bytes_per_second=capacities)


def _scale_up(network: LinkMap, name: str, gpu: int, share: float) -> LinkMap:
    if gpu >= network.cluster.num_gpus:
        raise InputError(f"{network.cluster.name} has no {name}: its GPUs are 0 to {network.cluster.num_gpus - 1}")
    if network.cluster.scale_up.kind == "none":
        raise InputError(f"the GPUs of {network.cluster.node.name} have no scale-up links, so {name} has none")
    first, size = network.first["scale_up_out"], network.cluster.scale_up.domain_size
    if not network.mesh:
        return network.degraded([first + gpu, network.first["scale_up_in"] + gpu], share)
    start = gpu - int(network.place[gpu])
    own = [first + gpu * size + place for place in range(size)]
    others = [first + (start + place) * size + int(network.place[gpu]) for place in range(size)]
    return network.degraded(sorted({*own, *others}), share)
