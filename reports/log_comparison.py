"""The promise of a plan beside the log of another trainer."""

from __future__ import annotations

from pathlib import Path

from planner.plan import Plan
from reports.comparison import Comparison, compare, promised, relative_error
from simulator.logs.against import choose_run, hold_against
from simulator.logs.reading import is_measurement, read_logs
from simulator.outcome import read_measurement
from topologies.errors import InputError


def compare_file(plan: Plan, path: str | Path, *, force: bool = False) -> Comparison:
    """Hold what a file shows against a plan: a measurement of ``headway run``, or the log of another trainer.

    Raises:
        InputError: neither of them, of another run and ``force`` is off, or without a steady iteration.
    """
    if is_measurement(path):
        return compare(plan, read_measurement(path), force=force)
    return compare_log(plan, path, force=force)


def compare_log(plan: Plan, path: str | Path, *, force: bool = False) -> Comparison:
    """Hold the log of a Megatron, torchtitan, NeMo ... run against a plan of that run.

    What the log does not state is taken from the plan and said in a note. The measured MFU counts FLOPs as headway
    does, over the dense peak of the plan's GPU, whatever the log prints.

    Raises:
        InputError: unreadable, no log, no steady iteration, or sizes of another run and ``force`` is off.
    """
    scenario, layout = plan.scenario, plan.layout
    cluster, job = scenario.cluster, scenario.job
    log = choose_run(read_logs(path), cluster, job, layout, path)
    run = hold_against(log, cluster, job, layout, accept_unsteady=force, file=path)
    if run.contradictions and not force:
        raise InputError(
            f"the log is of another run than the plan: {'; '.join(run.contradictions)}",
            hint="give the plan of that run, or compare all the same with --force",
            file=path,
        )
    predicted = promised(plan)
    low, high = float(predicted["step_seconds_low"] or 0), float(predicted["step_seconds_high"] or 0)
    notes = [f"another run, compared because of --force: {one}" for one in run.contradictions]
    if run.mfu is None:
        notes.append(
            f"no MFU: the dense peak of {cluster.gpu.name} at {job.precision} is unknown or not that of the run"
        )
    return Comparison(
        layout=layout.label(),
        predicted=predicted,
        measured={
            "step_seconds": run.step_seconds,
            "step_seconds_p10": run.step_seconds_p10,
            "step_seconds_p90": run.step_seconds_p90,
            "mfu": run.mfu,
            "tokens_per_second_per_gpu": run.tokens_per_second_per_gpu,
            "memory_bytes": run.memory_bytes,
            "reported_tflops_per_gpu": run.reported_tflops_per_gpu,
        },
        error={
            "step_seconds": relative_error(predicted["step_seconds"], run.step_seconds),
            "mfu": relative_error(predicted["mfu"], run.mfu),
            "memory": relative_error(predicted["memory_bytes"], run.memory_bytes),
        },
        phases={},
        within_band=low <= run.step_seconds <= high,
        contended=False,
        same_plan=not run.contradictions,
        same_world_size=log.gpus in (None, layout.world_size),
        notes=(*notes, *run.notes),
        remarks=(),
        source=f"{log.format} log, {len(log.steady or log.steps)} of {len(log.steps)} iterations",
    )
