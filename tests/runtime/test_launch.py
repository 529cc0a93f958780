"""Real jobs: what a plan shows, and that nothing is left behind when one fails, is interrupted or is killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from job_processes import descendants, wait_for_workers, wait_until_gone
from plans import plan_file, plan_of
from tiny_training import plain_losses, tiny

from simulator.outcome import read_measurement

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="reads /proc"),
    pytest.mark.xdist_group("jobs"),
    pytest.mark.jobs,
]
MANY_STEPS = "100000"
Start = Callable[..., subprocess.Popen[str]]


def test_a_plan_runs_and_is_measured(tmp_path: Path, start: Start) -> None:
    plan = plan_file(tmp_path, plan_of(dp=2, optimizer_sharding="zero3", micro_batch_size=2))
    target = tmp_path / "m.json"
    job = start("run", plan, "--steps", "4", "-o", str(target), "--json")
    out, err = job.communicate(timeout=240)
    assert job.returncode == 0, err
    measured = read_measurement(target)
    assert json.loads(out) == json.loads(target.read_text())
    assert measured.world_size == 2
    assert measured.steps == 4
    assert 0 < measured.step_seconds["p10"] <= measured.step_seconds["median"] <= measured.step_seconds["p90"]
    assert measured.peak_memory_bytes > 50e6
    assert measured.environment["communication_seconds"] > 0
    # the command line trains with another learning rate than the reference: the first loss is before any update
    assert measured.losses[0] == pytest.approx(plain_losses()[0], rel=2e-6)
    assert measured.losses[-1] < measured.losses[0]
    phases = sum(measured.phases_seconds.values())
    assert phases == pytest.approx(measured.step_seconds["median"], rel=0.5)
    assert "step 4/4" in err


def test_a_failing_worker_ends_the_job_with_its_traceback(tmp_path: Path, start: Start) -> None:
    too_large = tiny().model_copy(update={"vocab_size": 10**13})  # 2.5 PB: the allocation fails at once
    plan = plan_file(tmp_path, plan_of(too_large, dp=2))
    target = tmp_path / "m.json"
    job = start("run", plan, "--steps", "2", "-o", str(target))
    out, err = job.communicate(timeout=240)
    assert job.returncode == 2
    assert out == ""
    assert "Traceback" in err
    assert "in allocate" in err
    assert "of 2 failed" in err
    assert not target.exists()
    assert list(tmp_path.iterdir()) == [Path(plan)]


@pytest.mark.parametrize(
    ("sent", "code"),
    [(signal.SIGINT, 130), pytest.param(signal.SIGTERM, 143, marks=pytest.mark.slow)],
)
def test_an_interrupted_job_leaves_nothing(tmp_path: Path, start: Start, sent: signal.Signals, code: int) -> None:
    plan = plan_file(tmp_path, plan_of(dp=2))
    job = start("run", plan, "--steps", MANY_STEPS, "-o", str(tmp_path / "m.json"))
    processes = wait_for_workers(job, 2)
    job.send_signal(sent)
    job.communicate(timeout=120)
    assert job.returncode == code
    assert wait_until_gone(processes, 0.5) == []
    assert list(tmp_path.iterdir()) == [Path(plan)]


@pytest.mark.slow
def test_workers_end_when_their_launcher_is_killed(tmp_path: Path, start: Start) -> None:
    job = start("run", plan_file(tmp_path, plan_of(dp=2)), "--steps", MANY_STEPS)
    processes = wait_for_workers(job, 2)
    job.kill()
    job.communicate(timeout=10)
    assert wait_until_gone(processes, 30) == []


@pytest.mark.slow
def test_a_killed_rank_is_named(tmp_path: Path, start: Start) -> None:
    job = start("run", plan_file(tmp_path, plan_of(dp=2)), "--steps", MANY_STEPS)
    processes = wait_for_workers(job, 2)
    workers = sorted(pid for pid, line in processes.items() if "headway-worker" in line and "torchrun" not in line)
    os.kill(workers[1], signal.SIGKILL)
    _, err = job.communicate(timeout=120)
    assert job.returncode == 2
    assert "died without a traceback" in err
    assert wait_until_gone(processes, 1) == []


def test_a_job_that_takes_too_long_is_ended(tmp_path: Path, start: Start) -> None:
    plan = plan_file(tmp_path, plan_of(pp=2, micro_batch_size=2))
    job = start("run", plan, "--steps", MANY_STEPS, "--timeout", "6 s", "-o", str(tmp_path / "m.json"))
    processes: dict[int, str] = {}
    while job.poll() is None:
        processes |= descendants(job.pid)
        time.sleep(0.2)
    assert job.returncode == 2
    assert job.stderr is not None
    assert "did not finish within 6 s" in job.stderr.read()
    assert any("torchrun" in line for line in processes.values())
    assert wait_until_gone(processes, 1) == []
    assert not (tmp_path / "m.json").exists()
