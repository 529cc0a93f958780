"""Stages and recompute against exhaustive enumeration with the simulator as judge; so too the dynamic program."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from planner.contents import runs_of
from planner.partition import Effort, Partition, solve_partition
from planner.partition_dp import best_intervals
from planner.paths import PathPools
from planner.playing import played_step
from planner.stage_problem import Choice, StageProblem
from scenarios.job import Job
from scenarios.layout import Layout, Stage
from scenarios.model import Attention, Layer, Mlp, ModelSpec
from simulator.memory import memory_use
from simulator.pieces import pieces
from topologies.cluster import Cluster

MODES = ("full", "none")
EXACT = Effort(gap=1e-7, nodes=20_000, rounds=60)


def examples(count: int) -> settings:
    return settings(
        max_examples=count,
        derandomize=True,
        deadline=None,
        suppress_health_check=[HealthCheck.function_scoped_fixture],
    )


@dataclass
class Instance:
    """A small pipeline whose memory holds some but not all layers without recompute."""

    cluster: Cluster
    job: Job
    layout: Layout

    def problem(self, spread: int = 9) -> StageProblem:
        parts = pieces(self.cluster, self.job, self.layout, MODES)
        degrees = (self.layout.schedule, self.layout.pp, self.layout.vpp, parts.num_microbatches)
        return StageProblem(self.layout, parts, runs_of(self.job.model.pattern), PathPools().of(*degrees), spread)

    def with_stages(self, sizes: tuple[int, ...], again: tuple[int, ...]) -> Layout:
        stages = tuple(Stage(layers=n, recompute_layers=k) for n, k in zip(sizes, again, strict=True))
        return self.layout.model_copy(update={"stages": stages, "recompute": "full" if any(again) else "none"})

    def choices(self, most: int, allowed: Callable[[tuple[int, ...]], bool]) -> Iterator[Layout]:
        """Every split that is allowed and every number of recomputed layers of each stage."""
        layers, stages = self.job.model.num_layers, self.layout.pp * self.layout.vpp
        for sizes in itertools.product(range(most + 1), repeat=stages):
            if sum(sizes) == layers and allowed(sizes):
                for again in itertools.product(*(range(n + 1) for n in sizes)):
                    yield self.with_stages(sizes, again)

    def judged(self, most: int, allowed: Callable[[tuple[int, ...]], bool] = lambda _: True) -> float:
        """Seconds of the fastest choice that fits, by the simulator alone."""
        every = self.choices(most, allowed)
        fitting = (one for one in every if memory_use(self.cluster, self.job, one).headroom_bytes >= 0)
        return min((played_step(self.cluster, self.job, one).total_seconds for one in fitting), default=math.inf)


@st.composite
def instances(draw: Any, make_cluster: Callable[..., Cluster], vpp: int = 1) -> Instance:
    pp = draw(st.integers(2, 3)) if vpp == 1 else 2
    layers = draw(st.integers(pp * vpp, 5 if pp == 2 else 4))
    kinds = {
        name: Layer(
            mixer=Attention(heads=16, kv_heads=8, head_dim=64), feed_forward=Mlp(ffn_hidden_size=size, gated=True)
        )
        for name, size in (("thin", 1024), ("wide", draw(st.sampled_from([1024, 4096]))))
    }
    first = draw(st.integers(0, layers))
    pattern = ("thin",) * first + ("wide",) * (layers - first)
    model = ModelSpec(
        name="tiny",
        hidden_size=1024,
        vocab_size=draw(st.sampled_from([1000, 32_000])),
        layer_kinds={name: kinds[name] for name in dict.fromkeys(pattern)},
        pattern=pattern,
    )
    rounds = draw(st.integers(1, 3)) if vpp > 1 else 1
    micro = rounds * pp if vpp > 1 else draw(st.integers(pp, 7))
    job = Job(model=model, seq_length=4096, global_batch_size=micro)
    schedule = "1f1b" if vpp == 1 else "interleaved"
    layout = Layout(pp=pp, vpp=vpp, schedule=schedule, optimizer_sharding="none")
    roomy = make_cluster(1, pp, memory=79e9)
    plain, full = (
        memory_use(roomy, job, layout.model_copy(update={"recompute": mode})).peak_bytes for mode in ("none", "full")
    )
    memory = full + draw(st.floats(-0.05, 1.1)) * (plain - full)
    return Instance(make_cluster(1, pp, memory=memory), job, layout)


@examples(60)
@given(st.data())
def test_the_program_finds_what_exhaustive_enumeration_finds(make_cluster: Any, data: st.DataObject) -> None:
    """Splits into one chunk per rank, of one or two layer kinds, fewer and more micro-batches than stages."""
    one = data.draw(instances(make_cluster))
    found = solve_partition(one.problem(), EXACT)
    best = one.judged(one.job.model.num_layers)
    if math.isinf(best):
        assert found.choice is None
        return
    assert found.seconds == pytest.approx(best, rel=1e-6)
    assert found.bound <= best * (1 + 1e-7)
    assert found.gap <= 1e-5
    _promises_hold(one, found)


@examples(12)
@given(st.data())
def test_virtual_stages_are_bounded_and_near_the_best_of_their_region(make_cluster: Any, data: st.DataObject) -> None:
    one = data.draw(instances(make_cluster, vpp=2))
    problem = one.problem(spread=0)
    found = solve_partition(problem, EXACT)
    best = one.judged(problem.high, lambda sizes: max(sizes[0] + sizes[2], sizes[1] + sizes[3]) <= problem.most_layers)
    assert best <= found.seconds * (1 + 1e-9)
    if found.choice is not None:
        assert found.bound <= found.seconds * (1 + 1e-7)
        assert found.seconds <= found.uniform_seconds * (1 + 1e-9)
        assert found.seconds <= 1.03 * best
        _promises_hold(one, found)


def _promises_hold(one: Instance, found: Partition) -> None:
    """The simulator plays the choice in the seconds that were promised, and it fits."""
    choice, taken = found.choice, found.problem.pieces
    assert choice is not None
    full = np.array([column.recompute == 2 for column in taken.columns])
    sizes = tuple(int(sum(window)) for window in choice.windows)
    layout = one.with_stages(sizes, tuple(round(float(layers[full].sum())) for layers in choice.layers))
    # of a stage with both kinds the recomputed ones need not come first: only then is this another layout
    if all(len({c.kind for c, n in zip(taken.columns, layers, strict=True) if n}) < 2 for layers in choice.layers):
        assert played_step(one.cluster, one.job, layout).total_seconds == pytest.approx(found.seconds, rel=1e-9)
        assert memory_use(one.cluster, one.job, layout).headroom_bytes >= -1.0


@examples(30)
@given(st.data())
def test_the_dynamic_program_is_exact_for_the_classical_objective(make_cluster: Any, data: st.DataObject) -> None:
    """(micro-batches - 1) x slowest stage + all stages, over every split with the fastest mix that fits."""
    problem = data.draw(instances(make_cluster)).problem()
    layers, micro = problem.num_layers, problem.pieces.num_microbatches

    def classical(choice: Choice) -> float:
        forward, backward, _ = problem.choice_seconds(choice)
        return float((micro - 1) * (forward + backward).max() + (forward + backward).sum())

    best = math.inf
    for cuts in itertools.combinations_with_replacement(range(layers + 1), problem.pp - 1):
        ends = (0, *cuts, layers)
        held = [_window(problem, start, end) for start, end in itertools.pairwise(ends)]
        options = [problem.options(stage, window) for stage, window in enumerate(held)]
        for rows in itertools.product(*(range(len(mixes.layers)) for mixes in options)):
            mixes = tuple(one.layers[row] for one, row in zip(options, rows, strict=True))
            best = min(best, classical(Choice(windows=tuple(held), layers=mixes)))
    found = [classical(choice) for choice in best_intervals(problem)]
    assert min(found, default=math.inf) == pytest.approx(best, rel=1e-9)


def _window(problem: StageProblem, start: int, end: int) -> tuple[int, ...]:
    begins = np.cumsum([0, *(run.layers for run in problem.runs)])
    return tuple(int(max(0, min(end, stop) - max(start, begin))) for begin, stop in itertools.pairwise(begins.tolist()))
