"""Published, measured training runs: the table that ships with headway, and files of the same form.

A file is a list of rows (one JSON object each, see ``PublishedRun``), or the compact form, in which objects that many
rows share are stored once.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from topologies.errors import InputError
from topologies.reading import read_json

SHIPPED_RUNS = Path(__file__).parent / "published_runs.json"

SHARED_PARTS = ("source", "model", "hardware", "precision", "layout")
"""Objects of a row that the compact form stores once for all rows that have them."""
PLAIN_PARTS = ("id", "source_group", "date", "task", "confidence", "representative", "notes", "stack")
MFU_RANGE = (0.1, 0.75)
"""Implied MFU outside of it points to a run that something else limited, or to a wrong row."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedRun:
    """One measured run as its source tells it; what the source does not say is absent."""

    id: str
    source_group: str
    """The source with its versions merged."""
    source: Mapping[str, Any]
    """title, repo, path, table, line."""
    date: str | None
    """YYYY-MM of publication."""
    task: str
    """pretrain, sft or lora."""
    model: Mapping[str, Any]
    hardware: Mapping[str, Any]
    precision: Mapping[str, Any]
    layout: Mapping[str, Any]
    stack: Mapping[str, Any]
    """Fields of a Stack that the row declares itself."""
    notes: str
    confidence: str | None
    """A: complete; B: one or two gaps; C: more, or contradictory."""
    representative: bool
    """False: another row measures the same configuration."""
    implied_mfu: float | None
    measured_step_seconds: float | None

    @property
    def counted(self) -> bool:
        """Whether the run enters summaries and fits: complete enough, one row per configuration, a credible MFU."""
        credible = self.implied_mfu is None or MFU_RANGE[0] <= self.implied_mfu <= MFU_RANGE[1]
        return self.representative and self.confidence in (None, "A", "B") and credible

    @property
    def kind(self) -> str:
        """Kind of model: moe or dense."""
        return "moe" if self.model.get("moe") else "dense"


def read_runs(path: str | Path | None = None) -> list[PublishedRun]:
    """Read a table of runs; None is the one that ships with headway.

    Raises:
        InputError: not readable, not JSON, or neither a list of rows nor the compact form.
    """
    file = SHIPPED_RUNS if path is None else Path(path)
    content = read_json(file, "give a file of published runs")
    if isinstance(content, dict) and isinstance(content.get("rows"), list):
        content = expand(content, file)
    if not isinstance(content, list):
        raise InputError("holds no list of runs", hint="give a JSON list with one object for each run", file=file)
    return [_run(row, number) for number, row in enumerate(content, 1)]


def _run(row: Any, number: int) -> PublishedRun:
    row = row if isinstance(row, dict) else {}

    def part(name: str) -> dict[str, Any]:
        value = row.get(name)
        return value if isinstance(value, dict) else {}

    source, check = part("source"), part("check")
    step = row.get("step_seconds", part("normalised").get("step_time_s", part("measured").get("step_time_s")))
    return PublishedRun(
        id=str(row.get("id", f"row {number}")),
        source_group=str(row.get("source_group") or source.get("title") or "unknown source"),
        source=source,
        date=row.get("date"),
        task=row.get("task") or "pretrain",
        model=part("model"),
        hardware=part("hardware"),
        precision=part("precision"),
        layout=part("layout"),
        stack=part("stack"),
        notes=str(row.get("notes") or ""),
        confidence=row.get("confidence"),
        representative=row.get("representative", True) is not False,
        implied_mfu=row.get("implied_mfu", check.get("implied_mfu")),
        measured_step_seconds=step if isinstance(step, int | float) and step > 0 else None,
    )


def compact(path: str | Path) -> dict[str, Any]:
    """Return the compact form of a file of rows: the facts that a prediction or a citation needs, each object once.

    Raises:
        InputError: as ``read_runs``.
    """
    tables: dict[str, list[dict[str, Any]]] = {name: [] for name in SHARED_PARTS}
    places: dict[str, int] = {}

    def place(name: str, value: Mapping[str, Any]) -> int:
        known = {key: one for key, one in value.items() if one is not None}
        key = f"{name} {json.dumps(known, sort_keys=True)}"
        if key not in places:
            places[key] = len(tables[name])
            tables[name].append(known)
        return places[key]

    rows: list[dict[str, Any]] = []
    for run in read_runs(path):
        row: dict[str, Any] = {name: getattr(run, name) for name in PLAIN_PARTS}
        row |= {name: place(name, getattr(run, name)) for name in SHARED_PARTS}
        row |= {"implied_mfu": run.implied_mfu, "step_seconds": run.measured_step_seconds}
        rows.append({key: value for key, value in row.items() if value is not True and value not in (None, "", {})})
    return {"version": 1, "name": "published training runs", **tables, "rows": rows}


def expand(content: Mapping[str, Any], file: Path) -> list[dict[str, Any]]:
    """Undo ``compact``.

    Raises:
        InputError: a row points to an object that is not there.
    """
    rows = []
    for row in content["rows"]:
        try:
            shared = {name: content[name][row[name]] for name in SHARED_PARTS if name in row}
        except (KeyError, IndexError, TypeError) as error:
            raise InputError(f"points to what is not there: {error}", file=file, key=str(row)[:80]) from None
        rows.append({**row, **shared})
    return rows


def compact_text(path: str | Path) -> str:
    """Return the compact form as text, one row a line."""
    content = compact(path)

    def lines(entries: Sequence[Any]) -> str:
        return "[\n" + ",\n".join(json.dumps(one, separators=(",", ":")) for one in entries) + "\n]"

    parts = [
        f"{json.dumps(key)}: {lines(value) if isinstance(value, list) else json.dumps(value)}"
        for key, value in content.items()
    ]
    return "{\n" + ",\n".join(parts) + "\n}\n"
