"""What the plan says of the simulation that confirmed it."""

from typing import Any

from planner.confirming import told

DAY = 86_400.0
FOUND: dict[str, Any] = {
    "runs": 24, "seed": 0, "work_seconds": 60 * DAY, "whole_work_seconds": 86 * DAY, "saves": 5184, "goodput": 0.9312,
    "ci95": [0.93, 0.932], "analytic": 0.93, "difference_points": 0.12, "agrees": True, "because": [],
    "rate_spread": 0.3, "uncertain_goodput": 0.925,
}  # fmt: skip


def test_of_a_long_run_the_stretch_is_named() -> None:
    line = told(FOUND)
    assert line.startswith(
        "24 runs of 60 d of work (5,184 saves), a stretch of the 86 d of the run, played: 93.12 %"[:60]
    )
    assert "+0.12 points" in line
    assert "92.50% with failure rates that are known to 30 %" in line


def test_of_a_short_run_nothing_is_left_out() -> None:
    line = told(FOUND | {"whole_work_seconds": 60 * DAY, "rate_spread": 0.0})
    assert line == "24 runs of 60 d of work played: 93.12% (+0.12 points)"


def test_a_plan_of_an_older_version_is_told_too() -> None:
    assert "stretch" not in told(
        {key: value for key, value in FOUND.items() if key not in ("whole_work_seconds", "saves")}
    )


def test_reasons_follow() -> None:
    assert told(FOUND | {"because": ["bursts", "the archive"]}).endswith("leaves out: bursts; the archive")
