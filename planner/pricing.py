"""Step seconds and bytes of all legal layouts: bounds for the search, estimates of the closed form for the rest."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from planner.bounds import Floors, floors
from planner.candidates import Candidates
from planner.checkpointing import operation
from planner.question import Question
from planner.upkeep import working_watts
from scenarios.layout import Layout
from scenarios.scenario import Scenario
from simulator.arrays import LayoutArrays
from simulator.memory import peak_bytes
from simulator.step import step_seconds

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[Any]

DEGREES = ("tp", "cp", "pp", "dp", "ep")
SIZES = 24
"""Numbers of GPUs whose goodput is worked out; between them it is interpolated."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Priced:
    """All legal layouts with their bounds; ``fits`` marks those that stages and recompute may bring into memory."""

    found: Candidates
    layouts: LayoutArrays
    floors: Floors
    fits: npt.NDArray[np.bool_]
    rates: Floats
    """What a second of a step costs in the unit of the objective, failures and checkpoints included."""

    @property
    def values(self) -> Floats:
        """Bounds in the unit of the objective."""
        return self.floors.step_seconds * self.rates


def times(question: Question, layouts: LayoutArrays) -> Floats:
    """Seconds of one step of each layout, by the closed form."""
    return step_seconds(question.cluster, question.job, layouts).total_seconds if len(layouts) else np.empty(0)


def peaks(question: Question, layouts: LayoutArrays) -> Floats:
    """Bytes on the fullest rank of each layout."""
    return peak_bytes(question.cluster, question.job, layouts) if len(layouts) else np.empty(0)


def capacity_bytes(question: Question) -> float:
    """What one GPU offers; of several pools the smallest."""
    return min(pool.node.gpu.usable_memory_bytes for pool in question.cluster.pools)


def price(scenario: Scenario, question: Question, found: Candidates) -> Priced:
    """Bound every legal layout, and weigh its seconds by the objective."""
    layouts = found.layouts
    bounds = floors(question, layouts)
    return Priced(
        found=found,
        layouts=layouts,
        floors=bounds,
        fits=bounds.memory_bytes <= capacity_bytes(question),
        rates=rates(scenario, layouts, bounds.step_seconds),
    )


def rates(scenario: Scenario, layouts: LayoutArrays, seconds: Floats) -> Floats:
    """Weight of a second of each layout: what the GPUs in use cost or draw, over the goodput of so many of them."""
    used = layouts.world_size.astype(np.float64)
    if not len(used):
        return used
    sizes = np.unique(used)
    sampled = sizes[np.unique(np.linspace(0, len(sizes) - 1, SIZES).astype(int))]
    typical = float(np.median(seconds))
    goodput = [_goodput(scenario, int(size), typical) for size in sampled]
    weights = _weights(scenario, used)
    return np.asarray(weights / np.interp(used, sampled, goodput))


def _goodput(scenario: Scenario, gpus: int, seconds: float) -> float:
    return max(operation(scenario, Layout(dp=gpus), seconds).goodput, 1e-3)


def _weights(scenario: Scenario, used: Floats) -> Floats:
    if scenario.objective == "energy":
        return used
    if scenario.objective == "cost":
        watts = working_watts(scenario.cluster, 1) / scenario.cluster.node.gpus_per_node
        usd = scenario.prices.gpu_usd_per_second + scenario.prices.electricity_usd_per_joule * watts
        return used * usd if usd > 0 else used
    return np.ones_like(used)


def best_of_each(layouts: LayoutArrays, values: Floats, rows: Ints, by: tuple[str, ...]) -> Ints:
    """Of some rows the best one for each set of equal values of the axes ``by``, best first."""
    order = rows[np.argsort(values[rows], kind="stable")]
    code = np.zeros(len(order), dtype=np.int64)
    for axis in by:
        _, number = np.unique(getattr(layouts, axis)[order], return_inverse=True)
        code = code * (int(number.max(initial=0)) + 1) + number
    _, first = np.unique(code, return_index=True)
    return order[np.sort(first)]


def finite(value: float) -> float | None:
    """A number for JSON; None for infinity."""
    return value if math.isfinite(value) else None
