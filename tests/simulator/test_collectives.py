"""NCCL's model against its worked points and against published nccl-tests runs; measured collectives as given."""

import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from simulator import nccl
from simulator.collectives import bus_factor, collective_seconds, collective_times, groups_of, without_logs
from simulator.links import group_of, links, measured_seconds
from simulator.parameters import shipped_parameters
from topologies.cluster import Cluster, CollectivePoint, Measured
from topologies.document import LoadContext, check
from topologies.errors import Infeasible

GB, GIB, MIB = 1e9, 2**30, 2**20
GLOO = tuple(
    CollectivePoint(kind=kind, ranks=ranks, size_bytes=size, time_seconds=base + size / rate)
    for kind, rate in (("all_reduce", 1e9), ("all_gather", 2e9))
    for ranks, base in ((2, 1e-4), (4, 3e-4))
    for size in (1e3, 1e5, 1e7)
)


def cluster_of(node, num_nodes, **fabric):
    content = {"name": "test", "node": node, "num_nodes": num_nodes}
    content["fabric"] = {"kind": "rail-optimized", "rails": 8, **fabric}
    return check(content, Cluster, LoadContext(Path("test.yaml")))


def test_worked_points_of_the_ring():
    # 8 x A100, Simple, 8 GiB: 8.4 + 14 x 3.4 us of latency, 240 x 8 / 14 GB/s of algorithm bandwidth
    time = collective_seconds("all_reduce", without_logs(cluster_of("dgx-a100", 1)), 8, 8 * GIB)
    latency, transfer = 56e-6, 8 * GIB / (240e9 * 8 / 14)
    assert time.seconds == pytest.approx(latency + transfer + math.sqrt(latency * transfer), rel=1e-9)
    assert time.seconds * 1e6 == pytest.approx(63985, rel=0.01)  # measured: 63,896 to 64,074 us (ml-engineering)
    assert (time.algorithm, time.protocol) == ("ring", "Simple")
    # ring LL at 1 KiB: 6.6 + 14 x 0.6 us
    small = collective_seconds("all_reduce", without_logs(cluster_of("dgx-a100", 1)), 8, 1024)
    assert small.seconds == pytest.approx(15.0e-6, rel=0.01)
    assert (small.algorithm, small.protocol) == ("ring", "LL")


def test_worked_latency_across_eight_nodes():
    # 64 ranks on 8 H100 nodes, Simple: (8.4 + 112 x 3.4 + 14 x 14) x 1.4 us, NIC latency 0
    cluster = cluster_of("dgx-h100", 8)
    group = group_of(links(cluster), np.array([64.0]), np.ones(1))
    assert group.inter_channels * group.inter_bytes_per_second == pytest.approx(8 * 48e9)
    latency, transfer = nccl.lines("all_reduce", group)["ring", "Simple"].parts(np.array([64.0 * 8 * 64]))
    nic = 2 * cluster.node.nic.latency_seconds * 14
    assert latency[0] == pytest.approx(1.4 * (8.4e-6 + 112 * 3.4e-6 + 14 * 14e-6 + nic))
    # beyond two nodes the outer graph counts: 8 channels of 48 GB/s
    assert transfer[0] == pytest.approx(64 * 8 * 64 / (384e9 * 64 / 126))


def test_gathers_with_one_gpu_in_each_domain_run_on_aggregated_trees():
    # NCCL's tuning.cc: 8 us, log2(nodes) hops of which 3.5 overlap, 2.8 us a rank; 0.75 of the ring's bandwidth
    cluster = cluster_of("dgx-h100", 64)
    hop = 14e-6 + 2 * cluster.node.nic.latency_seconds
    small = collective_seconds("all_gather", cluster, 64, 1e6, ranks_per_domain=1)
    assert small.algorithm == "pat"
    assert small.seconds == pytest.approx(8e-6 + 6 * hop / 3.5 + 64 * 2.8e-6 + 1e6 / (0.75 * 48e9), rel=1e-9)
    large = collective_seconds("all_gather", cluster, 64, 8e9, ranks_per_domain=1)
    assert large.algorithm == "ring"
    assert collective_seconds("all_gather", cluster, 64, 1e6).algorithm == "ring"  # eight GPUs in each


# nccl-tests at large messages, GB/s: stas00/ml-engineering, superbench, NVIDIA/dgxc-benchmarking, coreweave/nccl-tests,
# aws-samples/awsome-distributed-training, NVIDIA/deepops; tolerance: what NCCL's own model misses
PUBLISHED = [
    ("dgx-a100", 1, 8, 8 * GIB, "all_reduce", 235.0, 0.03),
    ("dgx-a100", 1, 8, 8 * GIB, "all_gather", 223.4, 0.08),
    ("dgx-a100", 1, 8, 8 * GIB, "all_to_all", 224.3, 0.03),
    ("dgx-h100", 1, 8, 8 * GIB, "all_reduce", 481.0, 0.03),
    ("dgx-h200", 1, 8, 16 * GIB, "all_gather", 361.4, 0.03),
    ("dgx-h200", 1, 8, 16 * GIB, "reduce_scatter", 362.9, 0.03),
    ("dgx-h200", 1, 4, 8 * GIB, "all_reduce", 363.0, 0.03),
    ("dgx-h200", 1, 5, 8 * GIB, "all_reduce", 414.0, 0.03),
    ("dgx-h200", 1, 6, 8 * GIB, "all_reduce", 436.0, 0.18),
    ("dgx-b200", 1, 8, 16 * GIB, "all_reduce", 842.0, 0.12),
    ("gb200-nvl72-tray", 18, 72, 8 * GIB, "all_reduce", 843.0, 0.12),
    ("gb200-nvl72-tray", 360, 1440, 16 * GIB, "all_reduce", 405.7, 0.07),
    ("mi300x-node", 1, 8, 4 * GIB, "all_reduce", 312.9, 0.03),
    ("mi300x-node", 1, 2, 4 * GIB, "all_reduce", 47.7, 0.08),
    ("mi355x-node", 1, 8, 16 * GIB, "all_to_all", 361.0, 0.08),
    ("dgx-h100", 2, 16, 16 * GIB, "all_reduce", 480.0, 0.05),
    ("dgx-h100", 12, 96, 8 * GIB, "all_reduce", 386.6, 0.07),
    ("dgx-h200", 16, 128, 16 * GIB, "all_reduce", 369.9, 0.03),
    ("dgx-b200", 4, 32, 4 * GIB, "all_reduce", 377.3, 0.03),
    ("dgx-a100", 4, 32, 4 * GIB, "all_reduce", 191.1, 0.03),
]


@pytest.mark.parametrize(("node", "num_nodes", "ranks", "size", "kind", "busbw", "tolerance"), PUBLISHED)
def test_published_bus_bandwidths(node, num_nodes, ranks, size, kind, busbw, tolerance):
    time = collective_seconds(kind, cluster_of(node, num_nodes), ranks, size)
    assert time.busbw_bytes_per_second / GB == pytest.approx(busbw, rel=tolerance)


@settings(deadline=None)
@given(st.sampled_from(["all_reduce", "all_gather", "all_to_all", "broadcast", "send_recv"]), st.integers(10, 33))
def test_a_larger_message_takes_longer(kind, power):
    cluster = cluster_of("dgx-h100", 4)
    sizes = 2.0 ** np.array([power, power + 0.5, power + 1])
    seconds, _ = collective_times(kind, cluster, np.full(3, 32.0), sizes)
    assert np.all(np.diff(seconds) > -0.1 * seconds[:-1])  # a tree's correction steps down between powers of two
    assert seconds[2] <= 2.5 * seconds[0]


def test_one_call_is_one_row_of_the_array_form():
    cluster = cluster_of("dgx-h100", 4)
    sizes = np.array([1e3, 1e6, 1e9])
    seconds, names = collective_times("all_reduce", cluster, np.array([8.0, 16.0, 32.0]), sizes)
    for i, ranks in enumerate((8, 16, 32)):
        one = collective_seconds("all_reduce", cluster, ranks, sizes[i])
        assert (one.seconds, (one.algorithm, one.protocol)) == (seconds[i], names[i])


def test_oversubscription_and_spreading_slow_a_collective():
    tiers = [{"name": "leaf", "nodes": 4}, {"name": "spine", "nodes": 32, "oversubscription": 7.0}]
    thin, full = cluster_of("dgx-h100", 32, tiers=tiers), cluster_of("dgx-h100", 32)
    near, far, crowded = (
        [collective_seconds(kind, one, ranks, 16 * GIB).seconds for one in (thin, full)]
        for kind, ranks in (("all_to_all", 32), ("all_reduce", 256), ("all_to_all", 256))
    )
    assert near[0] == near[1]
    assert crowded[0] == pytest.approx(7 * 28 / 31 * crowded[1], rel=0.01)  # of 31 other nodes 28 are beyond the leaf
    # a ring in order leaves four nodes with the traffic of one: 4 / 7 of it has room
    assert far[0] == pytest.approx(7 / 4 * far[1], rel=0.05)
    spread = collective_seconds("all_reduce", full, 8, GIB, ranks_per_domain=1)
    assert spread.seconds > 5 * collective_seconds("all_reduce", full, 8, GIB).seconds


def test_bus_factors_are_those_of_nccl_tests():
    assert bus_factor("all_reduce", 8) == 1.75
    assert bus_factor("all_gather", 8) == bus_factor("all_to_all", 8) == 0.875
    assert bus_factor("broadcast", 8) == bus_factor("send_recv", 2) == 1.0


def test_misuse():
    cluster = cluster_of("dgx-h100", 1)
    assert collective_seconds("all_reduce", cluster, 1, GIB).seconds == 0.0
    with pytest.raises(Infeasible, match="needs 16 GPUs, has 8"):
        collective_seconds("all_reduce", cluster, 16, GIB)
    with pytest.raises(ValueError, match="make no collective"):
        collective_seconds("all_reduce", cluster, 2, -1.0)


def test_measured_points_are_met_and_interpolated():
    for point in GLOO:
        found = measured_seconds(GLOO, point.kind, float(point.ranks), point.size_bytes)
        assert float(found) == pytest.approx(point.time_seconds)
    sizes = np.geomspace(1e2, 1e9, 50)
    times = measured_seconds(GLOO, "all_reduce", 2.0, sizes)
    assert np.all(np.diff(times) >= 0)
    assert times[0] == pytest.approx(1e-4 + 1e-6)  # below the smallest size the time stays
    assert times[-1] == pytest.approx(1e9 / 1e7 * (1e-4 + 1e-2), rel=1e-6)  # above the largest with its bandwidth


def test_what_was_not_measured_is_stood_in_for():
    # gloo's reduce-scatter moves the volume of an all-reduce
    reduce = measured_seconds(GLOO, "all_reduce", 4.0, 1e6)
    assert measured_seconds(GLOO, "reduce_scatter", 4.0, 1e6) == pytest.approx(reduce)
    assert measured_seconds(GLOO, "all_to_all", 4.0, 1e6) == pytest.approx(
        measured_seconds(GLOO, "all_gather", 4.0, 1e6)
    )
    # eight ranks from four, by ring volume 7/8 to 3/4
    assert measured_seconds(GLOO, "all_reduce", 8.0, 1e6) == pytest.approx(reduce * (7 / 8) / (3 / 4))


def test_a_calibrated_cluster_uses_its_own_figures():
    content = {"name": "cpu", "node": "laptop-core", "num_nodes": 1}
    plain = check(content, Cluster, LoadContext(Path("test.yaml")))
    measured = plain.model_copy(update={"measured": Measured(date="2026-01-01", collectives=GLOO)})
    time = collective_seconds("all_reduce", measured, 2, 1e5)
    assert time.seconds == pytest.approx(1e-4 + 1e-4)
    assert time.algorithm == "measured"
    scatter = collective_seconds("reduce_scatter", plain, 2, 1e7).seconds
    assert scatter == pytest.approx(collective_seconds("all_reduce", plain, 2, 1e7).seconds)


def test_training_traffic_sees_the_links_of_its_group():
    net = links(cluster_of("dgx-h100", 4), shipped_parameters())
    ranks, stride = np.array([8.0, 4.0, 16.0, 4.0]), np.array([1.0, 1.0, 1.0, 8.0])
    group = group_of(net, ranks, stride)
    assert group.domains.tolist() == [1, 1, 2, 4]
    rate = group.inter_channels * group.inter_bytes_per_second / GB
    assert rate[2] == pytest.approx(8 * 50 * 0.75)
    assert rate[3] == pytest.approx(50 * 0.75)  # one member per node: one NIC
    older = links(cluster_of("dgx-a100", 4), shipped_parameters())
    assert group_of(older, np.array([4.0]), np.array([8.0])).inter_bytes_per_second[0] == pytest.approx(25e9 * 0.75)
    mesh = links(cluster_of("mi300x-node", 1), shipped_parameters())
    pair = group_of(mesh, np.array([2.0]), np.array([1.0]))
    assert pair.intra_channels * pair.intra_bytes_per_second[0] == pytest.approx(312e9 / 7)


@pytest.mark.parametrize("kind", ["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send_recv"])
def test_the_step_model_and_the_command_use_one_model(kind):
    """Many groups at once, as a benchmark finds them, are single collectives; training keeps less of a NIC."""
    cluster = cluster_of("dgx-h100", 16)
    ranks, sizes = np.array([2.0, 8.0, 16.0, 64.0, 128.0, 1.0]), np.array([1e4, 1e6, 3e7, 1e8, 1e9, 1e9])
    found = groups_of(links(cluster), ranks, np.ones(6)).seconds(kind, sizes)
    single = [collective_seconds(kind, cluster, int(n), size).seconds for n, size in zip(ranks, sizes, strict=True)]
    np.testing.assert_allclose(found, single, rtol=1e-12)
    training = groups_of(links(cluster, shipped_parameters()), ranks, np.ones(6)).seconds(kind, sizes)
    assert training[4] > 1.2 * found[4]
    assert training[5] == found[5] == 0.0


def test_a_curve_of_one_node_does_not_speak_for_the_network():
    cluster = cluster_of("dgx-h100", 4)
    points = tuple(
        CollectivePoint(kind="all_reduce", ranks=8, size_bytes=size, time_seconds=1e-3 + size / 1e10)
        for size in (1e6, 1e9)
    )
    known = cluster.model_copy(update={"measured": Measured(date="2026-01-01", collectives=points)})
    ranks, size = np.array([8.0, 32.0]), np.full(2, 1e9)
    measured, model = (groups_of(links(one), ranks, np.ones(2)).seconds("all_reduce", size) for one in (known, cluster))
    assert measured[0] == pytest.approx(0.101)
    assert measured[1] == model[1]


def test_what_runs_beside_others_costs_no_start():
    groups = groups_of(links(cluster_of("dgx-h100", 16)), np.array([128.0, 128.0]), np.ones(2))
    size = np.full(2, 1e8)
    alone, hidden = groups.seconds("all_gather", size, beside=np.array([False, True]))
    assert alone == groups.seconds("all_gather", size)[0]
    starts = [float(line.latency[0]) for line in groups.lines("all_gather").values()]
    assert min(abs(alone - hidden - one) for one in starts) < 1e-9
    assert hidden > 1e8 * 127 / 128 / (8 * 50e9)
