"""Matrices of GPUs and NICs: ``nvidia-smi topo -m``, ``nvidia-smi topo -p2p``, ``rocm-smi --showtopo``.

The letters of nvidia-smi name what a connection traverses, from near to far: NV# (so many NVLinks), PIX (one PCIe
bridge), PXB (several), PHB (the CPU's host bridge), NODE (several host bridges), SYS (between sockets).
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import networkx as nx

from topologies.errors import InputError
from topologies.importers.text import numbered_lines, without_label

DISTANCES = ("PIX", "PXB", "PHB", "NODE", "SYS")
NEAR = ("PIX", "PXB")
"""Without the CPU in between: GPUDirect RDMA runs at full rate."""

Link = Literal["nvlink", "xgmi", "pcie", "unknown"]

_DEVICE = re.compile(r"(GPU|NIC)\d+|(mlx|bnxt_re|hfi|irdma|cxi|rdma|efa|ionic|roce)[\w-]*", re.IGNORECASE)
_CELL = re.compile(r"X|NV\d+|PIX|PXB|PHB|NODE|SYS|SOC|OK|CNS|GNS|TNS|NS|DR|U|XGMI|PCIE|N/A|\d+")
_SECTION = re.compile(r"=+\s*(.*?)\s*=+\s*$")
_P2P = {"OK", "CNS", "GNS", "TNS", "NS", "DR", "U"}
_AMD_NUMA = re.compile(r"GPU\[(\d+)\].*Numa Node:\s*(-?\d+)")
_LEGEND = re.compile(r"\s*(NIC\d+):\s*(\S+)\s*$")


@dataclass(frozen=True, slots=True, kw_only=True)
class TopologyMatrix:
    """What a matrix says. Devices keep the names of the tool; ``links`` holds each ordered pair that it states."""

    tool: Literal["nvidia-smi topo -m", "nvidia-smi topo -p2p", "rocm-smi"]
    gpus: tuple[str, ...]
    nics: tuple[str, ...] = ()
    links: dict[tuple[str, str], str]
    nic_names: dict[str, str] = field(default_factory=dict)
    """Device of each NIC, from the legend."""
    numa: dict[str, tuple[int, ...]] = field(default_factory=dict)
    """NUMA nodes of each GPU; empty where the tool does not know."""
    cpus: dict[str, str] = field(default_factory=dict)
    hops: dict[tuple[str, str], int] = field(default_factory=dict)
    """rocm-smi only. A hop is a unit of distance, not a link: it does not say how many links join two GPUs."""
    weights: dict[tuple[str, str], int] = field(default_factory=dict)
    """rocm-smi only."""
    warnings: tuple[str, ...] = ()

    @property
    def link(self) -> Link:
        """What joins the GPUs."""
        kinds = {value for (one, other), value in self.links.items() if one in self.gpus and other in self.gpus}
        if any(re.fullmatch(r"NV\d+", kind) for kind in kinds):
            return "nvlink"
        if "XGMI" in kinds:
            return "xgmi"
        return "pcie" if kinds & {*DISTANCES, "PCIE"} else "unknown"

    @property
    def islands(self) -> tuple[tuple[str, ...], ...]:
        """GPUs that reach each other over NVLink or XGMI (one GPU each where neither is there)."""
        return self._groups(lambda value: value == "XGMI" or value.startswith("NV"))

    @property
    def pcie_groups(self) -> tuple[tuple[str, ...], ...]:
        """GPUs below the same PCIe switches (PIX or PXB)."""
        return self._groups(lambda value: value in NEAR)

    def _groups(self, joined: Callable[[str], bool]) -> tuple[tuple[str, ...], ...]:
        graph: nx.Graph[str] = nx.Graph()
        graph.add_nodes_from(self.gpus)
        graph.add_edges_from(pair for pair in itertools.combinations(self.gpus, 2) if joined(self.between(*pair)))
        groups = [sorted(group, key=self.gpus.index) for group in nx.connected_components(graph)]
        return tuple(tuple(group) for group in sorted(groups, key=lambda group: self.gpus.index(group[0])))

    def between(self, one: str, other: str) -> str:
        """Connection of two devices, from whichever row states it; empty where none does."""
        return self.links.get((one, other)) or self.links.get((other, one)) or ""

    @property
    def nvlinks(self) -> dict[str, int]:
        """NVLinks of each GPU: the count to one peer where a switch joins them, else the sum over peers."""
        found = {}
        for gpu in self.gpus:
            counts = [
                int(value[2:])
                for other in self.gpus
                if other != gpu and re.fullmatch(r"NV\d+", value := self.between(gpu, other))
            ]
            if counts:
                found[gpu] = max(counts) if self.switched else sum(counts)
        return found

    @property
    def switched(self) -> bool:
        """Whether NVSwitches join the GPUs: more links in sum than a GPU has (18 at most, up to Blackwell)."""
        sums = []
        for gpu in self.gpus:
            values = [self.between(gpu, other) for other in self.gpus if other != gpu]
            sums.append(sum(int(value[2:]) for value in values if re.fullmatch(r"NV\d+", value)))
        return max(sums, default=0) > 18

    @property
    def near_nics(self) -> dict[str, tuple[str, ...]]:
        """NICs of each GPU without the CPU in between, at the smallest distance that the GPU has."""
        near: dict[str, tuple[str, ...]] = {}
        for gpu in self.gpus:
            distance = {nic: self.between(gpu, nic) for nic in self.nics}
            best = next((step for step in NEAR if step in distance.values()), None)
            near[gpu] = tuple(nic for nic in self.nics if best is not None and distance[nic] == best)
        return near

    @property
    def compute_nics(self) -> tuple[str, ...]:
        """NICs near a GPU; the others serve storage and management. Empty where the matrix does not show locality."""
        used = {nic for nics in self.near_nics.values() for nic in nics}
        return tuple(nic for nic in self.nics if nic in used)

    @property
    def rails(self) -> int | None:
        """NICs near GPUs; None where the matrix does not tell."""
        return len(self.compute_nics) or None

    @property
    def nic_pairs(self) -> tuple[tuple[str, str], ...]:
        """NICs one PCIe bridge apart from each other: two ports of a card."""
        return tuple(
            (one, other)
            for index, one in enumerate(self.nics)
            for other in self.nics[index + 1 :]
            if self.between(one, other) == "PIX"
        )

    @property
    def no_p2p(self) -> tuple[tuple[str, str], ...]:
        """Pairs of GPUs that cannot reach each other's memory (matrices of ``-p2p``)."""
        return tuple(
            (one, other)
            for (one, other), value in self.links.items()
            if value in _P2P - {"OK"} and self.gpus.index(one) < self.gpus.index(other)
        )


def read_matrix(text: str, file: str | Path | None = None) -> TopologyMatrix:
    """Read the first matrix of nvidia-smi, or all of rocm-smi.

    Raises:
        InputError: no matrix, or a row that does not fit its header.
    """
    lines = [(number, without_label(line)) for number, line in numbered_lines(text, file)]
    sections: dict[str, dict[tuple[str, str], str]] = {}
    title = ""
    columns: tuple[str, ...] = ()
    devices: dict[str, None] = {}
    rests: dict[str, list[str]] = {}
    numa: dict[str, tuple[int, ...]] = {}
    names: dict[str, str] = {}
    for number, line in lines:
        tokens = line.split()
        heading, legend, amd = _SECTION.match(line.strip()), _LEGEND.match(line), _AMD_NUMA.match(line)
        if heading is not None:
            title, columns = heading[1], ()
        elif legend is not None:
            names[legend[1]] = legend[2]
        elif amd is not None:
            numa[f"GPU{amd[1]}"] = (int(amd[2]),) if int(amd[2]) >= 0 else ()
        elif len(tokens) > 1 and _is_header(tokens):
            if rests and not title:
                break
            columns = _columns(tokens)
            devices |= dict.fromkeys(columns)
        elif columns and tokens and tokens[0] in devices:
            cells = tokens[1 : len(columns) + 1]
            if len(cells) < len(columns) or not all(_CELL.fullmatch(cell) for cell in cells):
                raise InputError(
                    f"the row of {tokens[0]} does not have {len(columns)} connections",
                    hint="the matrix is truncated or edited; give the whole output",
                    file=file,
                    line=number,
                )
            row = {(tokens[0], column): cell.replace("SOC", "SYS") for column, cell in zip(columns, cells, strict=True)}
            sections.setdefault(title, {}).update({pair: cell for pair, cell in row.items() if pair[0] != pair[1]})
            rests[tokens[0]] = tokens[len(columns) + 1 :]
    if not rests:
        raise InputError("holds no matrix of GPUs", hint="give the output of nvidia-smi topo -m", file=file)
    gpus = tuple(name for name in devices if name.upper().startswith("GPU"))
    if "" not in sections or any("GPUs" in name for name in sections):
        return _amd(sections, gpus, numa)
    values = set(sections[""].values())
    return TopologyMatrix(
        tool="nvidia-smi topo -p2p" if values and values <= _P2P else "nvidia-smi topo -m",
        gpus=gpus,
        nics=tuple(name for name in devices if name not in gpus),
        links=sections[""],
        nic_names=names,
        numa={gpu: _numbers(rest[1]) if len(rest) > 1 else () for gpu, rest in rests.items() if gpu in gpus},
        cpus={gpu: rest[0] for gpu, rest in rests.items() if gpu in gpus and rest},
    )


def _is_header(tokens: list[str]) -> bool:
    return _DEVICE.fullmatch(tokens[0]) is not None and not _CELL.fullmatch(tokens[1])


def _columns(tokens: list[str]) -> tuple[str, ...]:
    """Device names up to the affinity columns (``CPU Affinity``)."""
    end = tokens.index("CPU") if "CPU" in tokens else len(tokens)
    return tuple(tokens[:end])


def _numbers(text: str) -> tuple[int, ...]:
    """NUMA nodes of ``0``, ``0,2-17`` or ``N/A``."""
    found: list[int] = []
    for piece in text.split(","):
        low, _, high = piece.partition("-")
        if not low.isdigit() or (high and not high.isdigit()):
            return ()
        found += range(int(low), int(high or low) + 1)
    return tuple(found)


def _amd(
    sections: dict[str, dict[tuple[str, str], str]], gpus: tuple[str, ...], numa: dict[str, tuple[int, ...]]
) -> TopologyMatrix:
    def section(word: str) -> dict[tuple[str, str], str]:
        return next((cells for title, cells in sections.items() if word in title), {})

    return TopologyMatrix(
        tool="rocm-smi",
        gpus=gpus,
        links=section("Link Type"),
        numa=numa,
        hops={pair: int(value) for pair, value in section("Hops").items() if value.isdigit()},
        weights={pair: int(value) for pair, value in section("Weight").items() if value.isdigit()},
    )
