"""Emitted sbatch files on a real Slurm of four virtual nodes: gang start, saving, loss of a node, requeue, resume."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from emit_plans import HOSTILE, tiny_plan
from slurm_cluster import SlurmCluster, wait_until

from runtime.emit.emitting import Wishes, emit_plan, write_files
from runtime.emit.submitting import run_on_slurm
from topologies.document import to_json
from topologies.errors import InputError, RunFailed

pytestmark = [pytest.mark.slurm, pytest.mark.xdist_group("slurm")]

STEPS, INTERVAL = 120, 10
ENDED = ("COMPLETED", "FAILED", "TIMEOUT", "CANCELLED", "NODE_FAIL", "OUT_OF_MEMORY")


def emitted(folder: Path, **wishes: object) -> Path:
    """Write a job of two nodes whose scenario has a hostile name; return its sbatch file."""
    _, files = emit_plan(tiny_plan(name=HOSTILE, interval_steps=INTERVAL), "slurm", folder, Wishes(**wishes))  # type: ignore[arg-type]
    write_files(files, folder)
    return folder / "job.sbatch"


def printed(slurm: SlurmCluster, job: str) -> str:
    return "".join(file.read_text() for file in slurm.folder.glob(f"*-{job}.log"))


def until_ended(slurm: SlurmCluster, job: str, seconds: float) -> str:
    wait_until(lambda: slurm.state(job) in ENDED, seconds, "the end of the job", lambda: printed(slurm, job))
    return slurm.state(job)


def until_restarted(slurm: SlurmCluster, job: str, seconds: float) -> None:
    """Wait until the job runs again, but not the two minutes for which Slurm holds it back.

    A node refuses the second start where it comes in the second in which the first one's credential was revoked.
    """
    held_since: list[float] = []

    def runs_again() -> bool:
        told = slurm.job(job)
        if told["Restarts"] == "1" and told["JobState"] == "PENDING" and told["Reason"] == "BeginTime":
            held_since.append(time.monotonic())
            if time.monotonic() > held_since[0] + 2:
                slurm.call("scontrol", "update", f"jobid={job}", "starttime=now")
        return "headway: start 1" in printed(slurm, job)

    wait_until(runs_again, seconds, "the restart", lambda: (slurm.job(job), slurm.nodes(), printed(slurm, job)))


def stand_in(folder: Path, script: str) -> str:
    """A torchrun that only does what the test needs; return its folder."""
    folder.mkdir()
    (folder / "torchrun").write_text(f"#!/bin/bash\n{script}\n")
    (folder / "torchrun").chmod(0o755)
    return str(folder)


def test_every_node_gets_its_words_as_they_are(slurm: SlurmCluster, tmp_path: Path) -> None:
    fake = stand_in(tmp_path / "bin", 'printf "node %s:" "$SLURM_NODEID"; printf " <%s>" "$@"; echo')
    folder = tmp_path / 'a "b" $HOME'
    job = slurm.submit(emitted(folder, bin_directory=fake, variables=("LETTERS=a b'c;$(id)",)))
    assert until_ended(slurm, job, 20) == "COMPLETED"
    for node in range(2):
        (line,) = re.findall(f"node {node}: (.*)", printed(slurm, job))
        assert f"<--nnodes=2> <--node-rank={node}> <--nproc-per-node=1> <--master-addr=127.0.0.1>" in line
        assert line.endswith(f"<--no-python> <headway-worker> <{folder}>")
    ports = re.findall(r"--master-port=(\d+)", printed(slurm, job))
    assert len(set(ports)) == 1
    assert 20000 <= int(ports[0]) < 32000
    assert slurm.job(job)["JobName"] == "it-s-touch-tmp-owned-id-x-rm-rf-SBATCH-uid-0-7-7"
    assert not Path("/tmp/owned").exists()


def test_ranks_follow_the_plans_nodes_and_broken_ones_are_left_out(slurm: SlurmCluster, tmp_path: Path) -> None:
    """Without n1 and n3 the job gets n2 and n4; the plan has rank 0 on n4."""
    fake = stand_in(tmp_path / "bin", 'printf "on %s: " "$SLURMD_NODENAME"; printf " <%s>" "$@"; echo')
    plan = tiny_plan(2)
    named = plan.scenario.cluster.model_copy(update={"node_names": "n[1-4]"})
    plan = replace(
        plan,
        scenario=plan.scenario.model_copy(update={"cluster": named}),
        placement={"nodes": 2, "node_numbers": [3, 1], "excluded_nodes": [0, 2]},
    )
    _, files = emit_plan(plan, "slurm", tmp_path / "job", Wishes(bin_directory=fake))
    write_files(files, tmp_path / "job")
    job = slurm.submit(tmp_path / "job" / "job.sbatch")
    assert until_ended(slurm, job, 20) == "COMPLETED"
    ranks = dict(re.findall(r"on (n\d): .*<--node-rank=(\d)>", printed(slurm, job)))
    assert ranks == {"n4": "0", "n2": "1"}


def test_gang_starts_whole_or_not_at_all(slurm: SlurmCluster, tmp_path: Path) -> None:
    fake = stand_in(tmp_path / "bin", "sleep 2")
    first = [slurm.submit(emitted(tmp_path / f"job{i}", bin_directory=fake)) for i in range(3)]
    wait_until(lambda: [slurm.state(job) for job in first].count("RUNNING") == 2, 10, "two of three jobs")
    assert [slurm.state(job) for job in first].count("PENDING") == 1
    assert list(slurm.nodes().values()).count("alloc") == 4
    assert [until_ended(slurm, job, 30) for job in first] == ["COMPLETED"] * 3


def test_failing_program_is_restarted_a_bounded_number_of_times(slurm: SlurmCluster, tmp_path: Path) -> None:
    fake = stand_in(tmp_path / "bin", "exit 3")
    job = slurm.submit(emitted(tmp_path / "job", bin_directory=fake, restarts=1))
    until_restarted(slurm, job, 20)
    assert until_ended(slurm, job, 20) == "FAILED"
    assert slurm.job(job)["Restarts"] == "1"
    # 3, or 143 where one node's end reaches the other node's program first
    assert len(re.findall(r"step ended with (?:3|143)\n", printed(slurm, job))) == 2


def test_before_its_time_is_up_the_ranks_are_asked_to_save_and_the_job_goes_on_later(
    slurm: SlurmCluster, tmp_path: Path
) -> None:
    script = '(( ${SLURM_RESTART_COUNT:-0} )) && exit 0\ntrap "echo saved; exit 143" TERM\nwhile :; do sleep 0.1; done'
    job = slurm.submit(emitted(tmp_path / "job", bin_directory=stand_in(tmp_path / "bin", script)))
    wait_until(lambda: "headway: start 0" in printed(slurm, job), 20, "the start")
    wait_until(lambda: f"{job}.0" in slurm.call("squeue", "--noheader", "--steps", "-o", "%i"), 10, "the step")
    slurm.call("scancel", "--batch", "--signal=USR1", job)
    until_restarted(slurm, job, 20)
    assert "saved" in printed(slurm, job)
    assert until_ended(slurm, job, 20) == "COMPLETED"


@pytest.fixture
def submitting(slurm: SlurmCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_CONF", slurm.environment["SLURM_CONF"])


def test_run_follows_the_job_and_measures_it(submitting: None, tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    report.write_text(
        to_json(
            {
                "losses": [3.0, 2.0, 1.0],
                "step_seconds": [0.5, 0.1, 0.1],
                "phases_seconds": {"optimizer": [0.1, 0.1, 0.1]},
                "cpu_seconds": [0.1, 0.1, 0.1],
                "communication_seconds": None,
                "foreign_cpu_share": 0.0,
                "peak_memory_bytes": [1e6, 1e6],
                "baseline_memory_bytes": [1e5, 1e5],
                "stopped_at": None,
            }
        )
    )
    fake = stand_in(tmp_path / "bin", f'echo "headway: step 1/3"; cp {report} "${{@: -1}}/result.json"')
    told: list[str] = []
    measured = run_on_slurm(
        tiny_plan(), tmp_path / "job", Wishes(steps=3, bin_directory=fake), timeout_seconds=30, on_progress=told.append
    )
    assert measured.losses == [3.0, 2.0, 1.0]
    assert "step 1/3" in told


def test_run_tells_how_the_job_failed(submitting: None, tmp_path: Path) -> None:
    fake = stand_in(tmp_path / "bin", "echo no such luck; exit 3")
    with pytest.raises(RunFailed, match="no such luck"):
        run_on_slurm(tiny_plan(), tmp_path / "job", Wishes(steps=3, bin_directory=fake, restarts=0), timeout_seconds=30)


def test_run_cancels_a_job_that_takes_too_long(slurm: SlurmCluster, submitting: None, tmp_path: Path) -> None:
    fake = stand_in(tmp_path / "bin", "sleep 100")
    told: list[str] = []
    with pytest.raises(RunFailed, match="CANCELLED"):
        run_on_slurm(
            tiny_plan(),
            tmp_path / "job",
            Wishes(steps=3, bin_directory=fake),
            timeout_seconds=2,
            on_progress=told.append,
        )
    (job,) = re.findall(r"submitted job (\d+)", "\n".join(told))
    wait_until(lambda: slurm.state(job) == "CANCELLED", 20, "the job's end")


def test_what_sbatch_refuses_is_told(submitting: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SBATCH_PARTITION", "elsewhere")
    with pytest.raises(InputError, match="invalid partition"):
        run_on_slurm(tiny_plan(), tmp_path / "job", Wishes(steps=3), timeout_seconds=30)


def test_death_of_a_node_costs_the_steps_since_the_last_checkpoint(slurm: SlurmCluster, tmp_path: Path) -> None:
    folders = {"steady": tmp_path / "it's a $job", "struck": tmp_path / "struck"}
    steady = slurm.submit(emitted(folders["steady"], steps=STEPS), "--nodelist=n[3-4]")
    struck = slurm.submit(emitted(folders["struck"], steps=STEPS), "--exclude=n4")
    wait_until(
        lambda: f"saved step-{2 * INTERVAL}" in printed(slurm, struck),
        150,
        "two checkpoints",
        lambda: printed(slurm, struck),
    )
    assert nodes_of(slurm, struck) == ["n1", "n2"]
    assert slurm.kill_node("n2") >= 4  # slurmd, slurmstepd, torchrun, the worker

    assert until_ended(slurm, steady, 150) == "COMPLETED", printed(slurm, steady)
    losses = losses_of(folders["steady"])
    assert len(losses) == STEPS
    assert losses[-1] < losses[0] - 0.2

    until_restarted(slurm, struck, 90)
    assert slurm.nodes()["n2"] == "down*"  # nothing is started on it until it answers again
    assert until_ended(slurm, struck, 150) == "COMPLETED", printed(slurm, struck)
    assert nodes_of(slurm, struck) == ["n1", "n3"]  # the spare took the place of the dead one
    assert slurm.job(struck)["Restarts"] == "1"
    (resumed,) = map(int, re.findall(r"resumed from step (\d+)", printed(slurm, struck)))
    assert resumed >= 2 * INTERVAL
    again = losses_of(folders["struck"])
    assert len(again) in (STEPS, STEPS - resumed)
    assert again == losses[-len(again) :]

    slurm.start_node("n2")
    wait_until(lambda: slurm.nodes()["n2"] == "idle", 20, "the node to come back")


def test_a_rank_that_hangs_is_named_and_the_job_goes_on(slurm: SlurmCluster, tmp_path: Path) -> None:
    folder = tmp_path / "hung"
    job = slurm.submit(emitted(folder, steps=4 * INTERVAL, bin_directory=str(Path(sys.executable).parent)))
    wait_until(
        lambda: f"saved step-{INTERVAL}" in printed(slurm, job), 100, "a checkpoint", lambda: printed(slurm, job)
    )
    os.kill(int((folder / "rank1.0.pid").read_text()), signal.SIGSTOP)
    hung = nodes_of(slurm, job)[1]
    until_restarted(slurm, job, 60)
    assert f"headway: rank 1 on {hung} shows no sign of life" in printed(slurm, job)
    assert until_ended(slurm, job, 100) == "COMPLETED", printed(slurm, job)
    assert re.search(r"resumed from step \d+", printed(slurm, job))
    told = [json.loads(line) for line in (folder / f"watch-{hung}.journal").read_text().splitlines()]
    assert [(event["event"], event["cause"], event["rank"], event["attempt"]) for event in told] == [
        ("failure", "hang", 1, 0)
    ]
    assert len(losses_of(folder)) <= 4 * INTERVAL


def nodes_of(slurm: SlurmCluster, job: str) -> list[str]:
    return slurm.call("scontrol", "show", "hostnames", slurm.job(job)["NodeList"]).split()


def losses_of(folder: Path) -> list[float]:
    losses: list[float] = json.loads((folder / "result.json").read_text())["losses"]
    return losses
