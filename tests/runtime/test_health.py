"""The health check names who is slow: ranks, hosts, links."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from runtime.faults import VARIABLE
from runtime.health.commands import health
from runtime.health.probe import tournament
from runtime.health.verdict import Verdict, judge
from scenarios.scenario import load_scenario
from topologies.cluster import Cluster, CollectivePoint, Measured


@given(st.integers(1, 20))
def test_everyone_meets_everyone_once(size: int) -> None:
    met = []
    for matches in tournament(size):
        assert all(matches[other] == one for one, other in matches.items())
        met += [pair for pair in matches.items() if pair[0] < pair[1]]
    assert sorted(met) == list(itertools.combinations(range(size), 2))


def result(ranks: int = 4, **changes: Any) -> dict[str, Any]:
    """Four ranks on two hosts, all alike; ``gemm_2=1e9`` changes one rank, ``pair_0_3=1e8`` one pair."""
    rows = [
        {"rank": rank, "host": f"node{rank // 2}", "gemm_flop_per_second": 1e11, "memory_bytes_per_second": 1e10}
        for rank in range(ranks)
    ]
    pairs = [{"a": a, "b": b, "bytes_per_second": 1e9} for a, b in itertools.combinations(range(ranks), 2)]
    for name, value in changes.items():
        what, *which = name.split("_")
        if what == "pair":
            next(one for one in pairs if [str(one["a"]), str(one["b"])] == which)["bytes_per_second"] = value
        else:
            key = {"gemm": "gemm_flop_per_second", "memory": "memory_bytes_per_second"}[what]
            rows[int(which[0])][key] = value
    group = {"kind": "all_reduce", "ranks": ranks, "size_bytes": 8e6, "seconds": 0.01, "busbw_bytes_per_second": 1.2e9}
    return {"precision": "fp32", "ranks": rows, "pairs": pairs, "pair_bytes": 1e6, "group": group}


def words(verdict: Verdict) -> list[tuple[int, str]]:
    return [(finding.rank, finding.what) for finding in verdict.findings]


def test_alike_ranks_are_healthy() -> None:
    verdict = judge(result(), None, 0.7)
    assert verdict.findings == ()
    assert verdict.excluded == []
    assert verdict.ranks[0]["gemm_flop_share"] == 1.0


def test_slow_cores_and_memory_name_their_host() -> None:
    verdict = judge(result(gemm_2=6e10, memory_1=2e9), None, 0.7)
    assert words(verdict) == [(2, "matrix product"), (1, "memory bandwidth")]
    assert verdict.excluded == ["node0", "node1"]
    assert verdict.findings[0].share == pytest.approx(0.6)
    assert judge(result(gemm_2=6e10), None, 0.5).findings == ()


def test_a_rank_that_is_slow_with_everybody_is_told_from_a_slow_link() -> None:
    cable = judge(result(pair_0_3=1e8), None, 0.7)
    assert words(cable) == [(-1, "link between rank 0 (node0) and rank 3 (node1)")]
    assert cable.excluded == []
    port = judge(result(pair_0_3=1e8, pair_1_3=1e8, pair_2_3=1e8), None, 0.7)
    assert words(port) == [(3, "best pair")]
    assert port.excluded == ["node1"]


def calibrated() -> Cluster:
    points = tuple(
        CollectivePoint(kind=kind, ranks=ranks, size_bytes=size, time_seconds=seconds)  # type: ignore[arg-type]
        for kind, ranks, size, seconds in (
            ("send_recv", 2, 1e5, 1e-4),
            ("send_recv", 2, 1e7, 1e-2),
            ("all_reduce", 2, 1e6, 1e-3),
            ("all_reduce", 2, 1e8, 0.1),
        )
    )
    cluster = load_scenario("laptop").cluster
    return cluster.model_copy(update={"measured": Measured(date="2026-01-01", collectives=points)})


def test_a_calibrated_cluster_is_the_expectation() -> None:
    cluster = calibrated()
    peak = cluster.gpu.peak("fp32")
    assert peak is not None
    slow = judge(result(2, gemm_0=peak, gemm_1=peak / 2, pair_0_1=5e8), cluster, 0.7)
    assert words(slow) == [(1, "matrix product"), (0, "best pair"), (1, "best pair")]
    assert slow.ranks[0]["gemm_flop_share"] == 1.0
    assert slow.group["share"] == pytest.approx(0.8, rel=1e-6)  # 8 ms are expected of 8 MB, it took 10
    late = result(2, gemm_0=peak, gemm_1=peak)
    late["group"]["seconds"] = 0.02
    assert words(judge(late, cluster, 0.7)) == [(-1, "all-reduce of 2 ranks")]


@pytest.mark.jobs
def test_a_slow_rank_of_a_real_check_is_named_and_the_exit_code_is_1(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, "slow:rank=1,step=0,seconds=0.05")
    target = tmp_path / "health.json"
    found = CliRunner().invoke(health, ["--ranks", "2", "--threshold", "0.4", "-o", str(target)])
    assert found.exit_code == 1, found.output
    told = json.loads(target.read_text())
    assert (1, "matrix product") in [(one["rank"], one["what"]) for one in told["findings"]]
    assert told["excluded"] == [told["ranks"][1]["host"]]
    assert "slow: rank 1 on" in found.stdout
    assert told["group"]["ranks"] == 2
    assert len(told["pairs"]) == 1
