"""Whole runs on a storage that others use too, against an independent loop in which every transfer is an event."""

import math
from dataclasses import replace

import numpy as np
import pytest
import simpy
from transfer_loop import loop

from scenarios.faults import Failure, Faults
from scenarios.layout import Layout
from scenarios.operations import Checkpointing
from scenarios.scenario import load_scenario
from simulator.run import simulate_run
from simulator.run_setup import RunSetup
from simulator.run_traffic import PlayedArchive, PlayedStorage, Traffic
from simulator.shared_storage import SharedStorage, Sharer, play_storage
from simulator.tiers import SURVIVES, SaveTier
from simulator.whole_runs import whole_run
from topologies.cluster import Storage

DAY = 86400.0


def policy(seed):
    """A random job on a storage of 1 GB/s, and what happens to it and beside it."""
    random = np.random.default_rng(seed)

    def pick(*values):
        return values[int(random.integers(len(values)))]

    stops, interval = bool(pick(0, 0, 1)), pick(150.0, 400.0, 900.0)
    every = 1 if stops else pick(1, 2, 5)
    near = SaveTier(
        name="peer", every=1, stall_seconds=1.5, drain_seconds=pick(0.0, 40.0), load_seconds=30.0,
        survives=SURVIVES["peer-memory"], keep=2,
    )  # fmt: skip
    far = SaveTier(
        name="disk", every=every, stall_seconds=pick(0.0, 3.0), drain_seconds=0.0, load_seconds=90.0,
        survives=SURVIVES["parallel-file-system"], keep=pick(2, 4),
    )  # fmt: skip
    others = tuple(
        Sharer(
            save_bytes=pick(5e9, 60e9, 200e9), every_seconds=pick(300.0, 777.0), cap_bytes_per_second=pick(0.21e9, 9e9),
            mtbf_seconds=pick(math.inf, 3000.0), in_phase=bool(pick(0, 1)),
        )
        for _ in range(pick(0, 1, 3))
    )  # fmt: skip
    cached = bool(pick(0, 1))
    played = PlayedStorage(
        tier=1 if not stops and pick(0, 1) else 0, write=1e9, read=1.3e9, nodes_cap=pick(0.4e9, 5e9),
        save_bytes=pick(10e9, 80e9), save_cap=pick(0.3e9, 5e9), restore_bytes=100e9, stops=stops, others=others,
        data=pick(0.0, 0.2e9, 0.9e9), data_cap=pick(0.4e9, 1e9), cache_bytes=cached * 3e12,
    )  # fmt: skip
    often = pick(1.0, 4.0) / (2 * DAY)
    tiers = (near, far) if played.tier else (far,)
    if pick(0, 1, 1):
        behind = SaveTier(
            name="vault", every=every * pick(1, 3, 6), stall_seconds=0.0, drain_seconds=0.0, load_seconds=200.0,
            survives=SURVIVES["object-store"], keep=1000,
        )  # fmt: skip
        own = bool(pick(0, 1, 1))
        archive = PlayedArchive(
            tier=len(tiers), every=behind.every, write=pick(0.15e9, 0.6e9, 3e9) if own else None,
            read=pick(0.2e9, 2e9) if own else None, copy_bytes=played.save_bytes * own,
            replicate_bytes=pick(0.0, 1.0, 2.0) * played.save_bytes, site_cap=pick(0.1e9, math.inf),
        )  # fmt: skip
        there = "archive" if own and pick(0, 0, 1) else "main"
        played, tiers = replace(played, archive=archive, data_store=there), (*tiers, behind)
    failures = (
        Failure(component="software", rate_per_second=10 * often, lost_nodes=0, per="job"),
        Failure(component="node", rate_per_second=15 * often, per="job"),
        Failure(component="power", rate_per_second=3 * often, lost_nodes=0, outage_seconds=900.0, per="job"),
        Failure(component="storage", rate_per_second=4 * often, lost_nodes=0, per="job", loses_file_system=True),
        Failure(
            component="corruption", rate_per_second=3 * often, lost_nodes=0, per="job", poisoned_seconds=1.7 * interval
        ),
    )
    faults = Faults(
        name="x", failures=failures, detection_seconds=30.0, restart_seconds=120.0, repair_seconds=0.08 * DAY,
        repair_law="fixed", spares=pick(2, 50), corrupt_checkpoints=pick(0.0, 0.2), rate_spread=0.0,
    )  # fmt: skip
    return RunSetup(
        step_seconds=interval / 10, num_steps=pick(2007, 10**7), tokens_per_step=1, interval_steps=10,
        tiers=tiers, faults=faults, num_gpus=512, num_nodes=64, replica_nodes=4,
        slow=pick({}, {"power cap": 0.9}), played=played, horizon_seconds=2 * DAY, checkpoint_bytes=played.save_bytes,
    )  # fmt: skip


@pytest.mark.parametrize("block", range(4))
def test_equal_to_a_loop_in_which_every_transfer_is_an_event(block):
    for seed in range(25 * block, 25 * block + 25):
        setup = policy(seed)
        found = simulate_run(setup, seed)
        wall, useful, rework, skipped, written, archived = loop(setup, seed)
        seen = (found.wall_seconds, found.useful_seconds, found.lost_seconds["rework"])
        assert seen == pytest.approx((wall, useful, rework), abs=1e-4), seed
        assert found.skipped_saves == skipped, seed
        assert found.checkpoint_bytes["disk"] / setup.checkpoint_bytes == pytest.approx(written), seed
        assert found.checkpoint_bytes.get("vault", 0.0) / setup.checkpoint_bytes == pytest.approx(archived), seed
        booked = found.useful_seconds + math.fsum(found.lost_seconds.values())
        assert booked == pytest.approx(found.wall_seconds, abs=1e-5), seed
        assert min(found.lost_seconds.values()) > -1e-5, seed


def test_alone_on_the_storage_played_transfers_are_the_mean_times():
    """One job on a storage of its own: a save takes size over rate, as the arithmetic has it, to the last second."""
    size, rate, interval = 60e9, 1e9, 600.0
    tier = SaveTier(
        name="disk", every=1, stall_seconds=2.0, drain_seconds=size / rate, load_seconds=size / rate,
        survives=SURVIVES["parallel-file-system"], keep=3,
    )  # fmt: skip
    failures = (Failure(component="node", rate_per_second=5 / DAY, per="job", lost_nodes=0),)
    setup = RunSetup(
        step_seconds=60.0, num_steps=20_000, tokens_per_step=1, interval_steps=10, tiers=(tier,), num_gpus=64,
        num_nodes=8, faults=Faults(name="x", failures=failures, restart_seconds=300.0),
    )  # fmt: skip
    store = PlayedStorage(
        tier=0, write=rate, read=rate, nodes_cap=9e9, save_bytes=size, save_cap=9e9, restore_bytes=size
    )
    for seed in range(5):
        mean, played = simulate_run(setup, seed), simulate_run(replace(setup, played=store), seed)
        assert played.wall_seconds == pytest.approx(mean.wall_seconds, abs=1e-5)
        assert played.lost_seconds["rework"] == pytest.approx(mean.lost_seconds["rework"], abs=1e-5)
        assert played.checkpoints == mean.checkpoints
    stops = replace(setup, tiers=(replace(tier, stall_seconds=size / rate, drain_seconds=0.0),))
    mean, played = simulate_run(stops, 1), simulate_run(replace(stops, played=replace(store, stops=True)), 1)
    assert played.wall_seconds == pytest.approx(mean.wall_seconds, abs=1e-5)
    assert interval == setup.interval_seconds


def test_other_jobs_lengthen_saves_as_their_mean_times_say():
    """The restores of a job in a busy hour take as long as those of the same job in ``play_storage``."""
    others = tuple(
        Sharer(save_bytes=200e9, every_seconds=every, cap_bytes_per_second=9e9, mtbf_seconds=9000.0)
        for every in (900.0, 1130.0, 1370.0)
    )
    own = Sharer(save_bytes=60e9, every_seconds=602.0, cap_bytes_per_second=9e9, mtbf_seconds=4 * 3600.0)
    mean = np.mean([play_storage((own, *others), 1e9, 1e9, seed=seed)[0].read_seconds for seed in range(4)])
    tier = SaveTier(
        name="disk", every=1, stall_seconds=2.0, drain_seconds=0.0, load_seconds=60.0,
        survives=SURVIVES["parallel-file-system"],
    )  # fmt: skip
    failures = (Failure(component="software", rate_per_second=6 / DAY, per="job", lost_nodes=0),)
    store = PlayedStorage(
        tier=0, write=1e9, read=1e9, nodes_cap=9e9, save_bytes=60e9, save_cap=9e9, restore_bytes=60e9, others=others
    )
    setup = RunSetup(
        step_seconds=60.0, num_steps=10**7, tokens_per_step=1, interval_steps=10, tiers=(tier,), num_gpus=64,
        num_nodes=8, faults=Faults(name="x", failures=failures, rate_spread=0.0), played=store,
        horizon_seconds=40 * DAY,
    )  # fmt: skip
    loads = [
        outcome.lost_seconds["load"] / sum(outcome.failures.values())
        for outcome in (simulate_run(setup, seed) for seed in range(4))
    ]
    assert mean > 1.3 * 60.0
    assert np.mean(loads) == pytest.approx(mean, rel=0.08)


def test_a_copy_to_the_archive_takes_half_of_a_save_s_storage():
    """60 GB at 1 GB/s beside a copy that reads as fast: 120 s; beside one that the archive slows to a fifth: 75 s."""
    for archive_write, seconds in ((5e9, 120.0), (0.2e9, 75.0)):
        environment, ends = simpy.Environment(), []
        storage = SharedStorage(environment, 1e9, 1e9, archive_bytes_per_second=(archive_write, 1e9))
        storage.copy("copy", 600e9, lambda: None)
        storage.start("save", 60e9, 9e9, lambda at=ends, of=environment: at.append(of.now), read=False)
        environment.run(until=1000.0)
        assert ends == [pytest.approx(seconds)]


def test_a_scenario_with_an_archive_plays_its_copies():
    """Two sites and a busy file system: every sixth hour is copied and sent on, and counted twice."""
    store = {"name": "vault", "kind": "object-store", "write": "40 GB/s", "read": "40 GB/s"}
    disk = {"name": "disk", "kind": "parallel-file-system", "write": "200 GB/s", "read": "200 GB/s"}
    other = {"save": "40 TB", "every": "600 s", "nodes": 512}
    scenario = load_scenario("llama3-405b-16k-h100")
    cluster = scenario.cluster.model_copy(
        update={"storage": tuple(Storage.model_validate(one) for one in (disk, store))}
    )
    wish = Checkpointing.model_validate({"replicas": 2, "other_jobs": [other]})
    scenario = scenario.model_copy(update={"cluster": cluster, "checkpoint": wish})
    run = whole_run(scenario, Layout(tp=8, pp=16, dp=128, sequence_parallel=True), 5.0)
    assert run.setup.played is not None
    assert run.setup.played.archive is not None
    short = replace(run.setup, horizon_seconds=4 * DAY)
    found = simulate_run(short, 1)
    size = run.policy.bytes
    assert found.checkpoint_bytes["vault"] / (2 * size) == pytest.approx(4 * 24 / 6, abs=3)
    assert run.policy.levels[-1].drain_seconds > 2 * size / 40e9


@pytest.mark.parametrize(("own", "position", "lost", "goes_on"), [
    (True, 12.0, True, True), (False, 12.0, True, False), (True, 8.0, False, False), (False, 12.0, False, True),
])  # fmt: skip
def test_what_is_sent_to_a_further_site_goes_on_while_it_has_a_source(own, position, lost, goes_on):
    """Save 10 has been copied and is on its way: it needs the storage that it is read from, and must still be good."""
    archive = PlayedArchive(
        tier=1, every=1, write=1e9 if own else None, read=1e9 if own else None, copy_bytes=own * 1e9,
        replicate_bytes=100e9,
    )  # fmt: skip
    played = PlayedStorage(tier=0, write=1e9, read=1e9, nodes_cap=1e9, archive=archive)
    environment = simpy.Environment()
    traffic = Traffic(environment, played, 8, np.random.default_rng(0), lambda: None)
    traffic.archive(10, lambda: None)
    environment.run(until=50.0)
    traffic.fall_back(position, lost=lost)
    assert list(traffic.storage.transfers) == (["replicate"] if goes_on else [])
