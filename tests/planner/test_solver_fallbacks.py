"""A solver that is missing, killed or cut short: another one answers, the bound is kept, the status tells no lies."""

from __future__ import annotations

import importlib.util
from typing import Any

import numpy as np
import pulp
import pytest

from planner.ilp import Program, cbc_path, solve
from planner.partition import Effort, solve_partition
from planner.planning import plan
from planner.stage_problem import StageProblem
from scenarios.layout import Layout
from scenarios.scenario import load_scenario
from topologies.errors import SolverFailed

needs_cbc = pytest.mark.skipif(cbc_path() is None, reason="no CBC here")


def knapsack(size: int = 12) -> Program:
    """Value 12 + 9 + ... under a weight limit; large enough that the relaxation is fractional."""
    weights = np.arange(3, 3 + size, dtype=float)
    program = Program(
        costs=-(weights**1.1), low=np.zeros(size), high=np.ones(size), integer=np.ones(size, dtype=bool), constant=100.0
    )
    program.add(weights, right=float(weights.sum()) / 2 + 0.5)
    return program


def best_knapsack(program: Program) -> float:
    count = len(program.costs)
    picks = (np.arange(2**count)[:, None] >> np.arange(count)) & 1
    allowed = picks @ program.rows[0] <= program.right[0]
    return float((picks[allowed] @ program.costs).min()) + program.constant


@pytest.mark.parametrize("chain", [("HiGHS",), pytest.param(("CBC",), marks=needs_cbc)])
def test_both_solvers_agree_with_enumeration_and_bound_it(chain: Any) -> None:
    program = knapsack()
    answer = solve(program, gap=1e-9, chain=chain)
    assert answer.objective == pytest.approx(best_knapsack(program))
    assert answer.bound <= answer.objective + 1e-6
    assert answer.solver == chain[0]


def break_highs(monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    if how == "missing":
        found = importlib.util.find_spec
        monkeypatch.setattr(
            importlib.util, "find_spec", lambda name, *a: None if name == "highspy" else found(name, *a)
        )
    else:

        def killed(*_: Any, **__: Any) -> None:
            raise pulp.PulpSolverError("killed")

        monkeypatch.setattr(pulp.HiGHS, "actualSolve", killed)


@needs_cbc
@pytest.mark.parametrize("how", ["missing", "killed"])
def test_cbc_takes_over(monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    break_highs(monkeypatch, how)
    answer = solve(knapsack(), gap=1e-9)
    assert answer.solver == "CBC"
    assert answer.objective == pytest.approx(best_knapsack(knapsack()))


def test_without_any_solver_each_failure_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    break_highs(monkeypatch, "killed")
    monkeypatch.setattr("planner.ilp.cbc_path", lambda: None)
    with pytest.raises(SolverFailed, match=r"HiGHS broke down.*killed.*CBC is not installed"):
        solve(knapsack())


def test_the_dynamic_program_is_the_last_resort_and_the_bound_stays(
    monkeypatch: pytest.MonkeyPatch, problem_of: Any
) -> None:
    scenario, layout = load_scenario("llama3-405b-16k-h100"), Layout(tp=8, pp=16, dp=128, sequence_parallel=True)
    problem: StageProblem = problem_of(scenario, layout)
    best = solve_partition(problem, Effort(gap=1e-5))
    break_highs(monkeypatch, "missing")
    monkeypatch.setattr("planner.ilp.cbc_path", lambda: None)
    found = solve_partition(problem_of(scenario, layout), Effort(gap=1e-5))
    assert found.solver == "dynamic program"
    assert found.sol_status == "feasible"
    assert any("not installed" in note for note in found.notes)
    assert found.bound <= best.seconds * (1 + 1e-9)
    assert best.seconds <= found.seconds * (1 + 1e-9)
    assert found.gap < 0.03


def test_a_node_limit_is_not_called_optimal() -> None:
    rng = np.random.default_rng(0)
    size = 60
    program = Program(
        costs=-rng.integers(20, 90, size).astype(float),
        low=np.zeros(size),
        high=np.ones(size),
        integer=np.ones(size, dtype=bool),
    )
    for _ in range(8):
        weights = rng.integers(10, 80, size).astype(float)
        program.add(weights, right=float(weights.sum()) / 3)
    answer = solve(program, gap=0.0, nodes=1, chain=("HiGHS",))
    assert answer.sol_status != "optimal"
    assert answer.bound < answer.objective


def test_a_time_limit_gives_a_plan_with_an_honest_gap() -> None:
    scenario = load_scenario("llama3-70b-512-h100")
    hasty, patient = plan(scenario, time_limit_seconds=0.1), plan(scenario)
    assert hasty.solver["status"] == "stopped by the time limit"
    assert hasty.predicted["memory_bytes"]["peak"] <= hasty.predicted["memory_bytes"]["capacity"]
    assert hasty.solver["bound_seconds"] <= patient.predicted["step_seconds"] <= hasty.predicted["step_seconds"]
    assert hasty.solver["gap"] >= hasty.predicted["step_seconds"] / patient.predicted["step_seconds"] - 1
