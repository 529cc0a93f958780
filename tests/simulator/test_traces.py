"""The Chrome trace: structure, nesting, times, reproducible bytes."""

import gzip
import json

import pytest

from scenarios.layout import Layout
from scenarios.scenario import load_scenario
from simulator.outcome import Span, StepTimeline
from simulator.traces import chrome_trace, trace_bytes
from simulator.training import play_step

LLAMA = load_scenario("llama3-405b-16k-h100")


def span(start, seconds, kind="forward", rank=0, name="op", **more):
    stream = "compute" if kind in {"forward", "backward", "optimizer"} else "communication"
    return Span(rank=rank, stream=stream, name=name, kind=kind, start_seconds=start, duration_seconds=seconds, **more)


@pytest.fixture(scope="module", params=[("1f1b", 1), ("zbv", 2), ("dualpipe", 2)], ids=str)
def timeline(request):
    schedule, vpp = request.param
    layout = Layout(tp=8, pp=8, dp=128, vpp=vpp, schedule=schedule, sequence_parallel=True)
    return play_step(LLAMA.cluster, LLAMA.job, layout)


def test_every_span_is_a_complete_event_on_a_named_thread(timeline):
    trace = json.loads(gzip.decompress(trace_bytes(timeline)))
    events = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    assert len(events) == len(timeline.spans)
    named = {
        (event["pid"], event["tid"]): event["args"]["name"]
        for event in trace["traceEvents"]
        if event["name"] == "thread_name"
    }
    processes = {event["pid"] for event in trace["traceEvents"] if event["name"] == "process_name"}
    assert processes == set(range(8))
    assert {(event["pid"], event["tid"]) for event in events} == set(named)
    assert set(named.values()) >= {"compute", "tp cp ep", "pipeline p2p", "data parallel"}
    assert {event["ph"] for event in trace["traceEvents"]} == {"X", "M"}


def test_threads_nest(timeline):
    """Perfetto drops slices that overlap on one thread without nesting."""
    lanes = {}
    for event in chrome_trace(timeline)["traceEvents"]:
        if event["ph"] == "X":
            start = round(event["ts"] * 1000)
            lanes.setdefault((event["pid"], event["tid"]), []).append((start, start + round(event["dur"] * 1000)))
    for intervals in lanes.values():
        stack = []
        for start, end in sorted(intervals, key=lambda one: (one[0], -one[1])):
            while stack and stack[-1] <= start:
                stack.pop()
            assert not stack or end <= stack[-1]
            stack.append(end)


def test_times_are_microseconds_to_the_nanosecond():
    event = chrome_trace(StepTimeline(spans=(span(1.000000001, 2e-9, bytes=5.0, group="pp"),), step_seconds=2.0))
    complete = event["traceEvents"][-1]
    assert complete["ts"] == 1000000.001
    assert complete["dur"] == 0.002
    assert complete["args"] == {"bytes": 5.0, "group": "pp"}
    assert event["displayTimeUnit"] == "ms"


def test_spans_that_touch_stay_on_one_thread_and_overlaps_move():
    touching = (span(0.1, 0.2), span(0.1 + 0.2, 0.3), span(0.15, 0.05))
    overlapping = (span(0.0, 2.0, "p2p"), span(1.0, 2.0, "p2p"), span(1.5, 2.0, "p2p"))

    def threads(spans):
        trace = chrome_trace(StepTimeline(spans=spans, step_seconds=4.0))["traceEvents"]
        return sorted(event["args"]["name"] for event in trace if event["name"] == "thread_name")

    assert threads(touching) == ["compute"]
    assert threads(overlapping) == ["pipeline p2p", "pipeline p2p #2", "pipeline p2p #3"]


def test_bytes_are_reproducible_and_gzip_is_optional(timeline):
    assert trace_bytes(timeline, "x") == trace_bytes(timeline, "x")
    assert json.loads(trace_bytes(timeline, "x", compress=False)) == json.loads(
        gzip.decompress(trace_bytes(timeline, "x"))
    )


def test_an_unknown_kind_is_drawn_on_its_stream():
    trace = chrome_trace(StepTimeline(spans=(span(0, 1, "checkpoint"),), step_seconds=1.0))["traceEvents"]
    assert [event["args"]["name"] for event in trace if event["name"] == "thread_name"] == ["communication"]
