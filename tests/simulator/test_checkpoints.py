"""Checkpoint intervals against published closed forms, worked values and brute force."""

from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scenarios.faults import Failure, Faults
from scenarios.layout import Layout
from scenarios.operations import Checkpointing
from simulator.checkpoints import CUSTOMARY_INTERVAL_SECONDS, checkpoint_bytes, choose_interval
from simulator.goodput_theory import expected_goodput, two_level_slowdown
from topologies.catalog import load_cluster
from topologies.cluster import Storage


def job(params=176.25e9, precision="bf16", optimizer="adamw"):
    return SimpleNamespace(model=SimpleNamespace(num_params=params), precision=precision, optimizer=optimizer)


def test_checkpoint_bytes():
    """BLOOM: 176.25e9 parameters, 2.3 TB with optimizer states (bigscience, chronicles of the 176B training)."""
    assert checkpoint_bytes(job()) == pytest.approx(2.3 * 2**40, rel=0.03)
    assert checkpoint_bytes(job(1e9)) == 14e9
    assert checkpoint_bytes(job(1e9, "fp8")) == 14e9
    assert checkpoint_bytes(job(1e9, "fp32")) == 12e9
    assert checkpoint_bytes(job(1e9, "fp32", "sgd")) == 4e9


LLAMA = Layout(tp=8, pp=16, dp=128, sequence_parallel=True)
LLAMA_FAULTS = Faults(  # 419 unexpected stops in 54 days on 16,384 GPUs (arXiv 2407.21783, table 5)
    name="Llama 3",
    failures=(Failure(component="all", rate_per_second=419 / 54 / 86400 / 16384),),
    detection_seconds=60,
    restart_seconds=300,
)


@pytest.fixture(scope="module")
def cluster():
    return load_cluster("llama3-roce-16k")


def stored(kind, write, *, per_node=False):
    return Storage(name=kind, kind=kind, write_bytes_per_second=write, read_bytes_per_second=write, per_node=per_node)


def test_the_interval_is_the_best_whole_number_of_steps(cluster):
    policy = choose_interval(cluster, job(405e9), LLAMA, LLAMA_FAULTS, 5.4, wish=Checkpointing(peer_memory=False))
    mtbf = 54 * 86400 / 419
    restart = 360 + policy.load_seconds
    goodputs = {
        steps: expected_goodput(steps * 5.4, policy.stall_seconds, mtbf, restart, policy.drain_seconds)
        for steps in range(1, 2000)
        if steps * 5.4 + policy.stall_seconds >= policy.drain_seconds
    }
    assert policy.interval_steps == max(goodputs, key=goodputs.get)
    assert policy.expected_goodput == pytest.approx(max(goodputs.values()))
    assert policy.mode == "async"
    assert policy.interval_seconds == pytest.approx(policy.interval_steps * 5.4)
    assert policy.as_json()["tiers"] == ["Tectonic"]


REACHING = LLAMA_FAULTS.model_copy(
    update={
        "failures": (
            Failure(component="one node", rate_per_second=370 / 54 / 86400 / 16384),
            Failure(component="rack", rate_per_second=49 / 54 / 86400 / 16384, lost_nodes=2),
        )
    }
)


@pytest.mark.parametrize("bandwidth", [20e9, 200e9, 2e12])
def test_two_tiers_are_the_best_of_all_numbers(cluster, bandwidth):
    """Peer memory first, the file system each n-th time: every pair of whole numbers tried."""
    tiers = (stored("peer-memory", 100e9, per_node=True), stored("parallel-file-system", bandwidth))
    policy = choose_interval(
        cluster.model_copy(update={"storage": tiers}), job(405e9), LLAMA, REACHING, 10.0,
        wish=Checkpointing(peer_memory=True),
    )  # fmt: skip
    near, far = policy.levels
    steps, every = np.arange(1, 200)[None, :], np.arange(1, 300)[:, None]
    slow = two_level_slowdown(
        steps * 10.0,
        every,
        (near.stall_seconds, 0.0),
        (370 / 54 / 86400, 49 / 54 / 86400),
        tuple(360 + one.load_seconds + one.drain_seconds for one in policy.levels),
    )
    slow = np.where(every * (steps * 10.0 + near.stall_seconds) >= far.drain_seconds, slow, np.inf)
    assert 1 / policy.expected_goodput == pytest.approx(slow.min(), rel=2e-5)
    assert policy.tiers == ("peer-memory", "parallel-file-system")


def test_peer_memory_is_insurance_against_slow_storage(cluster):
    def chosen(bandwidth):
        tiers = (stored("peer-memory", 100e9, per_node=True), stored("parallel-file-system", bandwidth))
        store = cluster.model_copy(update={"storage": tiers})
        with_peer, without = (
            choose_interval(store, job(405e9), LLAMA, REACHING, 5.4, wish=Checkpointing(peer_memory=peer))
            for peer in (True, False)
        )
        return with_peer.expected_goodput - without.expected_goodput

    assert chosen(10e9) > 0.04
    assert 0 < chosen(2e12) < 0.01


def test_a_rollback_needs_older_saves(cluster):
    faults = LLAMA_FAULTS.model_copy(
        update={"failures": (Failure(component="silent", rate_per_second=1e-10, poisoned_seconds=7200),)}
    )
    policy = choose_interval(cluster, job(405e9), LLAMA, faults, 5.4, wish=Checkpointing(interval_seconds=600))
    far, archive = policy.levels[-2:]
    assert far.keep == policy.keep
    assert (archive.name, archive.every > 10 * far.every) == ("Tectonic (archive)", True)
    assert (policy.keep - 1) * far.every * policy.interval_seconds >= 7200


def test_every_step_into_peer_memory(cluster):
    policy = choose_interval(cluster, job(405e9), LLAMA, REACHING, 10.0, mode="every-step")
    assert policy.interval_steps == 1
    assert policy.stall_seconds < 0.009 * 10  # ByteRobust reports less than 0.9 % (arXiv 2509.16293)
    assert policy.levels[0].every == 1 < policy.levels[1].every


def test_an_archive_takes_some_of_the_saves(cluster):
    tiers = (stored("parallel-file-system", 200e9), stored("object-store", 5e9))
    policy = choose_interval(cluster.model_copy(update={"storage": tiers}), job(405e9), LLAMA, LLAMA_FAULTS, 5.4)
    archive = policy.levels[-1]
    assert archive.name == "object-store"
    period = archive.every * policy.interval_seconds
    assert period == pytest.approx(6 * 3600, rel=0.05)
    assert period >= archive.drain_seconds > 14 * 405e9 / 5e9


def test_what_the_scenario_fixes_is_kept(cluster):
    wish = Checkpointing(mode="sync", interval_seconds=900, write_bytes_per_second=100e9, read_bytes_per_second=50e9)
    policy = choose_interval(cluster, job(405e9), LLAMA, LLAMA_FAULTS, 5.0, wish=wish)
    assert (policy.mode, policy.interval_steps) == ("sync", 180)
    assert policy.write_seconds == pytest.approx(56.7)
    assert policy.load_seconds == pytest.approx(113.4)


def test_a_save_is_complete_before_the_next(cluster):
    slow = cluster.model_copy(update={"storage": (stored("parallel-file-system", 10e9),)})
    policy = choose_interval(slow, job(405e9), LLAMA, LLAMA_FAULTS, 5.4, mode="async")
    assert policy.drain_seconds == pytest.approx(567)
    assert policy.interval_seconds + policy.stall_seconds >= policy.drain_seconds
    assert policy.optimum_interval_seconds < policy.drain_seconds
    assert "stretched" in policy.reason


def test_synchronous_saves_trade_stall_for_lost_work(cluster):
    """Reference: 405B, 200 GB/s, MTBF 3.09 h, 6 min + load to come back: optimum 12.9 min, goodput 0.898."""
    store = cluster.model_copy(update={"storage": (stored("parallel-file-system", 200e9),)})
    policy = choose_interval(store, job(405e9), LLAMA, LLAMA_FAULTS, 1.0, mode="sync")
    assert policy.interval_seconds / 60 == pytest.approx(12.9, abs=0.06)
    assert policy.expected_goodput == pytest.approx(0.898, abs=6e-4)
    assert choose_interval(store, job(405e9), LLAMA, LLAMA_FAULTS, 1.0).expected_goodput > 0.94


def test_without_faults_the_customary_interval_and_only_stalls(cluster):
    policy = choose_interval(cluster, job(405e9), LLAMA, Faults(name="none"), 10.0, mode="sync")
    assert abs(policy.interval_seconds - CUSTOMARY_INTERVAL_SECONDS) <= 10.0
    assert policy.optimum_interval_seconds is None
    assert policy.expected_goodput == pytest.approx(
        policy.interval_seconds / (policy.interval_seconds + policy.stall_seconds)
    )
    assert "no failure rate" in policy.reason


def test_a_cluster_without_storage_says_so():
    laptop = load_cluster("laptop")
    node = laptop.node.model_copy(update={"local_write_bytes_per_second": 0.0})
    bare = laptop.model_copy(update={"storage": (), "pools": (laptop.pools[0].model_copy(update={"node": node}),)})
    policy = choose_interval(bare, job(30e6), Layout(dp=2), LLAMA_FAULTS, 0.5)
    assert policy.tiers == ()
    assert policy.stall_seconds == 0.0
    assert policy.interval_seconds == pytest.approx(CUSTOMARY_INTERVAL_SECONDS, abs=0.6)
    assert "states no storage" in policy.reason


def test_a_pinned_interval_is_kept_and_judged(cluster):
    free = choose_interval(cluster, job(405e9), LLAMA, LLAMA_FAULTS, 5.4)
    pinned = choose_interval(cluster, job(405e9), LLAMA, LLAMA_FAULTS, 5.4, interval_steps=600)
    assert pinned.interval_steps == 600
    assert pinned.expected_goodput < free.expected_goodput
    with pytest.raises(ValueError, match="must be positive"):
        choose_interval(cluster, job(405e9), LLAMA, LLAMA_FAULTS, 0.0)


def test_a_longer_step_than_the_optimum_still_saves(cluster):
    policy = choose_interval(cluster, job(405e9), LLAMA, LLAMA_FAULTS, 7200.0)
    assert policy.interval_steps == 1


@settings(deadline=None)
@given(st.floats(0.05, 100), st.floats(1e-10, 1e-6))
def test_goodput_is_a_share_and_falls_with_the_failure_rate(step, rate):
    cluster = load_cluster("laptop")
    faults, worse = (
        Faults(name="x", failures=(Failure(component="c", rate_per_second=r),), restart_seconds=60)
        for r in (rate, 2 * rate)
    )
    first, second = (choose_interval(cluster, job(30e6), Layout(dp=2), f, step) for f in (faults, worse))
    assert 0 <= second.expected_goodput <= first.expected_goodput <= 1
    assert np.isfinite(first.interval_seconds)
