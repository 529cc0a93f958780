"""The metrics of a running job, and the dashboard that asks for them."""

from __future__ import annotations

import json
import re
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from plans import plan_file, plan_of
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

import runtime
from planner.plan import Plan
from runtime.commands import run
from runtime.follow import Follower
from runtime.journal import Journal
from runtime.metrics import JobMetrics, serve
from scenarios.prices import Prices
from topologies.errors import InputError

PHASES = {"forward_backward": 0.8, "gradient_reduction": 0.15, "optimizer": 0.05}


@pytest.fixture
def plan() -> Plan:
    made = plan_of(dp=2, optimizer_sharding="zero1")
    prices = Prices(name="rent", gpu_usd_per_second=0.001)
    object.__setattr__(made, "scenario", made.scenario.model_copy(update={"prices": prices}))
    promised = {"step_seconds": 0.9, "mfu": 0.5, "goodput": 0.97, "breakdown_seconds": {"dp_comm": 0.1, "tp_comm": 0.0}}
    object.__setattr__(made, "predicted", promised)
    return made


def events() -> Iterator[dict[str, Any]]:
    """A job of steps of 1 s that saves at 3 s, is killed at 5 s, and goes on from there at 9 s."""

    def event(what: str, time: float, attempt: int = 0, **more: Any) -> dict[str, Any]:
        return {"event": what, "time": 1000.0 + time, "attempt": attempt, **more}

    def step(number: int, time: float, attempt: int = 0) -> dict[str, Any]:
        more = {"loss": 7.0 - number, "seconds": 1.0, "cpu_seconds": 0.9, "phases_seconds": PHASES}
        return event("step", time, attempt, step=number, **more)

    yield event("begin", 0.0, step=0, load_seconds=0.0)
    yield step(0, 1.0)
    yield step(1, 2.0)
    yield event("save", 2.5, step=2, stall_seconds=0.5)
    yield event("saved", 3.0, step=2, stall_seconds=0.5, seconds=0.75, bytes=4096, error=None)
    yield step(2, 3.5)
    yield event("failure", 5.0, rank=1, host="here", cause="killed", step=3, last_beat=1004.5, words="died")
    yield event("begin", 9.0, 1, step=2, load_seconds=1.0)
    yield step(2, 10.0, 1)


def values(metrics: JobMetrics) -> dict[tuple[str, ...], float]:
    """All samples by name and values of labels, as Prometheus reads them."""
    registry = CollectorRegistry()
    registry.register(metrics)
    families = text_string_to_metric_families(generate_latest(registry).decode())
    return {
        (sample.name, *(value for _, value in sorted(sample.labels.items()))): sample.value
        for family in families
        for sample in family.samples
    }


def test_promise_and_fact_stand_side_by_side(plan: Plan) -> None:
    metrics = JobMetrics(plan)
    assert ("headway_step_seconds", "measured") not in values(metrics)
    for event in events():
        metrics.take(event)
    found = values(metrics)
    assert found["headway_step_seconds", "predicted"] == 0.9
    assert found["headway_step_seconds", "measured"] == 1.0
    assert found["headway_goodput_ratio", "predicted"] == 0.97
    assert found["headway_goodput_ratio", "measured"] == pytest.approx(3 / 10)  # three steps of 1 s in 10 s
    assert found["headway_step_exposed_comm_seconds", "dp", "measured"] == 0.15
    assert found["headway_step_exposed_comm_seconds", "dp", "predicted"] == 0.1
    assert found["headway_tokens_total",] == 3 * plan.scenario.job.tokens_per_step
    lost = {key[1]: value for key, value in found.items() if key[0] == "headway_lost_seconds_total"}
    assert lost["checkpoint"] == 0.5
    assert lost["detection"] == 0.5
    assert lost["load"] == 1.0
    assert sum(lost.values()) == pytest.approx(7.0)
    assert found["headway_failures_total", "killed"] == 1
    assert found["headway_checkpoint_bytes",] == 4096
    assert found["headway_cost_usd_total",] == pytest.approx(0.001 * 2 * 10)  # two ranks for 10 s


def test_counters_never_fall(plan: Plan) -> None:
    metrics = JobMetrics(plan)
    before: dict[tuple[str, ...], float] = {}
    for event in events():
        metrics.take(event)
        now = {key: value for key, value in values(metrics).items() if key[0].endswith("_total")}
        assert all(now[key] >= value for key, value in before.items())
        before = now


def test_every_query_of_the_dashboard_asks_for_a_metric_that_there_is(plan: Plan) -> None:
    metrics = JobMetrics(plan)
    for event in events():
        metrics.take(event)
    object.__setattr__(metrics.pace, "watts", 200.0)  # the laptop states no power
    there = {key[0] for key in values(metrics)}
    board = json.loads((Path(runtime.__file__).parent / "dashboards" / "headway.json").read_text())
    queries = [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    queries += [one["query"]["query"] for one in board["templating"]["list"] if one["type"] == "query"]
    asked = {name for query in queries for name in re.findall(r"\bheadway_\w+", query)}
    assert asked == there
    assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"])
    assert all(target["datasource"]["uid"] == "${datasource}" for p in board["panels"] for target in p["targets"])


def test_metrics_are_served_until_the_end(plan: Plan) -> None:
    server = serve(JobMetrics(plan), 0, "127.0.0.1")
    try:
        port = server.server_port
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
            assert 'headway_step_seconds{source="predicted"} 0.9' in answer.read().decode()
        with pytest.raises(InputError, match="choose a free port"):
            serve(JobMetrics(plan), port, "127.0.0.1")
    finally:
        server.shutdown()
        server.server_close()


def test_an_address_that_is_not_of_this_machine_is_refused(tmp_path: Path, plan: Plan) -> None:
    words = [plan_file(tmp_path, plan), "--metrics-port", "9000", "--metrics-address", "203.0.113.1"]
    result = CliRunner().invoke(run, words)
    assert result.exit_code == 2
    assert "cannot listen on 203.0.113.1:9000" in result.output


def test_a_follower_hands_on_each_event_once_and_waits_for_whole_lines(tmp_path: Path) -> None:
    seen: list[str] = []
    follower = Follower(tmp_path, lambda event: seen.append(event["event"]))
    ranks, watch = (Journal(tmp_path / name, 0) for name in ("rank0.0.journal", "watch.journal"))
    ranks.note("begin", time=1.0)
    follower.look()
    watch.note("failure", time=2.0)
    ranks.note("end", time=3.0)
    with ranks.file.open("a") as stream:
        stream.write('{"event": "half"')
    follower.look()
    follower.look()
    assert seen == ["begin", "failure", "end"]
    with ranks.file.open("a") as stream:
        stream.write(', "time": 4.0}\n')
    follower.look()
    assert seen[-1] == "half"
