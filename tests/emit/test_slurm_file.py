"""The sbatch file and the torchrun script, read by bash and by the manual pages (tests/slurm runs them for real)."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from emit_plans import HOSTILE, large_plan, tiny_plan, with_nodes
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.emit.emitting import Wishes, emit_plan
from runtime.emit.launch import segment_nodes
from runtime.emit.shell import comment, environment, job_name, word
from runtime.emit.slurm import sbatch_option
from runtime.request import TrainRequest
from topologies.errors import InputError

Facts = Callable[[str], dict[str, Any]]


def script(target: str = "slurm", plan: Any = None, folder: str = "/shared/job", **wishes: Any) -> str:
    _, files = emit_plan(plan or tiny_plan(), target, Path(folder), Wishes(**{"steps": 20, **wishes}))
    return next(iter(files.values()))


def checked_by_bash(text: str) -> None:
    done = subprocess.run(["bash", "-n"], input=text, text=True, capture_output=True, timeout=20, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def directives(text: str) -> dict[str, str]:
    """The options that sbatch reads: the lines before the first command."""
    head = text.split("\nset -uo pipefail\n")[0]
    pairs = [line.removeprefix("#SBATCH --").partition("=") for line in head.splitlines() if line.startswith("#SBATCH")]
    return {name: value for name, _, value in pairs}


@pytest.mark.parametrize("target", ["slurm", "torchrun"])
@pytest.mark.parametrize("nodes", [1, 2])
def test_bash_reads_the_script(target: str, nodes: int) -> None:
    plan = tiny_plan(nodes, name=HOSTILE)
    checked_by_bash(script(target, plan, "/a b/it's/$(id)", variables=("A=b c'd\"$(x)",)))


def test_slurm_is_told_what_the_plan_needs() -> None:
    told = directives(
        script(plan=large_plan(tp=8, dp=4), trainer="megatron", options=("partition=batch", "time=2-00:00"))
    )
    assert told == {
        "job-name": "large",
        "nodes": "4",
        "ntasks-per-node": "1",
        "exclusive": "",
        "gpus-per-node": "8",
        "partition": "batch",
        "time": "2-00:00",
        "requeue": "",
        "signal": "B:USR1@300",
        "open-mode": "append",
        "output": "%x-%j.log",
    }


def test_every_option_is_in_the_manual_page_of_its_command(facts: Facts) -> None:
    known = {name: set(words.split()) for name, words in facts("slurm_options").items() if name != "source"}
    text = script(
        plan=large_plan(cluster="gb200-nvl72", tp=8, dp=9, job={"global_batch_size": 576}),
        trainer="megatron",
        segment=True,
    )
    assert set(directives(text)) <= known["sbatch"] | known["sbatch_newer"]
    body = text.split("\nset -uo pipefail\n")[1]
    for command in ("srun", "scancel", "scontrol"):
        for line in body.splitlines():
            words = line.split(f"{command} ", 1)
            if len(words) == 2 and not line.lstrip().startswith("#"):
                assert set(re.findall(r"--([a-z][a-z-]*)", words[1])) <= known[command], line


def test_the_plans_nodes_and_their_order_reach_slurm(facts: Facts) -> None:
    plan = with_nodes(tiny_plan(2), "n[1-4]", [3, 1], [0, 2])
    _, files = emit_plan(plan, "slurm", Path("/shared/job"), Wishes(steps=20))
    text, known = files["job.sbatch"], facts("slurm_options")
    checked_by_bash(text)
    assert files["hosts.txt"] == "n4\nn2\n"
    assert directives(text)["exclude"] == "n1,n3"
    assert "\n##SBATCH --nodelist=/shared/job/hosts.txt\n" in text
    assert "nodelist" in known["sbatch"].split()
    (started,) = [line for line in text.splitlines() if line.startswith("srun ")]
    assert set(re.findall(r"--([a-z][a-z-]*)", started)) <= set(known["srun"].split())


@pytest.mark.parametrize(("own", "told"), [("n4", "0 n4 29500"), ("n2.site.org", "1 n4 29500"), ("n1", None)])
def test_a_node_finds_its_rank_by_its_name(tmp_path: Path, own: str, told: str | None) -> None:
    """Without arguments, on a node of any name; torchrun and hostname are stand-ins that tell and are told."""
    plan = with_nodes(tiny_plan(2), "n[1-4]", [3, 1], [0, 2])
    _, files = emit_plan(plan, "torchrun", tmp_path, Wishes(steps=20, bin_directory=str(tmp_path / "bin")))
    assert files["hosts.txt"] == "n4\nn2\n"
    for name, content in files.items():
        (tmp_path / name).write_text(content)
    (tmp_path / "bin").mkdir()
    reads = 'for one; do case $one in --node-rank=*|--master-*) printf "%s " "${one#*=}";; esac; done'
    for name, line in {"torchrun": reads, "hostname": f"echo {own}"}.items():
        (tmp_path / "bin" / name).write_text(f"#!/bin/bash\n{line}\n")
        (tmp_path / "bin" / name).chmod(0o755)
    environment = {"PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}"}
    done = subprocess.run(
        ["bash", "job.sh"], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60, check=False
    )
    if told is None:
        assert done.returncode == 2
        assert "n1 is not one of the plan's nodes" in done.stderr
    else:
        assert done.stdout.strip() == told, done.stderr


def test_without_names_the_numbers_are_told_where_they_matter() -> None:
    plan = with_nodes(tiny_plan(2), "", [0, 1], [])
    assert "the plan takes" not in script(plan=plan)
    assert "the plan takes nodes 1, 3; left out: 0" in script(plan=with_nodes(tiny_plan(2), "", [3, 1], [0]))


def test_torchrun_knows_the_options() -> None:
    from torch.distributed.run import get_args_parser

    known = {option for action in get_args_parser()._actions for option in action.option_strings}
    for text in (script(), script("torchrun"), script("torchrun", tiny_plan(1))):
        commands = [
            line for line in text.splitlines() if "torchrun" in line or "rendezvous=" in line or "--master" in line
        ]
        used = set(re.findall(r"(--[a-z][a-z-]*)", "\n".join(line for line in commands if "srun" not in line)))
        assert used <= known
        assert "--nproc-per-node" in text


def test_segment_is_the_group_that_the_plan_keeps_inside_a_rack() -> None:
    plan = large_plan(cluster="gb200-nvl72", tp=8, dp=9, job={"global_batch_size": 576})
    nodes = plan.scenario.cluster.node.gpus_per_node
    assert segment_nodes(plan) == 72 // nodes  # dp spans all 72 GPUs of a rack
    used, left = (
        script(plan=plan, trainer="megatron", segment=True),
        script(plan=plan, trainer="megatron", segment=False),
    )
    assert directives(used)["segment"] == str(72 // nodes)
    assert "segment" not in directives(left)
    assert f"\n##SBATCH --segment={72 // nodes}\n" in left
    assert segment_nodes(large_plan(tp=8, dp=4)) is None  # a node of eight holds the group


@pytest.mark.parametrize("target", ["slurm", "torchrun"])
def test_hostile_names_stay_words(tmp_path: Path, target: str) -> None:
    text = script(
        target, tiny_plan(1, name=HOSTILE), str(tmp_path / "a 'b' $(touch owned)"), variables=("X=$(touch owned)",)
    )
    (line,) = [line for line in text.splitlines() if line.startswith("directory=")]
    assert shlex.split(line) == [f"directory={tmp_path}/a 'b' $(touch owned)"]
    assert "--uid" not in " ".join(directives(text))
    assert "49" not in text.splitlines()[1]  # a template's braces in a name are not evaluated either
    assert [line for line in text.splitlines() if "touch /tmp/owned" in line and not line.startswith("# ")] == []


@settings(deadline=None)
@given(st.text())
def test_any_text_is_a_name_a_comment_and_a_word(text: str) -> None:
    assert re.fullmatch(r"[A-Za-z0-9._-]{1,60}", job_name(text))
    assert len(comment(text).splitlines()) <= 1
    try:
        quoted = word(text)
    except InputError:
        assert any(ord(letter) < 32 or ord(letter) == 127 for letter in text)
    else:
        assert shlex.split(quoted) == [text]


@pytest.mark.parametrize("name", ["HF_TOKEN", "WANDB_API_KEY", "aws_secret_access_key", "DB_PASSWORD"])
def test_secrets_are_refused(name: str) -> None:
    with pytest.raises(InputError, match="secret"):
        environment([f"{name}=x"])


@pytest.mark.parametrize(
    "option", ["partition=a b", "partition=$(id)", "Wrap=x", "wrap=id", "nodes=3", "comment='x'", "x\n#"]
)
def test_options_that_are_no_options_are_refused(option: str) -> None:
    with pytest.raises(InputError):
        sbatch_option(option)


def test_workers_read_the_plan_and_its_checkpoint_interval() -> None:
    plan = tiny_plan(2, interval_steps=7)
    _, files = emit_plan(plan, "slurm", Path("/shared/job"), Wishes(steps=33, seed=5))
    request = TrainRequest.model_validate(json.loads(files["request.json"]))
    assert (request.layout, request.steps, request.seed, request.device) == (plan.layout, 33, 5, "cpu")
    assert request.checkpoint is not None
    assert (request.checkpoint.directory, request.checkpoint.interval_steps) == ("checkpoints", 7)


def test_restarts_are_bounded_by_slurms_own_count() -> None:
    text = script(restarts=2)
    assert "most_restarts=2\n" in text
    assert "restart=${SLURM_RESTART_COUNT:-0}" in text


def test_relative_folder_is_refused() -> None:
    with pytest.raises(InputError, match="absolute"):
        script(directory="job")
