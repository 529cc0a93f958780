"""From what a file says to the raw mapping of a cluster; what the catalog adds is said in its sources."""

from __future__ import annotations

import io
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML

from topologies.document import InputFile, LoadContext, load, read_mapping, resolve, shipped
from topologies.errors import InputError
from topologies.hardware import CATALOG, Gpu, Nic, Node

NVLINK_BYTES_PER_SECOND = {"ampere": 25e9, "hopper": 25e9, "blackwell": 50e9}
"""One NVLink, one direction, by generation of the GPU (NVIDIA A100, H100 and GB200 datasheets: 600, 900 and 1,800 GB/s
in both directions over 12, 18 and 18 links)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Choices:
    """What the user adds to a file that does not say it. Names of the catalog or paths."""

    gpu: str | None = None
    node: str | None = None
    nic: str | None = None
    cluster: str | None = None
    part: str | None = None
    """A switch, topology or product: that part of the file only."""
    collective: str | None = None
    ranks: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeFacts:
    """What a file says of one node; None: it does not say."""

    source: str
    gpus: int
    gpu: str | None = None
    links: int | None = None
    """NVLinks of a GPU."""
    link: str | None = None
    """``nvlink``, ``xgmi`` or None."""
    switched: bool = True
    domain_size: int = 1
    nics: int = 0
    nic_bytes_per_second: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class FabricFacts:
    """What a file says of the network between nodes."""

    source: str
    num_nodes: int
    tiers: list[dict[str, Any]]
    kind: str = "fat-tree"
    rails: int = 1
    gpus_per_node: int | None = None
    nics_per_node: int | None = None
    nic_bytes_per_second: float | None = None


def cluster_of_node(facts: NodeFacts, choices: Choices) -> tuple[dict[str, Any], list[str]]:
    """Return the raw mapping of a cluster of this one node, and what had to be assumed or left out.

    Raises:
        InputError: the GPU is not known, or what joins the GPUs cannot be told.
    """
    gpu, gpu_name = _gpu(facts, choices)
    model = _model_node(gpu_name, choices, facts)
    notes: list[str] = []
    node: dict[str, Any] = {
        "name": f"{facts.gpus} x {gpu.name}",
        "gpu": gpu_name,
        "gpus_per_node": facts.gpus,
        "scale_up": _scale_up(facts, gpu, model, notes),
    }
    source = {"gpus_per_node": facts.source, "scale_up.domain_size": facts.source}
    nic: str | dict[str, Any] | None = reference(choices.nic, "nics") if choices.nic else None
    if nic is None and facts.nic_bytes_per_second is not None:
        nic = _nic(facts.nic_bytes_per_second)
    if facts.nics and nic is None:
        notes.append("the rate of the NICs is not in the file: the node is written without them; give --nic NAME")
    elif facts.nics and nic is not None:
        node |= {"nic": nic, "nics_per_node": facts.nics}
        source["nics_per_node"] = facts.source
    said, left_out = "; ".join(notes), "host memory, storage and power are not in the file and left out"
    source |= {"scale_up": said or facts.source, "host_memory": left_out, "*": facts.source}
    cluster = {
        "name": f"{facts.gpus} x {gpu.name}",
        "node": node | {"source": source},
        "num_nodes": 1,
        "source": {"*": facts.source, "num_nodes": "the node that the file is about"},
    }
    return cluster, [*notes, left_out]


def cluster_of_fabric(facts: FabricFacts, choices: Choices) -> tuple[dict[str, Any], list[str]]:
    """Return the raw mapping of a cluster with this fabric, of nodes of the kind that the user names.

    Raises:
        InputError: no node is named.
    """
    if choices.node is None:
        raise InputError(
            "the file says how nodes are joined, not what a node is",
            hint=f"give --node NAME (shipped: {', '.join(shipped(CATALOG / 'nodes'))}) or a path",
            file=facts.source,
        )
    name, model = reference(choices.node, "nodes"), load_named(choices.node, "nodes", Node)
    changes: dict[str, Any] = {}
    notes = ["latencies of the levels are not in the file and count as 0"]
    if facts.gpus_per_node is not None and facts.gpus_per_node != model.gpus_per_node:
        changes["gpus_per_node"] = facts.gpus_per_node
        notes.append(f"the file says {facts.gpus_per_node} GPUs a node, {model.name} has {model.gpus_per_node}")
    if choices.nic is not None or facts.nic_bytes_per_second is not None:
        nic = reference(choices.nic, "nics") if choices.nic else _nic(facts.nic_bytes_per_second or 0.0)
        changes |= {"nic": nic, "nics_per_node": facts.nics_per_node or model.nics_per_node or 1}
    kind, rails = facts.kind, facts.rails
    if facts.nics_per_node is None and model.nics_per_node > 1:
        kind, rails = "rail-optimized", model.nics_per_node
        notes.append(
            f"rails are not in the file: assumed that a leaf in it stands for {rails} switches, one for each NIC of "
            f"{model.name}"
        )
    fabric: dict[str, Any] = {"kind": kind, "tiers": facts.tiers} | ({"rails": rails} if rails > 1 else {})
    if not any("oversubscription" in tier for tier in facts.tiers):
        notes.append("oversubscription is not in the file and counts as 1")
    cluster = {
        "name": Path(facts.source).stem,
        "node": {"from": name, **changes} if changes else name,
        "num_nodes": facts.num_nodes,
        "fabric": fabric,
        "source": {"num_nodes": Path(facts.source).name, "fabric": "; ".join([Path(facts.source).name, *notes])},
    }
    return cluster, notes


def cluster_with_measured(measured: dict[str, Any], choices: Choices, source: str) -> dict[str, Any]:
    """Return the raw mapping of the named cluster with measured collectives added; equal kind and ranks are replaced.

    Raises:
        InputError: no cluster is named, or it does not exist.
    """
    if choices.cluster is None:
        raise InputError(
            "a log determines no cluster", hint="give --cluster NAME, on which it was measured", file=source
        )
    path = _path(choices.cluster, "clusters")
    raw = _absolute(dict(read_mapping(path)), path.parent)
    before = dict(raw.get("measured") or {})
    new = {(one["kind"], one["ranks"]) for one in measured["collectives"]}
    kept = [one for one in before.get("collectives") or () if (one["kind"], one["ranks"]) not in new]
    raw["measured"] = measured | before | {"collectives": [*kept, *measured["collectives"]]}
    return raw


def to_yaml(mapping: Mapping[str, Any]) -> str:
    """Render a raw mapping as a YAML document."""
    writer = YAML(typ="rt")
    writer.width, writer.default_flow_style = 4096, False
    out = io.StringIO()
    writer.dump(_plain(mapping), out)
    return out.getvalue()


def load_named(name: str, folder: str, model: type[Any], inputs: list[InputFile] | None = None) -> Any:
    """Load a document of the catalog by name, or from a path.

    Raises:
        InputError: no such thing.
    """
    return load(_path(name, folder), model, inputs=inputs)


def reference(name: str, folder: str) -> str:
    """Return how a document refers to a name (as it is) or to a path (absolute, so that the file may stand anywhere).

    Raises:
        InputError: no such thing.
    """
    path = _path(name, folder)
    return name if path.parent == CATALOG / folder and path.stem == name else str(path.resolve())


def _path(name: str, folder: str) -> Path:
    path = Path(name)
    if path.is_file():
        return path
    try:
        return resolve(name, CATALOG / folder, LoadContext(Path()))
    except ValueError as error:
        what, _, hint = str(error).partition("; ")
        raise InputError(what, hint=hint or None) from None


def _gpu(facts: NodeFacts, choices: Choices) -> tuple[Gpu, str]:
    name = choices.gpu or facts.gpu
    if name is None and choices.node is not None:
        raw = read_mapping(_path(choices.node, "nodes")).get("gpu")
        name = raw if isinstance(raw, str) else None
    if name is None:
        raise InputError(
            "the file does not say which GPU it is about, or one that the catalog lacks",
            hint=f"give --gpu NAME (shipped: {', '.join(shipped(CATALOG / 'gpus'))}) or a path",
            file=facts.source,
        )
    gpu: Gpu = load_named(name, "gpus", Gpu)
    return gpu, reference(name, "gpus")


def _model_node(gpu_name: str, choices: Choices, facts: NodeFacts) -> Node | None:
    """The node that the user names, else the first shipped one with this GPU."""
    if choices.node is not None:
        named: Node = load_named(choices.node, "nodes", Node)
        return named
    for path in shipped(CATALOG / "nodes").values():
        if read_mapping(path).get("gpu") == gpu_name:
            return load(path, Node)
    if facts.gpus == 1:
        return None
    raise InputError(
        f"no shipped node has the GPU {gpu_name}, so nothing is known of what its links reach",
        hint="give --node PATH",
        file=facts.source,
    )


def _scale_up(facts: NodeFacts, gpu: Gpu, model: Node | None, notes: list[str]) -> dict[str, Any]:
    if facts.gpus == 1 or model is None:
        return {"kind": "none", "bandwidth": "0 GB/s", "bus_bandwidth": "0 GB/s", "latency": "0 us", "domain_size": 1}
    like = model.scale_up
    rate = like.bandwidth_bytes_per_second
    if facts.link is None:
        raise InputError(
            "what joins the GPUs is not in the file",
            hint="give a file with NVLink or XGMI in it (nvidia-smi topo -m, not -mp)",
            file=facts.source,
        )
    if facts.link == "xgmi" and facts.domain_size != like.domain_size:
        raise InputError(
            f"{facts.domain_size} GPUs an island, {like.domain_size} in {model.name}: the rate of the links is unknown",
            hint="give --node PATH with the rate",
            file=facts.source,
        )
    if facts.link == "nvlink" and facts.links is not None and gpu.architecture in NVLINK_BYTES_PER_SECOND:
        rate = facts.links * NVLINK_BYTES_PER_SECOND[gpu.architecture]
        notes.append(f"{facts.links} NVLinks of {rate / facts.links / 1e9:g} GB/s a GPU")
    else:
        notes.append(f"rate of the links as in {model.name}: not in the file")
    share = like.bus_bandwidth_bytes_per_second / like.bandwidth_bytes_per_second
    notes.append(f"bus bandwidth assumed: {share:.1%} of the line rate, as in {model.name}; latency as there")
    kind = "infinity-fabric" if facts.link == "xgmi" else "nvswitch" if facts.switched else "nvlink-mesh"
    return {
        "kind": kind,
        "bandwidth": _rate(rate),
        "bus_bandwidth": _rate(rate * share),
        "latency": f"{like.latency_seconds * 1e6:.12g} us",
        "domain_size": facts.domain_size,
    }


def _nic(bytes_per_second: float) -> str | dict[str, Any]:
    """The shipped port of this rate, or one like the next faster one with its own rate."""
    ports = {name: load(path, Nic) for name, path in shipped(CATALOG / "nics").items()}
    ordered = sorted(ports, key=lambda name: ports[name].bandwidth_bytes_per_second)
    like = next((name for name in ordered if ports[name].bandwidth_bytes_per_second >= bytes_per_second), ordered[-1])
    if ports[like].bandwidth_bytes_per_second == bytes_per_second:
        return like
    gbit = f"{bytes_per_second * 8e-9:.12g}"
    return {"from": like, "name": f"{gbit}G port", "bandwidth": f"{gbit} Gbit/s"}


def _rate(bytes_per_second: float) -> str:
    return f"{bytes_per_second / 1e9:.12g} GB/s"


def _absolute(raw: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Make the relative paths of a document absolute, since it will stand elsewhere."""

    def moved(key: str, value: Any) -> Any:
        if isinstance(value, Mapping):
            return {inner: moved(inner, entry) for inner, entry in value.items()}
        if isinstance(value, list):
            return [moved(key, entry) for entry in value]
        named = key in ("node", "gpu", "nic", "from") and isinstance(value, str)
        return str((folder / value).resolve()) if named and (folder / value).is_file() else value

    return {key: moved(key, value) for key, value in raw.items()}


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _plain(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(entry) for entry in value]
    return value
