"""The plan and its file: what was chosen, what it promises, what lost and why, and which files it rests on."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from scenarios.layout import Layout
from scenarios.scenario import Scenario
from topologies.document import FORMAT_VERSION, explain, to_json, write_atomically
from topologies.errors import InputError


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

    def as_json(self) -> dict[str, Any]:
        """The plan as plain data, as in its file."""
        job = self.scenario.job
        layout = self.layout.model_dump(mode="json") | {"num_microbatches": self.layout.num_microbatches(job)}
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
        }

    def sha256(self) -> str:
        """Hash of the plan's content, by which a measurement names its plan."""
        return hashlib.sha256(to_json(self.as_json()).encode()).hexdigest()


def write_plan(plan: Plan, path: str | Path) -> None:
    """Write a plan file, whole or not at all."""
    write_atomically(path, to_json(plan.as_json()) + "\n")


def read_plan(path: str | Path) -> Plan:
    """Read a plan file.

    Unknown keys at the top are ignored within a format version, as the contract allows.

    Raises:
        InputError: unreadable, truncated, not a plan, or of a newer format version.
    """
    content = _read_json(Path(path))
    version = content.get("format_version")
    if not isinstance(version, int):
        raise InputError(
            "is not a plan: it has no format_version",
            hint="make one with 'headway plan SCENARIO -o plan.json'",
            file=path,
        )
    if version > FORMAT_VERSION:
        raise InputError(
            f"has format_version {version}, and this headway reads up to {FORMAT_VERSION}",
            hint="upgrade headway, or make the plan again",
            file=path,
        )
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
    return Plan(scenario=scenario, layout=chosen, **{key: content[key] for key in keys[2:]})


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"cannot be read: {error.strerror}", hint="give the path of a plan file", file=path) from None
    except UnicodeDecodeError:
        raise InputError("is not a text file", hint="give the path of a plan file", file=path) from None
    except json.JSONDecodeError as error:
        raise InputError(
            f"is not complete JSON: {error.msg}",
            hint="the file is truncated or was edited; make the plan again",
            file=path,
            line=error.lineno,
            column=error.colno,
        ) from None
    if not isinstance(content, dict):
        raise InputError("is not a plan", hint="make one with 'headway plan SCENARIO -o plan.json'", file=path)
    return content
