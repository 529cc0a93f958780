"""Several jobs, storage traffic and failures on one fabric, played in time.

Every load is a sequence of phases of traffic; loads start when they are told to and share links max-min fairly with
whatever else is under way. Links may die or recover meanwhile: hashed connections on a dead cable are hashed again.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import simpy

from simulator.flow_traffic import Traffic, collective_traffic, lockstep
from simulator.folding import fold
from simulator.network import Counters, Network
from topologies.cluster import CollectiveKind
from topologies.errors import InputError
from topologies.link_map import Floats, Ints, LinkMap
from topologies.routes import Routes, per_lane, storage_routes


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """Something that uses the fabric."""

    name: str
    traffic: Callable[[LinkMap], tuple[Traffic, ...]]
    """Phases, one after the other, on the links as they are."""
    start_seconds: float = 0.0
    repeats: int | None = 1
    """None: again and again, until all others have ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """Links that lose (or, with 1, regain) capacity at some time."""

    at_seconds: float
    links: tuple[int, ...]
    factor: float
    """Of the capacity that the links began with; 0: dead."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Together:
    """How loads ended that shared a fabric."""

    end_seconds: dict[str, float]
    carried_bytes: Floats
    """By link; edge by edge only on one link of each class."""
    counters: Counters
    classes: int
    """Transfers of different kind, after folding; groups in lockstep otherwise."""


def collective_load(
    name: str,
    kind: CollectiveKind,
    gpus: Sequence[int] | Ints,
    size_bytes: float,
    *,
    algorithm: str = "ring",
    seed: int = 0,
    start_seconds: float = 0.0,
    repeats: int = 1,
) -> Load:
    """A collective as a load; arguments as in ``flows.play_collective``."""
    members = np.asarray(gpus, np.int64)

    def traffic(network: LinkMap) -> tuple[Traffic, ...]:
        return collective_traffic(network, kind, members, size_bytes, algorithm=algorithm, seed=seed)

    return Load(name=name, traffic=traffic, start_seconds=start_seconds, repeats=repeats)


def storage_load(
    name: str,
    nodes: Sequence[int] | Ints,
    store: int,
    size_bytes: float,
    *,
    write: bool = True,
    start_seconds: float = 0.0,
) -> Load:
    """Every node writes (or reads) ``size_bytes`` to the cluster's storage tier number ``store``."""
    members = np.asarray(nodes, np.int64)

    def traffic(network: LinkMap) -> tuple[Traffic, ...]:
        edges, sizes = storage_routes(network, members, store, write=write), np.full(len(members), float(size_bytes))
        if len(edges.links):
            edges, sizes = per_lane(edges, sizes)
        each = np.arange(len(members))
        return (
            Traffic(
                edges=edges,
                edge_bytes=sizes,
                counts=each * 0 + 1,
                flow_edge=each,
                groups=each,
                steps=0,
                step_seconds=0.0,
            ),
        )

    return Load(name=name, traffic=traffic, start_seconds=start_seconds)


def play_together(
    network: LinkMap,
    loads: Sequence[Load],
    changes: Sequence[Change] = (),
    *,
    edge_by_edge: bool = False,
    window: float = 0.0,
) -> Together:
    """Play loads that share a fabric; bandwidth only, latency is not added.

    Args:
        network: the links as they begin.
        loads: each with a name of its own.
        changes: of links, in time.
        edge_by_edge: every flow takes its fair share for itself (folded by symmetry) instead of in lockstep with its
            ring: the upper end where unequal rings share links. Not with dead links.
        window: share of time within which ends are one instant, see ``network.Network``.

    Raises:
        InputError: a load can never end.
        ValueError: two loads have one name, or links die edge by edge.
    """
    if len({load.name for load in loads}) < len(loads):
        raise ValueError("two loads have the same name")
    if edge_by_edge and any(change.factor == 0 for change in changes):
        raise ValueError("edge by edge, flows are not moved off dead links")
    environment = simpy.Environment()
    engine = Network(environment, network.capacities_bytes_per_second, window=window)
    phases = {load.name: load.traffic(network) for load in loads}
    pieces = _classes(network, phases, changes) if edge_by_edge else _groups(phases)
    ends: dict[str, float] = {}
    under_way: dict[tuple[str, int], list[simpy.Event]] = {}

    def run(load: Load) -> Generator[simpy.Event, Any, None]:
        yield environment.timeout(load.start_seconds)
        for _ in itertools.count() if load.repeats is None else range(load.repeats):
            for index in range(len(phases[load.name])):
                flows, sizes = pieces[load.name, index]
                events = [engine.transfer(_links(flows, k), sizes[k], _loads(flows, k)) for k in range(len(sizes))]
                under_way[load.name, index] = events
                yield environment.all_of(events)
                del under_way[load.name, index]
        ends[load.name] = float(environment.now)

    def fail() -> Generator[simpy.Event, Any, None]:
        now = network
        for change in sorted(changes, key=lambda change: change.at_seconds):
            yield environment.timeout(change.at_seconds - environment.now)
            capacities = now.capacities_bytes_per_second.copy()
            links = np.array(change.links, np.int64)
            capacities[links] = network.capacities_bytes_per_second[links] * change.factor
            now = replace(now, capacities_bytes_per_second=capacities)
            engine.change(capacities)
            if not edge_by_edge:
                _move(now, engine, loads, pieces, under_way)

    finite = [environment.process(run(load)) for load in loads if load.repeats is not None]
    for load in loads:
        if load.repeats is None:
            environment.process(run(load))
    environment.process(fail())
    _run(environment, environment.all_of(finite) if len(finite) < len(loads) else None)
    stuck = [load.name for load in loads if load.name not in ends and load.repeats is not None]
    if stuck:
        raise InputError(f"{', '.join(stuck)} never ends: a link on the way is dead", hint="let it recover or reroute")
    return Together(
        end_seconds=ends,
        carried_bytes=engine.carried_bytes,
        counters=engine.counters,
        classes=sum(len(sizes) for _, sizes in pieces.values()),
    )


def _run(environment: simpy.Environment, until: simpy.Event | None) -> None:
    """Run to the end of an event; without events left before it comes, something never ends."""
    with contextlib.suppress(RuntimeError):  # simpy: no scheduled events left but "until" event was not triggered
        environment.run(until)


Pieces = dict[tuple[str, int], tuple[Routes, Floats]]
"""Transfers of each phase of each load."""


def _links(flows: Routes, k: int) -> Ints:
    return flows.links[flows.starts[k] : flows.starts[k + 1]]


def _loads(flows: Routes, k: int) -> Floats:
    return flows.loads[flows.starts[k] : flows.starts[k + 1]]


def _groups(phases: dict[str, tuple[Traffic, ...]]) -> Pieces:
    found: Pieces = {}
    for name, traffics in phases.items():
        for index, traffic in enumerate(traffics):
            found[name, index] = lockstep(traffic)
    return found


def _classes(network: LinkMap, phases: dict[str, tuple[Traffic, ...]], changes: Sequence[Change]) -> Pieces:
    """Fold all edges of all loads at once; those of one class start, run and end together."""
    keys = [(name, index) for name, traffics in phases.items() for index in range(len(traffics))]
    traffics = [phases[name][index] for name, index in keys]
    counts = np.concatenate([np.diff(traffic.edges.starts) for traffic in traffics])
    multiples = np.concatenate([traffic.counts for traffic in traffics])
    flows = Routes(
        starts=np.concatenate([[0], np.cumsum(counts)]).astype(np.int64),
        links=np.concatenate([traffic.edges.links for traffic in traffics]),
        loads=np.concatenate([traffic.edges.loads for traffic in traffics]) * np.repeat(multiples, counts),
    )
    sizes = np.concatenate([traffic.edge_bytes for traffic in traffics])
    owner = np.repeat(np.arange(len(keys)), [len(traffic.counts) for traffic in traffics])
    _, colours = np.unique(np.stack([owner, multiples, sizes]), axis=1, return_inverse=True)
    later = np.zeros(network.num_links)
    for number, change in enumerate(changes, 1):
        later[list(change.links)] += (1 + change.factor) * 2.0**number
    small = fold(network.capacities_bytes_per_second, flows, colours, later)
    representative = np.unique(small.flow_class, return_index=True)[1]
    link_of = np.unique(small.link_class, return_index=True)
    first_link = dict(zip(link_of[0].tolist(), link_of[1].tolist(), strict=True))
    real = np.array([first_link[k] for k in range(len(small.capacities))], np.int64)
    found: Pieces = {}
    for number, key in enumerate(keys):
        mine = np.flatnonzero(owner[representative] == number)
        parts = [slice(small.flows.starts[k], small.flows.starts[k + 1]) for k in mine]
        found[key] = (
            Routes(
                starts=np.cumsum([0, *(part.stop - part.start for part in parts)]),
                links=np.concatenate([real[small.flows.links[part]] for part in parts]),
                loads=np.concatenate([small.flows.loads[part] for part in parts]),
            ),
            sizes[representative[mine]],
        )
    return found


def _move(
    network: LinkMap,
    engine: Network,
    loads: Sequence[Load],
    pieces: Pieces,
    under_way: dict[tuple[str, int], list[simpy.Event]],
) -> None:
    """Give everything the ways that are left, also what has not started yet."""
    for load in loads:
        for index, traffic in enumerate(load.traffic(network)):
            flows, _ = pieces[load.name, index] = lockstep(traffic)
            for k, event in enumerate(under_way.get((load.name, index), [])):
                if not event.triggered:
                    engine.reroute(event, _links(flows, k), _loads(flows, k))
