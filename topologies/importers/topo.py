"""What a node's own tools say of it: the matrices of nvidia-smi and rocm-smi, and the list of GPUs with MIG slices."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from topologies.errors import InputError
from topologies.importers.text import numbered_lines, without_label
from topologies.importers.topo_matrix import TopologyMatrix, read_matrix

_GPU = re.compile(r"\s*GPU (\d+): (.+?) \(UUID: \S+\)")
_MIG = re.compile(r"\s+MIG (\S+)\s+Device\s+(\d+): \(UUID: \S+\)")


@dataclass(frozen=True, slots=True, kw_only=True)
class ListedGpu:
    """One line of ``nvidia-smi -L`` with the MIG slices below it."""

    index: int
    product: str
    mig_profiles: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuList:
    """The GPUs of a node, whole and sliced."""

    gpus: tuple[ListedGpu, ...]
    warnings: tuple[str, ...] = ()

    @property
    def physical(self) -> int:
        """GPUs in the node."""
        return len(self.gpus)

    @property
    def whole(self) -> int:
        """GPUs without slices: what a training job can use."""
        return sum(not gpu.mig_profiles for gpu in self.gpus)


def import_gpu_list(text: str, file: str | Path | None = None) -> GpuList:
    """Read ``nvidia-smi -L``.

    Raises:
        InputError: no GPU, or a slice without its GPU.
    """
    gpus: list[ListedGpu] = []
    for number, line in numbered_lines(text, file):
        gpu, mig = _GPU.match(line), _MIG.match(line)
        if gpu is not None:
            gpus.append(ListedGpu(index=int(gpu[1]), product=gpu[2]))
        elif mig is not None:
            if not gpus:
                raise InputError("a MIG slice before any GPU", hint="give the whole list", file=file, line=number)
            gpus[-1] = replace(gpus[-1], mig_profiles=(*gpus[-1].mig_profiles, mig[1]))
    if not gpus:
        raise InputError("lists no GPU", hint="give the output of nvidia-smi -L", file=file)
    sliced = [gpu for gpu in gpus if gpu.mig_profiles]
    warnings = [
        f"GPU {gpu.index} is split into {len(gpu.mig_profiles)} MIG slices: NCCL training cannot use them"
        for gpu in sliced
    ]
    if len({gpu.product for gpu in gpus}) > 1:
        warnings.append(f"GPUs of different kinds: {', '.join(sorted({gpu.product for gpu in gpus}))}")
    return GpuList(gpus=tuple(gpus), warnings=tuple(warnings))


def import_topo(text: str, file: str | Path | None = None) -> TopologyMatrix:
    """Read a matrix of nvidia-smi or rocm-smi and say what deserves a look.

    Raises:
        InputError: no matrix, or a truncated one.
    """
    matrix = read_matrix(text, file)
    labels = any(without_label(line) != line for _, line in numbered_lines(text, file) if "GPU" in line)
    found = [*_gpu_links(matrix), *_nic_links(matrix), *_numa(matrix), *_holes(matrix)]
    if labels:
        found.append("lines carry launcher labels: if several nodes printed, only the first matrix was read")
    return replace(matrix, warnings=tuple(found))


def _gpu_links(matrix: TopologyMatrix) -> Iterator[str]:
    if matrix.tool == "nvidia-smi topo -p2p":
        if matrix.no_p2p:
            codes = sorted({matrix.between(one, other) for one, other in matrix.no_p2p})
            yield f"{len(matrix.no_p2p)} pairs without peer access ({', '.join(codes)}): copies go through host memory"
        return
    sizes = sorted({len(island) for island in matrix.islands})
    if matrix.link in ("nvlink", "xgmi") and len(matrix.islands) > 1:
        shown = " and ".join(",".join(island) for island in matrix.islands)
        yield f"{len(matrix.islands)} {matrix.link} islands ({shown}): keep TP within one, at most {sizes[-1]}"
    if matrix.link == "pcie" and len(matrix.gpus) > 1:
        groups = matrix.pcie_groups
        largest = max(len(group) for group in groups)
        yield "no NVLink in the matrix: GPUs without it, or 'topo -mp', which hides it; NVLink is unknown"
        if largest > 1:
            shown = " ".join(",".join(group) for group in groups)
            yield f"{len(groups)} groups below one PCIe switch ({shown}): TP {largest} is natural"
    if matrix.hops:
        yield "hops measure distance and are not the number of links; bandwidth does not follow from them"


def _nic_links(matrix: TopologyMatrix) -> Iterator[str]:
    if matrix.tool != "nvidia-smi topo -m":
        return
    if not matrix.nics:
        yield "no NIC in the matrix: rails unknown"
        return
    near = matrix.near_nics
    if not matrix.compute_nics:
        kinds = sorted({matrix.between(gpu, nic) for gpu in matrix.gpus for nic in matrix.nics})
        yield f"every NIC is {' or '.join(kinds)} from every GPU: which NIC is near which GPU cannot be told"
    else:
        far = [gpu for gpu in matrix.gpus if not near[gpu] and (gpu, matrix.nics[0]) in matrix.links]
        if far:
            yield f"{', '.join(far)} have no near NIC: their traffic crosses the CPU, at a fraction of the rate"
        shared: dict[tuple[str, ...], list[str]] = {}
        for gpu, nics in near.items():
            if nics:
                shared.setdefault(nics, []).append(gpu)
        if any(len(gpus) > 1 for gpus in shared.values()):
            shown = "; ".join(f"{','.join(gpus)} on {','.join(nics)}" for nics, gpus in shared.items())
            yield f"GPUs share NICs: {shown}"
        order = [matrix.nics.index(nics[0]) for nics in near.values() if nics]
        if order != sorted(order):
            shown = ", ".join(f"{gpu}->{'/'.join(nics)}" for gpu, nics in near.items() if nics)
            yield f"GPU order is not NIC order ({shown}): a rail is a NIC, not an index"
        idle = [nic for nic in matrix.nics if nic not in matrix.compute_nics]
        if idle and all((gpu, nic) in matrix.links for gpu in matrix.gpus for nic in idle):
            yield f"{', '.join(idle)} near no GPU: storage or management, not rails"
    if matrix.nic_pairs:
        shown = ", ".join("+".join(pair) for pair in matrix.nic_pairs)
        yield f"NICs one bridge apart, ports of one card: {shown}"


def _numa(matrix: TopologyMatrix) -> Iterator[str]:
    if matrix.tool == "nvidia-smi topo -p2p":
        return
    known = {gpu: nodes for gpu, nodes in matrix.numa.items() if nodes}
    if matrix.numa and len(known) < len(matrix.numa):
        yield f"no NUMA node for {', '.join(gpu for gpu in matrix.numa if gpu not in known)}: a virtual machine?"
    if any(len(nodes) > 1 for nodes in known.values()):
        yield "NUMA affinity is a list: the first is the CPU's node, the others are memory of GPUs"
    first = [nodes[0] for nodes in known.values()]
    if first != sorted(first):
        yield f"GPU order is not NUMA order: {', '.join(f'{gpu} on {nodes[0]}' for gpu, nodes in known.items())}"
    distinct = sorted(set(first))
    if len(distinct) > 1 and all(node % 2 for node in distinct):
        yield f"only the odd NUMA nodes {distinct} hold GPUs: bind processes by affinity, not by rank"


def _holes(matrix: TopologyMatrix) -> Iterator[str]:
    with_row = {one for one, _ in matrix.links}
    missing = [gpu for gpu in matrix.gpus if gpu not in with_row]
    if missing and len(matrix.gpus) > 1:
        yield f"incomplete: no row for {', '.join(missing)}"
    if matrix.nics and not any(nic in with_row for nic in matrix.nics) and len(matrix.nics) > 1:
        yield "no rows for NICs: which of them are ports of one card is unknown"
    uneven = [
        f"{one}-{other}"
        for (one, other), value in matrix.links.items()
        if one < other and matrix.links.get((other, one), value) != value
    ]
    if uneven:
        yield f"the two directions disagree for {', '.join(uneven[:4])}"
