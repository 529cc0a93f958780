"""Pictures of whole runs hold what they are given, once each, and the same input gives the same bytes."""

import json
import re
import xml.etree.ElementTree as ElementTree

import pytest
from click.testing import CliRunner

from planner.cli import headway
from reports.run_charts import DOING, goodput_chart, run_chart
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
    for text, says in (("{}", "holds neither"), ("{", "cannot be read"), ("[]", "holds neither")):
        given.write_text(text)
        result = CliRunner().invoke(headway, ["picture", str(given), "-o", str(made)])
        assert (result.exit_code, says in result.stderr) == (2, True)


def timeline_of(days):
    return {"timeline": timeline(days)}
