"""Logs of nccl-tests as one measured cluster."""

from pathlib import Path

import pytest

from topologies.cluster import Cluster
from topologies.document import LoadContext, check
from topologies.errors import InputError
from topologies.importers import Choices
from topologies.importers.curves import measured_by_logs

LOGS = Path(__file__).resolve().parents[4] / "shared" / "data" / "practitioner-files" / "nccl_tests"
A100 = {
    "all_reduce": "16_allreduce_a100_1node_edited_underscores.txt",
    "all_to_all": "17_alltoall_a100_1node_old_error_col.txt",
    "all_gather": "19_allgather_a100_1node_old_no_redop.txt",
}
pytestmark = pytest.mark.skipif(not LOGS.is_dir(), reason="needs the practitioners' logs beside the repository")


def test_each_log_adds_its_curve():
    raw, read = measured_by_logs([LOGS / name for name in A100.values()], Choices(cluster="dgx-a100-superpod"))
    cluster = check(raw, Cluster, LoadContext(Path("measured.yaml")))
    assert [one.format for one in read] == ["nccl-tests"] * 3
    assert {(point.kind, point.ranks) for point in cluster.measured.collectives} == {(kind, 8) for kind in A100}
    counts = [sum(point.kind == kind for point in cluster.measured.collectives) for kind in A100]
    assert counts == [len(one.content.points) for one in read]


@pytest.mark.parametrize(
    ("names", "match"),
    [
        (["28_allreduce_2x5090_cuda_error_no_rows.txt"], "the run failed"),
        (["27_allreduce_2x3090_validation_failed_float_wrong.txt"], "results are wrong"),
        ([A100["all_reduce"], A100["all_reduce"]], "as .* does"),
        (["../fabric/08_ibnetdiscover_small.txt"], "only logs of nccl-tests"),
        (["20_reduce_a100_1node_old_root_col.txt"], "no collective that headway models"),
    ],
)
def test_what_measures_nothing_is_refused(names, match):
    with pytest.raises(InputError, match=match):
        measured_by_logs([LOGS / name for name in names], Choices(cluster="dgx-a100-superpod"))


def test_a_cluster_must_be_named():
    with pytest.raises(InputError, match="determines no cluster"):
        measured_by_logs([LOGS / A100["all_reduce"]], Choices())
