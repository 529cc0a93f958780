"""Whole runs on a storage that others use too, against an independent loop in which every transfer is an event."""

import heapq
import math
from dataclasses import replace
from itertools import islice

import numpy as np
import pytest

from scenarios.faults import Failure, Faults
from simulator.failures import failure_events, generator
from simulator.run import simulate_run
from simulator.run_setup import RunSetup
from simulator.run_traffic import PlayedStorage
from simulator.shared_storage import Sharer, play_storage
from simulator.tiers import SURVIVES, SaveTier

DAY = 86400.0


def water(flows):
    """Shares by filling up: whoever wants less than an equal part gets it, the rest is divided again."""
    left, open_, found = 1.0, dict(flows), {}
    while open_:
        equal = left / len(open_)
        small = [key for key, flow in open_.items() if flow[1] <= equal]
        for key in small or list(open_):
            cap = open_.pop(key)[1]
            found[key] = cap if small else equal
        left -= sum(found[key] for key in small)
    return found


def loop(setup, seed):
    """One happening at a time; returns wall seconds, useful seconds, rework, skipped saves, and bytes of far saves."""
    faults, store, tau, sources = setup.faults, setup.played, setup.interval_seconds, setup.sources
    events = list(islice(failure_events(sources, seed, 0), 3000))
    near = setup.tiers[0] if len(setup.tiers) > 1 else None
    far = setup.tiers[-1]
    random = generator("storage", seed, 0)
    clock = []  # others: (time, kind, job)
    for job, other in enumerate(store.others):
        clock.append((other.every_seconds if other.in_phase else random.uniform(0, other.every_seconds), "save", job))
        if math.isfinite(other.mtbf_seconds):
            clock.append((random.exponential(other.mtbf_seconds), "fail", job))
    heapq.heapify(clock)
    now, position, state, then, stall, index = 0.0, 0.0, "run", math.inf, 0.0, 0
    ram, ram_draining, disk, flows = [0.0], [], [0.0], {}
    rework, skipped, written, need, missing, spares = 0.0, 0, 0, 0, 0, faults.spares
    repairs, storms, load, reads, later = [], [], 0.0, 0, 0.0
    empty, unread = (setup.num_nodes, store.cache_bytes) if store.cache_bytes else (0, 0.0)
    target, replicas = setup.num_steps / setup.interval_steps, setup.num_nodes / setup.replica_nodes
    lasting = math.prod(setup.slow.values())
    restart, following = sum(faults.phases_seconds.values()), 1.0

    def live(broken):
        return 1.0 if not faults.elastic else max(0.0, replicas - math.ceil(broken / setup.replica_nodes)) / replicas

    def data_flow():
        """What training reads at this moment, and how much of it it needs."""
        nonlocal unread
        wanted = lasting * live(missing)
        if store.cache_bytes:
            share = empty / setup.num_nodes
            if empty and "data" not in flows:
                cap = min(share * store.nodes_cap, store.data_cap)
                flows["data"] = [unread / store.read, min(1.0, cap / store.read)]
            return wanted, store.data * wanted * share
        cap = min(store.data * wanted, store.data_cap) / store.read
        if cap:
            flows["data"] = [math.inf, min(1.0, cap)]
        return wanted, store.data * wanted

    def stop_reading():
        nonlocal unread
        if "data" in flows:
            left = flows.pop("data")[0]
            if empty:
                unread = left * store.read

    def get_nodes():
        nonlocal need, spares, missing, state, then, empty, unread
        again, taken = restart, need
        if need > spares:
            if not faults.elastic or live(missing + need - spares) == 0:
                state, then = "wait", math.inf
                return
            missing += need - spares
            taken, again = spares, faults.elastic.reconfigure_seconds
        spares -= taken
        join(taken)
        need, state, then = 0, "restart", now + again + load

    def join(nodes):
        nonlocal empty, unread
        if nodes and store.cache_bytes:
            empty = min(setup.num_nodes, empty + nodes)
            part = store.cache_bytes / setup.num_nodes
            unread = min(unread + nodes * part, empty * part)

    def newest(kind, limit):
        tiers = [(near, ram)] if near else []
        found = [(one, -tier.load_seconds, tier) for tier, saves in [*tiers, (far, disk)] if kind in tier.survives
                 for one in saves if one <= limit]  # fmt: skip
        return max(found, key=lambda one: one[:2], default=(0.0, 0.0, None))

    while True:
        running = state in ("run", "stall")
        wanted, needed = data_flow() if running else (0.0, 0.0)
        shares = water(flows)
        got = shares.get("data", 0.0) * store.read
        allowed = 1.0 if got >= needed * (1 - 1e-9) else got / needed
        speed = wanted * allowed if state == "run" else 0.0
        if state not in ("run", "stall"):
            following = min(math.floor(position + 1e-9) + 1, target)
        own = math.inf
        if state == "run":
            own = now + max(0.0, following - position) * tau / speed if speed else math.inf
        elif state == "stall":
            own = now + stall
        ends = {key: now + flow[0] / shares[key] for key, flow in flows.items() if shares[key] > 0}
        first = min(ends, key=ends.get, default=None)
        moments = [
            setup.horizon_seconds, events[index].time_seconds, repairs[0][0] if repairs else math.inf, then, own,
            ends[first] if first is not None else math.inf, clock[0][0] if clock else math.inf,
            min(storms, default=math.inf),
        ]  # fmt: skip
        what = min(range(8), key=moments.__getitem__)
        passed, now = moments[what] - now, moments[what]
        position = min(following, position + speed * passed / tau)
        stall = max(0.0, stall - passed) if state == "stall" else stall
        for key, flow in flows.items():
            flow[0] -= shares[key] * passed
        if running:
            ram += [one for ready, one in ram_draining if ready <= now]
            ram_draining = [one for one in ram_draining if one[0] > now]
            ram = ram[-near.keep :] if near else ram
        if what == 0:
            return now, position * tau, rework, skipped, written
        if what == 1:
            event = events[index]
            index += 1
            source = sources[event.source]
            if state in ("wait", "idle"):
                continue
            stop_reading()
            flows.pop("save", None)
            flows.pop("restore", None)
            ram_draining = []
            if source.lost_nodes:
                heapq.heappush(repairs, (now + source.detection_seconds + source.repair_seconds, source.lost_nodes))
                need += source.lost_nodes
            reached, load, reads = position, 0.0, 0
            for _ in range(1 + (event.corrupt < faults.corrupt_checkpoints)):
                limit = position - 1e-9 if reads or load else position
                position, seconds, tier = newest(source.loss, limit)
                reads += tier is far
                load += -seconds if tier is near and near else 0.0
            rework += (reached - position) * tau
            ram = [one for one in ram if one <= position] if near and source.loss in near.survives else []
            disk = [one for one in disk if one <= position]
            later = source.outage_seconds
            if later:
                storms.append(now + source.detection_seconds + later + restart)
            state, then = "detect", now + source.detection_seconds
        elif what == 2:
            _, nodes = heapq.heappop(repairs)
            back = min(nodes, missing)
            changes = live(missing) != live(missing - back)
            missing -= back
            spares += nodes - back
            join(back)
            if running and changes:
                raise AssertionError("not in these policies: an elastic job grows by a pause")
            if state == "wait":
                get_nodes()
        elif what == 3:
            if state == "detect" and later:
                state, then, later = "idle", now + later, 0.0
            elif state in ("detect", "idle"):
                get_nodes()
            elif reads:
                state, then = "loading", math.inf
                flows["restore"] = [reads * store.restore_bytes / store.read, min(1.0, store.nodes_cap / store.read)]
            else:
                state, then = "run", math.inf
        elif what == 4 and state == "run":
            position = following
            regular = abs(position - round(position)) < 1e-9
            to_far = not regular or round(position) % far.every == 0
            stall = (near.stall_seconds if near else 0.0) + (far.stall_seconds if to_far and not store.stops else 0.0)
            state = "stall"
        elif what == 4:
            to_far = position >= target or round(position) % far.every == 0
            if near and position < target:
                ram_draining.append((now + near.drain_seconds, position))
            state, following = "run", min(position + 1, target)
            if position >= target and not store.stops:
                return now, position * tau, rework, skipped, written + (round(position) % far.every == 0)
            if to_far and "save" in flows:
                skipped += 1
            elif to_far:
                written += 1
                flows["save"] = [store.save_bytes / store.write, min(1.0, store.save_cap / store.write), position]
                if store.stops:
                    stop_reading()
                    state = "sync"
        elif what == 5:
            flow = flows.pop(first)
            if first == "save":
                disk = [*disk, flow[2]][-far.keep :]
                if state == "sync":
                    if flow[2] >= target:
                        return now, position * tau, rework, skipped, written
                    state = "run"
            elif first == "restore":
                state = "run"
            elif first == "data":
                empty, unread = 0, 0.0
        elif what == 6:
            _, kind, job = heapq.heappop(clock)
            other = store.others[job]
            size, cap = other.save_bytes, other.cap_bytes_per_second
            if kind == "save":
                if ("w", job) not in flows and ("r", job) not in flows:
                    flows["w", job] = [size / store.write, min(1.0, cap / store.write)]
                heapq.heappush(clock, (now + other.every_seconds, "save", job))
            else:
                flows.pop(("w", job), None)
                flows["r", job] = [size / store.read, min(1.0, cap / store.read)]
                heapq.heappush(clock, (now + random.exponential(other.mtbf_seconds), "fail", job))
        else:
            storms.remove(now)
            for job, other in enumerate(store.others):
                flows.pop(("w", job), None)
                flows["r", job] = [other.save_bytes / store.read, min(1.0, other.cap_bytes_per_second / store.read)]


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
    often = pick(1.0, 4.0) / (5 * DAY)
    failures = (
        Failure(component="software", rate_per_second=10 * often, lost_nodes=0, per="job"),
        Failure(component="node", rate_per_second=15 * often, per="job"),
        Failure(component="power", rate_per_second=3 * often, lost_nodes=0, outage_seconds=900.0, per="job"),
    )
    faults = Faults(
        name="x", failures=failures, detection_seconds=30.0, restart_seconds=120.0, repair_seconds=0.2 * DAY,
        repair_law="fixed", spares=pick(2, 50), corrupt_checkpoints=pick(0.0, 0.2), rate_spread=0.0,
    )  # fmt: skip
    return RunSetup(
        step_seconds=interval / 10, num_steps=pick(3007, 10**7), tokens_per_step=1, interval_steps=10,
        tiers=(near, far) if played.tier else (far,), faults=faults, num_gpus=512, num_nodes=64, replica_nodes=4,
        slow=pick({}, {"power cap": 0.9}), played=played, horizon_seconds=5 * DAY, checkpoint_bytes=played.save_bytes,
    )  # fmt: skip


@pytest.mark.parametrize("block", range(4))
def test_equal_to_a_loop_in_which_every_transfer_is_an_event(block):
    for seed in range(25 * block, 25 * block + 25):
        setup = policy(seed)
        found = simulate_run(setup, seed)
        wall, useful, rework, skipped, written = loop(setup, seed)
        seen = (found.wall_seconds, found.useful_seconds, found.lost_seconds["rework"])
        assert seen == pytest.approx((wall, useful, rework), abs=1e-4), seed
        assert found.skipped_saves == skipped, seed
        assert found.checkpoint_bytes["disk"] / found_size(setup) == pytest.approx(written), seed
        booked = found.useful_seconds + math.fsum(found.lost_seconds.values())
        assert booked == pytest.approx(found.wall_seconds, abs=1e-5), seed
        assert min(found.lost_seconds.values()) > -1e-5, seed


def found_size(setup):
    return setup.checkpoint_bytes


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
    mean = np.mean([play_storage((own, *others), 1e9, 1e9, seed=seed)[0].read_seconds for seed in range(8)])
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
        for outcome in (simulate_run(setup, seed) for seed in range(8))
    ]
    assert mean > 1.3 * 60.0
    assert np.mean(loads) == pytest.approx(mean, rel=0.08)
