"""Jobs that go on after failures: who failed is named, the steps are the same, and the lost time is booked."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import tiny_training
from job_processes import start, wait_for_workers, wait_until_gone
from plans import plan_file, plan_of
from ranks_of_gloo import in_ranks

from runtime import checkpoint_files as files
from runtime.accounting import outcome_of
from runtime.faults import VARIABLE
from runtime.heartbeat import Beat, beat_file
from runtime.measurement import all_attempts
from runtime.stragglers import WINDOW, Stragglers
from runtime.watch import Watch
from simulator.outcome import read_measurement

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="reads /proc"),
    pytest.mark.xdist_group("jobs"),
    pytest.mark.jobs,
]
USUAL = {"learning_rate": 3e-4, "balance_loss": 0.001}
"""What a job takes that is not asked for anything else."""
LAYOUT: dict[str, Any] = {"dp": 2, "optimizer_sharding": "zero1", "micro_batch_size": 2}


def run_with(folder: Path, monkeypatch: pytest.MonkeyPatch, fault: str, *more: str) -> tuple[Any, str]:
    """Run 12 steps with a save every 4; return the measurement (None if there is none) and what was said."""
    if fault:
        monkeypatch.setenv(VARIABLE, fault)
    plan = plan_file(folder, plan_of(**LAYOUT))
    target, saved = folder / "m.json", folder / "saved"
    words = ["--steps", "12", "--checkpoint-dir", str(saved), "--checkpoint-interval", "4", "-o", str(target)]
    words += ["--checkpoint-mode", "sync"]  # so that it is known what is complete when the fault strikes
    job = start("run", plan, *words, "--heartbeat-timeout", "2 s", *more)
    _, err = job.communicate(timeout=200)
    assert job.returncode == (0 if target.exists() else 2), err
    return (read_measurement(target) if target.exists() else None), err


@pytest.fixture(scope="module")
def undisturbed() -> list[float]:
    """Losses of the same training without a fault, launcher or checkpoint."""
    losses: list[float] = in_ranks(2, tiny_training.run, {"whole": {"recipe": USUAL, "steps": 12, **LAYOUT}})["whole"]
    return losses


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "cause", "said"),
    [
        ("kill:rank=1,step=9", "killed", "rank 1 on"),
        ("stop:rank=1,step=9", "hang", "shows no sign of life for 2"),
        ("kill-save:rank=1,step=8", "killed", "removed step-8.partial: its save was interrupted"),
    ],
)
def test_a_job_heals(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, undisturbed: list[float], fault: str, cause: str, said: str
) -> None:
    measured, err = run_with(tmp_path, monkeypatch, fault)
    assert measured is not None, err
    assert said in err
    assert measured.losses == undisturbed  # bit by bit, through the failure
    run = measured.run
    assert run["failures"] == {cause: 1}
    assert run["attempts"] >= 2  # a machine under load may need one more start
    failure = next(one for one in run["incidents"] if one["event"] == "failure")
    assert failure["rank"] == 1
    assert failure["host"] == os.uname().nodename
    assert run["useful_seconds"] + sum(run["lost_seconds"].values()) == pytest.approx(run["wall_seconds"])
    assert run["lost_seconds"]["restart"] > 0
    assert run["goodput"] < 1 - run["lost_seconds"]["restart"] / run["wall_seconds"]
    if cause == "hang":
        assert run["lost_seconds"]["detection"] == pytest.approx(2.0, abs=4.0)
    assert files.complete_steps(tmp_path / "saved") == [8, 12]


@pytest.mark.slow
def test_a_failure_that_comes_again_ends_the_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fault = "raise:rank=1,step=5;raise:rank=1,step=5,attempt=1"
    measured, err = run_with(tmp_path, monkeypatch, fault)
    assert measured is None
    assert "rank 1 of 2 failed (attempt 2; the same failure in the same step as the attempt before" in err
    assert "a fault on purpose before step 5" in err
    assert files.complete_steps(tmp_path / "saved") == [4]


@pytest.mark.slow
def test_a_nan_ends_the_job_or_leaves_out_its_batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fault = "nan:rank=0,step=5"
    (tmp_path / "stop").mkdir()
    measured, err = run_with(tmp_path / "stop", monkeypatch, fault)
    assert measured is None
    assert "error: the loss is nan in step 6: the training ends" in err
    assert "Traceback" not in err
    monkeypatch.delenv(VARIABLE)
    more, err = run_with(tmp_path / "stop", monkeypatch, "", "--resume")  # a fault that does not come again
    assert more is not None, err
    assert len(more.losses) == 8
    (tmp_path / "back").mkdir()
    rolled, err = run_with(tmp_path / "back", monkeypatch, fault, "--on-nan", "rollback")
    assert rolled is not None, err
    assert "back to step 4, batch 5 is left out" in err
    assert rolled.run["failures"] == {"nan loss": 1}
    assert rolled.run["attempts"] == 1
    assert rolled.losses[4] == more.losses[0]  # step 5 again, with its batch
    assert rolled.losses[5] != more.losses[1]  # step 6 has the batch after the one that is left out


@pytest.mark.slow
def test_slow_and_stuck_ranks_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fault = "slow:rank=1,step=0,seconds=0.2;hang:rank=1,step=10"
    measured, err = run_with(tmp_path, monkeypatch, fault, "--progress-timeout", "4 s")
    assert measured is not None, err
    assert "is slow:" in err
    assert "lives, but is behind all others for 4" in err
    assert any(one["event"] == "straggler" and one["rank"] == 1 for one in measured.run["incidents"])
    assert measured.run["failures"] == {"hang": 1}


def test_sigterm_saves_and_the_job_goes_on_from_there(tmp_path: Path) -> None:
    plan = plan_file(tmp_path, plan_of(**LAYOUT))
    words = ["--checkpoint-dir", str(tmp_path / "saved"), "--checkpoint-interval", "100000"]
    job = start("run", plan, "--steps", "100000", *words)
    processes = wait_for_workers(job, 2)
    job.send_signal(signal.SIGTERM)
    job.communicate(timeout=60)
    assert job.returncode == 143
    assert wait_until_gone(processes, 0.5) == []
    (step,) = files.complete_steps(tmp_path / "saved")
    again = start("run", plan, "--steps", str(step + 2), *words, "--resume", "--json")
    out, err = again.communicate(timeout=100)
    assert again.returncode == 0, err
    assert f"resumed from step {step}" in err
    assert len(json.loads(out)["losses"]) == 2
    assert json.loads(out)["run"]["resumed_from_steps"] == [step]


# ---- without a job


def test_a_measurement_holds_each_step_once_and_drops_the_warm_up_of_every_attempt() -> None:
    def step(number: int, loss: float) -> dict[str, Any]:
        return event(
            "step", 0.0, step=number, loss=loss, seconds=loss, cpu_seconds=0.1, phases_seconds={"optimizer": 1.0}
        )

    events = [event("begin", 0.0), *(step(number, 10.0 + number) for number in range(4))]
    events += [event("begin", 0.0, 1), *(step(number, 20.0 + number) for number in range(2, 6))]
    report = {"losses": [], "phases_seconds": {"optimizer": []}, "foreign_cpu_share": 0.1}
    joined, steady = all_attempts(report, events, warmup_steps=1)
    assert joined["losses"] == [10.0, 11.0, 22.0, 23.0, 24.0, 25.0]
    assert [joined["step_seconds"][place] for place in steady] == [11.0, 23.0, 24.0, 25.0]
    assert joined["foreign_cpu_share"] == 0.1


def event(kind: str, time: float, attempt: int = 0, **details: Any) -> dict[str, Any]:
    return {"event": kind, "time": time, "attempt": attempt} | details


def test_every_second_is_booked_once() -> None:
    events = [
        event("failure", 3.0, rank=0, cause="exception", last_beat=2.0),  # before any training: no part of the run
        event("begin", 10.0, step=0, load_seconds=0.0),
        event("step", 11.0, step=0),
        event("step", 12.0, step=1),
        event("save", 12.5, step=2),
        event("step", 13.5, step=2),  # lost
        event("failure", 16.0, rank=1, cause="hang", last_beat=14.0),
        event("begin", 26.0, 1, step=2, load_seconds=2.0),
        event("step", 27.0, 1, step=2),
        event("step", 30.0, 1, step=3),  # three times the median
        event("rollback", 31.0, 1, step=4, cause="nan loss", seconds=0.25),
        event("step", 32.0, 1, step=4),
        event("saved", 32.25, 1, step=5, error=None, bytes=100),
        event("end", 32.5, 1, step=5),
    ]
    outcome = outcome_of(events, tokens_per_step=8, seed=3)
    assert outcome.wall_seconds == 22.5
    assert outcome.lost_seconds == pytest.approx(
        {
            "rework": 1.0 + 0.5 + 0.75,
            "checkpoint": 0.5 + 0.5,
            "detection": 2.0,
            "restart": 8.0,
            "load": 2.0 + 0.25,
            "degraded": 1.5,
        }
    )
    assert outcome.useful_seconds == pytest.approx(5.5)
    assert outcome.useful_seconds + sum(outcome.lost_seconds.values()) == pytest.approx(outcome.wall_seconds)
    assert outcome.tokens == 5 * 8
    assert outcome.failures == {"exception": 1, "hang": 1, "nan loss": 1}
    assert outcome.goodput == pytest.approx(5.5 / 22.5)
    assert [(span.doing, span.end_seconds) for span in outcome.spans][:3] == [
        ("training", 2.0),
        ("checkpoint", 2.5),
        ("rework", 4.0),
    ]


def test_only_a_rank_that_is_slow_in_every_step_is_a_straggler() -> None:
    judge = Stragglers(3)
    found = []
    for step in range(2 * WINDOW):
        own = [0.1, 0.1 if step % 3 else 0.9, 0.2]  # rank 1 stumbles now and then, rank 2 is always slow
        found += judge.judge(own, [1e-3] * 3, 0.3)
    assert [(one.rank, one.ratio) for one in found] == [(2, pytest.approx(2.0))]
    throttled = Stragglers(2)
    found = [one for _ in range(WINDOW) for one in throttled.judge([0.0, 0.0], [3e-4, 1e-3], 0.3)]
    assert [(one.rank, one.what) for one in found] == [(1, "a matrix product of fixed size")]


def test_the_supervisor_kills_the_stopped_process_and_no_other(tmp_path: Path) -> None:
    code = "import sys, time; time.sleep(60)"
    ranks = [subprocess.Popen([sys.executable, "-c", code, str(tmp_path)]) for _ in range(2)]
    told: list[str] = []
    watch = Watch(tmp_path, heartbeat_timeout_seconds=0.5, progress_timeout_seconds=60, tell=told.append)
    try:
        (tmp_path / "rank0.0.pid").touch()
        ranks[1].send_signal(signal.SIGSTOP)
        deadline = time.monotonic() + 20
        begun = time.time()
        while ranks[1].poll() is None and time.monotonic() < deadline:
            for rank, process in enumerate(ranks):
                now = time.time() if rank == 0 else begun
                beat = Beat(rank, 0, process.pid, "here", now, 6, 9)
                beat_file(tmp_path, rank, 0).write_text(
                    json.dumps({name: getattr(beat, name) for name in Beat.__slots__})
                )
            time.sleep(0.05)
            watch.look()
        assert ranks[1].returncode == -signal.SIGKILL
        assert ranks[0].poll() is None
        assert told[0].startswith("rank 1 on here shows no sign of life")
    finally:
        for process in ranks:
            process.kill()
            process.wait()


@pytest.mark.parametrize(
    ("node", "first_attempt", "noticed"), [("here", 0, True), ("there", 0, False), ("here", 1, False)]
)
def test_the_supervisor_of_a_node_judges_its_own_ranks_of_this_start_only(
    tmp_path: Path, node: str, first_attempt: int, noticed: bool
) -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    (tmp_path / "rank0.0.pid").touch()
    beat = Beat(0, 0, gone.pid, "here", time.time(), 6, 9)
    beat_file(tmp_path, 0, 0).write_text(json.dumps({name: getattr(beat, name) for name in Beat.__slots__}))
    told: list[str] = []
    watch = Watch(
        tmp_path,
        heartbeat_timeout_seconds=5,
        progress_timeout_seconds=60,
        tell=told.append,
        node=node,
        first_attempt=first_attempt,
    )
    watch.look()
    assert told == (["rank 0 on here died without a word (in step 7)"] if noticed else [])
    assert (tmp_path / "watch-here.journal").exists() == noticed
