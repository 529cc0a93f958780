"""How long whole runs take with every feature on; prints, asserts nothing about time."""

import time

import pytest

from scenarios.faults import Elastic, Failure, Faults, Lemons, Maintenance, Manual, Stragglers
from simulator.ensemble import simulate_runs
from simulator.run import simulate_run
from simulator.run_setup import RunSetup
from simulator.tiers import SURVIVES, SaveTier

DAY = 86400.0
COUNTS = {
    "faulty GPU": 148, "HBM3": 72, "software": 54, "switch": 35, "host": 32, "SRAM": 19, "processor": 17, "NIC": 7,
    "watchdog": 7, "corruption": 6, "thermal": 6, "SSD": 3, "PSU": 3, "chassis": 2, "IO board": 2, "dependency": 2,
    "CPU": 2, "memory": 2,
}  # fmt: skip
"""arXiv 2407.21783, table 5: 419 stops in 54 days on 16,384 GPUs."""
SPECIAL = {
    "software": {"lost_nodes": 0}, "watchdog": {"lost_nodes": 0}, "dependency": {"lost_nodes": 0},
    "switch": {"lost_nodes": 2}, "corruption": {"poisoned_seconds": 3600.0, "detection_seconds": 300.0},
    "NIC": {"burst_share": 0.3},
}  # fmt: skip


def everything(gpus, days, stops_per_day):
    """Three tiers, 18 kinds of failures, lemons, stragglers, maintenance, elastic, spares, standbys, people."""
    failures = tuple(
        Failure(component=name, rate_per_second=count / 419 * stops_per_day / DAY, per="job", **SPECIAL.get(name, {}))
        for name, count in COUNTS.items()
    )
    faults = Faults(
        name="everything", failures=failures, detection_seconds=60, diagnosis_seconds=30,
        restart_phases={"requeue": 60.0, "rendezvous": 120.0, "warm-up": 120.0}, repair_seconds=2 * DAY,
        spares=24 if gpus < 50_000 else 200, standbys=4, elastic=Elastic(reconfigure_seconds=200.0),
        stragglers=Stragglers(rate_per_second=1 / DAY / 2048, speed=0.7, lasts_seconds=14400.0, found_seconds=1800.0),
        maintenance=Maintenance(every_seconds=54 / 47 * DAY, takes_seconds=1800.0),
        lemons=Lemons(share=0.02, factor=10), corrupt_checkpoints=0.01, in_job_restart_seconds=120.0,
        manual=Manual(share=0.01, takes_seconds=3600.0),
    )  # fmt: skip
    kinds = (
        ("peer-memory", 1, 0.6, 20.0, 30.0, 2),
        ("parallel-file-system", 4, 0.0, 60.0, 90.0, 8),
        ("object-store", 72, 0.0, 300.0, 600.0, 10**6),
    )
    tiers = tuple(
        SaveTier(
            name=kind, every=every, stall_seconds=stall, drain_seconds=drain, load_seconds=load,
            survives=SURVIVES[kind], keep=keep,
        )
        for kind, every, stall, drain, load, keep in kinds
    )  # fmt: skip
    return RunSetup(
        step_seconds=5.0, num_steps=10**8, tokens_per_step=16_000_000, interval_steps=60, tiers=tiers, faults=faults,
        num_gpus=gpus, num_nodes=gpus // 8, replica_nodes=16, horizon_seconds=days * DAY,
    )  # fmt: skip


@pytest.mark.parametrize(("gpus", "days", "stops_per_day"), [(16_384, 54, 419 / 54), (100_000, 90, 80)])
def test_one_run(gpus, days, stops_per_day):
    setup = everything(gpus, days, stops_per_day)
    times, stops = [], []
    for seed in range(15):
        began = time.process_time()
        outcome = simulate_run(setup, seed)
        times.append(time.process_time() - began)
        stops.append(sum(outcome.failures.values()))
    times.sort()
    print(  # noqa: T201
        f"\n{gpus:,} GPUs, {days} days, every feature: best {1e3 * times[0]:.1f} ms, median {1e3 * times[7]:.1f} ms, "
        f"of CPU time, {sum(stops) / len(stops):.0f} failures"
    )


def test_a_thousand_runs():
    setup = everything(16_384, 54, 419 / 54)
    for jobs in (1, 2):
        began = time.perf_counter()
        simulate_runs(setup, 1000, 1, jobs)
        print(f"\n1,000 runs of 54 days on {jobs} process(es): {time.perf_counter() - began:.1f} s")  # noqa: T201
