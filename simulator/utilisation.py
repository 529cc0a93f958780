"""How much of the links a step uses in time: by block of links and rail, and the busiest links of all."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy import sparse

from simulator.outcome import Counter
from simulator.step_problem import StepProblem
from simulator.step_records import Played
from topologies.link_map import BLOCKS, Floats, Ints, LinkMap

BINS = 400
"""Stretches of a step over which use is averaged: finer than a screen shows, and few for a trace."""
SHOWN_LINKS = 5
NAMES = {
    "scale_up_out": "scale-up out",
    "scale_up_in": "scale-up in",
    "nic_up": "NICs out",
    "nic_down": "NICs in",
    "leaf_up": "leaves up",
    "leaf_down": "leaves down",
    "spine_up": "spines up",
    "spine_down": "spines down",
    "storage_up": "storage network up",
    "storage_down": "storage network down",
    "store_write": "storage written",
    "store_read": "storage read",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Utilisation:
    """Shares of capacity; of the links of a kind that carry anything in the step."""

    counters: tuple[Counter, ...]
    mean: dict[str, float]
    """Over the step, by name of the counter."""
    peak: dict[str, float]
    """Of the busiest of ``BINS`` equal stretches."""
    busiest: tuple[tuple[str, float], ...]
    """Links with their share over the step; the first of those that are alike."""
    bytes_moved: float
    """By all links together."""


def utilisation(network: LinkMap, problem: StepProblem, played: Played) -> Utilisation:
    """Add up what the streams of a step put on the links."""
    stream, start, end, rate = _pieces(played, len(problem.streams))
    loads = sparse.csc_array(problem.all_loads)
    used = np.flatnonzero(np.diff(loads.indptr))
    names, group = _groups(network, used)
    capacities = network.capacities_bytes_per_second
    joining = sparse.csr_array((np.ones(len(used)), (used, group)), shape=(network.num_links, len(names)))
    per_group: Any = np.asarray((problem.all_loads @ joining).todense())
    whole = np.bincount(group, capacities[used], len(names))
    edges = np.linspace(0.0, played.end_seconds, BINS + 1)
    carried = _carried(per_group[stream] * rate[:, None], start, end, edges)
    shares = np.diff(carried, axis=0) / (whole * played.end_seconds / BINS)
    moved = np.zeros(len(problem.streams))
    np.add.at(moved, stream, rate * np.maximum(np.minimum(end, played.end_seconds) - start, 0.0))
    of_link = np.asarray(problem.all_loads.T @ moved)
    order = [k for k in _order(names) if whole[k] > 0]
    return Utilisation(
        counters=tuple(
            Counter(name=names[k], start_seconds=tuple(edges[:-1].tolist()), values=tuple(shares[:, k].tolist()))
            for k in order
        ),
        mean={names[k]: float(shares[:, k].mean()) for k in order},
        peak={names[k]: float(shares[:, k].max()) for k in order},
        busiest=_busiest(network, of_link, played.end_seconds),
        bytes_moved=float(of_link.sum()),
    )


def _pieces(played: Played, streams: int) -> tuple[Ints, Floats, Floats, Floats]:
    """Stretches of constant rate: stream, start, end, bytes per second of one of its flows."""
    times = [entry[0] for entry in played.record]
    ends = [*times[1:], played.end_seconds]
    lengths = [len(entry[1]) for entry in played.record]
    parts = [
        np.array([key for entry in played.record for key in entry[1]], np.int64),
        np.repeat(times, lengths),
        np.repeat(ends[: len(times)], lengths),
        np.concatenate([np.zeros(0), *(entry[2] for entry in played.record)]),
    ]
    fixed = np.array(played.moved, np.float64).reshape(-1, 4)
    fixed = fixed[fixed[:, 2] > fixed[:, 1]]
    return (
        np.concatenate([parts[0], fixed[:, 0].astype(np.int64)]),
        np.concatenate([parts[1], fixed[:, 1]]),
        np.concatenate([parts[2], fixed[:, 2]]),
        np.concatenate([parts[3], fixed[:, 3] / (fixed[:, 2] - fixed[:, 1])]),
    )


def _carried(rates: Floats, start: Floats, end: Floats, edges: Floats) -> Floats:
    """Bytes up to each edge: (edges, groups). Rates that hold from start to end, integrated."""

    def ramps(at: Floats) -> Floats:
        order = np.argsort(at, kind="stable")
        zero = np.zeros((1, rates.shape[1]))
        slope = np.concatenate([zero, np.cumsum(rates[order], axis=0)])
        offset = np.concatenate([zero, np.cumsum(rates[order] * at[order, None], axis=0)])
        place = np.searchsorted(at[order], edges, side="right")
        return np.asarray(slope[place] * edges[:, None] - offset[place])

    return ramps(start) - ramps(end)


def _groups(network: LinkMap, links: Ints) -> tuple[list[str], Ints]:
    """Name the kind of each link: its block, and its rail where the fabric has rails."""
    firsts = np.array([network.first[block] for block in BLOCKS])
    sizes = np.diff(np.append(firsts, network.num_links))
    filled = np.flatnonzero(sizes > 0)
    block = filled[np.searchsorted(firsts[filled], links, side="right") - 1]
    place = links - firsts[block]
    rail = np.full(len(links), -1)
    fabric, wires = network.cluster.fabric, network.wires
    if wires is not None and fabric.kind != "fat-tree" and fabric.rails > 1:
        nics = np.isin(block, [BLOCKS.index("nic_up"), BLOCKS.index("nic_down")])
        rail[nics] = place[nics] // network.planes % network.cluster.node.nics_per_node // wires.cables_per_leaf
        leaves = np.isin(block, [BLOCKS.index("leaf_up"), BLOCKS.index("leaf_down")])
        leaf = place[leaves] // max(network.uplinks, 1)
        rail[leaves] = leaf // wires.groups if fabric.kind == "rail-only" else leaf % wires.leaves_per_group
    keys, group = np.unique(block * 10_000 + rail + 1, return_inverse=True)
    names = [
        NAMES[BLOCKS[key // 10_000]] + (f", rail {key % 10_000 - 1}" if key % 10_000 else "") for key in keys.tolist()
    ]
    return names, group.astype(np.int64)


def _order(names: list[str]) -> list[int]:
    return sorted(range(len(names)), key=lambda k: (list(NAMES.values()).index(names[k].split(",")[0]), names[k]))


def _busiest(network: LinkMap, carried: Floats, seconds: float) -> tuple[tuple[str, float], ...]:
    """Links by share of their capacity, one of each size of share."""
    capacities = network.capacities_bytes_per_second
    share = np.divide(carried, capacities * seconds, out=np.zeros_like(carried), where=capacities > 0)
    values, first = np.unique(np.round(share, 6), return_index=True)
    return tuple(
        (network.name(int(first[k])), float(values[k])) for k in range(len(values))[::-1][:SHOWN_LINKS] if values[k]
    )
