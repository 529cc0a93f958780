from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from planner.cli import headway
from planner.plan import Plan, write_plan
from reports import timeline as timeline_module
from reports.timeline import MOST_OPERATIONS, Picture, merged, play, shown_ranks
from simulator.outcome import Measurement, Span, StepTimeline, plain
from topologies.document import to_json

MakePlan = Callable[..., Plan]
MakeMeasurement = Callable[..., Measurement]


@pytest.fixture
def files(tmp_path: Path, make_plan: MakePlan, make_measurement: MakeMeasurement) -> tuple[Path, Path]:
    plan = make_plan()
    write_plan(plan, tmp_path / "plan.json")
    (tmp_path / "measurement.json").write_text(to_json(plain(make_measurement(plan))))
    return tmp_path / "plan.json", tmp_path / "measurement.json"


def invoke(*words: str | Path) -> Result:
    return CliRunner().invoke(headway, [str(word) for word in words])


def test_compare_prints_the_contract(files: tuple[Path, Path]) -> None:
    result = invoke("compare", *files, "--json")
    assert result.exit_code == 0
    told = json.loads(result.stdout)
    assert {"predicted", "measured", "error", "phases"} <= told.keys()
    assert set(told["error"]) == {"step_seconds", "mfu", "memory", "cpu_seconds", "goodput"}
    assert told["predicted"]["step_seconds"] == pytest.approx(4.0)
    assert told["predicted"]["memory_bytes"] == pytest.approx(53.5e9)
    assert {"mfu", "tokens_per_second_per_gpu"} <= told["measured"].keys()


def test_compare_prints_a_table_for_people(files: tuple[Path, Path]) -> None:
    result = invoke("compare", *files)
    assert result.exit_code == 0
    for text in ("Step time", "4.2 s", "-4.8 %", "53.5 GB", "Forward and backward"):
        assert text in result.stdout
    assert "inside the predicted 80 % band" in result.stderr
    assert "causal attention once, no recomputation" in result.stderr


def test_compare_refuses_a_foreign_measurement(files: tuple[Path, Path]) -> None:
    plan, measurement = files
    content = json.loads(measurement.read_text()) | {"plan_sha256": "f" * 64}
    measurement.write_text(json.dumps(content))
    result = invoke("compare", plan, measurement, "--json")
    assert result.exit_code == 2
    assert json.loads(result.stdout)["error"]["kind"] == "InputError"
    forced = invoke("compare", plan, measurement, "--json", "--force")
    assert forced.exit_code == 0
    assert json.loads(forced.stdout)["same_plan"] is False


@pytest.mark.parametrize("content", ["", "{", '{"format_version": 99}', "null"])
def test_compare_exits_2_on_a_bad_file(files: tuple[Path, Path], content: str) -> None:
    plan, measurement = files
    measurement.write_text(content)
    result = invoke("compare", plan, measurement)
    assert result.exit_code == 2
    assert result.stderr.startswith(f"error: {measurement}")
    assert result.stdout == ""
    assert invoke("report", plan, measurement, "-o", plan.with_name("r.html")).exit_code == 2
    assert not plan.with_name("r.html").exists()


@pytest.fixture
def played(monkeypatch: pytest.MonkeyPatch, timeline: StepTimeline) -> None:
    """Spare these tests the event-driven simulator: they are about the command."""
    monkeypatch.setattr(timeline_module, "play", lambda plan: Picture(timeline=timeline, num_microbatches=32))


@pytest.mark.usefixtures("played")
def test_report_writes_a_file_and_says_so(files: tuple[Path, Path]) -> None:
    plan, measurement = files
    out = plan.with_name("report.html")
    result = invoke("report", plan, measurement, "--rival", plan, measurement, "-o", out, "--json")
    assert result.exit_code == 0, result.output
    told = json.loads(result.stdout)
    assert told["report"] == str(out)
    assert told["bytes"] == out.stat().st_size
    assert len(told["comparisons"]) == 2
    assert f"wrote {out}" in result.stderr
    page = out.read_text()
    assert page.count("<h3>TP4 PP2 DP2") == 2
    assert "headway compare plan.json measurement.json" in page


@pytest.mark.usefixtures("played")
def test_report_goes_to_stdout(files: tuple[Path, Path]) -> None:
    result = invoke("report", files[0], "-o", "-")
    assert result.exit_code == 0
    assert result.stdout.startswith("<!DOCTYPE html>")
    assert result.stdout.endswith("</html>\n")
    assert invoke("report", files[0], "-o", "-", "--json").exit_code == 2


def test_a_place_that_cannot_be_written(files: tuple[Path, Path], played: None) -> None:
    result = invoke("report", files[0], "-o", files[0] / "report.html")
    assert result.exit_code == 2
    assert "cannot be written" in result.stderr


def test_neighbours_too_short_to_see_are_drawn_as_one() -> None:
    def span(start: float, duration: float, rank: int = 0) -> Span:
        return Span(
            rank=rank, stream="compute", name="F", kind="forward", start_seconds=start, duration_seconds=duration
        )

    short = [span(index * 0.001, 0.001) for index in range(1000)]
    assert merged(short, 0.01) == [(0.0, pytest.approx(1.0), 0, "compute")]
    long = [span(0.0, 1.0), span(1.0, 1.0), span(5.0, 1.0), span(2.0, 1.0, rank=1)]
    assert len(merged(long, 0.01)) == 4


def test_shown_ranks_keep_the_ends() -> None:
    for count in range(1, 200):
        shown = shown_ranks(range(count))
        assert shown[0] == 0
        assert shown[-1] == count - 1
        assert len(shown) == len(set(shown)) == min(count, 16)


@pytest.mark.parametrize(("pp", "total"), [(2, 32), (16, 32)])
def test_a_picture_plays_the_whole_step_where_it_can(make_plan: MakePlan, pp: int, total: int) -> None:
    plan = make_plan(pp=pp, layers=16)
    picture = play(plan)
    assert picture.num_microbatches == total
    assert 2 * total * pp <= MOST_OPERATIONS
    forwards = [span for span in picture.timeline.spans if span.kind == "forward" and span.rank == pp - 1]
    assert len(forwards) == total
