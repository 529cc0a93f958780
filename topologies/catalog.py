"""The shipped hardware and clusters, by name or by path."""

from __future__ import annotations

from pathlib import Path

from topologies.cluster import Cluster
from topologies.curves import Curves
from topologies.document import FileDocument, InputFile, LoadContext, did_you_mean, load, read_mapping, resolve, shipped
from topologies.errors import InputError
from topologies.hardware import CATALOG, Gpu, Nic, Node

KINDS: dict[str, type[FileDocument]] = {"clusters": Cluster, "nodes": Node, "gpus": Gpu, "nics": Nic, "curves": Curves}
"""Folder of the catalog, and what its files describe."""


def load_cluster(name: str | Path, inputs: list[InputFile] | None = None) -> Cluster:
    """Read a cluster by its shipped name or from a path.

    Raises:
        InputError: no such cluster, or the file is not one.
    """
    path = Path(name)
    if not path.exists():
        try:
            path = resolve(str(name), CATALOG / "clusters", LoadContext(Path()))
        except ValueError as error:
            what, _, hint = str(error).partition("; ")
            raise InputError(what, hint=hint or None) from None
    return load(path, Cluster, inputs=inputs)


def find(name: str, inputs: list[InputFile] | None = None) -> FileDocument:
    """Read anything that the catalog describes, by its shipped name or from a path.

    Raises:
        InputError: no such thing, or the file describes none.
    """
    path = Path(name)
    if path.exists() or "/" in name:
        return load(path, _kind(path), inputs=inputs)
    for folder, model in KINDS.items():
        known = shipped(CATALOG / folder)
        if name in known:
            return load(known[name], model, inputs=inputs)
    names = [known for folder in KINDS for known in shipped(CATALOG / folder)]
    raise InputError(f"{name!r} is not in the catalog", hint=did_you_mean(name, names) or "see 'headway topology list'")


def _kind(path: Path) -> type[FileDocument]:
    keys = read_mapping(path).keys()
    if "architecture" in keys:
        return Gpu
    if "gpus_per_node" in keys:
        return Node
    if "curves" in keys:
        return Curves
    return Nic if "bandwidth" in keys else Cluster
