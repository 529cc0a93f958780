"""Whole runs: their books, their ends, and what luck may and may not change. Exactness: test_run_exactness.py."""

import math
import tracemalloc
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scenarios.failure_traces import FailureTrace
from scenarios.faults import Elastic, Failure, Faults, Maintenance, Stragglers
from simulator.ensemble import simulate_runs
from simulator.progress import Progress
from simulator.run import PATIENCE_FAILURES, simulate_run
from simulator.run_setup import RunSetup
from simulator.tiers import SURVIVES, SaveTier

ALWAYS = SURVIVES["object-store"]
DAY = 86400.0


def tier(stall, drain=0.0, load=0.0, *, every=1, name="store", survives=ALWAYS, keep=2):
    return SaveTier(
        name=name,
        every=every,
        stall_seconds=stall,
        drain_seconds=drain,
        load_seconds=load,
        survives=survives,
        keep=keep,
    )


def setup_of(interval, stall, mtbf, restart, *, drain=0.0, days=54.0, steps=10, parts=(0.7, 0.3), **changes):
    failures = tuple(
        Failure(component=f"part {i}", rate_per_second=share / mtbf, per="job", lost_nodes=0)
        for i, share in enumerate(parts)
    )
    faults = Faults(
        name="test", failures=failures, detection_seconds=restart / 6, restart_seconds=restart / 2, rate_spread=0.0,
        **changes,
    )  # fmt: skip
    return RunSetup(
        step_seconds=interval / steps, num_steps=max(1, round(days * DAY / interval)) * steps, tokens_per_step=1000,
        interval_steps=steps, tiers=(tier(stall, drain, restart / 3),), faults=faults, num_gpus=64, num_nodes=8,
    )  # fmt: skip


@settings(max_examples=40, deadline=None)
@given(st.floats(10, 1e5), st.floats(0, 300), st.floats(200, 1e6), st.floats(0, 3000), st.integers(0, 99))
def test_every_second_is_in_the_books(interval, stall, mtbf, restart, seed):
    outcome = simulate_run(setup_of(interval, stall, mtbf, restart, days=3), seed)
    booked = outcome.useful_seconds + math.fsum(outcome.lost_seconds.values())
    assert booked == pytest.approx(outcome.wall_seconds, abs=1e-5, rel=1e-11)  # sums of up to 1e5 failures
    assert min(outcome.lost_seconds.values()) >= -1e-6
    assert 0 <= outcome.goodput <= 1 + 1e-12  # sums of seconds are rounded


def test_without_failures_only_stalls_are_lost():
    setup = replace(setup_of(600, 5, 1, 0, days=1, parts=()), num_steps=1435)
    outcome = simulate_run(setup, 0)
    assert outcome.checkpoints == 144  # 143 full intervals and the rest
    assert outcome.wall_seconds == pytest.approx(1435 * 60 + 144 * 5)
    assert outcome.completed
    assert outcome.tokens == 1435 * 1000
    assert setup.expected_goodput() == pytest.approx(600 / 605)


def test_an_interval_longer_than_the_run_saves_once_at_the_end():
    setup = replace(setup_of(86400, 5, 1e12, 0, days=1), num_steps=3)
    outcome = simulate_run(setup, 0)
    assert outcome.checkpoints == 1
    assert outcome.wall_seconds == pytest.approx(3 * 8640 + 5)


@pytest.mark.parametrize("mtbf", [1e-3, 1.0, 100.0])
def test_a_job_that_never_comes_back_ends_and_says_so(mtbf):
    outcome = simulate_run(setup_of(600, 10, mtbf, 300), seed=1)
    assert not outcome.completed
    assert outcome.goodput == 0
    assert sum(outcome.failures.values()) <= PATIENCE_FAILURES + 1


def test_a_very_slow_run_is_bounded():
    outcome = simulate_run(setup_of(600, 10, 160, 100, days=5), seed=1)
    assert not outcome.completed
    assert 0 <= outcome.goodput < 0.05
    assert outcome.wall_seconds < 21 * 5 * 86400


def test_a_block_of_runs_is_a_prefix_of_a_longer_one():
    setup = setup_of(600, 20, 6480, 300, days=5)
    assert simulate_runs(setup, 3, seed=3) == simulate_runs(setup, 9, seed=3)[:3]
    assert simulate_runs(setup, 3, seed=4) != simulate_runs(setup, 3, seed=3)


@pytest.mark.parametrize("wrong", [{"runs": 0}, {"jobs": 0}, {"seed": -1}])
def test_misuse(wrong):
    with pytest.raises(ValueError, match="must be at least"):
        simulate_runs(setup_of(600, 20, 6480, 300), **({"runs": 1, "seed": 0, "jobs": 1} | wrong))


def test_a_run_waits_for_nodes_and_says_how_long():
    """One spare, each node away for a day, a failure each 12 h: the shop is always full."""
    faults = Faults(
        name="few", failures=(Failure(component="node", rate_per_second=2 / DAY, per="job"),), restart_seconds=300,
        repair_seconds=DAY, repair_law="fixed", spares=1, rate_spread=0,
    )  # fmt: skip
    setup = replace(setup_of(600, 1, 1, 0, days=20, parts=()), faults=faults)
    few, many = (simulate_run(replace(setup, faults=faults.model_copy(update={"spares": s})), 3) for s in (1, 40))
    assert few.lost_seconds["waiting"] > 0.2 * few.wall_seconds
    assert many.lost_seconds["waiting"] == 0
    assert (few.spares_used, many.completed) == (1, True)
    smaller = faults.model_copy(update={"elastic": Elastic(reconfigure_seconds=100)})
    elastic = simulate_run(replace(setup, faults=smaller), 3)
    assert elastic.lost_seconds["waiting"] == 0
    assert elastic.goodput > few.goodput
    assert elastic.lost_seconds["degraded"] > 0


def test_a_run_that_waits_for_ever_ends():
    faults = Faults(
        name="none left", failures=(Failure(component="node", rate_per_second=1 / DAY, per="job"),),
        repair_seconds=1e12, repair_law="fixed", spares=0, rate_spread=0,
    )  # fmt: skip
    outcome = simulate_run(replace(setup_of(600, 1, 1, 0, days=5, parts=()), faults=faults), 0)
    assert not outcome.completed
    assert outcome.lost_seconds["waiting"] > 0.9 * outcome.wall_seconds


def test_maintenance_stops_as_often_as_it_should():
    setup = setup_of(600, 0, 1, 0, days=30, parts=(), maintenance=Maintenance(every_seconds=DAY, takes_seconds=1800.0))
    outcome = simulate_run(setup, 0)
    assert outcome.lost_seconds["maintenance"] == pytest.approx(1800 * round(outcome.wall_seconds / DAY), abs=1800)
    assert outcome.lost_seconds["rework"] == pytest.approx(0, abs=1e-6)


def test_a_straggler_slows_and_is_found():
    slow = Stragglers(rate_per_second=1 / DAY / 8, speed=0.5, lasts_seconds=4 * 3600.0)
    never = simulate_run(setup_of(600, 0, 1, 0, days=60, parts=(), stragglers=slow), 0)
    assert never.lost_seconds["degraded"] / never.wall_seconds == pytest.approx(4 / 24 * 0.5, rel=0.3)
    found = slow.model_copy(update={"found_seconds": 600.0})
    soon = simulate_run(setup_of(600, 0, 1, 60, days=60, parts=(), stragglers=found), 0)
    assert soon.lost_seconds["degraded"] < 0.1 * never.lost_seconds["degraded"]
    assert soon.lost_seconds["restart"] > 0


def test_the_horizon_cuts_and_counts_unsaved_work():
    setup = replace(setup_of(600, 0, 1e12, 0, days=30), horizon_seconds=12345.6)
    outcome = simulate_run(setup, 0)
    assert (outcome.wall_seconds, outcome.completed) == (pytest.approx(12345.6), True)
    assert outcome.useful_seconds == pytest.approx(12345.6)


def test_recorded_capacity_by_hand():
    """Four nodes wanted, two at first: waits until two come at 1,000 s, loses one at 10,000 s, gets it at 20,000 s."""
    trace = FailureTrace(
        name="spot", kind="capacity", times_seconds=(1000.0, 10_000.0, 20_000.0), nodes=(-2, 1, -1),
        span_seconds=20_001.0, start_nodes=2,
    )  # fmt: skip
    faults = Faults(name="x", trace=trace, detection_seconds=30, restart_seconds=70)
    setup = replace(setup_of(600, 0, 1, 0, days=1, parts=()), faults=faults, num_nodes=4, num_gpus=32)
    outcome = simulate_run(setup, 0)
    # first start 70 s; at 10,000 s 8,930 s of work are done, 530 s since the last save are lost
    assert outcome.lost_seconds["waiting"] == pytest.approx(1000 + 20_000 - 10_030)
    assert outcome.lost_seconds["rework"] == pytest.approx(530)
    assert outcome.lost_seconds["restart"] == pytest.approx(140)
    assert outcome.wall_seconds == pytest.approx(86_400 + 1000 + 9970 + 530 + 140 + 30)
    elastic = faults.model_copy(update={"elastic": Elastic(reconfigure_seconds=50)})
    smaller = simulate_run(replace(setup, faults=elastic), 0)
    assert smaller.lost_seconds["waiting"] == 0
    assert smaller.lost_seconds["degraded"] == pytest.approx((1000 - 50) / 2 + (20_000 - 10_000 - 80) / 4)


def test_enough_notice_saves_the_work():
    spot = Failure(component="spot", rate_per_second=1 / 20_000, per="job", lost_nodes=2, repair_seconds=600)
    kept, lost = (
        simulate_run(
            replace(
                setup_of(3600, 5, 1, 60, days=10, parts=(), drain=20),
                faults=Faults(
                    name="x",
                    failures=(spot.model_copy(update={"notice_seconds": notice}),),
                    restart_seconds=60,
                    rate_spread=0,
                ),
            ),
            0,
        )
        for notice in (120.0, 10.0)
    )
    assert sum(kept.failures.values()) > 30
    assert kept.lost_seconds["rework"] == 0
    assert lost.lost_seconds["rework"] > 30 * 600


def test_recorded_spans_cover_the_run_without_gaps():
    faults = Faults(
        name="x", failures=(Failure(component="node", rate_per_second=1 / 5000, per="job"),), detection_seconds=60,
        restart_phases={"requeue": 100.0, "warm-up": 50.0}, spares=2, repair_seconds=20_000,
        stragglers=Stragglers(rate_per_second=1 / DAY / 8, speed=0.5, lasts_seconds=4 * 3600.0),
    )  # fmt: skip
    outcome = simulate_run(replace(setup_of(600, 10, 1, 0, days=3, parts=()), faults=faults), 5, record=True)
    ends = [0.0, *(span.end_seconds for span in outcome.spans)]
    assert [span.start_seconds for span in outcome.spans] == pytest.approx(ends[:-1])
    assert ends[-1] == pytest.approx(outcome.wall_seconds)
    for cause in ("detection", "waiting", "requeue"):
        seen = sum(span.end_seconds - span.start_seconds for span in outcome.spans if span.doing == cause)
        assert seen == pytest.approx(outcome.lost_seconds[cause])
    again = simulate_run(replace(setup_of(600, 10, 1, 0, days=3, parts=()), faults=faults), 5)
    assert replace(outcome, spans=()) == again


def test_memory_is_flat_in_simulated_time():
    """A run fifty times as long holds no more: rows of saves are ranges, failures come in blocks."""
    progress = Progress(600.0, (tier(1.0, 30.0, keep=10**6), tier(1.0, 30.0, every=4, name="far")), math.inf)
    now = 0.0
    for _ in range(3000):
        progress.advance(7000.0, now := now + 7000.0)
        found = progress.newest_save(0, now)
        progress.restore(found[0], 0, now)
    assert max(len(held.ranges) for held in progress.held) <= 2


def test_tiers_that_cannot_work_are_refused():
    with pytest.raises(ValueError, match="longer than its period"):
        Progress(600.0, (tier(1.0, 700.0),), 1e6)
    with pytest.raises(ValueError, match="not nested"):
        Progress(600.0, (tier(1.0, every=2), tier(1.0, every=3)), 1e6)


def test_a_long_run_needs_no_more_memory_than_a_short_one():
    def peak(days):
        setup = replace(setup_of(600, 5, 600, 20, days=1e5, parts=(0.7, 0.3)), horizon_seconds=days * DAY)
        simulate_run(setup, 0)  # what is imported and cached
        tracemalloc.start()
        simulate_run(setup, 0)
        used = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return used

    assert peak(160) < 1.1 * peak(40)  # 5,800 failures and 23,000
