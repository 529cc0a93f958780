"""The partition program: between its bound and equal stages, and what it promises is what is played."""

from types import SimpleNamespace

import pytest

from planner.partition import Effort, solve_partition
from planner.search import spelled_out
from scenarios.layout import Layout
from scenarios.scenario import load_scenario
from simulator.training import play_step


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        ("llama3-70b-512-h100", Layout(tp=4, pp=4, dp=32, sequence_parallel=True)),
        ("llama3-70b-512-h100", Layout(tp=4, pp=8, dp=16, sequence_parallel=True)),
        ("llama3-405b-16k-h100", Layout(tp=8, pp=16, dp=128, sequence_parallel=True)),
    ],
)
def test_the_choice_is_between_its_bound_and_equal_stages(problem_of, name, layout):
    scenario = load_scenario(name)
    found = solve_partition(problem_of(scenario, layout), Effort())
    assert found.choice is not None
    assert found.bound <= found.seconds * (1 + 1e-9)
    assert found.seconds <= found.uniform_seconds * (1 + 1e-9)
    assert found.gap <= 0.01


def test_the_simulator_plays_the_choice_in_the_time_that_was_promised(problem_of):
    scenario, layout = load_scenario("llama3-70b-512-h100"), Layout(tp=4, pp=8, dp=16, sequence_parallel=True)
    problem = problem_of(scenario, layout)
    found = solve_partition(problem, Effort())
    opened = SimpleNamespace(work=SimpleNamespace(problem=problem), found=found, layout=layout)
    chosen = spelled_out(opened, scenario.model.pattern)
    assert sum(one.layers for one in chosen.stages) == scenario.model.num_layers
    assert play_step(scenario.cluster, scenario.job, chosen).step_seconds == pytest.approx(found.seconds, rel=1e-6)
