"""Recorded failures and spot capacity, read from the files that others publish.

``read_trace_file`` looks at the first line and picks the reader: Titan GPU lives, Bamboo and Parcae spot traces,
Google Cloud counts, a table with the columns ``time,nodes,component``, or headway's own YAML. A spot trace is a list
of nodes that leave (positive) and come (negative) after ``start_nodes``.
"""

from __future__ import annotations

import csv
import hashlib
import json
import re
from collections.abc import Callable
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, model_validator

from topologies.document import FileDocument, InputFile, read_mapping
from topologies.errors import InputError
from topologies.reading import decoded, read_bytes
from topologies.units import Seconds

TITAN_GPUS = 18_688
"""GPUs of Titan, one a node (Ostrouchov et al., SC20)."""


class FailureTrace(FileDocument):
    """Events of a fleet, in time order."""

    kind: Literal["failures", "capacity"] = "failures"
    """failures: broken nodes are repaired as the faults say; capacity: nodes come back when the trace says so."""
    times_seconds: tuple[Seconds, ...] = Field(min_length=1)
    nodes: tuple[int, ...] = ()
    """Nodes that each event takes; negative: that come back; empty: one each."""
    components: tuple[str, ...] = ()
    """What broke, for each event; empty: the name of the trace."""
    span_seconds: Seconds = Field(gt=0)
    """Length of the record."""
    fleet: int | None = Field(default=None, ge=1)
    """GPUs or nodes that the record covers; None: exactly those of the job."""
    per: Literal["gpu", "node"] = "node"
    """What ``fleet`` counts."""
    start_nodes: int = Field(default=0, ge=0)
    """Nodes at hand at the start of a capacity trace."""
    notice_seconds: Seconds = 0.0
    """Warning before nodes are taken."""
    offset_seconds: Seconds | None = None
    """Where in the record a run starts; None: each run somewhere else, and the record is a circle."""

    @model_validator(mode="after")
    def _consistent(self) -> FailureTrace:
        events = len(self.times_seconds)
        for name, values in (("nodes", self.nodes), ("components", self.components)):
            if values and len(values) != events:
                raise ValueError(f"{name} has {len(values)} entries for {events} times; give one for each time")
        for index, (before, after) in enumerate(pairwise(self.times_seconds)):
            if after < before:
                raise ValueError(f"times are not in order: entry {index + 2} is before entry {index + 1}; sort them")
        if self.times_seconds[-1] > self.span_seconds:
            raise ValueError("an event lies beyond the span of the record; give a longer span")
        if self.kind == "failures" and any(nodes < 0 for nodes in self.nodes):
            raise ValueError("nodes that come back belong to a trace of kind 'capacity'")
        if self.kind == "capacity":
            level = self.start_nodes
            for index, taken in enumerate(self.nodes):
                level -= taken
                if level < 0:
                    raise ValueError(f"entry {index + 1} takes more nodes than there are; check the trace")
        return self

    def scale(self, num_gpus: int, num_nodes: int) -> float:
        """Size of a job over that of the recorded fleet."""
        return 1.0 if self.fleet is None else (num_gpus if self.per == "gpu" else num_nodes) / self.fleet

    def rate_per_second(self, num_gpus: int, num_nodes: int) -> float:
        """Mean failures per second of a job; a capacity trace counts the times when nodes leave."""
        leaving = sum(nodes > 0 for nodes in self.nodes) if self.nodes else len(self.times_seconds)
        return leaving * self.scale(num_gpus, num_nodes) / self.span_seconds


def read_trace_file(path: Path, inputs: list[InputFile] | None) -> dict[str, Any]:
    """Read a trace in any known form into the raw mapping of a FailureTrace.

    Raises:
        InputError: the file cannot be read, has no known form, or contradicts itself; with the line.
    """
    if path.suffix in (".yaml", ".yml", ".json"):
        return read_mapping(path, inputs)
    content = read_bytes(path)
    lines = decoded(content, path, "give a trace").splitlines()
    if inputs is not None:
        inputs.append(InputFile(path=str(path), sha256=hashlib.sha256(content).hexdigest()))
    first = lines[0] if lines else ""
    reader = next((reader for pattern, reader in _READERS if re.match(pattern, first)), None)
    if reader is None:
        raise InputError(
            "is not a trace of a known form",
            hint="give a table with the columns time,nodes,component (seconds), or a spot trace 'ms,add|remove,node'",
            file=path,
            line=1,
        )
    return {"name": path.stem} | reader(path, lines)


def _titan(path: Path, lines: list[str]) -> dict[str, Any]:
    """One row a stint of one GPU; those that end with a double-bit error or off the bus are failures."""
    events: list[tuple[float, str]] = []
    first = last = None
    for number, row in enumerate(csv.DictReader(lines), start=2):
        if not (row.get("insert") and row.get("remove")):
            continue  # a stint with an open end says nothing about when
        try:
            start, end = (_seconds(row[key]) for key in ("insert", "remove"))
        except ValueError:
            raise InputError("is not a date", hint="write 2019-08-01 20:07:33", file=path, line=number) from None
        if end < start:
            raise InputError("a stint ends before it begins", hint="correct the row", file=path, line=number)
        first, last = min(start, first or start), max(end, last or end)
        if row.get("event"):
            events.append((end, f"GPU {row['event']}"))
    if not events or first is None or last is None:
        raise InputError("holds no failure with both dates", file=path)
    events.sort()
    # nothing was recorded before the first failure, however early the first GPU came
    start = events[0][0]
    return {
        "times": [f"{time - start} s" for time, _ in events],
        "components": [name for _, name in events],
        "span": f"{last - start + 1} s",
        "fleet": TITAN_GPUS,
        "per": "gpu",
        "source": {"*": "olcf/TitanGPULife (Ostrouchov et al., SC20): stints with both dates"},
    }


def _seconds(date: str) -> float:
    """Of a date without a zone; one zone for all, so that no summer time comes in."""
    return datetime.fromisoformat(date).replace(tzinfo=UTC).timestamp()


def _bamboo(path: Path, lines: list[str]) -> dict[str, Any]:
    """``milliseconds,add|remove,node``: who is there is known by name."""
    changes: list[tuple[float, int]] = []
    alive: set[str] = set()
    for number, line in enumerate(lines, start=1):
        parts = [part.strip() for part in line.split(",")]
        if len(parts) != 3 or parts[1] not in ("add", "remove") or not parts[0].isdigit():
            raise InputError("is not 'milliseconds,add|remove,node'", hint="correct it", file=path, line=number)
        time, node = float(parts[0]) / 1000, parts[2]
        if changes and time < changes[-1][0]:
            raise InputError("is earlier than the line before", hint="sort the lines", file=path, line=number)
        if (parts[1] == "add") == (node in alive):
            state = "here already" if node in alive else "not here"
            raise InputError(f"{node} is {state}", hint="overlapping events; correct it", file=path, line=number)
        (alive.add if parts[1] == "add" else alive.remove)(node)
        changes.append((time, -1 if parts[1] == "add" else 1))
    return _capacity(changes, changes[-1][0] + 1)


def _cloud_counts(path: Path, lines: list[str]) -> dict[str, Any]:
    """``date, time, instances alive``; published lines are not always in order."""
    samples: list[tuple[float, int]] = []
    for number, line in enumerate(lines, start=1):
        day, time, count = (part.strip() for part in line.split(",")) if line.count(",") == 2 else ("", "", "")
        try:
            samples.append((_seconds(f"{day} {time}"), int(count)))
        except ValueError:
            raise InputError("is not 'date, time, instances'", hint="correct it", file=path, line=number) from None
    samples.sort(key=lambda sample: sample[0])
    start = samples[0][0]
    levels = [(0.0, 0), *((time - start, count) for time, count in samples)]
    changes = [(now, before - after) for (_, before), (now, after) in pairwise(levels) if before != after]
    return _capacity(changes, samples[-1][0] - start + 1)


def _parcae(path: Path, lines: list[str]) -> dict[str, Any]:
    """A JSON list a line: milliseconds, add|remove|no-op|migration, nodes."""
    changes: list[tuple[float, int]] = []
    end = 0.0
    for number, line in enumerate(lines, start=1):
        try:
            milliseconds, event, detail = json.loads(line)
            time, nodes, length = float(milliseconds) / 1000, len(detail["nodes"]), float(detail["duration"]) / 1000
        except (ValueError, KeyError, TypeError):
            raise InputError("is not '[milliseconds, event, {...}]'", file=path, line=number) from None
        if time < end - 1e-9:
            raise InputError("overlaps the segment before", hint="correct the times", file=path, line=number)
        end = time + length
        if event in ("add", "remove") and nodes:
            changes.append((time, -nodes if event == "add" else nodes))
    return _capacity(changes, end)


def _table(path: Path, lines: list[str]) -> dict[str, Any]:
    """Columns ``time`` in seconds, and if given ``nodes`` and ``component``."""
    rows = list(csv.DictReader(lines))
    times: list[float] = []
    nodes: list[int] = []
    for number, row in enumerate(rows, start=2):
        try:
            times.append(float(row["time"]))
            nodes.append(int(row.get("nodes") or 1))
        except ValueError:
            raise InputError("time and nodes must be numbers", hint="correct it", file=path, line=number) from None
        if times[-1] < 0 or (len(times) > 1 and times[-1] < times[-2]):
            raise InputError("is earlier than the row before", hint="sort the rows", file=path, line=number)
    if not times:
        raise InputError("holds no event", file=path)
    if min(nodes) < 0:
        return _capacity(list(zip(times, nodes, strict=True)), times[-1] + 1)
    components = [row.get("component") or path.stem for row in rows]
    return {"times": [f"{time} s" for time in times], "nodes": nodes, "components": components} | {
        "span": f"{times[-1] + 1} s"
    }


def _capacity(changes: list[tuple[float, int]], span: float) -> dict[str, Any]:
    """Merge changes at the same time; what comes at time 0 is there from the start."""
    merged: dict[float, int] = {}
    for time, taken in changes:
        merged[time] = merged.get(time, 0) + taken
    start = -merged.pop(0.0, 0)
    kept = [(time, taken) for time, taken in merged.items() if taken]
    return {
        "kind": "capacity",
        "times": [f"{time} s" for time, _ in kept] or [f"{span} s"],
        "nodes": [taken for _, taken in kept] or [0],
        "span": f"{span} s",
        "start_nodes": start,
    }


_READERS: tuple[tuple[str, Callable[[Path, list[str]], dict[str, Any]]], ...] = (
    (r"SN,location,insert,remove", _titan),
    (r"\d+,(add|remove),", _bamboo),
    (r"\d{4}-\d\d-\d\d, *\d\d:\d\d", _cloud_counts),
    (r"\[\d+, *\"", _parcae),
    (r"time\b", _table),
)
"""First line to reader."""
