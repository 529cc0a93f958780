"""The plan and its file: what was chosen, what it promises, what lost and why, and which files it rests on."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from scenarios.layout import Layout
from scenarios.scenario import Scenario
from topologies.document import FORMAT_VERSION, explain, to_json, write_atomically
from topologies.errors import InputError
from topologies.result_file import read_result_file


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A plan as it stands in its file; ``scenario`` holds everything that the plan was made from.

    ``predicted``, ``checkpoint``, ``alternatives`` and ``solver`` are plain data with the keys of the JSON contract.
    """

    scenario: Scenario
    layout: Layout
    placement: dict[str, Any]
    checkpoint: dict[str, Any]
    predicted: dict[str, Any]
    alternatives: list[dict[str, Any]]
    solver: dict[str, Any]
    inputs: list[dict[str, str]]
    replicas: list[dict[str, Any]] = field(default_factory=list)
    """Of clusters with several kinds of GPUs: which replicas run on which pool, and their numbers of micro-batches.
    ``layout`` is then that of the first kind. Empty: all replicas are equal."""
    file_sha256: str = field(default="", compare=False)
    """Of the file that the plan was read from; empty for a plan that was just made."""

    def as_json(self) -> dict[str, Any]:
        """The plan as plain data, as in its file."""
        layout = self.layout.model_dump(mode="json") | {"num_microbatches": self.num_microbatches}
        different = {"replicas": self.replicas} if self.replicas else {}
        return {
            "format_version": FORMAT_VERSION,
            "scenario": self.scenario.model_dump(mode="json"),
            "layout": layout,
            "placement": self.placement,
            "checkpoint": self.checkpoint,
            "predicted": self.predicted,
            "alternatives": self.alternatives,
            "solver": self.solver,
            "inputs": self.inputs,
            **different,
        }

    @property
    def num_microbatches(self) -> int:
        """Micro-batches of a replica in a step; where replicas differ, the most that one runs."""
        if self.replicas:
            return max(int(one["num_microbatches"]) for one in self.replicas)
        return self.layout.num_microbatches(self.scenario.job)

    def as_text(self) -> str:
        """The content of its file."""
        return to_json(self.as_json()) + "\n"

    def sha256(self) -> str:
        """SHA-256 of the plan's file, by which a measurement names its plan."""
        return self.file_sha256 or hashlib.sha256(self.as_text().encode()).hexdigest()


def write_plan(plan: Plan, path: str | Path) -> None:
    """Write a plan file, whole or not at all."""
    write_atomically(path, plan.as_text())


def read_plan(path: str | Path) -> Plan:
    """Read a plan file.

    Unknown keys at the top are ignored within a format version, as the contract allows.

    Raises:
        InputError: unreadable, truncated, not a plan, or of a newer format version.
    """
    content = read_result_file(path, kind="plan", command="headway plan SCENARIO -o plan.json")
    keys = ("scenario", "layout", "placement", "checkpoint", "predicted", "alternatives", "solver", "inputs")
    for key in keys:
        if key not in content:
            raise InputError("is missing", hint="make the plan again", file=path, key=key)
    layout = {key: value for key, value in content["layout"].items() if key != "num_microbatches"}
    try:
        scenario = Scenario.model_validate(content["scenario"])
    except ValidationError as error:
        raise explain(error, Scenario, Path(path), content["scenario"]) from None
    try:
        chosen = Layout.model_validate(layout)
    except ValidationError as error:
        raise explain(error, Layout, Path(path), layout) from None
    digest = hashlib.sha256(Path(path).read_bytes()).hexdigest()
    parts = {key: content[key] for key in keys[2:]} | {"replicas": content.get("replicas", [])}
    return Plan(scenario=scenario, layout=chosen, file_sha256=digest, **parts)


def refuse_unequal(plan: Plan, what: str) -> None:
    """Refuse a plan whose replicas differ, for everything that runs all replicas alike.

    Raises:
        InputError: the plan's replicas run different numbers of micro-batches on different GPUs.
    """
    if plan.replicas:
        told = ", ".join(f"{one['replicas']} x {one['num_microbatches']} on {one['node']}" for one in plan.replicas)
        raise InputError(
            f"replicas run different numbers of micro-batches ({told}), and {what} runs all replicas alike",
            hint="plan each pool as a cluster of its own, or use a trainer that weighs gradients by tokens",
            key="replicas",
        )
