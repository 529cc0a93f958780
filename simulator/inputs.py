"""What a simulation starts from: a plan file, or a scenario whose layout is pinned.

The simulator stands below the planner and knows a plan only by the stable keys of its file.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from ruamel.yaml.comments import CommentedMap

from scenarios.job import Job
from scenarios.layout import Layout
from scenarios.scenario import Scenario, load_scenario
from simulator.rank_places import placed_gpus
from simulator.schedule import schedule_complaint
from topologies.document import DocumentT, InputFile, apply_override, explain
from topologies.errors import Infeasible, InputError
from topologies.link_map import Ints
from topologies.result_file import read_result_file

PLAN_COMMAND = "headway plan SCENARIO -o plan.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """A job on a cluster with a complete layout."""

    scenario: Scenario
    layout: Layout
    checkpoint: Mapping[str, Any] | None
    """The ``checkpoint`` of a plan; None for a scenario."""
    inputs: tuple[InputFile, ...]
    placement: Mapping[str, Any] | None = None
    """The ``placement`` of a plan; None for a scenario."""

    def gpus(self) -> Ints | None:
        """Return the GPU of each rank as the plan places them; None: ranks stand on GPUs in their order."""
        try:
            return placed_gpus(self.layout, self.scenario.cluster.node.gpus_per_node, self.placement)
        except ValueError as error:
            raise InputError(str(error), hint="make the plan again", key="placement.node_numbers") from None


def read_subject(name: str, *, pins: Sequence[str] = (), overrides: Sequence[str] = ()) -> Subject:
    """Read a plan file or a scenario (by path or shipped name).

    Args:
        name: a JSON file with a ``format_version`` is a plan, anything else a scenario.
        pins: ``tp=8`` texts that fix fields of the layout.
        overrides: ``key.path=value`` texts that change the scenario.

    Raises:
        InputError: unreadable or invalid files, unknown keys, or a scenario without a complete layout.
        Infeasible: the layout cannot run this job on this cluster.
    """
    for pin in pins:
        if "=" not in pin:
            raise InputError(f"{pin!r} is not of the form field=value", hint="for example --pin tp=8", file="--pin")
    subject = (
        _from_plan(Path(name), pins, overrides) if _looks_like_plan(name) else _from_scenario(name, pins, overrides)
    )
    _check_layout(subject.scenario, subject.layout)
    return subject


def _looks_like_plan(name: str) -> bool:
    try:
        with Path(name).open("rb") as stream:
            start = stream.read(4096)
    except OSError:
        return False
    return start.lstrip().startswith(b"{") and b'"format_version"' in start


def _from_plan(path: Path, pins: Sequence[str], overrides: Sequence[str]) -> Subject:
    content = read_result_file(path, kind="plan", command=PLAN_COMMAND)
    for key in ("scenario", "layout", "checkpoint"):
        if not isinstance(content.get(key), dict):
            raise InputError("is missing", hint="make the plan again", file=path, key=key)
    if content.get("replicas"):
        raise InputError(
            "replicas run different numbers of micro-batches on different GPUs, and the simulation plays all alike",
            hint="the plan's own step is played already; simulate one pool as a cluster of its own",
            file=path,
            key="replicas",
        )
    scenario = _validated(Scenario, content["scenario"], path)
    if overrides:
        raw = CommentedMap(scenario.model_dump(mode="json", by_alias=True))
        for override in overrides:
            apply_override(raw, override)
        scenario = _validated(Scenario, raw, path)
    raw_layout = CommentedMap({key: value for key, value in content["layout"].items() if key != "num_microbatches"})
    for pin in pins:
        apply_override(raw_layout, pin)
    if any(pin.split("=")[0].strip() in {"pp", "vpp", "recompute"} for pin in pins):
        raw_layout["stages"] = []
    used = InputFile(path=str(path), sha256=hashlib.sha256(path.read_bytes()).hexdigest())
    return Subject(
        scenario=scenario,
        layout=_validated(Layout, raw_layout, path),
        checkpoint=content["checkpoint"] if not pins and not overrides else None,
        placement=content.get("placement") if not pins and not overrides else None,
        inputs=(used,),
    )


def _from_scenario(name: str, pins: Sequence[str], overrides: Sequence[str]) -> Subject:
    inputs: list[InputFile] = []
    scenario = load_scenario(name, overrides=[*overrides, *(f"layout.{pin}" for pin in pins)], inputs=inputs)
    kinds = scenario.cluster.kinds
    if len(kinds) > 1:
        raise InputError(
            f"the cluster holds {' and '.join(kinds)}, and one layout for all would be played as if all were the first",
            hint="'headway plan' shares the batch between them; simulate one pool as a cluster of its own",
            file=name,
            key="cluster.pools",
        )
    pinned = scenario.layout.model_dump(exclude_none=True)
    if "dp" not in pinned:
        raise InputError(
            "the scenario leaves the layout open",
            hint="run 'headway plan' first and simulate its plan, or pin dp (degrees that are not pinned are 1)",
            file=name,
            key="layout",
        )
    return Subject(scenario=scenario, layout=Layout.model_validate(pinned), checkpoint=None, inputs=tuple(inputs))


def _validated(model: type[DocumentT], content: Any, path: Path) -> DocumentT:
    try:
        return model.model_validate(content)
    except ValidationError as error:
        raise explain(error, model, path, content) from None


def _check_layout(scenario: Scenario, layout: Layout) -> None:
    """Refuse what no simulation can play; the planner's rules say more."""
    cluster, job = scenario.cluster, scenario.job
    if layout.world_size > cluster.num_gpus:
        raise Infeasible(
            f"layout {layout.label()} on {cluster.name}",
            needed=f"{layout.world_size} GPUs",
            available=f"{cluster.num_gpus}",
            relax=("smaller degrees", "a larger cluster"),
        )
    complaint = _count_complaint(job, layout) or _stage_complaint(job, layout)
    if complaint is None:
        complaint = schedule_complaint(layout.schedule, layout.pp, layout.vpp, layout.num_microbatches(job))
    if complaint is not None:
        raise Infeasible(f"layout {layout.label()}: {complaint}", relax=("another --pin",))


def _count_complaint(job: Job, layout: Layout) -> str | None:
    try:
        layout.num_microbatches(job)
    except ValueError as error:
        return str(error)
    return None


def _stage_complaint(job: Job, layout: Layout) -> str | None:
    slots, held = layout.pp * layout.vpp, sum(stage.layers for stage in layout.stages)
    if layout.pp > job.model.num_layers:
        return f"pp {layout.pp} is more than the model's {job.model.num_layers} layers"
    if layout.stages and (len(layout.stages) != slots or held != job.model.num_layers):
        return (
            f"{len(layout.stages)} stages hold {held} layers; pp {layout.pp} x vpp {layout.vpp} needs {slots} stages "
            f"that hold {job.model.num_layers}"
        )
    return None
