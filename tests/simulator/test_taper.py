"""Oversubscribed levels in the closed form against flows: a level slows what crosses it, and nothing else."""

from pathlib import Path

import numpy as np
import pytest

from scenarios.layout import Layout
from scenarios.scenario import load_scenario
from simulator.collectives import groups_of
from simulator.disturbances import Disturbances
from simulator.links import exchange_taper, links, ring_taper
from simulator.shared_step import shared_step
from simulator.sharing import collective_load, play_together
from simulator.step import predict_step
from topologies.cluster import Cluster
from topologies.document import LoadContext, check
from topologies.link_map import link_map

SIZE = 2e9


def cluster(rails, leaf=1, core=1):
    """32 nodes of 8 H100, four below each leaf (rail by rail, or one leaf for all NICs of a node), 16 in a pod."""
    tiers = [
        {"name": "leaf", "nodes": 4},
        {"name": "pod", "nodes": 16, "oversubscription": leaf},
        {"name": "core", "nodes": 32, "oversubscription": core},
    ]
    fabric = {"kind": "rail-optimized" if rails == 8 else "fat-tree", "rails": rails, "tiers": tiers}
    content = {"name": "thin", "node": "dgx-h100", "num_nodes": 32, "fabric": fabric}
    return check(content, Cluster, LoadContext(Path("test.yaml")))


def together(machine, kind, ranks, stride):
    """Time of all groups of a machine at once, on the links."""
    grid = np.arange(machine.num_gpus).reshape(-1, ranks, stride)
    gpus = np.swapaxes(grid, 1, 2).reshape(-1, ranks)
    loads = [collective_load(f"{i}", kind, one, SIZE) for i, one in enumerate(gpus)]
    return max(play_together(link_map(machine), loads).end_seconds.values())


@pytest.mark.parametrize(
    ("rails", "leaf", "core", "kind", "ranks", "stride", "slower"),
    [
        (1, 8, 1, "all_gather", 32, 1, 1.0),  # four nodes below one leaf: nothing crosses it
        (1, 8, 1, "all_gather", 16, 8, 8 / 4),  # one node in four sends over its leaf's way up
        (8, 4, 1, "all_gather", 16, 8, 1.0),  # which a quarter of the way carries
        (8, 4, 1, "all_gather", 8, 16, 4 / 2),  # neighbours two nodes apart: half of a leaf's nodes send over it
        (1, 8, 1, "all_gather", 8, 16, 8 / 2),
        (8, 4, 1, "all_gather", 4, 32, 4.0),  # neighbours below different leaves
        (1, 1, 4, "all_gather", 256, 1, 1.0),  # one of a pod's sixteen nodes sends to the other pod
        (1, 1, 4, "all_gather", 4, 64, 4 / 2),  # half of them do
        (1, 2, 4, "all_gather", 4, 64, 8 / 2),  # levels below are thin as well
        (8, 4, 1, "all_to_all", 128, 1, 4 * 12 / 15),  # twelve of fifteen other nodes are below other leaves
        (1, 8, 1, "all_to_all", 128, 1, 8 * 12 / 15),
        (8, 4, 1, "all_to_all", 16, 8, 4 * 12 / 15),
        (8, 4, 1, "all_to_all", 4, 32, 4.0),
        (1, 1, 4, "all_to_all", 256, 1, 4 * 16 / 31),
    ],
)
def test_levels_slow_what_crosses_them(rails, leaf, core, kind, ranks, stride, slower):
    thin, full = cluster(rails, leaf, core), cluster(rails)
    taper = exchange_taper if kind == "all_to_all" else ring_taper
    found = taper(thin.fabric.tiers, np.array([ranks * stride / 8.0]), np.array([stride / 8.0]))[0]
    assert found == pytest.approx(slower)
    played = together(thin, kind, ranks, stride) / together(full, kind, ranks, stride)
    assert found == pytest.approx(played, rel=0.03)


def test_fully_sharded_weights_cross_pods_with_the_traffic_of_one_node():
    """16,384 GPUs with 1:7 between pods: weights sharded over all of them, in order, hardly notice."""
    scenario = load_scenario("llama3-405b-16k-h100")
    job = scenario.job.model_copy(update={"global_batch_size": 2048})
    layout = Layout(tp=8, dp=2048, optimizer_sharding="zero3", sequence_parallel=True)
    closed = predict_step(scenario.cluster, job, layout)
    played = shared_step(scenario.cluster, job, layout, Disturbances())
    assert closed.total_seconds == pytest.approx(played.timeline.step_seconds, rel=0.01)
    stages = Layout(tp=8, pp=2, dp=1024, optimizer_sharding="zero3", sequence_parallel=True)
    far = predict_step(scenario.cluster, job, stages.model_copy(update={"rank_order": ("tp", "pp", "cp", "ep", "dp")}))
    near = predict_step(scenario.cluster, job, stages)
    assert far.breakdown_seconds["dp_comm"] == pytest.approx(near.breakdown_seconds["dp_comm"], rel=0.01)


@pytest.mark.parametrize("kind", ["all_gather", "all_to_all"])
def test_the_collective_model_charges_what_crosses(kind):
    """Neighbours in one node notice nothing of a thin core; neighbours in two pods get what it leaves."""
    thin, full = (groups_of(links(cluster(1, 1, core)), *np.array([[8.0, 2.0], [1.0, 128.0]])) for core in (16, 1))
    slow, fast = (one.seconds(kind, np.full(2, SIZE)) for one in (thin, full))
    assert slow[0] == fast[0]
    assert slow[1] == pytest.approx(16 * fast[1], rel=0.01)
