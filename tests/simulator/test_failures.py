"""Failure streams against what is known of their laws, and independence of what is drawn."""

import math
from itertools import islice
from pathlib import Path

import numpy as np
import pytest

from scenarios.failure_traces import FailureTrace
from scenarios.faults import Failure, Faults, Lemons
from simulator.failures import failure_events, failure_rates, rate_factor, sources
from simulator.tiers import FILE_SYSTEM, NODE, NODES, PROCESS

DAY = 86400.0


def stream(*failures, nodes=64, count=400, seed=5, run=0, **other):
    faults = Faults(name="x", failures=failures, **other)
    found = sources(faults, 8 * nodes, nodes)
    return [(event, found[event.source]) for event in islice(failure_events(found, seed, run), count)]


def of_job(name, rate, **other):
    return Failure(component=name, rate_per_second=rate, per="job", **other)


def test_a_new_failure_source_leaves_the_others_as_they_were():
    gpu, nic, switch = of_job("gpu", 1e-4), of_job("nic", 2e-5), of_job("switch", 3e-5)
    before = [(event.time_seconds, event.repair) for event, _ in stream(gpu, nic)]
    after = [(event.time_seconds, event.repair) for event, one in stream(switch, gpu, nic) if one.component != "switch"]
    assert after == before[: len(after)]
    assert len(after) > 250
    assert before != [(event.time_seconds, event.repair) for event, _ in stream(gpu, nic, run=1)]


def test_windows_change_nothing():
    found = sources(Faults(name="x", failures=(of_job("a", 1e-3), of_job("b", 1e-4, burst_share=0.5))), 8, 1)
    short, long = (list(islice(failure_events(found, 1, window_seconds=w), 500)) for w in (3000.0, 1e6))
    assert short == long


def test_failures_are_poisson():
    events = [event for event, _ in stream(of_job("a", 0.3), of_job("b", 0.1), count=40_000)]
    gaps = np.diff([event.time_seconds for event in events])
    assert np.mean(gaps) == pytest.approx(2.5, rel=0.02)
    assert np.std(gaps) == pytest.approx(2.5, rel=0.03)
    assert sum(event.source == 0 for event in events) / len(events) == pytest.approx(0.75, abs=0.01)


def test_bursts_keep_the_rate_and_gather():
    plain, gathered = (
        np.array([event.time_seconds for event, _ in stream(of_job("a", 1e-3, burst_share=share), count=40_000)])
        for share in (0.0, 0.7)
    )
    for times in (plain, gathered):
        assert len(times) / times[-1] == pytest.approx(1e-3, rel=0.03)
    counts = [np.histogram(times, np.arange(0, times[-1], 5000))[0] for times in (plain, gathered)]
    ratio = [one.var() / one.mean() for one in counts]
    assert ratio[0] == pytest.approx(1, abs=0.06)
    assert ratio[1] > 2.5


@pytest.mark.parametrize(
    ("shape", "days", "expected"),
    [(1.0, 0.0, 399), (0.7, 0.0, 825), (0.7, 30.0, 598), (0.7, 365.0, 343), (1.5, 0.0, 148)],
)
def test_a_vendor_mtbf_without_age_is_not_enough(shape, days, expected):
    """2,048 nodes whose MTBF gives 400 failures in 54 days if exponential; renewal theory by an independent program."""
    one = Failure(
        component="n", rate_per_second=400 / 54 / DAY / 2048, per="node", weibull_shape=shape, age_seconds=days * DAY
    )
    counts = []
    for seed in range(12):
        found = sources(Faults(name="x", failures=(one,)), 16384, 2048)
        events = failure_events(found, seed, window_seconds=54 * DAY)
        counts.append(sum(1 for _ in iter(lambda e=events: next(e).time_seconds < 54 * DAY, False)))
    assert np.mean(counts) == pytest.approx(expected, rel=0.025)


def test_a_weibull_life_has_its_distribution():
    """One node that is replaced at each failure: gaps are Weibull with the stated mean."""
    events = [
        event
        for event, _ in stream(
            Failure(component="n", rate_per_second=1e-4, per="node", weibull_shape=2.0), nodes=1, count=4000
        )
    ]
    gaps = np.diff([0.0, *(event.time_seconds for event in events)])
    assert gaps.mean() == pytest.approx(1e4, rel=0.03)
    assert gaps.std() / gaps.mean() == pytest.approx(math.sqrt(math.gamma(2) / math.gamma(1.5) ** 2 - 1), rel=0.04)


def test_lemons_share_the_rate():
    found = sources(Faults(name="x", failures=(of_job("n", 1e-4),), lemons=Lemons(share=0.05, factor=10)), 512, 64)
    assert sum(one.rate_per_second for one in found) == pytest.approx(1e-4)
    assert [one.rate_per_second for one in found if one.lemon] == pytest.approx([1e-4 * 0.5 / 1.45])


def test_uncertain_rates_are_gamma():
    factors = np.array([rate_factor(0.3, 1, run) for run in range(20_000)])
    assert factors.mean() == pytest.approx(1, abs=0.01)
    assert factors.std() == pytest.approx(0.3, abs=0.01)
    assert rate_factor(0.0, 1, 1) == 1.0


def test_what_a_failure_takes():
    found = sources(
        Faults(name="x", failures=(
            of_job("a", 1e-9, lost_nodes=0), of_job("b", 1e-9), of_job("c", 1e-9, lost_nodes=4),
            of_job("d", 1e-9, loses_file_system=True),
        )), 512, 64,
    )  # fmt: skip
    assert [one.loss for one in found] == [PROCESS, NODE, NODES, FILE_SYSTEM]


def test_rates_count_components():
    faults = Faults(
        name="x",
        failures=(
            Failure(component="gpu", rate_per_second=1e-9),
            Failure(component="host", rate_per_second=1e-8, per="node"),
            Failure(component="gpu", rate_per_second=1e-9),
            Failure(component="leaf", rate_per_second=1e-8, per="group", group_nodes=4),
            Failure(component="facility", rate_per_second=1e-8, per="job"),
            Failure(component="never", rate_per_second=0.0),
        ),
    )
    expected = {"gpu": 32e-9, "host": 2e-8, "leaf": 0.5e-8, "facility": 1e-8}
    assert failure_rates(faults, 16, 2) == pytest.approx(expected)
    assert sum(expected.values()) == pytest.approx(faults.rate_per_second(16, 2))


def record(times, **other):
    return FailureTrace(name="log", times_seconds=times, span_seconds=1000.0, **other)


def test_a_record_is_replayed_around_and_around():
    faults = Faults(name="x", trace=record((10.0, 20.0, 900.0), offset_seconds=15.0))
    found = sources(faults, 8, 1)
    times = [event.time_seconds for event in islice(failure_events(found, 0), 6)]
    assert times == pytest.approx([5.0, 885.0, 995.0, 1005.0, 1885.0, 1995.0])


def test_a_larger_job_meets_more_of_a_record():
    faults = Faults(name="x", trace=record((10.0, 20.0, 900.0), fleet=10, per="node"))
    assert faults.rate_per_second(0, 25) == pytest.approx(3 / 1000 * 2.5)
    found = sources(faults, 200, 25)
    counts = [sum(e.time_seconds < 20_000 for e in islice(failure_events(found, seed), 250)) for seed in range(20)]
    assert np.mean(counts) == pytest.approx(20 * 3 * 2.5, rel=0.05)


def test_each_run_starts_elsewhere_in_a_record():
    found = sources(Faults(name="x", trace=record((10.0, 20.0, 900.0))), 8, 1)
    assert len({next(failure_events(found, 0, run)).time_seconds for run in range(5)}) == 5


TITAN = Path(__file__).resolve().parents[2].parent / "shared" / "data" / "traces" / "titan_gpu_lives.csv"


@pytest.mark.skipif(not TITAN.is_file(), reason="the Titan trace is not here")
def test_titan_failures_come_in_waves():
    """Weekly counts vary far more than Poisson's: variance over mean 15.6 in an independent count."""
    from scenarios.failure_traces import read_trace_file
    from topologies.document import LoadContext, check

    trace = check(read_trace_file(TITAN, None), FailureTrace, LoadContext(TITAN))
    assert (len(trace.times_seconds), trace.fleet) == (5209, 18_688)
    weeks = np.histogram(trace.times_seconds, np.arange(0, trace.times_seconds[-1], 7 * DAY))[0]
    assert weeks.var() / weeks.mean() == pytest.approx(15.6, abs=0.3)
    found = sources(Faults(name="x", trace=trace.model_copy(update={"offset_seconds": 0.0})), 18_688, 18_688)
    times = [event.time_seconds for event in islice(failure_events(found, 0), 5209)]
    assert times == pytest.approx(list(trace.times_seconds))
