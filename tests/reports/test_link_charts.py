"""The picture of the links that a step uses: from counters, from the file of ``simulate``, and what cannot be drawn."""

import json

import pytest
from click.testing import CliRunner

from planner.cli import headway
from reports.link_charts import counters_of, links_chart
from simulator.outcome import Counter


def counter(name, *values):
    return Counter(name=name, start_seconds=tuple(0.5 * k for k in range(len(values))), values=values)


def test_rails_and_directions_share_a_row():
    alike = [counter(f"NICs {way}, rail {rail}", 0.25, 0.75) for way in ("out", "in") for rail in range(4)]
    picture = links_chart([*alike, counter("scale-up out", 0.1, 0.3), counter("scale-up in", 0.1, 0.3)], 1.0)
    assert picture.startswith("<svg")
    assert picture.count("4 rails") == 1
    assert "mean 50.0 %, busiest moment 75.0 %" in picture
    assert "In, down, read" not in picture
    assert "Range of the rails" not in picture
    assert picture == links_chart([*alike, counter("scale-up out", 0.1, 0.3), counter("scale-up in", 0.1, 0.3)], 1.0)


def test_what_differs_is_drawn_apart():
    both = links_chart([counter("NICs out", 0.5, 0.5), counter("NICs in", 0.1, 0.9)], 1.0)
    assert "In, down, read" in both
    rails = links_chart([counter("NICs out, rail 0", 0.5, 0.5), counter("NICs out, rail 1", 0.2, 0.5)], 1.0)
    assert "Range of the rails" in rails


def test_picture_draws_the_answer_of_simulate(tmp_path):
    run = CliRunner()
    layout = ["--pin", "tp=8", "--pin", "pp=4", "--pin", "dp=16", "--set", "job.global_batch_size=64"]
    answer = run.invoke(headway, ["simulate", "llama3-70b-512-h100", *layout, "--step", "--json"])
    file, out = tmp_path / "step.json", tmp_path / "links.svg"
    file.write_text(answer.stdout)
    assert run.invoke(headway, ["picture", str(file), "-o", str(out)]).exit_code == 0
    picture = out.read_text()
    for counters in (counters_of(json.loads(answer.stdout)["links"]["counters"]),):
        assert picture == links_chart(counters, json.loads(answer.stdout)["step_seconds"])
    assert "NICs" in picture


@pytest.mark.parametrize("links", [{}, {"counters": [{"name": "NICs out"}]}, {"counters": 3}])
def test_a_broken_file_is_one_sentence(links, tmp_path):
    file = tmp_path / "step.json"
    file.write_text(json.dumps({"step_seconds": 1.0, "links": links}))
    found = CliRunner().invoke(headway, ["picture", str(file), "-o", "-"])
    assert found.exit_code == 2
    assert "cannot be drawn" in found.stderr or "can be drawn" in found.stderr
