"""``headway simulate --step`` and ``headway collective`` on links that are slow, dead or shared."""

import json

import pytest
from click.testing import CliRunner

from planner.cli import headway

STEP = ["simulate", "llama3-70b-512-h100", "--pin", "tp=8", "--pin", "pp=4", "--pin", "dp=16", "--step"]
STEP += ["--set", "job.global_batch_size=128"]
COLLECTIVE = ["collective", "all_reduce", "--cluster", "dgx-h100-superpod", "--gpus", "512", "--bytes", "8 GiB"]


def run(*arguments):
    return CliRunner().invoke(headway, list(arguments))


def answer(*arguments):
    found = run(*arguments, "--json")
    assert found.exit_code == 0, found.output
    return json.loads(found.stdout)


def test_the_answer_has_the_stable_keys_and_adds_up():
    found = answer(*STEP)
    for key in ("step_seconds", "mfu", "breakdown_seconds", "memory_bytes", "critical_path", "links", "network"):
        assert key in found
    assert sum(found["breakdown_seconds"].values()) == pytest.approx(found["step_seconds"])
    assert sum(found["critical_path"]["seconds_by_kind"].values()) == pytest.approx(found["step_seconds"])
    closed = found["closed_form"]["step_seconds"]
    assert closed + sum(found["difference_seconds"].values()) == pytest.approx(found["step_seconds"])
    for counter in found["links"]["counters"]:
        assert counter["seconds"] * len(counter["shares"]) == pytest.approx(found["step_seconds"])


def test_disturbances_are_told_by_name():
    calm = answer(*STEP)["step_seconds"]
    slow = answer(*STEP, "--slow-gpu", "17=80 %", "--slow-link", "node3.nic2=50 %", "--dead", "leaf0.0.1-spine0.0.0")
    assert slow["step_seconds"] > calm
    assert slow["difference_seconds"]["stragglers"] > 0
    assert slow["network"]["replica_classes"] > 1
    beside = answer(*STEP, "--beside", "all_reduce:0-511:4 GiB", "--drain")
    assert beside["difference_seconds"]["contention"] > 0
    assert len(beside["network"]["others"]) == 2
    told = run(*STEP, "--slow-link", "node3.nic2=10 %")
    assert "held up by" in told.stdout
    assert "node3.nic2" in told.stdout


def test_jitter_depends_on_the_seed():
    first, again, other = (answer(*STEP, "--jitter", "3 %", "--seed", seed)["step_seconds"] for seed in ("1", "1", "2"))
    assert first == again != other


def test_a_collective_on_a_damaged_and_shared_fabric():
    whole = answer(*COLLECTIVE, "--flows")["seconds"]
    slow = answer(*COLLECTIVE, "--slow-link", "node3.nic2=50 %")
    assert slow["seconds"] > 1.5 * whole
    assert "node3.nic2" in slow["bottleneck"]
    beside = answer(*COLLECTIVE, "--beside", "all_reduce:256-767:8 GiB")
    assert beside["seconds"] == pytest.approx(whole)
    assert beside["beside_seconds"] > 1.2 * whole
    apart = answer(*COLLECTIVE, "--beside", "all_reduce:512-1023:8 GiB")
    assert apart["beside_seconds"] == pytest.approx(whole)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--dead", "leaf9.9.9"], "the last leaf is leaf0."),
        (["--dead", "leaf0.0.0"], "has no live NIC"),
        (["--dead", "gpu"], "no link and no switch"),
        (["--dead", "leaf0.0.0-core0.0.0"], "no link or switch"),
        (["--slow-link", "node3.nic2"], "is not of the form"),
        (["--slow-link", "node3.nic2=2"], "no share from 0 to 1"),
        (["--slow-link", "leaf0.0.0=50 %"], "can be dead, but not slow"),
        (["--slow-gpu", "x=1"], "no number of a GPU"),
        (["--slow-gpu", "17=0"], "above 0"),
        (["--beside", "all_reduce:5-4:1 GiB"], "KIND:FIRST-LAST:SIZE"),
        (["--beside", "gossip:0-4:1 GiB"], "no collective 'gossip'"),
        (["--beside", "all_reduce:0-4:1 apple"], "apple"),
        (["--jitter", "much"], "no share"),
        (["--runs", "3", "--drain"], "for one step"),
    ],
)
def test_bad_flags_are_one_sentence(arguments, said):
    steps = [one for one in STEP if one != "--step"] if "--runs" in arguments else STEP
    found = run(*steps, *arguments)
    assert found.exit_code == 2
    assert said in found.stderr
    assert "Traceback" not in found.output


@pytest.mark.parametrize(
    "fabric", ["{kind: none}", "{kind: rail-optimized, rails: 8, tiers: [{name: leaf, nodes: 32}]}"]
)
def test_gpus_that_no_fabric_joins_are_refused(fabric, tmp_path):
    path = tmp_path / "parts.yaml"
    path.write_text(f"name: parts\nnode: dgx-h100\nnum_nodes: 64\nfabric: {fabric}\nsource: {{'*': made up}}\n")
    asked = ["collective", "all_reduce", "--cluster", str(path), "--bytes", "1 GiB", "--gpus"]
    for flows in ([], ["--flows"]):
        found = run(*asked, "512", *flows)
        assert found.exit_code == 2
        assert "no fabric between them" in found.stderr or "joins 32" in found.stderr
    assert run(*asked, "8").exit_code == 0
