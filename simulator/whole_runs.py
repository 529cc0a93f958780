"""From a scenario with a layout to whole runs: data path, power, checkpoints, setup, and what is told about them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from scenarios.layout import Layout
from scenarios.operations import CheckpointMode
from scenarios.scenario import Scenario
from simulator.busy_storage import played_storage
from simulator.checkpoint_policy import policy_of
from simulator.checkpoints import CheckpointPolicy, choose_interval
from simulator.ensemble import Backend, simulate_runs
from simulator.outcome import RunOutcome, StepTime, plain
from simulator.power import Bill, NodePower, billed, node_power, power_json
from simulator.run_setup import RunSetup, run_setup
from simulator.storage import DataPath, bandwidth_estimates, data_path


@dataclass(frozen=True, slots=True, kw_only=True)
class WholeRun:
    """A run that is ready to be played, and the parts that it was made of."""

    scenario: Scenario
    setup: RunSetup
    policy: CheckpointPolicy
    data: DataPath
    power: NodePower
    bill: Bill
    layout: Layout
    step: StepTime | None


def whole_run(
    scenario: Scenario,
    layout: Layout,
    step_seconds: float,
    *,
    step: StepTime | None = None,
    mode: CheckpointMode | None = None,
    interval_steps: int | None = None,
    planned: Mapping[str, Any] | None = None,
) -> WholeRun:
    """Make a run of a scenario with this layout.

    Args:
        scenario: with faults, prices, checkpoint and data.
        layout: complete.
        step_seconds: of one step undisturbed.
        step: its parts, for the power of a node.
        mode: pins the checkpoints' mode.
        interval_steps: pins their interval.
        planned: the ``checkpoint`` of a plan, whose policy and spares are taken as they are.
    """
    if planned and scenario.faults.spares is None and planned.get("spares") is not None:
        faults = scenario.faults.model_copy(update={"spares": planned["spares"]})
        scenario = scenario.model_copy(update={"faults": faults})
    cluster, job, faults = scenario.cluster, scenario.job, scenario.faults
    nodes = math.ceil(layout.world_size / cluster.node.gpus_per_node)
    data = data_path(cluster, scenario.data, job.tokens_per_step / step_seconds, nodes)
    power = node_power(cluster, step, nodes)
    policy = policy_of(planned or {}) or choose_interval(
        cluster,
        job,
        layout,
        faults,
        step_seconds,
        mode=mode,
        interval_steps=interval_steps,
        wish=scenario.checkpoint,
        data_share=data.storage_share,
    )
    played = played_storage(scenario, layout, policy, data)
    lasting = {"data": 1.0 if played and played.data and not data.cached else data.speed, "power cap": power.speed}
    slow = {name: speed for name, speed in lasting.items() if speed < 1}
    setup = run_setup(cluster, job, layout, faults, policy, step_seconds, slow=slow, played=played)
    bill = Bill(
        power=power,
        nodes=nodes,
        spares=(faults.spares or 0) + faults.standbys,
        gpus_per_node=cluster.node.gpus_per_node,
        pue=cluster.power.pue,
        prices=scenario.prices,
    )
    return WholeRun(
        scenario=scenario, setup=setup, policy=policy, data=data, power=power, bill=bill, layout=layout, step=step
    )


def play(
    run: WholeRun,
    runs: int,
    seed: int,
    jobs: int,
    *,
    first_run: int = 0,
    backend: Backend = "processes",
    tell: Callable[[int], None] | None = None,
) -> tuple[RunOutcome, ...]:
    """Play runs and write their bills."""
    played = simulate_runs(run.setup, runs, seed, jobs, first_run=first_run, backend=backend, tell=tell)
    return tuple(billed(outcome, run.bill) for outcome in played)


def known(run: WholeRun) -> dict[str, Any]:
    """What is told about the runs and does not depend on luck, as plain data."""
    setup, policy = run.setup, run.policy
    mtbf = setup.mtbf_seconds
    window = policy.interval_seconds * max((level.every for level in policy.levels), default=1)
    estimates = bandwidth_estimates(run.scenario.model.num_params, policy.bytes, window, mtbf)
    return {
        "scenario": run.scenario.name,
        "layout_label": run.layout.label(),
        "customary_length": run.scenario.job.target_tokens is None,
        "analytic": {
            "goodput": setup.expected_goodput(),
            "optimum_interval_seconds": policy.optimum_interval_seconds,
            "leaves_out": analytic_gaps(setup),
        },
        "rate_spread": setup.faults.rate_spread if setup.sources else 0.0,
        "step_seconds": setup.step_seconds,
        "num_steps": setup.num_steps,
        "checkpoint": policy.as_json(),
        "mtbf_seconds": None if math.isinf(mtbf) else mtbf,
        "storage": {"write_bytes_per_second": estimates, "write_seconds": policy.write_seconds},
        "data": _finite(plain(run.data)),
        "power": power_json(run.bill),
        "not_modelled": not_modelled(setup),
    }


def _finite(content: dict[str, Any]) -> dict[str, Any]:
    return {key: None if value == math.inf else value for key, value in content.items()}


def analytic_gaps(setup: RunSetup) -> list[str]:
    """What the closed form leaves out or only approximates for this run: reasons why the simulation may differ."""
    faults, found = setup.faults, setup.sources
    gaps = [
        (faults.rate_spread > 0 and bool(found), "rates that differ from run to run (it takes their mean)"),
        (faults.spares is not None, "spares and repair shop full and empty at the start (it takes the long run)"),
        (faults.elastic is not None, "restarts to shrink and to grow, and waiting for the first replica"),
        (faults.repair_crews is not None, "the queue for the repair crews"),
        (faults.corrupt_checkpoints > 0, "corrupt checkpoints"),
        (faults.lemons is not None, "lemons that are found and retired"),
        (bool(faults.wrong_diagnoses or faults.failed_repairs), "when nodes that are still broken fail again"),
        (len(set(faults.spares_shared_with) | {setup.num_nodes}) > 1, "jobs of unequal size that share the spares"),
        (setup.played is not None, "how long single transfers on the shared storage take (it takes their mean)"),
        (faults.trace is not None, "the times of recorded events"),
        (any(one.burst_share for one in found), "bursts"),
        (any(one.shape != 1 for one in found), "lives that are not exponential"),
        (any(one.notice_seconds for one in found), "saves on notice"),
        (any(one.poisoned_seconds for one in found), "rollbacks beyond the mean poisoned work"),
        (len(setup.tiers) > 2, "the archive"),
        (setup.work_seconds < 20 * setup.interval_seconds, "a run of few intervals"),
        (_without_refuge(setup), "failures that no tier of checkpoints outlives: the run starts again"),
    ]
    return [reason for applies, reason in gaps if applies]


def _without_refuge(setup: RunSetup) -> bool:
    return any(all(one.loss not in tier.survives for tier in setup.tiers) for one in setup.sources)


def not_modelled(setup: RunSetup) -> list[str]:
    """What a reader should know to be missing, or assumed for want of a figure."""
    faults, found = setup.faults, []
    if not faults.wrong_diagnoses and any(one.lost_nodes for one in setup.sources):
        found.append("wrong diagnoses: none are stated")
    if not faults.failed_repairs and faults.spares is not None:
        found.append("repairs that fail: none are stated")
    if faults.spares is not None and not faults.spares_shared_with:
        found.append("other jobs that take from the same spares: none are stated")
    if setup.faults.spares is None and setup.sources:
        found.insert(0, "waiting for spares: none are stated, so one is always at hand")
    return found
