"""The numbers that a plan rests on, each with its unit and where it comes from."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from pydantic import BaseModel

from reports.tables import number, seconds, tokens
from scenarios.faults import Failure
from scenarios.scenario import Scenario
from topologies.cluster import Measured
from topologies.document import FileDocument
from topologies.units import UNITS, document_key, format_quantity

NOT_STATED, DEFAULT = "not stated", "headway's default"
LEFT_OUT = {"version", "name", "source", "layer_kinds", "measured"}
HUMAN_RATES = ("USD/h", "USD/kWh", "%/year")
"""Units in which rates are told; all other quantities take the largest unit that fits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Assumption:
    """One number of the scenario. ``group`` is the document that states it."""

    group: str
    key: str
    value: str
    source: str


def assumptions(scenario: Scenario) -> list[Assumption]:
    """List every number of cluster, hardware, model, job, faults and prices, in the scenario's order."""
    cluster, model = scenario.cluster, scenario.model
    documents: list[tuple[str, FileDocument]] = [(f"Cluster {cluster.name}", cluster)]
    for pool in cluster.pools:
        documents += [(f"Node {pool.node.name}", pool.node), (f"GPU {pool.node.gpu.name}", pool.node.gpu)]
        documents += [(f"NIC {pool.node.nic.name}", pool.node.nic)] if pool.node.nic else []
    documents += [
        (f"Model {model.name}", model),
        (f"Faults {scenario.faults.name}", scenario.faults),
        (f"Prices {scenario.prices.name}", scenario.prices),
    ]
    rows = [
        Assumption(group=group, key=key, value=value, source=source_of(document, key, by_default))
        for group, document in documents
        for key, value, by_default in _numbers(document)
    ]
    job = [
        Assumption(group="Job", key=key, value=value, source=DEFAULT if by_default else f"scenario {scenario.name}")
        for key, value, by_default in _numbers(scenario.job)
    ]
    return list(dict.fromkeys([*rows, *job, *_measured(cluster.measured, cluster.name)]))


def by_source(rows: Iterable[Assumption]) -> list[tuple[str, list[tuple[str, list[Assumption]]]]]:
    """Group rows by document, and neighbours of one document by source: (document, [(source, rows)])."""
    return [
        (group, [(source, list(same)) for source, same in groupby(mine, key=lambda row: row.source)])
        for group, mine in ((group, list(found)) for group, found in groupby(rows, key=lambda row: row.group))
    ]


def source_of(document: FileDocument, key: str, by_default: bool) -> str:
    """Where a document says that a number comes from: by full key, by first key, by ``*``."""
    sources = document.source
    named = next((sources[name] for name in (key, key.split(".")[0]) if name in sources), None)
    return named or (DEFAULT if by_default else sources.get("*", NOT_STATED))


def _numbers(document: BaseModel, prefix: str = "") -> Iterator[tuple[str, str, bool]]:
    """Key, value as text, and whether it is what headway takes where a file is silent; such zeros are left out."""
    for name, info in type(document).model_fields.items():
        value = getattr(document, name)
        key = f"{prefix}{document_key(name)}"
        by_default = not info.is_required() and value == info.default
        if name in LEFT_OUT or isinstance(value, FileDocument) or (by_default and not value):
            continue
        if name == "pattern":
            yield "num_layers", str(len(value)), by_default
        elif isinstance(value, BaseModel):
            yield from _numbers(value, f"{key}.")
        elif isinstance(value, tuple) and value and isinstance(value[0], BaseModel):
            for index, one in enumerate(value):
                if isinstance(one, Failure):
                    rate = _shown("rate_per_second", one.rate_per_second)
                    yield f"{key}.{one.component}", f"{rate} per {one.per}", by_default
                elif not any(isinstance(getattr(one, field), FileDocument) for field in type(one).model_fields):
                    label = getattr(one, "name", None) or str(index)
                    yield from _numbers(one, f"{key}.{label}.")
        elif isinstance(value, Mapping):
            yield from ((f"{key}.{inner}", _shown(name, entry), by_default) for inner, entry in value.items())
        elif isinstance(value, int | float | str) and not isinstance(value, bool):
            yield key, _shown(name, value), by_default


def _shown(name: str, value: Any) -> str:
    if isinstance(value, str):
        return value
    if name.endswith("tokens"):
        return tokens(value)
    dimension = next((one for one in sorted(UNITS, key=len, reverse=True) if name.endswith(f"_{one}")), None)
    if dimension == "seconds":
        return seconds(value)
    if dimension is None:
        return number(value, 12 if isinstance(value, int) else 4)
    rate = next((unit for unit in HUMAN_RATES if unit in UNITS[dimension]), None)
    return f"{number(value / UNITS[dimension][rate])} {rate}" if rate else format_quantity(value, dimension)


def _measured(measured: Measured | None, name: str) -> list[Assumption]:
    if measured is None:
        return []
    where = ", ".join(f"{key} {value}" for key, value in measured.environment.items())
    source = f"headway calibrate, {measured.date}" + (f" ({where})" if where else "")
    counts = {
        "matrix products": len(measured.gemms),
        "attention cores": len(measured.attention),
        "collectives": len(measured.collectives),
    }
    group = f"Measured on {name}"
    rows = [
        Assumption(group=group, key=key, value=f"{count} points", source=source)
        for key, count in counts.items()
        if count
    ]
    rows += [
        Assumption(group=group, key=f"host.{key}", value=seconds(value), source=source)
        for key, value in measured.host_seconds.items()
    ]
    return rows
