"""Traces as others publish them, and as they go wrong."""

from __future__ import annotations

from pathlib import Path

import pytest

from scenarios.failure_traces import FailureTrace, read_trace_file
from scenarios.scenario import load_scenario
from topologies.document import LoadContext, check
from topologies.errors import InputError

TRACES = Path(__file__).resolve().parents[2].parent / "shared" / "data" / "traces"
published = pytest.mark.skipif(not TRACES.is_dir(), reason="the public traces are not here")


def read(path: Path) -> FailureTrace:
    return check(read_trace_file(path, []), FailureTrace, LoadContext(path))


@published
@pytest.mark.parametrize(
    ("name", "start", "removed", "hours"),
    [
        ("spot/bamboo_p3-trace.csv", 18, 167, 11.37),
        ("spot/bamboo_g4dn-trace.csv", 0, 74, 10.77),
        ("spot/bamboo_gcloud_a100x1-east1b.txt", 55, 154, 27.0),
        ("spot/bamboo_gcloud_v100x1-east1c.txt", 80, 533, 24.2),
        ("spot/parcae_aws_traces_bert_trace_hh_55_65.txt", 32, 19, 1.0),
        ("spot/parcae_aws_traces_bert_trace_ll_10_11.txt", 18, 4, 1.0),
    ],
)
def test_published_spot_traces(name: str, start: int, removed: int, hours: float) -> None:
    trace = read(TRACES / name)
    assert trace.kind == "capacity"
    assert trace.start_nodes == start
    assert sum(nodes for nodes in trace.nodes if nodes > 0) == removed
    assert trace.span_seconds / 3600 == pytest.approx(hours, abs=0.03)


@published
def test_bamboo_counts_by_hand() -> None:
    """Nodes alive after each line of the file, counted here line by line."""
    path = TRACES / "spot/bamboo_p3-trace.csv"
    trace, alive, levels = read(path), 0, {}
    for line in path.read_text().splitlines():
        time, what, _ = line.split(",")
        alive += 1 if what == "add" else -1
        levels[float(time) / 1000] = alive
    level = trace.start_nodes
    for time, taken in zip(trace.times_seconds, trace.nodes, strict=True):
        level -= taken
        assert level == levels[time]


@published
def test_a_trace_in_a_scenario() -> None:
    path = TRACES / "titan_gpu_lives.csv"
    scenario = load_scenario("llama3-405b-16k-h100", overrides=[f"faults.trace={path}", "faults.failures=[]"])
    trace = scenario.faults.trace
    assert trace is not None
    assert scenario.faults.rate_per_second(18_688, 2336) == pytest.approx(5209 / trace.span_seconds)


TITAN = "SN,location,insert,remove,duration,out,event\n"


def write(folder: Path, text: str, name: str = "trace.csv") -> Path:
    path = folder / name
    path.write_text(text)
    return path


def test_a_plain_table(tmp_path: Path) -> None:
    trace = read(write(tmp_path, "time,nodes,component\n10,1,gpu\n20.5,2,leaf\n"))
    assert trace.times_seconds == (10.0, 20.5)
    assert (trace.nodes, trace.components, trace.kind) == ((1, 2), ("gpu", "leaf"), "failures")
    capacity = read(write(tmp_path, "time,nodes\n0,-8\n10,3\n20,-2\n"))
    assert (capacity.kind, capacity.start_nodes, capacity.nodes) == ("capacity", 8, (3, -2))


def test_native_yaml(tmp_path: Path) -> None:
    trace = read(write(tmp_path, "name: mine\ntimes: [1 h, 2.5 h]\nspan: 1 d\nfleet: 100\n", "trace.yaml"))
    assert trace.times_seconds == (3600.0, 9000.0)
    assert trace.scale(0, 50) == 0.5


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("time,nodes\n20,1\n10,1\n", "csv:3: is earlier than the row before"),
        ("time,nodes\nsoon,1\n", "csv:2: time and nodes must be numbers"),
        ("time,nodes\n", "holds no event"),
        ("time,nodes\n0,-2\n5,3\n", "takes more nodes than there are"),
        ("0,add,a\n5,add,a\n", "csv:2: a is here already; overlapping events"),
        ("0,add,a\n5,remove,b\n", "csv:2: b is not here"),
        ("5,add,a\n0,add,b\n", "csv:2: is earlier than the line before"),
        ("0,add,a\nx,y\n", "csv:2: is not 'milliseconds,add|remove,node'"),
        ("2021-12-11, 11:11:30, many\n", "csv:1: is not 'date, time, instances'"),
        ('[0, "add", {"nodes": []}]\n', "csv:1: is not '[milliseconds, event, {...}]'"),
        (
            '[0, "add", {"nodes": ["a"], "duration": 60000}]\n[30000, "no-op", {"nodes": [], "duration": 60000}]\n',
            "csv:2: overlaps the segment before",
        ),
        (TITAN + "1,c,2019-02-01 00:00:00,2019-01-01 00:00:00,1,F,DBE\n", "csv:2: a stint ends before it begins"),
        (TITAN + "1,c,soon,later,1,F,DBE\n", "csv:2: is not a date"),
        (TITAN, "holds no failure"),
        ("what is this\n", "is not a trace of a known form"),
        ("", "is not a trace of a known form"),
    ],
)  # fmt: skip
def test_traces_that_go_wrong(tmp_path: Path, text: str, says: str) -> None:
    with pytest.raises(InputError) as error:
        read(write(tmp_path, text))
    assert says in str(error.value)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("name: x\ntimes: [2 h, 1 h]\nspan: 1 d\n", "times are not in order"),
        ("name: x\ntimes: [2 h]\nspan: 1 h\n", "beyond the span"),
        ("name: x\ntimes: [1 h]\nnodes: [1, 2]\nspan: 1 d\n", "nodes has 2 entries for 1 times"),
        ("name: x\ntimes: [1 h]\nnodes: [-1]\nspan: 1 d\n", "kind 'capacity'"),
        ("name: x\ntimes: []\nspan: 1 d\n", "times"),
        ("name: x\ntimes: [1]\nspan: 1 d\n", "not a quantity"),
    ],
)
def test_native_traces_that_go_wrong(tmp_path: Path, text: str, says: str) -> None:
    with pytest.raises(InputError, match=says):
        read(write(tmp_path, text, "trace.yaml"))


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot be read"):
        read_trace_file(tmp_path / "none.csv", None)
