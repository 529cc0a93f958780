"""Storage: who decides, shares between jobs, the data path, and rules of thumb."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scenarios.operations import Checkpointing, DataReading, OtherJob
from simulator.fair_shares import crossing_shares, shared_rates
from simulator.shared_storage import Sharer, play_storage
from simulator.storage import (
    bandwidth_estimates,
    choose_storage,
    contended_seconds,
    data_path,
    restore_storm_seconds,
    storage_seconds,
)
from topologies.catalog import load_cluster
from topologies.cluster import Storage


@pytest.fixture(scope="module")
def cluster():
    return load_cluster("llama3-roce-16k")


def stored(kind, write, *, per_node=False):
    return Storage(name=kind, kind=kind, write_bytes_per_second=write, read_bytes_per_second=write, per_node=per_node)


def test_the_slower_of_the_store_and_the_nodes_decides(cluster):
    shared = stored("parallel-file-system", 2e12)
    nic = cluster.node.network_bytes_per_second_per_gpu * cluster.node.gpus_per_node
    assert storage_seconds(shared, cluster, 5.67e12, 2048) == pytest.approx(5.67e12 / 2e12)
    assert storage_seconds(shared, cluster, 5.67e12, 2) == pytest.approx(5.67e12 / 2 / nic)
    local = stored("local-nvme", 8e9, per_node=True)
    assert storage_seconds(local, cluster, 5.67e12, 2048) == pytest.approx(5.67e12 / 2048 / 8e9)


def test_saves_go_where_they_outlive_a_node(cluster):
    tiers = (
        stored("local-nvme", 100e9, per_node=True),
        stored("peer-memory", 50e9, per_node=True),
        stored("object-store", 100e9),
        stored("parallel-file-system", 200e9),
    )
    for count, name in ((4, "parallel-file-system"), (3, "object-store"), (2, "peer-memory"), (1, "local-nvme")):
        chosen = choose_storage(cluster.model_copy(update={"storage": tiers[:count]}), 5.67e12, 2048)
        assert chosen is not None
        assert chosen.name == name


@settings(deadline=None)
@given(st.lists(st.floats(0.001, 5), min_size=1, max_size=9), st.floats(0.01, 3))
def test_shares_are_max_min_fair(caps, capacity):
    rates = shared_rates(caps, capacity)
    assert sum(rates) == pytest.approx(min(sum(caps), capacity))
    level = max(rates)
    for rate, cap in zip(rates, caps, strict=True):
        assert rate <= cap * (1 + 1e-12)
        assert rate == pytest.approx(cap) or rate == pytest.approx(level)  # capped, or as much as anyone


flow = st.tuples(st.floats(0.001, 1.5), st.sampled_from(({"here": 1.0}, {"there": 1.0})))
copy = st.sampled_from(({"here": 1.0, "there": 0.4}, {"here": 0.3, "there": 1.0}))


@settings(deadline=None)
@given(st.lists(flow, max_size=8), copy, st.floats(0.1, 1), st.floats(0.1, 1))
def test_shares_of_two_storages_are_max_min_fair(flows, copied, here, there):
    """By what characterises them: a flow has its cap, or loads a full storage of which nobody takes more time."""
    capacities, flows = {"here": here, "there": there}, [*flows, (1.0, copied)]
    shares = crossing_shares([cap for cap, _ in flows], [loads for _, loads in flows], capacities)
    taken = {
        store: [share * loads[store] for share, (_, loads) in zip(shares, flows, strict=True) if store in loads]
        for store in capacities
    }
    assert all(sum(taken[store]) <= room * (1 + 1e-9) for store, room in capacities.items())
    for share, (cap, loads) in zip(shares, flows, strict=True):
        assert share <= cap * (1 + 1e-9)
        fair = any(
            sum(taken[store]) >= capacities[store] * (1 - 1e-9) and share * load >= max(taken[store]) * (1 - 1e-9)
            for store, load in loads.items()
        )
        assert fair or share == pytest.approx(cap)


def test_on_one_storage_both_ways_to_fill_are_one():
    caps = [0.05, 0.3, 0.9, 0.2]
    assert crossing_shares(caps, [{"here": 1.0}] * 4, {"here": 0.8}) == pytest.approx(shared_rates(caps, 0.8))


# parameters and nodes of seven jobs
JOBS = [(405e9, 1024), (671e9, 256), (70e9, 256), (70e9, 128), (1e12, 320), (8e9, 32), (340e9, 384)]


def sharers(every, *, in_phase=False):
    return tuple(
        Sharer(save_bytes=14 * params, every_seconds=every, cap_bytes_per_second=nodes * 10e9,
               mtbf_seconds=54 * 86400 * 2048 / 419 / nodes, in_phase=in_phase)
        for params, nodes in JOBS
    )  # fmt: skip


@pytest.mark.parametrize(
    ("bandwidth", "every", "random", "in_phase"),
    [(50e9, 1800, 1.39, 4.8), (100e9, 1800, 1.20, 4.8), (200e9, 600, 1.27, 4.8), (500e9, 600, 1.07, 4.5)],
)
def test_seven_jobs_on_one_file_system(bandwidth, every, random, in_phase):
    """Drain over drain alone, mean of the jobs: an independent fluid model of the same seven jobs."""

    def stretch(together):
        days = 20 * every / 1800  # equally many saves
        found = [
            play_storage(sharers(every, in_phase=together), bandwidth, bandwidth, seed=seed, seconds=days * 86400)
            for seed in range(3)
        ]
        ratios = [one.write_seconds / one.write_alone_seconds for seen in found for one in seen]
        return sum(ratios) / len(ratios)

    assert stretch(False) == pytest.approx(random, rel=0.06)
    assert stretch(True) == pytest.approx(in_phase, rel=0.06)


def test_one_job_alone_is_not_stretched():
    only = play_storage(sharers(600)[:1], 50e9, 50e9, seconds=5 * 86400)[0]
    assert only.write_seconds == pytest.approx(only.write_alone_seconds, rel=1e-6)


def test_two_jobs_in_phase_take_twice_as_long():
    """Equal saves at the same moments share the store by halves."""
    pair = tuple(Sharer(save_bytes=1e12, every_seconds=600, cap_bytes_per_second=1e12, in_phase=True) for _ in range(2))
    for seen in play_storage(pair, 10e9, 10e9, seconds=86400):
        assert seen.write_seconds == pytest.approx(200.0)


def test_restores_first_shorten_restores_and_lengthen_saves():
    fair, first = (play_storage(sharers(1800), 50e9, 50e9, seed=1, reads_first=one) for one in (False, True))
    reads = [sum(one.read_seconds / one.read_alone_seconds for one in seen) for seen in (fair, first)]
    writes = [sum(one.write_seconds / one.write_alone_seconds for one in seen) for seen in (fair, first)]
    assert reads[1] < reads[0]
    assert writes[1] > writes[0]


def test_data_loading_leaves_less():
    pair = sharers(1800)[:1]
    free, busy = (play_storage(pair, 50e9, 50e9, seconds=5 * 86400, busy_share=one)[0] for one in (0.0, 0.5))
    assert busy.write_seconds == pytest.approx(2 * free.write_seconds, rel=1e-6)


def test_contention_of_a_scenario(cluster):
    store = stored("parallel-file-system", 200e9)
    alone = contended_seconds(store, cluster, 5.67e12, 2048, Checkpointing(), 1800)
    assert alone == pytest.approx((28.35, 28.35))
    quiet = Checkpointing(other_jobs=(OtherJob(save_bytes=10e12, every_seconds=1000, nodes=256),))
    assert contended_seconds(store, cluster, 5.67e12, 2048, quiet, 1800)[0] == pytest.approx(28.35 / 0.95)
    busy = Checkpointing(other_jobs=(OtherJob(save_bytes=40e12, every_seconds=600, nodes=256),) * 1)
    played = contended_seconds(store, cluster, 5.67e12, 2048, busy, 1800)[0]
    assert 28.35 < played < 28.35 / (1 - 1 / 3) * 1.1
    flooded = Checkpointing(other_jobs=(OtherJob(save_bytes=400e12, every_seconds=600, nodes=256),))
    assert contended_seconds(store, cluster, 5.67e12, 2048, flooded, 1800) == (math.inf, math.inf)


def test_a_slow_storage_is_slow_and_not_full(cluster):
    """2 GB/s: a save takes 47 min, and the next one waits for it, however soon it is wanted; data take 1 %."""
    store = stored("parallel-file-system", 2e9)
    seconds = contended_seconds(store, cluster, 5.67e12, 2048, Checkpointing(), 1800, 0.01)
    assert seconds == pytest.approx((2835 / 0.99, 2835 / 0.99))
    assert contended_seconds(store, cluster, 5.67e12, 2048, Checkpointing(), 1800, 1.0) == (math.inf, math.inf)


def test_a_restore_storm():
    """200 GB/s: all seven jobs after a power event 179 s; 405B sharded 28 s, with the weights for 64 replicas 284 s."""
    assert restore_storm_seconds([14 * params for params, _ in JOBS], 200e9) == pytest.approx(179, abs=1)
    assert restore_storm_seconds([14 * 405e9], 200e9) == pytest.approx(28.35)
    assert restore_storm_seconds([(14 + 2 * 63) * 405e9], 200e9) == pytest.approx(283.5)


def test_the_data_path(cluster):
    text = data_path(cluster, DataReading(), 4e6, 2048)
    assert text.speed == 1.0
    assert text.needed_bytes_per_second == 16e6
    video = data_path(cluster, DataReading(bytes_per_token=1e6), 4e6, 2048)
    assert video.speed == pytest.approx(video.available_bytes_per_second / 4e12)
    assert video.speed < 1
    cached = data_path(cluster, DataReading(bytes_per_token=1e6, dataset_bytes=1e15, local_cache=True), 4e6, 2048)
    assert cached.speed == 1.0
    assert cached.fill_seconds == pytest.approx(1e15 / video.available_bytes_per_second)
    too_large = data_path(cluster, DataReading(bytes_per_token=1e6, dataset_bytes=1e18, local_cache=True), 4e6, 2048)
    assert too_large.speed == video.speed


def test_rules_of_thumb():
    """405 B parameters: 1 % of a 3.09 h MTBF needs 51 GB/s, 5 % of synchronous waste 407 GB/s."""
    found = bandwidth_estimates(405e9, 14 * 405e9, 60.0, 54 * 86400 / 419)
    assert found["drain_costs_1_percent"] == pytest.approx(51e9, rel=0.01)
    assert found["sync_costs_5_percent"] == pytest.approx(407e9, rel=0.01)
    assert found["size_x_8_over_window"] / found["keep_up"] == pytest.approx(16 / 14)
