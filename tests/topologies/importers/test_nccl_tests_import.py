import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from topologies.errors import InputError
from topologies.importers.nccl_curve import NcclRun, explain_wire, import_nccl_tests

Practitioner = Callable[[str], tuple[str, Path]]
MIB, GIB = 2**20, 2**30

HEADER = """\
#                                                              out-of-place                       in-place
#       size         count      type   redop    root     time   algbw   busbw #wrong     time   algbw   busbw #wrong
#        (B)    (elements)                               (us)  (GB/s)  (GB/s)            (us)  (GB/s)  (GB/s)
"""
SUMMARY = "# Out of bounds values : 0 OK\n# Avg bus bandwidth    : {average}\n"


def row(size: int, micro: float, factor: float, redop: str = "sum", count: int | None = None, wrong: str = "0") -> str:
    algbw = size / micro / 1000
    half = f"{micro:9.2f} {algbw:7.2f} {algbw * factor:7.2f} {wrong:>6}"
    return f"{size:12d} {count or size // 4:13d} {'float':>9} {redop:>7} {-1:7d} {half} {half}\n"


def table(factor: float, times: dict[int, float], **words: Any) -> str:
    rows = "".join(row(size, micro, factor, **words) for size, micro in times.items())
    return HEADER + rows + SUMMARY.format(average=1.0)


def said(run: NcclRun, *words: str) -> bool:
    return any(all(word in warning for word in words) for warning in run.warnings)


@given(st.integers(2, 96))
def test_bandwidths_tell_the_number_of_ranks(ranks: int) -> None:
    for name, factor in (("all_reduce", 2 * (ranks - 1) / ranks), ("all_gather", (ranks - 1) / ranks)):
        text = f"# Collective test starting: {name}_perf\n" + table(factor, {4 * GIB: 9000.0, 8 * GIB: 17000.0})
        run = import_nccl_tests(text)
        assert run.ranks_low is not None
        assert run.ranks_high is not None
        assert run.ranks_low <= ranks <= run.ranks_high
        assert run.ranks is None or run.ranks == ranks


def test_text_says_64_and_numbers_say_96() -> None:
    text = "8 nodes, 64 GPUs\n" + table(2 * 95 / 96, {4 * GIB: 22181.0, 8 * GIB: 43980.0})
    run = import_nccl_tests(text)
    assert run.ranks == 96
    assert said(run, "the text says 64 ranks, the numbers say 96")
    assert said(import_nccl_tests(text.replace("8 nodes, 64 GPUs", ""), claimed_ranks=64), "wrong rank count")


def test_8_gpus_per_node_is_no_claim() -> None:
    text = "H100, 8 GPUs per node, -n 20\n" + table(2 * 15 / 16, {8 * GIB: 17000.0})
    assert import_nccl_tests(text).log.claimed_ranks == ()


def test_rank_lines_that_disagree() -> None:
    lines = "".join(
        f"#  Rank {rank:2d} Group  0 Pid  10{rank} on h1 device {rank} [0x0f] NVIDIA H100\n" for rank in range(4)
    )
    run = import_nccl_tests(lines + table(2 * 7 / 8, {8 * GIB: 17000.0}))
    assert run.ranks == 8
    assert said(run, "the rank lines count 4, busbw / algbw says 8")


def test_elements_tell_the_ranks_of_an_all_gather_with_little_bandwidth() -> None:
    run = import_nccl_tests(HEADER + row(1024, 54.0, 15 / 16, "none", 16), collective="all_gather")
    assert (run.ranks, run.ranks_low) == (16, None)


def test_latency_outliers_points_and_average() -> None:
    times = {8: 13.0, 16: 13.1, 32: 68.0, 64: 14.0, 1024: 16.0, MIB: 28.0, GIB: 4253.0, 2 * GIB: 8460.0}
    run = import_nccl_tests(table(1.75, times))
    assert run.latency_seconds == pytest.approx(14.0e-6)
    assert [one.size_bytes for one in run.outliers] == [32]
    assert [point.size_bytes for point in run.points] == [8, 16, 64, 1024, MIB, GIB, 2 * GIB]
    assert run.points[-1].time_seconds == pytest.approx(8460e-6)
    assert {(point.kind, point.ranks) for point in run.points} == {("all_reduce", 8)}
    assert said(run, "outlier: 68.00 us at 32 B")
    assert said(run, "no link speed")
    assert not said(run, "not saturated")


def test_a_row_cut_short_is_left_out_and_told() -> None:
    text = HEADER + row(MIB, 28.0, 1.75) + row(GIB, 4253.0, 1.75)
    run = import_nccl_tests(text[:-80])
    assert len(run.rows) == 1 or run.rows[-1].in_place_busbw is None
    cut = import_nccl_tests(text[: text.rindex("float") + 5])
    assert [one.size_bytes for one in cut.rows] == [MIB]
    assert said(cut, "1 rows are cut short")
    assert said(cut, "no summary at the end")


def test_an_edited_time_is_told() -> None:
    text = HEADER + row(GIB, 4253.0, 1.75).replace("4253.00", "9999.00")
    assert said(import_nccl_tests(text), "algbw is not size / time on line 4")


def test_a_second_table_is_not_mixed_in() -> None:
    run = import_nccl_tests(table(1.75, {GIB: 4253.0}) + table(0.875, {GIB: 9000.0}))
    assert len(run.rows) == 1
    assert said(run, "another table follows")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (table(1.75, {GIB: 4253.0}, wrong="5"), r"^t:4: the results are wrong at 1,073,741,824 bytes"),
        (table(1.75, {GIB: 4253.0}, wrong="1.67772e+07"), "the results are wrong"),
        (table(1.75, {GIB: 4253.0}).replace("0 OK", "16 FAILED"), "16 values were wrong"),
        (table(1.75, {GIB: 4253.0}) + "n1: Test CUDA failure common.cu:1 'out of memory'\n", r"^t:7: the run failed"),
        (HEADER + "n1: Test NCCL failure common.cu:392 'unhandled cuda error / '\n", "unhandled cuda error"),
        (HEADER, "holds no row"),
        ("# Collective test starting: hypercube_perf\n" + table(1.0, {GIB: 4253.0}), "hypercube_perf fails its own"),
        ("", "is empty"),
        ("\0\0", "is not a text file"),
    ],
)
def test_failed_runs_and_wrong_results_are_refused(text: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        import_nccl_tests(text, "t")


def test_new_columns_of_per_iteration_timing() -> None:
    text = (
        "# size count type redop root time algbw busbw #wrong i_min i_max i_p99 i_cv% "
        "time algbw busbw #wrong i_min i_max i_p99 i_cv%\n"
        "1073741824 268435456 float sum -1 4253.0 252.47 441.81 0 1 2 3 4 4255.4 252.33 441.57 0 1 2 3 4\n"
    )
    (found,) = import_nccl_tests(text).rows
    assert found.busbw == pytest.approx(441.81e9)
    assert found.in_place_busbw == pytest.approx(441.57e9)


def test_json_of_new_versions() -> None:
    half = {"time": 4253.0, "alg_bw": 252.47, "bus_bw": 441.81, "nwrong": 0}
    one = {
        "size": GIB,
        "count": GIB // 4,
        "type": "float",
        "redop": "sum",
        "root": "-1",
        "out_of_place": half,
        "in_place": half,
    }
    content: dict[str, Any] = {
        "version": 2,
        "args": ["./build/all_reduce_perf", "-g", "8"],
        "config": {
            "nthreads": 1,
            "ngpus": 8,
            "devices": [{"rank": 0, "hostname": "h", "device": 0, "device_info": "H100"}],
        },
        "results": [one],
        "out_of_bounds": {"count": 0, "okay": "true"},
        "average_bus_bandwidth": {"bandwidth": 441.81, "okay": "unchecked"},
        "errors": [],
    }
    run = import_nccl_tests(json.dumps(content))
    assert (run.collective, run.ranks) == ("all_reduce", 8)
    assert run.peak.busbw == pytest.approx(441.81e9)
    content["out_of_bounds"] = {"count": 3, "okay": "false"}
    with pytest.raises(InputError, match="the run failed"):
        import_nccl_tests(json.dumps(content))
    with pytest.raises(InputError, match="not complete JSON"):
        import_nccl_tests(json.dumps(content)[:200])


@pytest.mark.parametrize(
    ("busbw", "nodes", "wire", "nvls", "words"),
    [
        (480.0, 1, 450.0, True, "NVLS"),
        (480.0, 1, 450.0, False, "no algorithm explains it"),
        (78.33, 2, 50.0, False, "a tree between two nodes"),
        (78.33, 3, 50.0, False, "no algorithm explains it"),
        (190.0, 5, 200.0, False, None),
    ],
)
def test_bandwidth_above_the_wire_is_explained(
    busbw: float, nodes: int, wire: float, nvls: bool, words: str | None
) -> None:
    factor = 1.875
    run = import_nccl_tests(table(factor, {8 * GIB: 8 * GIB / (busbw * 1e9 / factor) * 1e6}))
    reason = explain_wire(
        run,
        num_nodes=nodes,
        node_network_bytes_per_second=wire * 1e9,
        scale_up_bytes_per_second=wire * 1e9,
        nvls=nvls,
    )
    assert (reason is None) == (words is None)
    assert words is None or words in (reason or "")


@dataclass(frozen=True, kw_only=True)
class Expected:
    kind: str
    ranks: int
    peak: float
    at: int
    half: int | None = None
    most: int | None = None
    latency: float | None = None


EXPECTED = {
    "01": Expected(kind="all_reduce", ranks=96, peak=386.56, at=8 * GIB, most=512 * MIB),
    "02": Expected(kind="all_reduce", ranks=72, peak=839.16, at=4 * GIB, most=2 * GIB),
    "04": Expected(kind="all_reduce", ranks=1440, peak=405.74, at=16 * GIB, half=GIB, most=8 * GIB),
    "05": Expected(kind="all_reduce", ranks=16, peak=78.33, at=2 * GIB, half=32 * MIB, most=512 * MIB, latency=161.8),
    "07": Expected(kind="all_reduce", ranks=16, peak=437.79, at=2 * GIB),
    "08": Expected(kind="all_reduce", ranks=8, peak=483.05, at=16 * GIB, half=32 * MIB, most=GIB, latency=15.7),
    "10": Expected(kind="all_reduce", ranks=16, peak=471.22, at=16 * GIB),
    "11": Expected(kind="all_reduce", ranks=8, peak=480.16, at=8 * GIB, half=32 * MIB, most=512 * MIB, latency=16.1),
    "13": Expected(kind="all_gather", ranks=16, peak=188.73, at=8 * GIB, half=32 * MIB, most=512 * MIB, latency=85.7),
    "14": Expected(kind="all_gather", ranks=16, peak=328.85, at=8 * GIB, half=32 * MIB, most=512 * MIB, latency=54.1),
    "16": Expected(kind="all_reduce", ranks=8, peak=234.89, at=16 * GIB, half=32 * MIB, most=512 * MIB),
    "17": Expected(kind="alltoall", ranks=8, peak=224.31, at=8 * GIB, half=32 * MIB, most=512 * MIB, latency=87.3),
    "19": Expected(kind="all_gather", ranks=8, peak=223.39, at=8 * GIB, half=64 * MIB, most=512 * MIB),
    "20": Expected(kind="reduce", ranks=8, peak=230.99, at=4 * GIB),
    "22": Expected(kind="all_reduce", ranks=8, peak=406.76, at=8 * GIB),
    "23": Expected(kind="alltoall", ranks=8, peak=361.41, at=16 * GIB),
    "25": Expected(kind="alltoall", ranks=4, peak=175.31, at=512 * MIB),
}


@pytest.mark.parametrize("start", EXPECTED)
def test_published_logs(practitioner: Practitioner, start: str) -> None:
    run, expected = import_nccl_tests(*practitioner(f"nccl_tests/{start}")), EXPECTED[start]
    assert (run.collective, run.ranks) == (expected.kind, expected.ranks)
    assert run.peak.busbw == pytest.approx(expected.peak * 1e9)
    assert run.peak.size_bytes == expected.at
    assert expected.half in (None, run.first_size_at(0.5))
    assert expected.most in (None, run.first_size_at(0.9))
    if expected.latency is not None:
        assert run.latency_seconds == pytest.approx(expected.latency * 1e-6, abs=0.05e-6)
    assert all(one.size_bytes > 0 for one in run.rows)
    assert not said(run, "algbw is not size / time")


ODDITIES = [
    ("01", ("contradict maxBytes 2,147,483,648",)),
    ("04", ("not saturated",)),
    ("07", ("the average covers rows that are not shown",)),
    ("08", ("no link speed", "156.7")),
    ("11", ("outlier: 68.14 us at 32 B",)),
    ("11", ("outlier: 23.59 us at 4096 B",)),
    ("16", ("109.93 to 106.16", "protocol")),
    ("20", ("8 is what rank lines say",)),
    ("22", ("the average covers rows that are not shown",)),
]


@pytest.mark.parametrize(("start", "words"), ODDITIES)
def test_oddities_of_published_logs_are_told(practitioner: Practitioner, start: str, words: tuple[str, ...]) -> None:
    assert said(import_nccl_tests(*practitioner(f"nccl_tests/{start}")), *words)


def test_more_of_published_logs(practitioner: Practitioner) -> None:
    runs = {start: import_nccl_tests(*practitioner(f"nccl_tests/{start}")) for start in EXPECTED}
    assert (runs["04"].ranks_low or 0) <= 1430 <= 1450 <= (runs["04"].ranks_high or 0)
    assert max(one.in_place_busbw or 0 for one in runs["02"].rows) == pytest.approx(846.82e9)
    assert max(one.in_place_busbw or 0 for one in runs["14"].rows) == pytest.approx(335.67e9)
    assert runs["10"].hosts == 2
    assert runs["10"].product == "NVIDIA H100 80GB HBM3"
    assert runs["02"].product == "NVIDIA Graphics Device"
    assert runs["01"].log.average_busbw == pytest.approx(373.187e9)
    assert runs["23"].rows[0].in_place_busbw == pytest.approx(361.06e9)
    assert runs["20"].points == ()
    assert runs["20"].rows[-1].busbw == pytest.approx(228.38e9)
    covered = {start for start, run in runs.items() if said(run, "the average covers rows")}
    assert covered == {"07", "22", "23", "25"}


def test_a100_over_two_nodes_exceeds_its_nics_by_the_tree(practitioner: Practitioner) -> None:
    reason = explain_wire(
        import_nccl_tests(*practitioner("nccl_tests/05")),
        num_nodes=2,
        node_network_bytes_per_second=50e9,
        scale_up_bytes_per_second=300e9,
        nvls=False,
    )
    assert reason is not None
    assert "78.3 GB/s is above the 50 GB/s" in reason
    assert "do not use it for more nodes" in reason


@pytest.mark.parametrize(("start", "message"), [("27", "the results are wrong"), ("28", "unhandled cuda error")])
def test_published_failures_are_refused(practitioner: Practitioner, start: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        import_nccl_tests(*practitioner(f"nccl_tests/{start}"))
