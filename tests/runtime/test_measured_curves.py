"""``headway calibrate --from``: curves of collectives from logs of nccl-tests."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from planner.cli import headway

LOGS = Path(__file__).resolve().parents[3] / "shared" / "data" / "practitioner-files" / "nccl_tests"
REDUCE = LOGS / "16_allreduce_a100_1node_edited_underscores.txt"
GATHER = LOGS / "19_allgather_a100_1node_old_no_redop.txt"
FAILED = LOGS / "28_allreduce_2x5090_cuda_error_no_rows.txt"
pytestmark = pytest.mark.skipif(not LOGS.is_dir(), reason="needs the practitioners' logs beside the repository")


def run(*arguments):
    return CliRunner().invoke(headway, [str(one) for one in arguments])


def test_predictions_follow_the_logs(tmp_path):
    out = tmp_path / "measured.yaml"
    made = run("calibrate", "--from", REDUCE, GATHER, "--cluster", "dgx-a100-superpod", "-o", out)
    assert made.exit_code == 0, made.output
    for kind, size, seconds in (("all_reduce", "16 MiB", 276.6e-6), ("all_gather", "32 MiB", 265.8e-6)):
        found = run("collective", kind, "--cluster", out, "--gpus", 8, "--bytes", size, "--json")
        assert json.loads(found.stdout)["seconds"] == pytest.approx(seconds, rel=0.05)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--from", REDUCE], "--cluster"),
        (
            ["--from", FAILED, "--cluster", "dgx-a100-superpod"],
            "run failed",
        ),
        (["--cluster", "dgx-a100-superpod"], "--cluster goes with --from"),
        (["--from", REDUCE, "--runs", REDUCE, "--plan", "x"], "give one"),
        ([REDUCE], "--from or --runs"),
    ],
)
def test_what_is_missing_is_told(arguments, said):
    found = run("calibrate", *arguments)
    assert found.exit_code == 2
    assert said in found.stderr
