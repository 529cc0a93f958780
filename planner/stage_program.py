"""The integer program of one layout's stages.

It has one binary per content of each stage (layers of every run, recompute mix) and rows for memory at every peak of
live micro-batches, for the order of the runs, for the traffic after the pipeline, and one for each path that was met:
the paths make its bound one against the simulator and not against a formula.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

from planner.ilp import Program
from planner.paths import Path
from planner.stage_problem import Choice, StageProblem

Floats = npt.NDArray[np.float64]

GIGA = 1e-9
"""Bytes and parameters enter the program in billions."""


def stage_program(problem: StageProblem) -> Program:
    """Everything but the paths that are yet to be met."""
    at, tail = problem.extra, problem.pieces.tail
    size = at["gather"] + 1
    costs = np.zeros(size)
    costs[[at["pipeline"], at["exposed"]]] = 1.0
    costs[at["dense"]], costs[at["expert"]] = tail.update.dense / GIGA, tail.update.expert / GIGA
    high = np.full(size, math.inf)
    high[: problem.wholes] = 1.0
    constant = tail.update.constant + problem.pieces.num_microbatches * problem.pieces.per_microbatch
    integer = np.arange(size) < problem.wholes
    program = Program(costs=costs, low=np.zeros(size), high=high, integer=integer, constant=constant)
    _one_content_per_stage(problem, program)
    _order_of_runs(problem, program)
    if problem.vpp > 1:
        _layers_per_rank(problem, program)
        _memory(problem, program)
    _tail(problem, program)
    return program


def _one_content_per_stage(problem: StageProblem, program: Program) -> None:
    stage = problem.arrays["stage"]
    for one in range(problem.stages):
        row = np.zeros(len(program.costs))
        row[: len(stage)] = stage == one
        program.add(row, 1.0, 1.0)
    for place, run in enumerate(problem.runs):
        row = np.zeros(len(program.costs))
        row[: len(stage)] = [column.window[place] for column in problem.columns]
        program.add(row, float(run.layers), float(run.layers))


def _layers_per_rank(problem: StageProblem, program: Program) -> None:
    """Trust region of virtual stages: no rank holds more than the even share, rounded up."""
    layers = np.array([sum(column.window) for column in problem.columns], dtype=np.float64)
    for chunk in problem.chunks:
        row = np.zeros(len(program.costs))
        row[: len(layers)] = np.where(np.isin(problem.arrays["stage"], chunk), layers, 0.0)
        program.add(row, right=float(problem.most_layers))


def _order_of_runs(problem: StageProblem, program: Program) -> None:
    """``done[r, q]``: run r ends in stage q or before; later stages hold none of it, earlier ones nothing after."""
    if not problem.order_size:
        return
    held = np.array([column.window for column in problem.columns]) > 0
    stage = problem.arrays["stage"]
    for r in range(len(problem.runs) - 1):
        for q in range(problem.stages):
            done = len(problem.columns) + r * problem.stages + q
            row = np.zeros(len(program.costs))
            row[: len(stage)] = (stage == q) & held[:, r + 1 :].any(axis=1)
            row[done] = -1.0
            program.add(row, right=0.0)
            if q == 0:
                continue
            row = np.zeros(len(program.costs))
            row[: len(stage)] = (stage == q) & held[:, r]
            row[done - 1] = 1.0
            program.add(row, right=1.0)
            row = np.zeros(len(program.costs))
            row[[done - 1, done]] = 1.0, -1.0
            program.add(row, right=0.0)


def _memory(problem: StageProblem, program: Program) -> None:
    """Every rank at every peak; of its layers' transient bytes the largest counts."""
    numbers, start, count = problem.arrays, problem.wholes, len(problem.columns)
    for rank in range(problem.pp):
        for stage in problem.chunks[rank]:
            row = np.zeros(len(program.costs))
            row[:count] = -GIGA * np.where(numbers["stage"] == stage, numbers["again"], 0.0)
            row[start + rank] = 1.0
            program.add(row, left=0.0)
        for peak in problem.live[rank]:
            row = np.zeros(len(program.costs))
            for stage, live in zip(problem.chunks[rank], peak, strict=True):
                mine = numbers["stage"] == stage
                row[:count] += GIGA * np.where(mine, numbers["held"] + live * numbers["saved"], 0.0)
            row[start + rank] = 1.0
            program.add(row, right=GIGA * problem.room(rank))


def _tail(problem: StageProblem, program: Program) -> None:
    """Heaviest weights, slowest load, and the forms of traffic after and beside the pipeline."""
    numbers, at, pieces, tail = problem.arrays, problem.extra, problem.pieces, problem.pieces.tail
    count, slow = len(problem.columns), problem.pieces.straggler

    def row(**values: float) -> Floats:
        found = np.zeros(len(program.costs))
        for name, value in values.items():
            found[at[name]] = value
        return found

    for rank in range(problem.pp):
        mine = np.isin(numbers["stage"], problem.chunks[rank])
        for name, params in zip(("dense", "expert"), problem.end_params(rank), strict=True):
            one = row(**{name: 1.0})
            one[:count] = -GIGA * np.where(mine, numbers[name], 0.0)
            program.add(one, left=GIGA * params)
    reduce, each = tail.reduce, tail.each
    for share, load in ((tail.exposed_share, 0.0), (1.0, tail.hidden_share)):
        if math.isfinite(load):
            costs = {"dense": -share * reduce.dense / GIGA, "expert": -share * reduce.expert / GIGA}
            program.add(row(exposed=1.0, load=load, **costs), left=share * reduce.constant)
    if each.dense or each.expert or each.constant:
        for share, load in ((tail.beside_share, 0.0), (1.0, 1.0 - tail.beside_share)):
            costs = {"dense": -share * each.dense / GIGA, "expert": -share * each.expert / GIGA}
            program.add(row(gather=1.0, load=load, **costs), left=share * each.constant)
    _load(problem, program)
    # the slowest rank works through all micro-batches, so its load cannot be larger than this
    m = pieces.num_microbatches
    program.add(row(pipeline=1.0, load=-m * slow), left=-m * slow * pieces.loaded)


def _load(problem: StageProblem, program: Program) -> None:
    """One rank is the slowest, and what hides behind its work cannot be longer than that."""
    numbers, count, slow = problem.arrays, len(problem.columns), problem.pieces.straggler
    if not problem.slowest:
        return
    work = (numbers["forward"] + numbers["backward"]) / slow
    most = problem.vpp * float(work.max()) + problem.pieces.loaded
    one = np.zeros(len(program.costs))
    one[problem.slowest] = 1.0
    program.add(one, 1.0, 1.0)
    for rank, place in enumerate(problem.slowest):
        row = np.zeros(len(program.costs))
        row[problem.extra["load"]], row[place] = 1.0, most
        row[:count] = -np.where(np.isin(numbers["stage"], problem.chunks[rank]), work, 0.0)
        program.add(row, right=most + problem.pieces.loaded)


def cut(problem: StageProblem, path: Path) -> tuple[Floats, float]:
    """The pipeline takes at least as long as a path: row and least value of ``pipeline - path >= constant``.

    The constant is what the path takes whatever the stages hold.
    """
    numbers, at, pieces = problem.arrays, problem.extra, problem.pieces
    stage, (sends, passes) = numbers["stage"].astype(np.int64), path[-2:]
    forward, backward, weight = path[:-2].reshape(3, problem.stages)[:, stage]
    row = np.zeros(at["gather"] + 1)
    row[: len(stage)] = -(forward * numbers["forward"] + backward * numbers["backward"] + weight * numbers["weight"])
    row[at["pipeline"]] = 1.0
    row[at["gather"]] = -passes * pieces.straggler / (2 * problem.vpp)
    return row, float(sends * pieces.send + passes * pieces.host)


def stage_seconds(problem: StageProblem, values: Any) -> tuple[Floats, Floats, Floats]:
    """Forward, backward and weight seconds of every stage in a (perhaps fractional) solution."""
    numbers, count = problem.arrays, len(problem.columns)
    stage = numbers["stage"].astype(np.int64)
    found = np.zeros((3, problem.stages))
    for part, name in zip(found, ("forward", "backward", "weight"), strict=True):
        np.add.at(part, stage, numbers[name] * values[:count])
    return found[0], found[1], found[2]


def choice_of_values(problem: StageProblem, values: Floats) -> Choice:
    """Read a choice off the binaries of a solution."""
    chosen = {column.stage: column for column, value in zip(problem.columns, values, strict=False) if value > 0.5}
    order = [chosen[stage] for stage in range(problem.stages)]
    return Choice(windows=tuple(one.window for one in order), layers=tuple(one.layers for one in order))
