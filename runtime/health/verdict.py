"""Who is below what is expected: a calibrated cluster where there is one, else the median of the others."""

from __future__ import annotations

import statistics
from dataclasses import asdict, dataclass
from typing import Any

from simulator.links import measured_seconds
from topologies.cluster import Cluster, CollectiveKind


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """Something that is too slow."""

    host: str
    rank: int
    what: str
    share: float
    """Of what is expected."""
    expected_by: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Of a health check."""

    ranks: list[dict[str, Any]]
    """Of each rank: host, rates, and their shares of what is expected (None: nothing to compare with)."""
    pairs: list[dict[str, Any]]
    group: dict[str, Any]
    findings: tuple[Finding, ...]
    threshold: float

    @property
    def excluded(self) -> list[str]:
        """Hosts that a job should leave out."""
        return sorted({finding.host for finding in self.findings if finding.rank >= 0})

    def as_json(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "healthy": not self.findings,
            "excluded": self.excluded,
            "threshold": self.threshold,
            "findings": [asdict(finding) for finding in self.findings],
            "ranks": self.ranks,
            "pairs": self.pairs,
            "group": self.group,
        }


def judge(result: dict[str, Any], cluster: Cluster | None, threshold: float) -> Verdict:
    """Hold what the ranks measured against what is expected of them.

    A rank is named for its pairs where even its best one is slow; a pair that is slow between two ranks with good
    ones is named as a link. The group counts only against a calibrated cluster.
    """
    ranks = [dict(one) for one in result["ranks"]]
    findings: list[Finding] = []
    by_pairs: dict[int, float] = {}
    for pair in result["pairs"]:
        for end in (pair["a"], pair["b"]):
            by_pairs[end] = max(by_pairs.get(end, 0.0), pair["bytes_per_second"])
    for one in ranks:
        one["pair_bytes_per_second"] = by_pairs.get(one["rank"])
    for what, key in (
        ("matrix product", "gemm_flop_per_second"),
        ("memory bandwidth", "memory_bytes_per_second"),
        ("best pair", "pair_bytes_per_second"),
    ):
        for one in ranks:
            expected, source = expectation(key, one, ranks, result, cluster)
            share = one[key] / expected if expected and one[key] is not None else None
            one[key.replace("_per_second", "_share")] = share
            if share is not None and share < threshold:
                findings.append(Finding(host=one["host"], rank=one["rank"], what=what, share=share, expected_by=source))
    named = {finding.rank for finding in findings}
    findings += _links(result["pairs"], ranks, named, threshold)
    group = dict(result["group"])
    findings += _group(group, cluster, threshold)
    return Verdict(ranks=ranks, pairs=result["pairs"], group=group, findings=tuple(findings), threshold=threshold)


def expectation(
    key: str, one: dict[str, Any], ranks: list[dict[str, Any]], result: dict[str, Any], cluster: Cluster | None
) -> tuple[float | None, str]:
    """What a rank should reach, and who says so; None where nobody does."""
    if cluster is not None and cluster.measured is not None:
        calibrated = "the calibrated cluster"
        if key == "gemm_flop_per_second":
            return cluster.gpu.peak(result["precision"]), calibrated
        if key == "pair_bytes_per_second":
            seconds = _seconds(cluster, "send_recv", 2, result["pair_bytes"])
            if seconds is not None:
                return result["pair_bytes"] / seconds, calibrated
    others = [other[key] for other in ranks if other is not one and other[key] is not None]
    if len(others) < 1 or (key == "pair_bytes_per_second" and len(ranks) < 3):
        return None, ""
    return statistics.median(others), "the median of the other ranks"


def _links(
    pairs: list[dict[str, Any]], ranks: list[dict[str, Any]], named: set[int], threshold: float
) -> list[Finding]:
    if len(ranks) < 3:
        return []
    usual = statistics.median(pair["bytes_per_second"] for pair in pairs)
    hosts = {one["rank"]: one["host"] for one in ranks}
    found = []
    for pair in pairs:
        share = pair["bytes_per_second"] / usual
        if share < threshold and not named & {pair["a"], pair["b"]}:
            words = f"link between rank {pair['a']} ({hosts[pair['a']]}) and rank {pair['b']} ({hosts[pair['b']]})"
            found.append(Finding(host="", rank=-1, what=words, share=share, expected_by="the median of the pairs"))
    return found


def _group(group: dict[str, Any], cluster: Cluster | None, threshold: float) -> list[Finding]:
    if cluster is None or cluster.measured is None:
        return []
    expected = _seconds(cluster, "all_reduce", group["ranks"], group["size_bytes"])
    if expected is None:
        return []
    group["share"] = expected / group["seconds"]
    if group["share"] >= threshold:
        return []
    what = f"all-reduce of {group['ranks']} ranks"
    return [Finding(host="", rank=-1, what=what, share=group["share"], expected_by="the calibrated cluster")]


def _seconds(cluster: Cluster, kind: CollectiveKind, ranks: int, size_bytes: float) -> float | None:
    """What a calibration found for a collective; None where it did not measure this number of ranks."""
    assert cluster.measured is not None
    points = cluster.measured.collectives
    if not any(point.kind == kind and point.ranks == ranks for point in points):
        return None
    return float(measured_seconds(points, kind, float(ranks), size_bytes))
