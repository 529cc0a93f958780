"""``headway sweep``: every combination, common luck, bad input."""

import csv
import json

import pytest
from click.testing import CliRunner

from planner.cli import headway
from planner.sweep import parse_vary, rows_csv, sweep
from topologies.errors import InputError

PINNED = ["tp=8", "pp=16", "dp=128"]


def test_every_combination_in_order():
    rows = sweep(
        "llama3-405b-16k-h100",
        {"checkpoint.interval": ["5 min", "20 min"], "faults.spares": [16, 40]},
        pins=PINNED,
        runs=8,
        seed=1,
    )
    assert [(row["checkpoint.interval"], row["faults.spares"]) for row in rows] == [
        ("5 min", 16), ("5 min", 40), ("20 min", 16), ("20 min", 40),
    ]  # fmt: skip
    for values in ([row["goodput"] for row in rows], [row["simulated_goodput"]["mean"] for row in rows]):
        assert values[1] > values[0] > values[2]
        assert values[1] > values[3] > values[2]
    assert rows[0]["waiting_seconds"] > 100 * rows[1]["waiting_seconds"]


def test_without_runs_the_closed_form_answers():
    (row,) = sweep("llama3-405b-16k-h100", {"job.seq_length": [4096]}, pins=PINNED)
    assert "simulated_goodput" not in row
    assert 0.8 < row["goodput"] < 1
    assert row["gpus"] == 16384


def test_open_layouts_are_planned_at_each_point():
    rows = sweep("llama3-70b-512-h100", {"cluster.num_nodes": [16, 32]})
    assert [row["gpus"] for row in rows] == [128, 256]
    assert rows[0]["days"] > 1.5 * rows[1]["days"]


def test_what_cannot_run_says_why():
    rows = sweep("llama3-405b-16k-h100", {"cluster.num_nodes": [2048, 4]}, pins=PINNED)
    assert "infeasible" not in rows[0]
    assert "needs 16384 GPUs, has 32" in rows[1]["infeasible"]


@pytest.mark.parametrize(
    ("texts", "says"),
    [
        (["faults.spares"], "is not of the form"),
        (["faults.spares=8"], "is not of the form"),
        (["faults.spares=[]"], "is not of the form"),
        (["faults.spares=[8"], "is not of the form"),
        (["faults.spares=[8]", "faults.spares=[9]"], "varied twice"),
        ([f"a=[{','.join('1' * 50)}]", f"b=[{','.join('1' * 50)}]"], "2500 points"),
    ],
)
def test_bad_grids(texts, says):
    with pytest.raises(InputError, match=says):
        parse_vary(texts)


def test_a_key_that_is_not_there():
    with pytest.raises(InputError, match="did you mean"):
        sweep("llama3-405b-16k-h100", {"faults.spare": [3]}, pins=PINNED)


def test_the_command(tmp_path):
    words = ["sweep", "llama3-405b-16k-h100", *(word for pin in PINNED for word in ("--pin", pin))]
    words += ["--vary", "faults.restart=[2 min, 10 min]", "--runs", "3"]
    result = CliRunner().invoke(headway, [*words, "--json"])
    assert result.exit_code == 0, result.output
    content = json.loads(result.stdout)
    assert [row["faults.restart"] for row in content["rows"]] == ["2 min", "10 min"]
    assert len(content["inputs"][0]["sha256"]) == 64
    path = tmp_path / "rows.csv"
    assert CliRunner().invoke(headway, [*words, "-o", str(path)]).exit_code == 0
    table = list(csv.DictReader(path.read_text().splitlines()))
    assert float(table[1]["simulated_goodput_mean"]) < float(table[0]["simulated_goodput_mean"])
    shown = CliRunner().invoke(headway, words)
    assert "simulated" in shown.stdout
    assert CliRunner().invoke(headway, ["sweep", "llama3-405b-16k-h100", "--vary", "x"]).exit_code == 2


def test_a_table_with_refusals_has_all_columns():
    text = rows_csv([{"x": 1, "goodput": 0.9}, {"x": 2, "infeasible": "too small, by far"}])
    assert list(csv.DictReader(text.splitlines()))[1] == {"x": "2", "goodput": "", "infeasible": "too small, by far"}
