"""Many variants of one scenario: every combination of some values, each planned or as pinned, and played if asked."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Sequence
from itertools import product
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

from planner.pins import parse_pins
from planner.plan import refuse_unequal
from planner.planning import plan as make_plan
from planner.planning import scenario_pins
from scenarios.layout import Layout
from scenarios.scenario import Scenario, load_scenario
from simulator.run_answers import answer as played_answer
from simulator.step import predict_step
from simulator.whole_runs import whole_run
from topologies.document import InputFile
from topologies.errors import Infeasible, InputError

MOST_POINTS = 2_000
"""A grid larger than this is a mistake more often than a question."""


def parse_vary(texts: Sequence[str]) -> dict[str, list[Any]]:
    """Read ``key.path=[value, value]`` texts.

    Raises:
        InputError: not of that form, no list, an empty one, or a key that is given twice.
    """
    found: dict[str, list[Any]] = {}
    for text in texts:
        key, separator, value = text.partition("=")
        key = key.strip()
        try:
            values = YAML(typ="safe").load(value) if separator else None
        except YAMLError:
            values = None
        if not key or not isinstance(values, list) or not values:
            raise InputError(
                f"{text!r} is not of the form key.path=[value, value]",
                hint="for example --vary 'faults.spares=[8, 16]'",
                file="--vary",
            )
        if key in found:
            raise InputError("is varied twice", hint="put all values into one list", file="--vary", key=key)
        found[key] = values
    points = 1
    for values in found.values():
        points *= len(values)
    if points > MOST_POINTS:
        raise InputError(f"asks for {points} points, more than {MOST_POINTS}", hint="vary fewer values", file="--vary")
    return found


def sweep(
    name: str,
    vary: dict[str, list[Any]],
    *,
    pins: Sequence[str] = (),
    overrides: Sequence[str] = (),
    runs: int | None = None,
    seed: int = 0,
    jobs: int = 1,
    inputs: list[InputFile] | None = None,
    tell: Callable[[str], None] | None = None,
) -> list[dict[str, Any]]:
    """Answer every combination of the values; the last key varies fastest.

    All points see the same failures (common random numbers), so differences between rows are sharper than rows.

    Args:
        name: scenario, by path or shipped name.
        vary: values by key of the scenario.
        pins: ``tp=8`` texts that fix fields of the layout; a layout with ``dp`` is taken as it is, others are planned.
        overrides: ``key=value`` texts for all points.
        runs: whole runs to play at each point; None: closed forms only.
        seed: of the runs.
        jobs: processes.
        inputs: receives the files that were read for the first point.
        tell: is given a line for each point that is done.

    Returns:
        one row a point: the values, then the answer, or ``infeasible`` with the reason.

    Raises:
        InputError: a key or value that no scenario takes.
    """
    rows = []
    points = list(product(*vary.values()))
    for number, values in enumerate(points, start=1):
        point = dict(zip(vary, values, strict=True))
        changes = [*overrides, *(f"{key}={json.dumps(value)}" for key, value in point.items())]
        scenario = load_scenario(name, overrides=changes, inputs=inputs if number == 1 else None)
        try:
            answer = _answer(scenario, pins, runs, seed, jobs)
        except Infeasible as refusal:
            answer = {"infeasible": str(refusal)}
        rows.append(point | answer)
        if tell is not None:
            tell(f"{number}/{len(points)} " + ", ".join(f"{key}={value}" for key, value in point.items()))
    return rows


def _answer(scenario: Scenario, pins: Sequence[str], runs: int | None, seed: int, jobs: int) -> dict[str, Any]:
    fixed = scenario_pins(scenario)
    fixed |= parse_pins(pins, fixed)
    if "dp" in fixed:
        layout, checkpoint = Layout.model_validate(fixed), None
        _check_fits(scenario, layout)
    else:
        made = make_plan(scenario, pins=fixed, top=0)
        refuse_unequal(made, "headway sweep")
        layout, checkpoint = made.layout, made.checkpoint
    step = predict_step(scenario.cluster, scenario.job, layout)
    run = whole_run(scenario, layout, step.total_seconds, step=step, planned=checkpoint)
    goodput = run.setup.expected_goodput()
    useful = run.setup.work_seconds
    row = {
        "layout": layout.label(),
        "gpus": layout.world_size,
        "step_seconds": step.total_seconds,
        "mfu": step.mfu,
        "checkpoint_interval_seconds": run.policy.interval_seconds,
        "goodput": goodput,
        "days": useful / goodput / 86_400 if goodput > 0 else None,
    }
    if runs is not None:
        content = played_answer(run, runs, seed, jobs)
        row |= {"simulated_goodput": content["goodput"], "simulated_seconds": content["wall_seconds"]}
        row |= {key: content[key] for key in ("cost_usd", "energy_kwh") if content.get(key)}
        row |= {"waiting_seconds": content["lost_seconds"]["waiting"], "runs": runs, "seed": seed}
    return row


def _check_fits(scenario: Scenario, layout: Layout) -> None:
    if layout.world_size > scenario.cluster.num_gpus:
        raise Infeasible(
            f"layout {layout.label()} on {scenario.cluster.name}",
            needed=f"{layout.world_size} GPUs",
            available=str(scenario.cluster.num_gpus),
        )
    try:
        layout.num_microbatches(scenario.job)
    except ValueError as error:
        raise Infeasible(f"layout {layout.label()}: {error}") from None


def rows_csv(rows: Sequence[dict[str, Any]]) -> str:
    """The rows as a table; of a spread the mean, and its quantiles in columns of their own."""
    flat = []
    for row in rows:
        cells: dict[str, Any] = {}
        for key, value in row.items():
            if isinstance(value, dict):
                cells |= {f"{key}_{name}": value[name] for name in ("mean", "p10", "p50", "p90")}
            else:
                cells[key] = value
        flat.append(cells)
    columns = list(dict.fromkeys(key for cells in flat for key in cells))
    out = io.StringIO()
    writer = csv.DictWriter(out, columns, restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows(flat)
    return out.getvalue()
