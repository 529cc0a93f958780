from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from simulator.logs.steady import settle
from simulator.logs.trainer_log import StepRecord, TrainerLog


def settled(*timed: tuple[int, float]) -> TrainerLog:
    return settle(
        TrainerLog(format="test", steps=tuple(StepRecord(step=step, seconds=seconds) for step, seconds in timed))
    )


def steady(log: TrainerLog) -> list[int]:
    return [one.step for one in log.steady]


def test_first_iterations_and_a_slow_start_are_left_out() -> None:
    assert steady(settled((1, 4.0), (2, 4.0), (3, 4.0))) == [2, 3]
    assert steady(settled((0, 4.0), (1, 4.0), (2, 4.0))) == [2]
    assert steady(settled((10, 9.0), (20, 4.3), (30, 4.0), (40, 4.01), (50, 4.0))) == [30, 40, 50]


def test_a_save_is_an_outlier_and_a_bimodal_run_is_uncertain() -> None:
    log = settled(*((step, 40.0 if step == 7 else 4.0) for step in range(2, 12)))
    assert 7 not in steady(log)
    assert log.step_seconds == 4.0
    assert any("1 of 10 iterations are outliers" in told for told in log.warnings)
    torn = settled(*((step, 4.0 if step % 2 else 8.0) for step in range(3, 13)))
    assert any("it is uncertain" in told for told in torn.warnings)
    assert len(torn.steady) == 10


def test_a_restart_begins_anew() -> None:
    log = settled((100, 4.0), (101, 4.0), (102, 4.0), (100, 30.0), (101, 4.1), (102, 4.1), (103, 4.1))
    assert [one.seconds for one in log.steady] == [4.0, 4.0, 4.0, 4.1, 4.1, 4.1]
    assert any("restarted at iteration 100" in told for told in log.warnings)


def test_only_a_first_iteration_is_no_pace() -> None:
    log = settled((1, 20.0))
    assert log.steady == ()
    assert log.step_seconds is None
    assert log.step_seconds_p10_p90 is None


def test_averages_of_runs_have_no_first_iteration() -> None:
    log = settle(TrainerLog(format="table", steps=(StepRecord(step=1, seconds=3.0),), averaged=True))
    assert log.step_seconds == 3.0


def test_the_clock_counts_iterations_between_lines() -> None:
    records = tuple(
        StepRecord(step=step, tokens_per_second_per_gpu=100.0, clock_seconds=2.5 * step) for step in (10, 20, 30)
    )
    log = settle(TrainerLog(format="test", steps=records))
    assert log.timed_by_clock
    assert log.step_seconds == pytest.approx(2.5)


@given(
    pace=st.floats(0.1, 100.0),
    noise=st.lists(st.floats(-0.01, 0.01), min_size=5, max_size=30),
    ranks=st.integers(1, 4),
)
def test_the_median_survives_repeats_first_iterations_and_a_stall(pace: float, noise: list[float], ranks: int) -> None:
    timed = [(1, 5 * pace), *((step, pace * (1 + part)) for step, part in enumerate(noise, 2)), (900, 8 * pace)]
    log = settled(*(one for one in timed for _ in range(ranks)))
    assert log.step_seconds == pytest.approx(pace, rel=0.0101)
    assert len(log.steps) == len(timed)
    assert steady(log) == [step for step, _ in timed[1:-1]]
