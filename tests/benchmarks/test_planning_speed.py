"""How fast layouts are enumerated and priced; run with ``make bench``. The best of three counts."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest

from planner.bounds import floors
from planner.candidates import legal_layouts
from planner.planning import plan
from planner.question import Question
from scenarios.scenario import load_scenario


def best_of_three(run: Callable[[], Any]) -> float:
    seconds = []
    for _ in range(3):
        started = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - started)
    return min(seconds)


@pytest.mark.parametrize("name", ["llama3-405b-16k-h100", "deepseek-v3-2048-h800"])
def test_how_many_candidates_a_second_are_checked_and_bounded(
    name: str, record_property: Callable[[str, Any], None]
) -> None:
    """Combinations that rules reject count too; the legal ones get a bound of their step and of their memory.

    The rate is the machine's and is printed; that arrays are what makes it holds on any: one by one takes 50 times as
    long and more.
    """
    scenario = load_scenario(name)
    question = Question(cluster=scenario.cluster, job=scenario.job, allow=scenario.allow, least_gpus=LEAST.get(name))
    found = legal_layouts(question)
    seconds = best_of_three(lambda: floors(question, legal_layouts(question).layouts))
    rate = (len(found.layouts) + sum(found.rejected.values())) / seconds
    record_property("candidates_per_second", rate)
    print(f"{name}: {len(found.layouts):,} legal layouts, {rate / 1e6:.2f} million candidates a second")  # noqa: T201
    few = found.layouts.take(slice(0, 20))
    one_by_one = best_of_three(lambda: [floors(question, few.take(slice(row, row + 1))) for row in range(len(few))])
    together = best_of_three(lambda: floors(question, found.layouts))
    assert one_by_one / len(few) > 50 * together / len(found.layouts)


LEAST = {"llama3-405b-16k-h100": 8192}
"""GPUs that must work: with fewer than all of them there are more layouts."""


@pytest.mark.parametrize(
    ("name", "wanted_seconds", "limit_gap"),
    [
        ("laptop", 1.0, 0.01),
        ("llama3-70b-512-h100", 5.0, 0.03),
        ("llama3-405b-16k-h100", 15.0, 0.03),
        ("gpt-1t-8192-a100", 15.0, 0.03),
        ("deepseek-v3-2048-h800", 20.0, 0.03),
    ],
)
def test_a_whole_plan(name: str, wanted_seconds: float, limit_gap: float) -> None:
    """Seconds are printed beside those that are wanted on two quiet cores; the gap is the same on every machine."""
    scenario = load_scenario(name)
    started = time.perf_counter()
    made = plan(scenario)
    seconds = time.perf_counter() - started
    print(f"{name}: {seconds:.1f} s (wanted: {wanted_seconds:g}), gap {made.solver['gap']:.2%}")  # noqa: T201
    assert made.solver["gap"] <= limit_gap


def test_deepseek_s_own_layout_is_not_faster_than_the_plan() -> None:
    """PP 16, EP 64, ZeRO-1, DualPipe (arXiv 2412.19437, section 3.2), with the stages and recompute that suit it."""
    scenario = load_scenario("deepseek-v3-2048-h800")
    pins = {"pp": 16, "ep": 64, "tp": 1, "optimizer_sharding": "zero1", "schedule": "dualpipe"}
    made, theirs = plan(scenario, top=0), plan(scenario, pins=pins, top=0)
    print(f"{made.predicted['step_seconds']:.2f} s, theirs {theirs.predicted['step_seconds']:.2f} s")  # noqa: T201
    assert made.predicted["step_seconds"] <= theirs.predicted["step_seconds"]
