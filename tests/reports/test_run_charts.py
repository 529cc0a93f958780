"""Pictures of whole runs hold what they are given, once each, and the same input gives the same bytes."""

import json
import re
import xml.etree.ElementTree as ElementTree

import pytest
from click.testing import CliRunner

from planner.cli import headway
from reports.run_charts import DOING, _visible, goodput_chart, run_chart
from reports.run_losses import loss_chart, losses, tokens_chart
from topologies.errors import InputError

DAY = 86_400.0


def row(interval, goodput, spares, *, width=0.01):
    played = {"mean": goodput - 0.002, "ci95": [goodput - width, goodput + width]}
    return {
        "checkpoint_interval_seconds": interval, "goodput": goodput, "faults.spares": spares,
        "simulated_goodput": played,
    }  # fmt: skip


ROWS = [row(t * 60, g - s, n) for n, s in ((8, 0.1), (24, 0.0)) for t, g in ((2, 0.93), (10, 0.94), (30, 0.88))]


def drawn(svg):
    ElementTree.fromstring(svg)
    return svg


def test_goodput_against_the_interval():
    svg = drawn(goodput_chart(ROWS, ["faults.spares"]))
    for word in ("faults.spares 8", "faults.spares 24", "closed form", "goodput, %", "best of the closed form"):
        assert word in svg
    assert svg == goodput_chart(ROWS, ["faults.spares"])
    assert svg != goodput_chart(ROWS[:5], ["faults.spares"])
    drawn(goodput_chart([*ROWS[:3], {"infeasible": "no"}]))


def test_one_interval_is_no_curve():
    with pytest.raises(InputError, match="fewer than two"):
        goodput_chart(ROWS[:1])


def timeline(days):
    spans = [[0, 10 * DAY, "training"], [10 * DAY, 10 * DAY + 60, "detection"]]
    spans += [[10 * DAY + 60, 10 * DAY + 600, "rendezvous"], [10 * DAY + 600, days * DAY, "training slowly"]]
    return {"run": 0, "goodput": 0.91, "wall_seconds": days * DAY, "spans": spans}


@pytest.mark.parametrize(("days", "lines"), [(14.0, 2), (54.0, 8), (320.0, 16)])
def test_a_line_a_week(days, lines):
    svg = drawn(run_chart(timeline(days)))
    assert len(re.findall(r">day \d+<", svg)) == lines
    for word in ("training", "training slowly", "detection", "restart", "91.0 %"):
        assert word in svg
    assert DOING["detection"].lower() in svg


def test_a_short_run_has_one_line():
    spans = [[0, 1000, "training"]]
    svg = drawn(run_chart({"run": 0, "goodput": 1.0, "wall_seconds": 1000.0, "spans": spans}))
    assert len(re.findall(r">day \d+<", svg)) == 1


def test_the_command(tmp_path):
    given, made = tmp_path / "runs.json", tmp_path / "run.svg"
    for content, word in (
        (timeline_of(20.0), "day 7"),
        ({"rows": ROWS, "vary": {"faults.spares": [8, 24]}}, "goodput, %"),
    ):
        given.write_text(json.dumps(content))
        result = CliRunner().invoke(headway, ["picture", str(given), "-o", str(made)])
        assert result.exit_code == 0, result.output
        assert word in drawn(made.read_text())
    for text, says in (("{}", "holds neither"), ("{", "is not complete JSON"), ("[]", "holds neither")):
        given.write_text(text)
        result = CliRunner().invoke(headway, ["picture", str(given), "-o", str(made)])
        assert (result.exit_code, says in result.stderr) == (2, True)


def timeline_of(days):
    return {"timeline": timeline(days)}


def test_a_short_phase_does_not_hide_a_longer_one():
    """Of each stop only the longest part is drawn at least as wide as a pixel."""
    spans = [[0, 1000, "training"], [1000, 1060, "detection"], [1060, 1061, "load"], [1061, 7 * DAY, "training"]]
    drawn_with = {doing: (start, seen) for start, _, doing, seen in _visible(spans, 500.0) if doing != "training"}
    assert drawn_with == {"detection": (1000, 500.0), "load": (1060, 0.0)}


CONTENT = {
    "wall_seconds": {"mean": 1000.0, "p10": 900.0, "p50": 1000.0, "p90": 1100.0},
    "lost_seconds": {"waiting": 30.0, "rework": 70.0, "manual": 0.0},
}


def test_losses_by_cause():
    assert losses(CONTENT) == [("rework", pytest.approx(0.07)), ("waiting", pytest.approx(0.03))]
    svg = drawn(loss_chart(CONTENT))
    assert ("rework" in svg, "waiting" in svg, "manual" in svg) == (True, True, False)


def test_tokens_over_time():
    spans = [[0, 600, "training", 2e6], [600, 700, "detection", 0.0], [700, 1000, "training slowly", 1e6]]
    told = {"wall_seconds": 1000.0, "tokens": 1.4e9, "spans": spans}
    svg = drawn(tokens_chart(told))
    for word in ("million tokens/s", "kept, mean of the run", "while training at full speed"):
        assert word in svg
    assert svg != tokens_chart(told | {"tokens": 0.7e9})
