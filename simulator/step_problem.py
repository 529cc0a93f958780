"""The streams of a step as a small problem of shared links: symmetric replicas as one, links that cannot fill left out.

Units of replicas that nothing tells apart (colour refinement, ``folding``) do the same at the same time, so that one of
them is played and its streams carry the loads of all. A link that all its streams together cannot fill never binds;
links that see the same are one row. Where hashed paths leave no symmetry and units are many, they are drawn into
groups, and a group moves at the pace of its slowest (``exact`` is False): the more groups, the better the estimate.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy import sparse

from simulator.folding import fold
from simulator.step_traffic import ONCE, StepTraffic, Stream
from topologies.errors import InputError
from topologies.link_map import Floats, Ints, LinkMap
from topologies.routes import Routes, hash64

FITS = 1e-9
"""Relative room below which a link counts as full."""
MOST_APART = 64
"""Groups of gradients and weights that are streams of their own beside hashed paths; of more, each rank's are one."""
MOST_COMPARED = 20_000_000
"""Entries of the table of rows up to which rows are compared with each other."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepProblem:
    """Streams of classes of units on rows of links. The last rows are the paces, one for each stream."""

    streams: tuple[Stream, ...]
    """The unit of a stream is its class; -1: all."""
    index: dict[Stream, int]
    at_once: dict[tuple[str, int], tuple[int, ...]]
    """Streams of gradients or weights of a pipeline rank, that start together."""
    pace_bytes_per_second: Floats
    capacities: Floats
    links: tuple[Ints, ...]
    """Rows of each stream, its pace last."""
    loads: tuple[Floats, ...]
    alone_factor: Floats
    """Time of each stream with its links to itself, over its time at its pace; above 1 its own flows share a link."""
    live: tuple[bool, ...]
    """Whether a stream may be held up."""
    row_link: Ints
    """A link of each row (without the paces)."""
    row_count: Ints
    all_loads: Any
    """Sparse, (streams, links): everything, for utilisation."""
    unit_class: Ints
    exact: bool

    @property
    def num_classes(self) -> int:
        """Classes of units."""
        return int(self.unit_class.max()) + 1

    def members(self, number: int) -> int:
        """Units of a class."""
        return int((self.unit_class == number).sum())


def step_problem(
    network: LinkMap,
    traffic: StepTraffic,
    unit_colours: Ints,
    *,
    most_classes: int = 64,
    most_groups: int = 16,
    fold_alike: bool = True,
    seed: int = 0,
) -> StepProblem:
    """Fold the streams of a step.

    Args:
        network: the links.
        traffic: on them.
        unit_colours: (units,) what tells units apart besides their links: stragglers.
        most_classes: units of more classes are played in groups.
        most_groups: that many, or one for each colour.
        fold_alike: False leaves every unit and every stream by itself.
        seed: of the groups.

    Raises:
        InputError: a stream crosses a dead link.
    """
    capacities = network.capacities_bytes_per_second
    if not fold_alike:
        each = np.arange(traffic.num_units), np.arange(len(traffic.streams))
        return _quotient(network, traffic, np.array([one.unit for one in traffic.streams], np.int64), *each, True)
    unit_class, exact = _relabel(unit_colours), True
    hashed = not network.bundled and traffic.num_units > most_classes  # every path is another: nothing would fold
    apart = hashed and sum(one.kind in ONCE for one in traffic.streams) <= MOST_APART
    kinds = [hash((one.kind, one.rank, -1 if one.kind in ONCE and not apart else one.other)) for one in traffic.streams]
    kind = _relabel(np.array(kinds))
    owner = np.array([one.unit for one in traffic.streams], np.int64)
    once = np.array([one.unit < 0 for one in traffic.streams])
    if hashed:
        unit_class, exact = _grouped(unit_class, most_groups, seed), False
    stream_class = _classes(kind, owner, unit_class, traffic.pace_bytes_per_second)
    if hashed:
        return _quotient(network, traffic, owner, unit_class, stream_class, exact)
    if traffic.streams and (traffic.num_units > 1 or once.any()):
        folded_units, folded_streams = _refined(capacities, traffic, kind, owner, unit_class)
        if int(folded_units.max()) + 1 <= most_classes:
            unit_class, stream_class = folded_units, folded_streams
        else:
            unit_class, exact = _grouped(unit_class, most_groups, seed), False
            stream_class = _classes(kind, owner, unit_class, traffic.pace_bytes_per_second)
    return _quotient(network, traffic, owner, unit_class, stream_class, exact)


def _grouped(colours: Ints, most: int, seed: int) -> Ints:
    """Draw units of each colour into groups of about equal size, ``most`` in all."""
    groups = max(1, most // (int(colours.max()) + 1))
    return _relabel(colours * groups + np.random.default_rng(seed).permutation(len(colours)) % groups)


def _relabel(values: Any) -> Ints:
    return np.unique(values, return_inverse=True)[1].astype(np.int64)


def _classes(kind: Ints, owner: Ints, unit_class: Ints, pace: Floats) -> Ints:
    of_unit = np.where(owner >= 0, unit_class[np.maximum(owner, 0)], -1)
    if not len(kind):
        return kind
    return np.unique(np.stack([kind, of_unit, _relabel(pace)]), axis=1, return_inverse=True)[1].astype(np.int64)


def _refined(capacities: Floats, traffic: StepTraffic, kind: Ints, owner: Ints, unit_class: Ints) -> tuple[Ints, Ints]:
    """Split units and streams until all streams of a unit's class look alike."""
    loads = traffic.loads
    flows = Routes(starts=loads.indptr.astype(np.int64), links=loads.indices.astype(np.int64), loads=loads.data)
    mine = owner >= 0
    number = int(unit_class.max()) + 1
    while True:
        colours = _classes(kind, owner, unit_class, traffic.pace_bytes_per_second)
        stream_class = fold(capacities, flows, colours).flow_class
        seen = np.full((len(unit_class), int(kind.max(initial=0)) + 1), -1, np.int64)
        seen[owner[mine], kind[mine]] = stream_class[mine]
        table = np.column_stack([unit_class, seen])
        unit_class = np.unique(table, axis=0, return_inverse=True)[1].astype(np.int64).ravel()
        before, number = number, int(unit_class.max()) + 1
        if number == before:
            return unit_class, stream_class


def _quotient(
    network: LinkMap, traffic: StepTraffic, owner: Ints, unit_class: Ints, stream_class: Ints, exact: bool
) -> StepProblem:
    capacities = network.capacities_bytes_per_second
    classes, first = np.unique(stream_class, return_index=True)
    count = len(classes)
    joining = sparse.csr_array(
        (np.ones(len(stream_class)), (stream_class, np.arange(len(stream_class)))), shape=(count, len(stream_class))
    )
    all_loads: Any = sparse.csr_array(joining @ traffic.loads)
    pace = traffic.pace_bytes_per_second[first]
    streams = tuple(traffic.streams[k]._replace(unit=int(unit_class[owner[k]]) if owner[k] >= 0 else -1) for k in first)
    row_link, row_count, rows = _rows(capacities, all_loads, pace)
    _refuse_dead(network, all_loads, streams)
    links, loads, factor = [], [], np.ones(count)
    for k in range(count):
        mine = slice(rows.indptr[k], rows.indptr[k + 1])
        own, load = rows.indices[mine].astype(np.int64), rows.data[mine]
        if len(own):
            factor[k] = max(1.0, float((load * pace[k] / capacities[row_link[own]]).max()))
        links.append(np.append(own, len(row_link) + k))
        loads.append(np.append(load, 1.0))
    at_once: dict[tuple[str, int], tuple[int, ...]] = {}
    for k, one in enumerate(streams):
        if one.kind in ONCE:
            at_once[one.kind, one.rank] = (*at_once.get((one.kind, one.rank), ()), k)
    return StepProblem(
        streams=streams,
        index={one: k for k, one in enumerate(streams)},
        at_once=at_once,
        pace_bytes_per_second=pace,
        capacities=np.concatenate([capacities[row_link], pace]),
        links=tuple(links),
        loads=tuple(loads),
        alone_factor=factor,
        live=tuple(len(own) > 1 for own in links),
        row_link=row_link,
        row_count=row_count,
        all_loads=all_loads,
        unit_class=unit_class,
        exact=exact,
    )


def _rows(capacities: Floats, loads: Any, pace: Floats) -> tuple[Ints, Ints, Any]:
    """Keep the links that may fill, one of each kind: its number, how many are like it, and (streams, rows) loads."""
    most = np.asarray(loads.T @ pace)
    full = np.flatnonzero(most > capacities * (1 + FITS))
    columns = sparse.csc_array(loads)[:, full]
    if not len(full):
        return full, full, sparse.csr_array(columns)
    entry_link = np.repeat(np.arange(len(full)), np.diff(columns.indptr))
    share = np.round(columns.data * pace[columns.indices] / capacities[full[entry_link]], 12)
    mixed = hash64(hash64(columns.indices + 1) + hash64(share.view(np.uint64)))
    colour = np.zeros(len(full), np.uint64)
    with np.errstate(over="ignore"):
        np.add.at(colour, entry_link, mixed)
    _, first, counts = np.unique(colour, return_index=True, return_counts=True)
    kept = _undominated(columns[:, first], capacities[full[first]])
    return full[first][kept], counts[kept], sparse.csr_array(columns[:, first[kept]])


def _undominated(columns: Any, capacities: Floats) -> Ints:
    """Rows that no other row fills sooner, whatever moves: first among those of the same streams, then among all."""
    shares = sparse.csr_array((columns / capacities).T)
    shares.sort_indices()
    support = np.zeros(len(capacities), np.uint64)
    entry_row = np.repeat(np.arange(len(capacities)), np.diff(shares.indptr))
    with np.errstate(over="ignore"):
        np.add.at(support, entry_row, hash64(shares.indices + 1))
    order = np.argsort(support, kind="stable")
    kept = []
    for rows in np.split(order, np.flatnonzero(np.diff(support[order])) + 1):
        width = int(shares.indptr[rows[0] + 1] - shares.indptr[rows[0]])
        table = shares.data[shares.indptr[rows][:, None] + np.arange(width)]
        kept.append(rows[_front(table)])
    some = np.concatenate(kept)
    if len(some) * columns.shape[0] <= MOST_COMPARED:
        some = some[_front(shares[some].toarray())]
    return np.sort(some)


def _front(table: Floats) -> Ints:
    """Rows of a table that no other row equals or exceeds in every entry."""
    order = np.argsort(-table.sum(axis=1), kind="stable")
    table, alive, kept = np.ascontiguousarray(table[order]), np.arange(len(table)), []
    while len(alive):
        kept.append(int(alive[0]))
        alive = alive[(table[alive] > table[alive[0]] * (1 + FITS)).any(axis=1)]
    return order[kept]


def _refuse_dead(network: LinkMap, loads: Any, streams: tuple[Stream, ...]) -> None:
    dead = np.flatnonzero(network.capacities_bytes_per_second <= 0)
    if not len(dead):
        return
    hit = sparse.coo_array(sparse.csc_array(loads)[:, dead])
    for stream, column in zip(hit.coords[0], hit.coords[1], strict=True):
        raise InputError(
            f"{network.name(int(dead[column]))} is dead, and the {streams[stream].kind} traffic of pipeline rank "
            f"{streams[stream].rank} has no other way",
            hint="leave the nodes behind it out, or give up the rail",
        )
