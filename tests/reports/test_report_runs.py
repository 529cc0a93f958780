"""Whole runs in the report: played for a plan, or from a file of ``headway simulate --runs``."""

import json
from dataclasses import replace

from click.testing import CliRunner

from planner.cli import headway
from planner.plan import write_plan
from reports.whole_runs import play_plan, runs_section
from scenarios.faults import Failure, Faults
from simulator.run_answers import confirmation, interval_curve
from simulator.whole_runs import whole_run


def failing(make_plan):
    """A plan of 16 cards of which one in the job fails every two days."""
    plan = make_plan()
    faults = Faults(
        name="often", failures=(Failure(component="card", rate_per_second=1 / 172_800, per="job"),),
        restart_seconds=600, source={"*": "made for a test"},
    )  # fmt: skip
    job = plan.scenario.job.model_copy(update={"target_tokens": 60_000_000_000})
    scenario = plan.scenario.model_copy(update={"faults": faults, "job": job})
    return type(plan)(**{name: getattr(plan, name) for name in plan.__dataclass_fields__} | {"scenario": scenario})


def invoke(*words):
    return CliRunner().invoke(headway, [str(word) for word in words])


def test_a_plan_without_failures_has_no_section(make_plan):
    assert play_plan(make_plan(), 8) is None
    assert play_plan(failing(make_plan), 0) is None
    assert runs_section(None) is None


def test_the_section_says_what_was_played(make_plan):
    found = play_plan(failing(make_plan), 8)
    section = runs_section(found)
    assert section["runs"] == 8
    assert {"restart", "rework"} <= {cause for cause, *_ in section["losses"]}
    assert "within one goodput point" in section["verdict"]
    for name in ("loss_chart", "curve", "timeline", "tokens"):
        assert section[name].startswith("<svg")
    lost = found.content | {"analytic": found.content["analytic"] | {"difference_points": -3.0, "agrees": False}}
    worse = runs_section(type(found)(content=lost | {"intervals": []}, source="x"))
    assert "more than one goodput point" in worse["verdict"]
    assert "rates that differ from run to run" in worse["verdict"]
    assert worse["curve"] is None


def test_the_report_of_a_plan_and_of_a_file_of_runs(make_plan, tmp_path):
    plan, page = tmp_path / "plan.json", tmp_path / "report.html"
    made = failing(make_plan)
    write_plan(made, plan)
    assert invoke("report", plan, "--runs", 4, "-o", page).exit_code == 0
    text = page.read_text()
    assert "Whole runs, played with failures" in text
    assert "played for this report with seed 0" in text
    runs = tmp_path / "runs.json"
    result = invoke("simulate", plan, "--runs", 8, "--jobs", 1, "-o", runs)
    assert result.exit_code == 0, result.output
    content = json.loads(runs.read_text())
    assert len(content["intervals"]) > 3
    result = invoke("report", plan, runs, "-o", page)
    assert result.exit_code == 0, result.output
    assert "8 runs (runs.json)" in page.read_text()
    other = tmp_path / "other.json"
    other.write_text(json.dumps(content | {"layout_label": "TP1"}))
    refused = invoke("report", plan, other, "-o", page)
    assert (refused.exit_code, "the plan is of" in refused.stderr) == (2, True)
    two = invoke("report", plan, runs, other, "-o", page)
    assert (two.exit_code, "a second file of whole runs" in two.stderr) == (2, True)
    assert invoke("picture", runs, "--intervals", "-o", tmp_path / "g.svg").exit_code == 0
    assert "work between checkpoints" in (tmp_path / "g.svg").read_text()


def test_a_choice_is_confirmed_or_the_reasons_are_told(make_plan):
    plan = failing(make_plan)
    run = whole_run(plan.scenario, plan.layout, plan.predicted["step_seconds"])
    found = confirmation(run, runs=12)
    assert abs(found["difference_points"]) < 1
    assert (found["agrees"], found["because"]) == (True, [])
    assert found["ci95"][1] - found["ci95"][0] < 0.01
    assert abs(found["uncertain_goodput"] - found["goodput"]) < 0.02
    years = replace(run, setup=replace(run.setup, num_steps=1000 * run.setup.num_steps))
    assert confirmation(years, runs=12)["work_seconds"] <= 61 * 86400  # a longer run says no more about a rate
    rows = interval_curve(run, 12, 0)
    intervals = [row["checkpoint_interval_seconds"] for row in rows]
    assert intervals == sorted(set(intervals))
    for row in rows:  # at known rates, so that the closed form lies in the band or within a point of it
        low, high = row["simulated_goodput"]["ci95"]
        assert low - 0.01 < row["goodput"] < high + 0.01
