"""A rank that was traced without weights, as the report shows it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from planner.plan import Plan
from reports.tables import percent, size
from topologies.errors import InputError
from topologies.result_file import read_result_file


@dataclass(frozen=True, slots=True, kw_only=True)
class DryRun:
    """What ``headway run --dry-run`` said about a plan."""

    plan_sha256: str
    trace: dict[str, Any]


def read_dry_run(path: str | Path) -> DryRun:
    """Read the file of a dry run.

    Raises:
        InputError: not such a file, or one in which no rank was traced.
    """
    content = read_result_file(path, kind="dry run", command="headway run plan.json --dry-run -o dry-run.json")
    trace = content.get("trace")
    if "plan_sha256" not in content or "trace_refused" not in content:
        raise InputError("is not a dry run", hint="make one with: headway run plan.json --dry-run -o FILE", file=path)
    if not isinstance(trace, dict):
        raise InputError(f"holds no trace: {content['trace_refused']}", hint="make the dry run again", file=path)
    return DryRun(plan_sha256=str(content["plan_sha256"]), trace=trace)


def traced_section(plan: Plan, dry: DryRun | None, *, force: bool) -> dict[str, Any] | None:
    """Return the rows of the report's section: memory by part, collectives of a step.

    Raises:
        InputError: of another plan, and ``force`` is off; or a figure is missing.
    """
    if dry is None:
        return None
    if dry.plan_sha256 != plan.sha256() and not force:
        raise InputError("the dry run is of another plan", hint="trace this plan, or show it all the same with --force")
    try:
        return _section(dry.trace)
    except (KeyError, TypeError):
        raise InputError("the dry run lacks a figure", hint="make it again with this headway", key="trace") from None


def _section(trace: dict[str, Any]) -> dict[str, Any]:
    memory, collectives = trace["traced_memory"], trace["collectives"]
    return {
        "rank": trace["rank"],
        "stage": trace["pipeline_rank"],
        "moment": memory["peak_moment"],
        "layers": memory["layers"],
        "traced_layers": [depth for depth in memory["traced_layers"] if depth != memory["layers"]],
        "memory": [
            (
                row["part"],
                size(row["predicted_bytes"]),
                size(row["traced_bytes"]),
                percent(row["error"], sign=True),
                size(row["promised_bytes"]),
            )
            for row in trace["memory"]
        ],
        "collectives": [
            (one["operation"].replace("_", "-"), one["axis"], one["dtype"], f"{one['count']:,}", size(one["bytes"]))
            for one in sorted(collectives, key=lambda one: -one["bytes"] * one["count"])
        ],
        "axes": [
            (axis, size(sum(one["bytes"] * one["count"] for one in collectives if one["axis"] == axis)))
            for axis in sorted({one["axis"] for one in collectives})
        ],
    }
