"""How far predictions for this machine are from runs on it: many layouts, each predicted before it runs.

    python tests/benchmarks/layout_accuracy.py predict MACHINE.yaml FOLDER   # plans of all layouts
    python tests/benchmarks/layout_accuracy.py run FOLDER --budget 150       # as many as fit; again until all have run
    python tests/benchmarks/layout_accuracy.py table FOLDER

``headway calibrate -o MACHINE.yaml`` comes first, in the same sitting. Ranks beyond the cores are told, not judged.
Where others used the cores, CPU time is judged. ``--wall`` judges wall time all the same: for runs with a real-time
priority (``chrt --rr 1``), beside which others get what is idle. A nice value does not do that where the kernel groups
processes by session (/proc/sys/kernel/sched_autogroup_enabled).
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from planner.plan import read_plan, write_plan
from planner.planning import plan as make_plan
from reports.comparison import Comparison, compare
from runtime.job import run_plan
from runtime.measurement import write_measurement
from scenarios.layout import Layout
from scenarios.scenario import Scenario, load_scenario
from simulator.outcome import read_measurement
from topologies.errors import HeadwayError

STEPS = 8
"""Two of them warm up."""
PER_RUN_SECONDS = 30.0
"""No run is begun with less of the budget left."""
SP = {"sequence_parallel": True}
DENSE: dict[str, dict[str, Any]] = {
    **{
        f"dp2-{sharding}-mb{size}": {"dp": 2, "optimizer_sharding": sharding, "micro_batch_size": size}
        for sharding in ("none", "zero1", "zero2", "zero3")
        for size in (1, 4)
    },
    "dp2-none-mb4-full": {"dp": 2, "optimizer_sharding": "none", "micro_batch_size": 4, "recompute": "full"},
    "dp2-zero3-mb2-full": {"dp": 2, "optimizer_sharding": "zero3", "micro_batch_size": 2, "recompute": "full"},
    **{f"tp2-mb{size}": {"tp": 2, "micro_batch_size": size} for size in (1, 2, 4)},
    **{f"tp2-sp-mb{size}": {"tp": 2, "micro_batch_size": size, **SP} for size in (1, 4)},
    "tp2-mb4-full": {"tp": 2, "micro_batch_size": 4, "recompute": "full"},
    "tp2-sp-mb2-full": {"tp": 2, "micro_batch_size": 2, "recompute": "full", **SP},
    **{f"pp2-1f1b-mb{size}": {"pp": 2, "micro_batch_size": size} for size in (1, 2)},
    "pp2-gpipe-mb1": {"pp": 2, "schedule": "gpipe"},
    "pp2-1f1b-mb1-full": {"pp": 2, "recompute": "full"},
    "pp2-interleaved-mb1": {"pp": 2, "vpp": 2, "schedule": "interleaved"},
}
MOE: dict[str, dict[str, Any]] = {
    "moe-dp2-zero1-mb4": {"dp": 2, "micro_batch_size": 4},
    "moe-dp2-ep2-mb1": {"dp": 2, "ep": 2},
    "moe-dp2-ep2-mb4": {"dp": 2, "ep": 2, "micro_batch_size": 4},
    "moe-tp2-ep2-sp-mb2": {"tp": 2, "ep": 2, "micro_batch_size": 2, **SP},
    "moe-pp2-1f1b-mb2": {"pp": 2, "micro_batch_size": 2},
}
CROWDED: dict[str, dict[str, Any]] = {
    "tp2-dp2-zero1-mb2": {"tp": 2, "dp": 2, "micro_batch_size": 2},
    "pp2-dp2-zero1-mb1": {"pp": 2, "dp": 2},
    "tp2-pp2-mb1": {"tp": 2, "pp": 2},
    "dp4-zero3-mb2": {"dp": 4, "optimizer_sharding": "zero3", "micro_batch_size": 2},
}
"""Four ranks."""


def on(machine: Path, ranks: int, name: str = "laptop") -> Scenario:
    """A scenario for a laptop with half its batch, on the measured machine with so many ranks."""
    overrides = [f"cluster={machine.resolve()}", "job.global_batch_size=8"]
    scenario = load_scenario(name, overrides=overrides)
    cluster = scenario.cluster
    crowd = ranks / cluster.num_gpus
    if crowd <= 1:
        return scenario
    together = cluster.scale_up.model_copy(update={"domain_size": ranks})
    node = cluster.node.model_copy(update={"gpus_per_node": ranks, "scale_up": together})
    pool = cluster.pools[0].model_copy(update={"node": node})
    crowded = cluster.model_copy(update={"pools": (pool,), "oversubscribed_cores": crowd})
    return scenario.model_copy(update={"cluster": crowded})


def predict(machine: Path, folder: Path) -> None:
    """Write a plan of every layout, and the one that the planner chooses."""
    folder.mkdir(parents=True, exist_ok=True)
    for layouts, ranks, shipped in ((DENSE, 2, "laptop"), (MOE, 2, "laptop-moe"), (CROWDED, 4, "laptop")):
        scenario = on(machine, ranks, shipped)
        for name, fields in layouts.items():
            pins = Layout(**{"optimizer_sharding": "zero1", **fields}).model_dump(exclude={"stages", "rank_order"})
            try:
                write_plan(make_plan(scenario, pins=pins, top=0), folder / f"{name}.plan.json")
            except HeadwayError as error:
                sys.stderr.write(f"{name}: {error}\n")
    write_plan(make_plan(on(machine, 2), pins={"cp": 1}, top=5), folder / "chosen.plan.json")


def run(folder: Path, budget_seconds: float) -> None:
    """Run what has not run yet, while the budget lasts; the planner's choice first."""
    end = time.monotonic() + budget_seconds
    for file in sorted(folder.glob("*.plan.json"), key=lambda one: (one.stem != "chosen.plan", one.name)):
        target = folder / file.name.replace(".plan.", ".run.")
        if target.exists():
            continue
        if time.monotonic() + PER_RUN_SECONDS > end:
            return
        try:
            write_measurement(run_plan(read_plan(file), steps=STEPS, timeout_seconds=PER_RUN_SECONDS * 4), target)
        except HeadwayError as error:
            sys.stderr.write(f"{file.stem}: {error}\n")


def table(folder: Path, *, wall: bool = False) -> str:
    """All rows, the median of the errors, and how good the planner's choice was."""
    found: dict[str, Comparison] = {}
    for file in sorted(folder.glob("*.run.json")):
        plan = read_plan(folder / file.name.replace(".run.", ".plan."))
        found[file.name.removesuffix(".run.json")] = compare(plan, read_measurement(file))
    lines = ["layout                  predicted   measured        CPU   error of the step (contended: of the CPU time)"]
    judged = {}
    for name, one in sorted(found.items(), key=lambda item: (item[0] in CROWDED, item[0])):
        by_cpu = one.contended and not wall
        error = float(one.error["cpu_seconds" if by_cpu else "step_seconds"] or 0.0)
        note = " (CPU time)" if by_cpu else ""
        note += " (4 ranks: told, not judged)" if name in CROWDED else ""
        if name not in CROWDED and name != "chosen":
            judged[name] = error
        seconds = [
            float(one.predicted["step_seconds"] or 0.0),
            measured(one),
            float(one.measured["cpu_seconds"] or 0.0),
        ]
        lines.append(f"{name:22}" + "".join(f"{value:9.3f} s" for value in seconds) + f"{error:+9.1%}{note}")
    if DENSE.keys() & judged.keys():
        errors = [abs(error) for error in judged.values()]
        bias = statistics.median(judged.values())
        lines.append(
            f"{len(errors)} layouts: median error {statistics.median(errors):.1%}, worst {max(errors):.1%}, "
            f"median with sign {bias:+.1%}"
        )
        best = min(DENSE.keys() & judged.keys(), key=lambda name: measured(found[name]))
        if "chosen" in found:
            lines.append(
                f"the planner's choice took {measured(found['chosen']):.3f} s, "
                f"the fastest layout {measured(found[best]):.3f} s ({best})"
            )
    return "\n".join(lines)


def measured(comparison: Comparison) -> float:
    """Median seconds of a step."""
    return float(comparison.measured["step_seconds"] or 0.0)


def main() -> None:
    """One of the three commands."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    predicting = commands.add_parser("predict")
    predicting.add_argument("machine", type=Path)
    predicting.add_argument("folder", type=Path)
    running = commands.add_parser("run")
    running.add_argument("folder", type=Path)
    running.add_argument("--budget", type=float, default=150.0)
    telling = commands.add_parser("table")
    telling.add_argument("folder", type=Path)
    telling.add_argument("--wall", action="store_true")
    asked = parser.parse_args()
    if asked.command == "predict":
        predict(asked.machine, asked.folder)
    elif asked.command == "run":
        run(asked.folder, asked.budget)
    else:
        sys.stdout.write(table(asked.folder, wall=asked.wall) + "\n")


if __name__ == "__main__":
    main()
