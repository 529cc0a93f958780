"""The one place that talks to PuLP: a mixed-integer program as arrays, solved by HiGHS, else by CBC.

Only what PuLP 3.3.2 and 4 share without a warning is used. A status is never believed alone: the solution status and
the dual bound say what was proved. One thread and a fixed seed make the answer repeatable.
"""

from __future__ import annotations

import importlib.util
import math
import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from topologies.errors import SolverFailed

Floats = npt.NDArray[np.float64]
SolverName = Literal["HiGHS", "CBC"]
CHAIN: tuple[SolverName, ...] = ("HiGHS", "CBC")
"""Solvers in the order in which they are tried."""

THREADS = 1
"""HiGHS answers nonsense, without an error, if this changes within a process."""
INTEGRAL = 1e-6
"""Values this close to a whole number count as one."""


@dataclass(slots=True)
class Program:
    """Minimise ``costs @ x`` under ``low <= x <= high`` and rows ``left <= row @ x <= right``; rows may be added."""

    costs: Floats
    low: Floats
    high: Floats
    integer: npt.NDArray[np.bool_]
    rows: list[Floats] = field(default_factory=list)
    left: list[float] = field(default_factory=list)
    right: list[float] = field(default_factory=list)
    constant: float = 0.0
    """Added to the objective; solvers do not see it."""

    def copy(self) -> Program:
        """Return a program of its own that shares the rows so far."""
        return replace(
            self,
            low=self.low.copy(),
            high=self.high.copy(),
            rows=list(self.rows),
            left=list(self.left),
            right=list(self.right),
        )

    def add(self, row: Floats, left: float = -math.inf, right: float = math.inf) -> None:
        """Add one row."""
        self.rows.append(row)
        self.left.append(left)
        self.right.append(right)


@dataclass(frozen=True, slots=True, kw_only=True)
class Solved:
    """What a solver found. Both objective and bound hold the program's constant."""

    values: Floats | None
    """Of an integer-feasible solution; None: none was found."""
    objective: float
    bound: float
    """No solution is better; minus infinity where the solver does not say (CBC)."""
    status: str
    sol_status: str
    solver: SolverName
    seconds: float
    nodes: int = 0

    @property
    def infeasible(self) -> bool:
        """Proved to have no solution."""
        return self.status == "Infeasible"

    @property
    def gap(self) -> float:
        """Objective over bound less 1 (the solver's own gap leaves out the constant)."""
        return self.objective / self.bound - 1 if self.bound > 0 else math.inf


def solve(
    program: Program,
    *,
    gap: float = 1e-4,
    nodes: int | None = None,
    seconds: float | None = None,
    chain: Sequence[SolverName] = CHAIN,
) -> Solved:
    """Solve with the first solver of the chain that gives an answer.

    Args:
        program: what to minimise.
        gap: relative gap at which to stop.
        nodes: branch-and-bound nodes at most; unlike a time limit it means the same on every machine.
        seconds: time limit.
        chain: solvers to try.

    Raises:
        SolverFailed: no solver is installed, or each one broke down.
    """
    trouble = []
    for name in chain:
        try:
            found = _solve_with(name, program, gap, nodes, seconds)
        except SolverFailed as failure:
            trouble.append(str(failure))
            continue
        if found.values is not None or found.infeasible or name == chain[-1]:
            return found
        trouble.append(f"{name}: {found.status} without a solution")
    raise SolverFailed("; ".join(trouble) or "no solver was named")


def _solve_with(name: SolverName, program: Program, gap: float, nodes: int | None, seconds: float | None) -> Solved:
    import pulp

    solver = _solver(pulp, name, gap, nodes, seconds)
    problem = pulp.LpProblem("headway", pulp.LpMinimize)
    variables = [
        problem.add_variable(f"x{i}", _bound(low), _bound(high), "Integer" if whole else "Continuous")
        for i, (low, high, whole) in enumerate(zip(program.low, program.high, program.integer, strict=True))
    ]
    problem += pulp.lpSum(float(program.costs[i]) * variables[i] for i in np.flatnonzero(program.costs))
    for row, left, right in zip(program.rows, program.left, program.right, strict=True):
        total = pulp.lpSum(float(row[i]) * variables[i] for i in np.flatnonzero(row))
        if left == right:
            problem += total == right
            continue
        if math.isfinite(left):
            problem += total >= left
        if math.isfinite(right):
            problem += total <= right
    started = time.perf_counter()
    try:
        problem.solve(solver)
    except Exception as error:  # a killed or broken solver raises whatever it likes
        if not _stopped_at_limit(name, problem):
            raise SolverFailed(f"{name} broke down: {type(error).__name__}: {error}") from error
    seconds = time.perf_counter() - started
    if name == "HiGHS":
        return _highs_answer(problem, variables, program, seconds)
    values = np.array([math.nan if one.varValue is None else float(one.varValue) for one in variables])
    optimal = problem.sol_status == pulp.LpSolutionOptimal
    feasible = (optimal or problem.sol_status == pulp.LpSolutionIntegerFeasible) and _whole(values, program)
    objective = float(program.costs @ values) + program.constant if feasible else math.inf
    return Solved(
        values=values if feasible else None,
        objective=objective,
        bound=objective - gap * abs(objective) if optimal and feasible else -math.inf,
        status=pulp.LpStatus[problem.status],
        sol_status=pulp.LpSolution[problem.sol_status],
        solver=name,
        seconds=seconds,
    )


def _stopped_at_limit(name: SolverName, problem: Any) -> bool:
    """PuLP 3.3.2 does not know HiGHS's status for a node limit and raises a KeyError, though the answer is there."""
    model = getattr(problem, "solverModel", None)
    return name == "HiGHS" and model is not None and "imit" in model.modelStatusToString(model.getModelStatus())


def _highs_answer(problem: Any, variables: list[Any], program: Program, seconds: float) -> Solved:
    """Read HiGHS's own status, solution and dual bound: what PuLP makes of them hides limits."""
    model = problem.solverModel
    info, status = model.getInfo(), model.modelStatusToString(model.getModelStatus())
    place = {one.name: index for index, one in enumerate(problem.variables())}
    columns = model.getSolution().col_value
    feasible = int(info.primal_solution_status) == 2 and len(columns) == len(variables)
    values = np.array([columns[place[one.name]] for one in variables]) if feasible else np.empty(0)
    feasible = feasible and _whole(values, program)
    objective = float(program.costs @ values) + program.constant if feasible else math.inf
    mixed = bool(np.any(program.integer))
    bound = float(info.mip_dual_bound) + program.constant if mixed else objective if status == "Optimal" else -math.inf
    return Solved(
        values=values if feasible else None,
        objective=objective,
        bound=bound if math.isfinite(bound) else -math.inf,
        status="Infeasible" if "nfeasible" in status else status,
        sol_status="optimal" if feasible and status == "Optimal" else "feasible" if feasible else "none",
        solver="HiGHS",
        seconds=seconds,
        nodes=max(int(info.mip_node_count), 0),
    )


def _solver(pulp: Any, name: SolverName, gap: float, nodes: int | None, seconds: float | None) -> Any:
    if name == "HiGHS":
        if importlib.util.find_spec("highspy") is None:
            raise SolverFailed("HiGHS is not installed (pip install highspy)")
        limits = {} if nodes is None else {"mip_max_nodes": nodes}
        return pulp.HiGHS(msg=False, gapRel=gap, timeLimit=seconds, threads=THREADS, random_seed=0, **limits)
    path = cbc_path()
    if path is None:
        raise SolverFailed("CBC is not installed (pip install cbcbox)")
    return pulp.COIN_CMD(path=path, msg=False, gapRel=gap, timeLimit=seconds, threads=THREADS, maxNodes=nodes)


def cbc_path() -> str | None:
    """Find a CBC: on the path, in the package cbcbox, or the one that PuLP 3 brings along."""
    found = shutil.which("cbc")
    if found is None and importlib.util.find_spec("cbcbox") is not None:
        import cbcbox  # type: ignore[import-not-found, unused-ignore]

        found = str(cbcbox.cbc_bin_path())
    if found is None:
        import platform

        import pulp

        machine = {"x86_64": "i64", "aarch64": "arm64"}.get(platform.machine(), "")
        brought = Path(pulp.__file__).parent / "solverdir" / "cbc" / platform.system().lower() / machine / "cbc"
        found = str(brought) if brought.is_file() else None
    return found


def _bound(value: float) -> float | None:
    return float(value) if math.isfinite(value) else None


def _whole(values: Floats, program: Program) -> bool:
    """Without an incumbent CBC leaves the fractional values of its relaxation behind."""
    chosen = values[program.integer]
    return bool(np.all(np.isfinite(values)) and np.all(np.abs(chosen - np.round(chosen)) < INTEGRAL * 100))
