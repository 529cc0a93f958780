"""How fast layouts are enumerated and priced; run with ``make bench``. The best of three counts."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest

from planner.candidates import legal_layouts
from planner.planning import plan
from planner.pricing import peaks, times
from planner.question import Question
from scenarios.scenario import load_scenario


def best_of_three(run: Callable[[], Any]) -> float:
    seconds = []
    for _ in range(3):
        started = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - started)
    return min(seconds)


@pytest.mark.parametrize(
    ("name", "least", "limit_seconds"),
    [("llama3-405b-16k-h100", 60_000, 1.0), ("deepseek-v3-2048-h800", 1_000_000, 3.0)],
)
def test_enumeration(name: str, least: int, limit_seconds: float, record_property: Callable[[str, Any], None]) -> None:
    scenario = load_scenario(name)
    question = Question(cluster=scenario.cluster, job=scenario.job)
    layouts = legal_layouts(question).layouts
    seconds = best_of_three(lambda: legal_layouts(question))
    record_property("layouts_per_second", len(layouts) / seconds)
    assert len(layouts) > least
    assert seconds < limit_seconds


def test_pricing_reaches_half_a_million_layouts_a_second(record_property: Callable[[str, Any], None]) -> None:
    scenario = load_scenario("llama3-405b-16k-h100")
    question = Question(cluster=scenario.cluster, job=scenario.job, least_gpus=scenario.cluster.num_gpus // 2)
    layouts = legal_layouts(question).layouts
    seconds = best_of_three(lambda: (times(question, layouts), peaks(question, layouts)))
    rate = len(layouts) / seconds
    record_property("layouts_per_second", rate)
    print(f"{len(layouts):,} layouts, step and memory: {rate / 1e6:.2f} million a second")  # noqa: T201
    assert rate > 5e5


@pytest.mark.parametrize(
    ("name", "limit_seconds"),
    [("laptop", 1.0), ("llama3-70b-512-h100", 5.0), ("llama3-405b-16k-h100", 15.0), ("deepseek-v3-2048-h800", 20.0)],
)
def test_a_whole_plan(name: str, limit_seconds: float) -> None:
    scenario = load_scenario(name)
    started = time.perf_counter()
    plan(scenario)
    assert time.perf_counter() - started < limit_seconds
