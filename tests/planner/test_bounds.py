"""Every bound of a layout is below the best stages that are found for it, played by the simulator."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from planner.bounds import floors
from planner.candidates import legal_layouts
from planner.partition import Effort, Solving
from planner.playing import played_step
from planner.question import Question
from planner.search import Opened, Search, spelled_out
from planner.sharper import sharpened
from simulator.arrays import LayoutArrays
from simulator.memory import memory_use

ROWS = 12
"""Layouts of each question that are solved."""
FAST = Effort(nodes=50, rounds=3)


@st.composite
def questions(draw: Any, tools: dict[str, Any]) -> Question:
    """Up to 16 GPUs, a few layers with or without experts and a heavy head, memory that may force recompute."""
    layers, vocab = draw(st.integers(3, 9)), draw(st.sampled_from([8_000, 256_000]))
    model = tools["make_model"](layers, vocab=vocab, experts=draw(st.sampled_from([0, 0, 4])))
    cluster = tools["make_cluster"](draw(st.integers(1, 2)), memory=draw(st.floats(3e9, 40e9)))
    batch = draw(st.sampled_from([16, 24, 32]))
    return tools["ask"](cluster, model, seq=4096, batch=batch, allow=("zero-bubble",))  # type: ignore[no-any-return]


def opened(question: Question, rows: LayoutArrays, bounds: Any) -> list[Opened]:
    search = Search(question, rows, bounds, np.ones(len(rows)), ("full", "none"), FAST)
    found = [search._open(row) for row in range(len(rows))]
    return [one for one in found if one.playable]


@pytest.fixture
def tools(make_model: Any, make_cluster: Any, ask: Any) -> dict[str, Any]:
    return {"make_model": make_model, "make_cluster": make_cluster, "ask": ask}


@settings(max_examples=6, derandomize=True, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_no_bound_is_above_the_simulated_step(tools: dict[str, Any], data: st.DataObject) -> None:
    question = data.draw(questions(tools))
    rows = legal_layouts(question).layouts
    piped = np.flatnonzero((rows.pp > 1) & (rows.micro_batch_size <= 2))
    dice = np.random.default_rng(data.draw(st.integers(0, 999)))
    rows = rows.take(dice.choice(piped, min(ROWS, len(piped)), replace=False))
    floor, sharp = floors(question, rows).step_seconds, sharpened(question, rows)
    for one in opened(question, rows, floor):
        work: Solving = one.work
        quick = work.found.bound
        work.start()
        work.relax(np.inf, FAST)
        work.solve(np.inf, FAST)
        if work.found.choice is None:
            continue
        layout = spelled_out(one, question.job.model.pattern)
        assert memory_use(question.cluster, question.job, layout).headroom_bytes >= -1.0
        seconds = played_step(question.cluster, question.job, layout).total_seconds * (1 + 1e-9)
        told = f"{layout.label()}, {seconds:.6g} s"
        assert floor[one.row] <= seconds, told
        assert sharp[one.row] <= seconds, told
        assert quick <= seconds, told
        assert work.found.bound <= seconds, told


def test_the_sharper_bound_knows_the_head(tools: dict[str, Any]) -> None:
    """Six layers on three ranks are two each, but where the head works as long as a layer and more, one rank has three.

    The floor shares everything evenly, (6 + h) / 3 layers each; whole layers make it 3, so up to 3 / 2.5 of the floor.
    """
    pins = {"pp": 3, "tp": 1, "cp": 1, "dp": 1, "schedule": "1f1b", "vpp": 1, "micro_batch_size": 1}
    for vocab, least, most in ((1_000, 1.0, 1.05), (20_000, 1.1, 1.2)):
        question = tools["ask"](tools["make_cluster"](1, 3), tools["make_model"](6, vocab=vocab), batch=24)
        rows = legal_layouts(question, pins).layouts
        assert least <= float((sharpened(question, rows) / floors(question, rows).step_seconds)[0]) <= most
