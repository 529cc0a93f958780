"""Max-min fair rates of flows that share links, by progressive filling.

All rates rise together, each in proportion to its weight, until a link is full; its flows are frozen, the others go on
(Bertsekas and Gallager, Data Networks, 1992, section 6.5.2). Freezing only the emptiest link of all costs one round per
link. Here every link that is the tightest of *all* its flows is frozen in the same round: freezing flows at or below
the share of a link never lowers that share, so such a link keeps it until the global filling would have reached it.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from topologies.link_map import Floats
from topologies.routes import Routes

TIE = 1e-12
"""Relative difference below which two shares are one, so that ties freeze in one round."""


def max_min_rates(capacities: Floats, flows: Routes, weights: Floats | None = None) -> Floats:
    """Return the max-min fair rate of each flow, in the unit of the capacities.

    A flow of rate x puts ``loads * x`` on each of its links. A flow without links is infinitely fast, a flow over a
    link of capacity 0 stands still.

    Args:
        capacities: (links,).
        flows: the links of each flow; a link may appear twice in a flow.
        weights: (flows,) positive; rates are raised in this proportion. None: all equal.
    """
    counts = np.diff(flows.starts)
    rates = np.full(len(counts), np.inf)
    weight = np.ones(len(counts)) if weights is None else weights
    active = np.flatnonzero(counts > 0)
    counts = counts[active]
    links, rows = flows.links, np.repeat(np.arange(len(active)), counts)
    loads = flows.loads * weight[active][rows]
    left = np.asarray(capacities, np.float64).copy()
    while len(active):
        starts = np.cumsum(counts) - counts
        total = np.bincount(links, loads, len(left))
        with np.errstate(divide="ignore", invalid="ignore"):
            share = np.where(total > 0, left / total, np.inf)
        seen = share[links]
        level = np.minimum.reduceat(seen, starts)
        lowest = np.full(len(left), np.inf)
        np.minimum.at(lowest, links, level[rows])
        frozen = np.logical_or.reduceat(seen <= lowest[links] * (1 + TIE), starts)
        rates[active[frozen]] = level[frozen] * weight[active[frozen]]
        gone = frozen[rows]
        left -= np.bincount(links[gone], loads[gone] * level[rows[gone]], len(left))
        np.maximum(left, 0.0, out=left)
        active, counts = active[~frozen], counts[~frozen]
        links, loads = links[~gone], loads[~gone]
        rows = np.repeat(np.arange(len(active)), counts)
    return rates


def link_rates(num_links: int, flows: Routes, rates: Floats) -> Floats:
    """Return what flows of these rates put on each link."""
    moving = np.isfinite(rates)[flows.rows]
    return np.bincount(flows.links[moving], flows.loads[moving] * rates[flows.rows[moving]], num_links).astype(
        np.float64
    )


def is_max_min(
    capacities: Floats, flows: Routes, rates: Floats, weights: Floats | None = None, tolerance: float = 1e-9
) -> bool:
    """Say whether rates are max-min fair, by what characterises them rather than by filling again.

    No link carries more than it can, and every flow crosses a full link on which no flow has a higher level (rate over
    weight).
    """
    rows = flows.rows
    used = link_rates(len(capacities), flows, rates)
    if (used > capacities * (1 + tolerance)).any():
        return False
    level = rates if weights is None else rates / weights
    highest = np.zeros(len(capacities))
    np.maximum.at(highest, flows.links, level[rows])
    full = used[flows.links] >= capacities[flows.links] * (1 - tolerance)
    tight: NDArray[np.bool_] = full & (level[rows] >= highest[flows.links] * (1 - tolerance)) & (flows.loads > 0)
    bound = np.zeros(len(rates), np.bool_)
    np.logical_or.at(bound, rows, tight)
    return bool((bound | np.isinf(rates)).all())
