"""Findings about whatever describes a machine: a cluster of ours, or what a tool printed."""

from __future__ import annotations

from pathlib import Path

from topologies.catalog import load_cluster
from topologies.checks import Finding, check_cluster
from topologies.errors import InputError
from topologies.importers.importing import import_file

FATAL = ("disconnected", "missing links", "rails crossed")
"""Beginnings of warnings that say that a fabric is not what it was built to be."""


def check_named(name: str) -> tuple[str, list[Finding]]:
    """Check a cluster by its name or file, or a file that ``import_file`` reads.

    Returns:
        What was checked, and what was found.

    Raises:
        InputError: neither, or broken.
    """
    path = Path(name)
    if not path.is_file() or _is_ours(path):
        cluster = load_cluster(name)
        return cluster.name, check_cluster(cluster)
    found = import_file(path)
    return f"{found.file} ({found.format})", [_finding(warning) for warning in found.warnings]


def _is_ours(path: Path) -> bool:
    """A YAML file of a tool is told from a cluster by what it lists at the top."""
    if path.suffix not in (".yaml", ".yml"):
        return False
    try:
        import_file(path)
    except InputError as error:
        return "no format that headway reads" in str(error)
    return False


def _finding(warning: str) -> Finding:
    rule, colon, text = warning.partition(": ")
    short = bool(colon) and len(rule) <= 20
    return Finding(
        level="failure" if warning.startswith(FATAL) else "warning",
        rule=rule if short else "import",
        text=text if short else warning,
    )
