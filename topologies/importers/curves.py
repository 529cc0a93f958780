"""Logs of nccl-tests as one measured cluster: a curve for each collective and number of ranks."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from topologies.errors import InputError
from topologies.importers.assemble import Choices
from topologies.importers.importing import Imported, import_file
from topologies.importers.nccl_curve import NcclRun


def measured_by_logs(files: Sequence[str | Path], choices: Choices) -> tuple[dict[str, Any], tuple[Imported, ...]]:
    """Return the raw mapping of the chosen cluster with the curves of all logs in it, and what each log gave.

    Raises:
        InputError: a file is no log of nccl-tests, its run failed, no cluster is named, or two logs measure the same.
    """
    read: list[Imported] = []
    seen: dict[tuple[str, int], str] = {}
    for file in files:
        found = import_file(file, choices)
        if not isinstance(found.content, NcclRun):
            raise InputError(
                f"is {found.format}, and only logs of nccl-tests measure collectives",
                hint="'headway topology import' reads the other formats",
                file=found.file,
            )
        if found.undetermined is not None:
            raise found.undetermined
        for kind, ranks in {(point.kind, point.ranks) for point in found.content.points}:
            if (kind, ranks) in seen:
                raise InputError(
                    f"measures {kind} of {ranks} ranks, as {seen[kind, ranks]} does",
                    hint="give one log for each",
                    file=found.file,
                )
            seen[kind, ranks] = found.file
        read.append(found)
    first, *rest = read
    cluster = dict(first.cluster or {})
    measured = dict(cluster["measured"])
    for one in rest:
        assert one.cluster is not None and isinstance(one.content, NcclRun)
        mine = {(point.kind, point.ranks) for point in one.content.points}
        curve = [entry for entry in one.cluster["measured"]["collectives"] if (entry["kind"], entry["ranks"]) in mine]
        kept = [entry for entry in measured["collectives"] if (entry["kind"], entry["ranks"]) not in mine]
        measured["collectives"] = [*kept, *curve]
    cluster["measured"] = measured
    return cluster, tuple(read)
