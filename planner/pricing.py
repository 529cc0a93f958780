"""Step seconds and peak bytes of all legal layouts, and the few that deserve a closer look."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from planner.candidates import Candidates
from planner.outlook import facility_watts
from planner.question import Question
from scenarios.layout import SCHEDULES
from scenarios.scenario import Scenario
from simulator.arrays import LayoutArrays
from simulator.memory import peak_bytes
from simulator.step import step_seconds

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[Any]

DEGREES = ("tp", "cp", "pp", "dp", "ep")


@dataclass(frozen=True, slots=True, kw_only=True)
class Priced:
    """All legal layouts with their memory and step time; ``fits`` marks those that a GPU can hold."""

    found: Candidates
    layouts: LayoutArrays
    peak_bytes: Floats
    fits: npt.NDArray[np.bool_]
    step_seconds: Floats
    score: Floats
    """What the objective minimises, before checkpoints and failures."""


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
    """Memory and step time of every legal layout, and what they mean for the objective."""
    layouts = found.layouts
    peak, seconds = peaks(question, layouts), times(question, layouts)
    return Priced(
        found=found,
        layouts=layouts,
        peak_bytes=peak,
        fits=peak <= capacity_bytes(question),
        step_seconds=seconds,
        score=seconds * _weights(scenario, layouts),
    )


def _weights(scenario: Scenario, layouts: LayoutArrays) -> Floats:
    """What a second of each layout costs in the unit of the objective, by GPUs in use."""
    used = layouts.world_size.astype(np.float64)
    if scenario.objective == "energy":
        return used
    if scenario.objective == "cost":
        watts = facility_watts(scenario.cluster, 1) / scenario.cluster.node.gpus_per_node
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


def shortlist(priced: Priced, rows: Ints, per_schedule: int) -> Ints:
    """The best rows of every schedule, one for each set of degrees: the closed form may flatter one schedule."""
    groups = best_of_each(priced.layouts, priced.score, rows, (*DEGREES, "schedule"))
    schedules = priced.layouts.schedule[groups]
    chosen = [groups[schedules == code][:per_schedule] for code in range(len(SCHEDULES))]
    merged = np.concatenate(chosen)
    return merged[np.argsort(priced.score[merged], kind="stable")]
