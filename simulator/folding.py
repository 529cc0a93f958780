"""Exact symmetry folding: flows that cannot be told apart become one flow, and so do links.

Colour refinement (the one-dimensional Weisfeiler-Leman test) splits flows by what they are and by the links that they
cross, and links by capacity and by the flows that they carry, until nothing splits further. The result is equitable:
all links of a class have equal capacity and get equal load from each class of flows. Filling raises all flows of a
class together, so all links of a class fill at the same moment and all flows of a class freeze at the same level: the
rates of the folded problem are the rates of the whole one. A broken symmetry only splits what it touches.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from topologies.link_map import Floats, Ints
from topologies.routes import Routes, hash64


@dataclass(frozen=True, slots=True, kw_only=True)
class Folded:
    """A problem of flows and links with one of each class."""

    capacities: Floats
    flows: Routes
    flow_class: Ints
    """Class of each flow of the whole problem."""
    link_class: Ints
    """Class of each link of the whole problem; -1 where no flow passes."""
    sizes: Ints
    """Flows of each class."""
    rounds: int
    """Of refinement."""


def fold(
    capacities: Floats,
    flows: Routes,
    colours: Floats | Ints | None = None,
    link_colours: Floats | Ints | None = None,
) -> Folded:
    """Fold a problem.

    Args:
        capacities: (links,).
        flows: the links of each flow.
        colours: (flows,) what else tells flows apart: bytes, start, collective. Needed where flows end in time.
        link_colours: (links,) what else tells links apart: a capacity that they will have later.

    Raises:
        AssertionError: two colours of the 64-bit hash collided (the check is exact and always on).
    """
    rows = flows.rows
    used, place = np.unique(flows.links, return_inverse=True)
    number = len(flows.starts) - 1
    empty = np.diff(flows.starts) == 0
    flow_colour = hash64(_relabel(np.zeros(number) if colours is None else np.asarray(colours)) * 2 + empty)
    link_colour = hash64(_relabel(capacities[used]))
    if link_colours is not None:
        link_colour = hash64(link_colour + hash64(_relabel(np.asarray(link_colours)[used])))
    load = hash64(_relabel(flows.loads))
    by_link = np.argsort(place, kind="stable")
    link_starts = np.concatenate([[0], np.cumsum(np.bincount(place, minlength=len(used)))[:-1]]).astype(np.int64)
    flow_starts = flows.starts[:-1][~empty]
    rounds, classes = 0, (0, 0)
    while len(used):
        seen = hash64(link_colour[place] + load)
        total = np.zeros(number, np.uint64)
        total[~empty] = np.add.reduceat(seen, flow_starts)
        flow_colour = hash64(flow_colour * np.uint64(3) + total)
        seen = hash64(flow_colour[rows] + load)[by_link]
        link_colour = hash64(link_colour * np.uint64(7) + np.add.reduceat(seen, link_starts))
        rounds += 1
        before, classes = classes, (len(np.unique(flow_colour)), len(np.unique(link_colour)))
        if before == classes:
            break
    return _quotient(capacities, flows, _relabel(flow_colour), used, place, _relabel(link_colour), rounds)


def _quotient(
    capacities: Floats, flows: Routes, flow_class: Ints, used: Ints, place: Ints, link_class: Ints, rounds: int
) -> Folded:
    """Keep one flow and one link per class; the load is that of the whole class on one link."""
    num_flows, num_links = _count(flow_class), _count(link_class)
    key = place.astype(np.int64) * max(num_flows, 1) + flow_class[flows.rows]
    keys, inverse = np.unique(key, return_inverse=True)
    load = np.bincount(inverse, flows.loads, len(keys)).astype(np.float64)
    link, of_flow = keys // max(num_flows, 1), keys % max(num_flows, 1)
    _assert_equitable(link_class, link, of_flow, load, num_flows)
    seen = flows.rows * max(num_links, 1) + link_class[place]
    keys, inverse = np.unique(seen, return_inverse=True)
    total = np.bincount(inverse, flows.loads, len(keys)).astype(np.float64)
    _assert_equitable(flow_class, keys // max(num_links, 1), keys % max(num_links, 1), total, num_links)

    first = np.full(num_links, -1, np.int64)
    first[link_class[::-1]] = np.arange(len(link_class))[::-1]
    kept = first[link_class[link]] == link
    order = np.lexsort((link_class[link[kept]], of_flow[kept]))
    counts = np.bincount(of_flow[kept], minlength=num_flows)
    everywhere = np.full(len(capacities), -1, np.int64)
    everywhere[used] = link_class
    return Folded(
        capacities=capacities[used][first],
        flows=Routes(
            starts=np.concatenate([[0], np.cumsum(counts)]).astype(np.int64),
            links=link_class[link[kept]][order],
            loads=load[kept][order],
        ),
        flow_class=flow_class,
        link_class=everywhere,
        sizes=np.bincount(flow_class, minlength=num_flows),
        rounds=rounds,
    )


def _assert_equitable(classes: Ints, member: Ints, other: Ints, load: Floats, num_others: int) -> None:
    """Every member of a class must have the same load in common with every class of the other kind."""
    pair = classes[member] * max(num_others, 1) + other
    order = np.argsort(pair, kind="stable")
    starts = np.flatnonzero(np.diff(pair[order], prepend=-1))
    if not len(starts):
        return
    low, high = np.minimum.reduceat(load[order], starts), np.maximum.reduceat(load[order], starts)
    members = np.bincount(classes)[pair[order][starts] // max(num_others, 1)]
    counts = np.diff(np.append(starts, len(order)))
    assert (high <= low * (1 + 1e-12)).all(), "two of one class carry different loads"
    assert (counts == members).all(), "two of one class meet different classes"


def _relabel(values: Any) -> Ints:
    return np.unique(values, return_inverse=True)[1].astype(np.int64)


def _count(classes: Ints) -> int:
    return int(classes.max()) + 1 if len(classes) else 0
