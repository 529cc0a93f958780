"""Layers and recompute of every stage of one layout: solve, walk the pipeline, add its longest path, solve again.

The bound comes from the program's dual, the value from the simulator's formulas; they meet when no path is missing.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import numpy.typing as npt

from planner.ilp import CHAIN, Program, SolverName, solve
from planner.partition_dp import best_intervals, choice_of
from planner.paths import Path, path_key
from planner.recompute import uniform_choice
from planner.stage_problem import MAX_COLUMNS, Choice, StageProblem
from planner.stage_program import choice_of_values, cut, stage_program, stage_seconds
from planner.tightening import (
    chunk_bound,
    interval_bound,
    least_tail,
    most_each,
    sends_each,
    share_cases,
    share_rows,
    whole_shares,
    work_rows,
)
from topologies.errors import SolverFailed

Floats = npt.NDArray[np.float64]

SLOWER = 1.03
"""Factor on one rank's times where paths are looked for."""
CLOSE = 1e-6
"""A path is missing where it exceeds the program's makespan by more than this share."""
SLOW = 2e-4
"""Rounds stop where one raises the bound by no more than this share."""
PATHS_A_ROUND = 8
"""Paths that enter the relaxation at once."""
LOOSE = 0.985
"""Paths below this share of the makespan leave the relaxation."""
FIRST_PATHS = 48
"""Known paths with which a layout begins."""
LOAD_SPREAD = 1.03
"""Trust region of virtual stages: no rank works longer than the slowest one of the start, times this."""
FIRST_ROUNDS, RELAXED_ROUNDS = 3, 30
"""Rounds of paths on the relaxation, before and after the cases of whole layers are looked at."""
CHUNK_NODES = 20
"""The same with virtual stages, where a node takes longer."""
MAX_CASES = 40
"""Cases of which rank holds how much that are bounded one by one."""
SHARE_ROUNDS = 4
"""Rounds of paths for each case of the last rank that holds a full share."""
EXACT_ROUNDS = 12
"""Rounds of paths on whole layers."""
NODES = 300
"""Branch-and-bound nodes of one solution."""


@dataclass(slots=True)
class Partition:
    """The best stages of one layout that were found, and what bounds all others inside the trust region."""

    problem: StageProblem
    choice: Choice | None = None
    seconds: float = math.inf
    """Of the step with the best choice."""
    uniform_seconds: float = math.inf
    """With equal stages and the least recompute that fits."""
    bound: float = 0.0
    """No step is faster; infinite: nothing fits."""
    status: str = "relaxation"
    sol_status: str = "none"
    solver: str = "linear relaxation"
    programs: int = 0
    nodes: int = 0
    notes: set[str] = field(default_factory=set)

    @property
    def gap(self) -> float:
        """How far the best choice may be from the optimum."""
        return self.seconds / self.bound - 1 if 0 < self.bound < math.inf else math.inf


@dataclass(frozen=True, slots=True, kw_only=True)
class Effort:
    """How hard to try. All limits but the deadline mean the same on every machine."""

    gap: float = 1e-3
    nodes: int = NODES
    rounds: int = EXACT_ROUNDS
    chain: Sequence[SolverName] = CHAIN
    opened: int = 2000
    """Layouts that a search opens at most."""
    steps: int = 3
    """What is done with them: 1 equal stages only, 2 the relaxation too, 3 the integer program too."""
    deadline: float = math.inf
    """Of ``time.perf_counter``."""

    @property
    def left_seconds(self) -> float | None:
        """Until the deadline; None: there is none."""
        return None if math.isinf(self.deadline) else max(self.deadline - time.perf_counter(), 0.0)

    @property
    def over(self) -> bool:
        """The deadline has passed."""
        return self.left_seconds == 0.0


class Solving:
    """The work on one layout: a quick bound at once, then start, relax and solve, each of which may be the last."""

    def __init__(self, problem: StageProblem) -> None:
        self.found = Partition(problem)
        self.problem = problem
        self.active: dict[bytes, Path] = {}
        """Paths in the program; those that are far from binding are taken out again."""
        self.found.bound = self._quick_bound()
        self.excluded = math.inf
        """What the program leaves out takes at least so long."""

    @cached_property
    def uniform(self) -> Choice | None:
        """Equal stages with the least recompute that fits; None: not even full recompute does."""
        return uniform_choice(self.problem)

    @cached_property
    def program(self) -> Program:
        """The program without its paths."""
        program = stage_program(self.problem)
        for row, left in work_rows(self.problem, whole_shares(self.problem), len(program.costs)):
            program.add(row, left=left)
        if math.isfinite(self.most_load):
            program.high[self.problem.extra["load"]] = self.most_load
        return program

    @cached_property
    def most_load(self) -> float:
        """Trust region of virtual stages: the longest that a rank may work on a micro-batch."""
        problem = self.problem
        if problem.vpp == 1 or self.uniform is None:
            return math.inf
        forward, backward, _ = problem.choice_seconds(self.uniform)
        slowest = max(float((forward + backward)[chunk].sum()) for chunk in problem.chunks)
        return LOAD_SPREAD * slowest / problem.pieces.straggler + problem.pieces.loaded

    def start(self) -> None:
        """Walk the uniform split with the least recompute, in each of a rank's chunks in turn: the first choice."""
        if self.uniform is None:
            return
        others = [uniform_choice(self.problem, chunk) for chunk in range(1, self.problem.vpp)]
        self._offer([self.uniform, *(one for one in others if one is not None)])
        self.found.uniform_seconds = self.found.seconds

    def relax(self, cutoff: float, effort: Effort) -> None:
        """Raise the bound by paths on the relaxation, until none is missing or the bound exceeds the cutoff."""
        if self.found.bound >= cutoff:
            return
        if not self.problem.columns:
            self.found.bound = math.inf
            return
        self._known_paths()
        self._by_intervals()
        if self._one_stage() or self.found.gap <= effort.gap:
            return
        for rounds in (FIRST_ROUNDS, RELAXED_ROUNDS) if math.isfinite(cutoff) else (RELAXED_ROUNDS,):
            complete = self._by_paths(rounds, cutoff, effort)
            if self.found.bound < cutoff and not effort.over:
                self._by_shares(cutoff, effort)
            if complete or self.found.bound >= cutoff or effort.over:
                return

    def _known_paths(self) -> None:
        """Begin with the paths of other layouts that take longest here."""
        known, problem = self.problem.pool.paths, self.problem
        if self.found.choice is not None:
            fixed = np.array([problem.pieces.send, problem.pieces.host])
            times = np.concatenate([*problem.choice_seconds(self.found.choice), fixed])
            known = known[np.argsort(-(known @ times), kind="stable")]
        self.active.update((path_key(path), path) for path in known[:FIRST_PATHS])

    def _by_paths(self, rounds: int, cutoff: float, effort: Effort) -> bool:
        """Solve the relaxation and add the paths that it breaks; True: it breaks no more (or next to none)."""
        last = 0.0
        for _ in range(rounds):
            if self.found.bound >= cutoff or effort.over:
                return True
            values, bound = relaxed(self._whole_program())
            self.found.bound = max(self.found.bound, bound)
            if values is None or not self._add_paths(values) or bound - last < SLOW * bound:
                return True
            last = bound
        return False

    def _quick_bound(self) -> float:
        """All work evenly shared, and what follows the pipeline at least: no program is needed for that."""
        problem, pieces = self.problem, self.problem.pieces
        shares = whole_shares(problem)
        passes = 2 * problem.vpp * pieces.host + sends_each(problem) * pieces.send
        pipeline = pieces.num_microbatches * (shares.even_seconds(problem.pp) + passes + pieces.per_microbatch)
        simple = pipeline + least_tail(problem, math.inf) + pieces.tail.update.constant
        return max(simple, chunk_bound(problem, shares, self.most_load))

    def _by_intervals(self) -> None:
        """One chunk per rank: the dynamic program bounds all plans, and what it met are good ones."""
        bound, sizes = interval_bound(self.problem)
        self.found.bound = max(self.found.bound, bound)
        self._offer([choice_of(self.problem, one) for one in sizes])

    def _by_shares(self, cutoff: float, effort: Effort) -> None:
        """Bound case by case which rank is the last to hold as many layers as it can in a better step."""
        problem, limit = self.problem, min(cutoff, self.found.seconds)
        if not math.isfinite(limit):
            return
        shares = whole_shares(problem)
        rows = share_rows(problem, shares, len(self.program.costs))
        most = most_each(problem, shares, limit)
        cases = share_cases(most, shares.total)
        if self.excluded > limit:
            self.excluded = limit
            for row, count in zip(rows, most, strict=True):
                self.program.add(row, right=float(count))
        if cases is None:
            self.found.bound = max(self.found.bound, limit)
            return
        if len(cases) > MAX_CASES:
            return
        smallest = limit
        for case in cases:
            limits = [(row, least, more) for row, (least, more) in zip(rows, case, strict=True)]
            last = 0.0
            for _ in range(SHARE_ROUNDS):
                values, bound = relaxed(self._whole_program(limits))
                if values is None or bound >= smallest or not self._add_paths(values) or bound - last < SLOW * bound:
                    break
                last = bound
            smallest = min(smallest, bound)
            if smallest <= self.found.bound or effort.over:
                return
        self.found.bound = max(self.found.bound, smallest)

    def solve(self, cutoff: float, effort: Effort) -> None:
        """Solve with whole layers and walk the answer, until bound and value meet or the cutoff is passed."""
        found, problem = self.found, self.problem
        if found.bound >= cutoff or problem.stages == 1 or not self._small_enough():
            return
        for _ in range(effort.rounds):
            if found.gap <= effort.gap or found.bound >= cutoff or effort.over:
                return
            try:
                answer = solve(
                    self._whole_program(),
                    gap=effort.gap / 2,
                    nodes=effort.nodes if problem.vpp == 1 else CHUNK_NODES,
                    seconds=effort.left_seconds,
                    chain=effort.chain,
                )
            except SolverFailed as failure:
                self._without_solver(str(failure))
                return
            found.programs, found.nodes = found.programs + 1, found.nodes + answer.nodes
            found.solver, found.status, found.sol_status = answer.solver, answer.status, answer.sol_status
            if answer.infeasible:
                found.bound = max(found.bound, self.excluded)
                return
            found.bound = max(found.bound, min(answer.bound, self.excluded, found.seconds))
            if answer.values is None:
                return
            new = self._offer([choice_of_values(problem, answer.values)])
            if not self._add_paths(answer.values) and not new:
                return

    def _whole_program(self, limits: Sequence[tuple[Floats, float, float]] = ()) -> Program:
        """The program with its active paths, and with some rows more."""
        program, problem = self.program.copy(), self.problem
        for path in self.active.values():
            row, left = cut(problem, path)
            program.add(row, left=left)
        for row, least, most in limits:
            program.add(row, left=least, right=most)
        return program

    def _offer(self, choices: Sequence[Choice]) -> bool:
        """Walk choices, keep the best one and all their paths; False: the program had them."""
        if not choices:
            return False
        seconds, paths = self.problem.seconds(choices)
        best = int(np.argmin(seconds))
        if seconds[best] < self.found.seconds:
            self.found.seconds, self.found.choice = float(seconds[best]), choices[best]
        self.problem.pool.add(paths)
        keys = {path_key(path): path for path in paths}
        new = not keys.keys() <= self.active.keys()
        self.active.update(keys)
        return new

    def _add_paths(self, values: Floats) -> bool:
        """Add the paths that a fractional solution breaks; False: it breaks none.

        Where ranks are alike, one longest path at a time would take for ever. So the pipeline is also walked half-way
        to the best choice, and there with each rank a little slower.
        """
        problem, at, pieces = self.problem, self.problem.extra, self.problem.pieces
        host = pieces.host + pieces.straggler * float(values[at["gather"]]) / (2 * problem.vpp)
        limit = float(values[at["pipeline"]])
        points = np.array(stage_seconds(problem, values))[None]
        if self.found.choice is not None:
            between = 0.5 * (points[0] + np.array(problem.choice_seconds(self.found.choice)))
            slower = np.where(np.array(problem.ranks) == np.arange(problem.pp)[:, None], SLOWER, 1.0)
            points = np.concatenate([points, between[None], between[None] * slower[:, None]])
        fixed = np.broadcast_to([pieces.send, host], (len(points), 2))
        times = np.concatenate([points.reshape(len(points), -1), fixed], axis=1)
        problem.pool.add(problem.pool.walks.longest(times)[1])
        if len(self.active) > FIRST_PATHS:
            self.active = {key: path for key, path in self.active.items() if path @ times[0] >= LOOSE * limit}
        known = problem.pool.paths
        taken = known @ times[0]
        broken = [row for row in np.argsort(-taken, kind="stable") if taken[row] > limit * (1 + CLOSE)]
        fresh = {path_key(known[row]): known[row] for row in broken[: PATHS_A_ROUND + len(self.active)]}
        fresh = {key: path for key, path in fresh.items() if key not in self.active}
        self.active.update(itertools.islice(fresh.items(), PATHS_A_ROUND))
        return bool(fresh)

    def _one_stage(self) -> bool:
        """Without a pipeline every content is priced: there is nothing to solve."""
        problem = self.problem
        if problem.stages > 1:
            return False
        self._offer([Choice(windows=(column.window,), layers=(column.layers,)) for column in problem.columns])
        self.found.bound, self.found.solver, self.found.status = self.found.seconds, "enumeration", "Optimal"
        self.found.sol_status = "optimal" if self.found.choice else "none"
        return True

    def _small_enough(self) -> bool:
        if len(self.problem.columns) <= MAX_COLUMNS:
            return True
        self._without_solver("layer kinds alternate: too many contents of a stage for the integer program")
        return False

    def _without_solver(self, reason: str) -> None:
        """The dynamic program (one chunk per rank) gives a choice; the bound of the relaxation stays."""
        self.found.notes.add(reason)
        choices = list(best_intervals(self.problem)) if self.problem.vpp == 1 else []
        if choices:
            self._offer(choices)
            self.found.solver, self.found.status, self.found.sol_status = "dynamic program", "fallback", "feasible"


def relaxed(program: Program) -> tuple[Floats | None, float]:
    """Solve without wholeness; (None, infinity) where nothing fits."""
    from scipy.optimize import linprog  # a third of a second of imports, and small questions never ask for it

    rows, left, right = np.array(program.rows), np.array(program.left), np.array(program.right)
    equal = left == right
    below, above = np.isfinite(right) & ~equal, np.isfinite(left) & ~equal
    found = linprog(
        program.costs,
        A_ub=np.concatenate([rows[below], -rows[above]]),
        b_ub=np.concatenate([right[below], -left[above]]),
        A_eq=rows[equal],
        b_eq=right[equal],
        bounds=list(zip(program.low.tolist(), program.high.tolist(), strict=True)),
        method="highs",
    )
    if found.status == 2:
        return None, math.inf
    if found.x is None:
        return None, 0.0
    return np.asarray(found.x), float(found.fun or 0.0) + program.constant


def solve_partition(
    problem: StageProblem, effort: Effort, cutoff: float = math.inf, told: Callable[[Partition], None] | None = None
) -> Partition:
    """Start, relax and solve one layout."""
    work = Solving(problem)
    work.start()
    work.relax(cutoff, effort)
    work.solve(cutoff, effort)
    if told is not None:
        told(work.found)
    return work.found
