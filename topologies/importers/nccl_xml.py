"""NCCL's and RCCL's XML of a node (``NCCL_TOPO_DUMP_FILE``, or files that cloud images ship for ``NCCL_TOPO_FILE``).

The tree is system > cpu (a NUMA node) > pci (bridges and devices) > gpu with nvlink or xgmi, and nic with net ports.
Files made by hand often hold pci devices only: their class tells GPUs (0x03.., 0x12..) from NICs (0x02..).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from xml.etree.ElementTree import Element, ParseError

import networkx as nx
from defusedxml import DefusedXmlException
from defusedxml.ElementTree import fromstring

from topologies.errors import InputError
from topologies.importers.products import gpu_of_device
from topologies.importers.text import require_text

LANE_BYTES_PER_SECOND = {
    "2.5 GT/s": 1.5e9 / 8,
    "5 GT/s": 3e9 / 8,
    "8 GT/s": 6e9 / 8,
    "16 GT/s": 12e9 / 8,
    "32 GT/s": 24e9 / 8,
    "64 GT/s": 48e9 / 8,
}
"""What NCCL counts for one PCIe lane (src/graph/topo.cc: 15 to 480, in units of 100 Mbit/s)."""
DEFAULT_LANE_BYTES_PER_SECOND = 6e9 / 8
"""Where the link speed is unknown: 60 times 100 Mbit/s."""

STANDARD_MBIT_PER_SECOND = (10_000, 25_000, 40_000, 50_000, 56_000, 100_000, 200_000, 400_000, 800_000)
FASTEST_MBIT_PER_SECOND = 1_600_000
"""Nothing faster was sold as one port by 2026; higher figures are placeholders or in another unit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class XmlGpu:
    """One GPU. ``path`` lists the PCI bridges from the CPU down to it."""

    bus_id: str
    numa: int
    path: tuple[str, ...]
    dev: int | None = None
    sm: int | None = None
    """Compute capability times ten (NVIDIA) or compute units (AMD)."""
    gcn: str | None = None
    product: str | None = None
    """File of the catalog, where the PCI device tells."""
    nvlinks: dict[str, int]
    """Links by target, switches or peers."""
    xgmi: dict[str, int]
    pcie_bytes_per_second: float
    link_speed_known: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class XmlPort:
    """One network port (or one NIC without ports in the file)."""

    bus_id: str
    numa: int
    path: tuple[str, ...]
    name: str | None = None
    mbit_per_second: float | None = None
    """As written; None where the file does not say."""
    port: int | None = None
    guid: str | None = None
    gdr: bool | None = None
    pcie_bytes_per_second: float

    @property
    def bytes_per_second(self) -> float | None:
        """Rate of the port; None where unknown or a placeholder."""
        if self.mbit_per_second is None or not 0 < self.mbit_per_second <= FASTEST_MBIT_PER_SECOND:
            return None
        return self.mbit_per_second * 1e6 / 8


@dataclass(frozen=True, slots=True, kw_only=True)
class NcclTopology:
    """A node as NCCL sees it; GPUs in the order of the file."""

    version: str
    numa_nodes: tuple[int, ...]
    cpu: str
    """Vendor and model of the CPUs."""
    gpus: tuple[XmlGpu, ...]
    ports: tuple[XmlPort, ...]
    links: dict[str, float]
    """Rate of the PCIe link above each device or bridge, bytes per second."""
    warnings: tuple[str, ...] = ()

    @property
    def gpus_by_bus(self) -> tuple[XmlGpu, ...]:
        """GPUs in the order in which CUDA numbers them with CUDA_DEVICE_ORDER=PCI_BUS_ID."""
        return tuple(sorted(self.gpus, key=lambda gpu: gpu.bus_id))

    @property
    def islands(self) -> tuple[tuple[str, ...], ...]:
        """Bus ids of GPUs that NVLink (directly or over switches) or XGMI joins; one GPU each where neither is."""
        graph: nx.Graph[str] = nx.Graph()
        buses = [gpu.bus_id for gpu in self.gpus]
        graph.add_nodes_from(buses)
        graph.add_edges_from((gpu.bus_id, target) for gpu in self.gpus for target in {**gpu.nvlinks, **gpu.xgmi})
        groups = [tuple(bus for bus in buses if bus in group) for group in nx.connected_components(graph)]
        return tuple(sorted(filter(None, groups), key=lambda group: buses.index(group[0])))

    @property
    def node_bytes_per_second(self) -> float | None:
        """Rate of all ports, one direction; None where a rate is unknown."""
        rates = [port.bytes_per_second for port in self.ports]
        return sum(rate for rate in rates if rate is not None) if rates and None not in rates else None

    @property
    def cards(self) -> tuple[tuple[XmlPort, ...], ...]:
        """Ports by card: equal GUID, or the same PCI device."""
        found: dict[str, list[XmlPort]] = {}
        for index, port in enumerate(self.ports):
            guid = port.guid if port.guid and int(port.guid, 16) else None
            found.setdefault(guid or port.bus_id or str(index), []).append(port)
        return tuple(tuple(ports) for ports in found.values())

    def near_ports(self, gpu: XmlGpu) -> tuple[XmlPort, ...]:
        """Return the ports that share the deepest PCI bridge with a GPU; none where only the CPU joins them."""
        shared = [_shared(gpu.path, port.path) for port in self.ports]
        best = max(shared, default=0)
        return tuple(port for port, depth in zip(self.ports, shared, strict=True) if best and depth == best)


def import_nccl_xml(text: str, file: str | Path | None = None) -> NcclTopology:
    """Read a topology of NCCL or RCCL.

    Raises:
        InputError: broken or hostile XML, another root than ``system``, or no GPU in it.
    """
    require_text(text, file)
    try:
        root: Element = fromstring(text.strip())
    except ParseError as error:
        line, column = error.position
        raise InputError(
            f"is not valid XML: {str(error).partition(':')[0]}",
            hint="the file is truncated or was edited; dump it again",
            file=file,
            line=line + text[: len(text) - len(text.lstrip())].count("\n"),
            column=column + 1,
        ) from None
    except DefusedXmlException:
        raise InputError(
            "declares XML entities, which a topology has no use for",
            hint="do not trust this file; dump the topology again",
            file=file,
        ) from None
    if root.tag != "system":
        raise InputError(f"holds <{root.tag}> at its top, not <system>", hint="give a NCCL topology", file=file)
    cpus = root.findall("cpu")
    gpus: list[XmlGpu] = []
    ports: list[XmlPort] = []
    above: dict[str, float] = {}
    for cpu in cpus:
        numa = _integer(cpu, "numaid", file) or 0
        for pci, path in _devices(cpu, ()):
            kind = pci.get("class", "").lower()
            above[pci.get("busid", "")] = _pcie(pci, file)[0]
            if pci.find("gpu") is not None or re.match(r"0x(03|12)", kind):
                gpus.append(_gpu(pci, path, numa, file))
            elif pci.find("nic") is not None or kind.startswith("0x02"):
                ports += _ports(pci, path, numa, file)
    if not gpus:
        raise InputError("describes no GPU", hint="dump the topology on a node with visible GPUs", file=file)
    models = {
        f"{cpu.get('vendor', '?')} family {cpu.get('familyid', '?')} model {cpu.get('modelid', '?')}" for cpu in cpus
    }
    topology = NcclTopology(
        version=root.get("version", ""),
        numa_nodes=tuple(_integer(cpu, "numaid", file) or 0 for cpu in cpus),
        cpu=", ".join(sorted(models)),
        gpus=tuple(gpus),
        ports=tuple(ports),
        links=above,
    )
    return replace(topology, warnings=tuple(_warnings(topology)))


def _devices(parent: Element, path: tuple[str, ...]) -> Iterator[tuple[Element, tuple[str, ...]]]:
    for pci in parent.findall("pci"):
        yield pci, path
        yield from _devices(pci, (*path, pci.get("busid", "")))


def _integer(element: Element, key: str, file: str | Path | None) -> int | None:
    text = element.get(key)
    if text is None or text == "":
        return None
    try:
        return int(text)
    except ValueError:
        raise InputError(f"{key}={text!r} of <{element.tag}> is not a whole number", file=file, key=key) from None


def _pcie(pci: Element, file: str | Path | None) -> tuple[float, bool]:
    """Rate of a PCIe link as NCCL counts it, and whether the file states the speed; width 0 counts as 16."""
    speed = re.sub(r"\.0(?= GT)", "", pci.get("link_speed", "").removesuffix(" PCIe").strip())
    width = _integer(pci, "link_width", file) or 16
    lane = LANE_BYTES_PER_SECOND.get(speed)
    return width * (lane if lane is not None else DEFAULT_LANE_BYTES_PER_SECOND), lane is not None


def _gpu(pci: Element, path: tuple[str, ...], numa: int, file: str | Path | None) -> XmlGpu:
    gpu = pci.find("gpu")
    rate, known = _pcie(pci, file)
    links: dict[str, dict[str, int]] = {"nvlink": {}, "xgmi": {}}
    for kind, targets in links.items():
        for link in gpu.findall(kind) if gpu is not None else ():
            target = link.get("target", "")
            targets[target] = targets.get(target, 0) + (_integer(link, "count", file) or 0)
    return XmlGpu(
        bus_id=pci.get("busid", ""),
        numa=numa,
        path=path,
        dev=_integer(gpu, "dev", file) if gpu is not None else None,
        sm=_integer(gpu, "sm", file) if gpu is not None else None,
        gcn=gpu.get("gcn") if gpu is not None else None,
        product=gpu_of_device(pci.get("vendor", ""), pci.get("device", "")),
        nvlinks=links["nvlink"],
        xgmi=links["xgmi"],
        pcie_bytes_per_second=rate,
        link_speed_known=known,
    )


def _ports(pci: Element, path: tuple[str, ...], numa: int, file: str | Path | None) -> list[XmlPort]:
    rate, _ = _pcie(pci, file)
    plain = XmlPort(bus_id=pci.get("busid", ""), numa=numa, path=path, pcie_bytes_per_second=rate)
    nets = [net for nic in pci.findall("nic") for net in nic.findall("net")]
    return [
        replace(
            plain,
            name=net.get("name"),
            mbit_per_second=_integer(net, "speed", file),
            port=_integer(net, "port", file),
            guid=net.get("guid"),
            gdr=None if net.get("gdr") is None else net.get("gdr") == "1",
        )
        for net in nets
    ] or [plain]


def _shared(one: tuple[str, ...], other: tuple[str, ...]) -> int:
    depth = 0
    for left, right in zip(one, other, strict=False):
        if left != right:
            break
        depth += 1
    return depth


def _warnings(topology: NcclTopology) -> Iterator[str]:
    yield from _rates(topology)
    double = [ports for ports in topology.cards if len(ports) > 1 and ports[0].guid]
    if double:
        names = "+".join(port.name or port.bus_id for port in double[0])
        yield (
            f"{len(double)} cards have several ports of one GUID, such as {names}: NCCL may cross rails between them "
            "even with NCCL_CROSS_NIC=0"
        )
    far = [gpu.bus_id for gpu in topology.gpus if not topology.near_ports(gpu)]
    if topology.ports and far:
        yield f"{len(far)} GPUs share no PCIe bridge with a NIC, such as {far[0]}: traffic crosses the CPU"
    numa = [gpu.numa for gpu in topology.gpus_by_bus]
    if numa != sorted(numa):
        shown = ",".join(map(str, numa))
        yield f"GPU order by bus id is not NUMA order ({shown}): index 0 sits on NUMA {numa[0]}"
    if not any(gpu.nvlinks or gpu.xgmi for gpu in topology.gpus) and len(topology.gpus) > 1:
        yield "no NVLink or XGMI in the file: NCCL adds what it finds; here it is unknown"
    sizes = [len(island) for island in topology.islands]
    if 1 < len(sizes) < len(topology.gpus):
        yield f"{len(sizes)} islands of {sizes[0]} GPUs, joined by PCIe only: keep TP within one, at most {max(sizes)}"
    peers = {target for gpu in topology.gpus for target in gpu.nvlinks | gpu.xgmi}
    hidden = peers - {gpu.bus_id for gpu in topology.gpus}
    if hidden and len(topology.gpus) == 1:
        yield f"1 GPU visible, with links to {len(hidden)} others: the dump was made with few visible devices"
    if not all(gpu.link_speed_known for gpu in topology.gpus):
        yield "PCIe speed unknown (a virtual machine?): NCCL counts 6 Gbit/s a lane"
    if len(topology.gpus) != len({gpu.bus_id for gpu in topology.gpus}):
        yield "two GPUs have the same bus id"


def _rates(topology: NcclTopology) -> Iterator[str]:
    speeds = sorted({port.mbit_per_second for port in topology.ports if port.mbit_per_second is not None})
    for speed in speeds:
        if speed > FASTEST_MBIT_PER_SECOND or speed <= 0:
            yield f"net speed {speed:.0f} Mbit/s ({speed / 8000:,.0f} GB/s) is a placeholder or another unit: unknown"
        elif speed not in STANDARD_MBIT_PER_SECOND:
            yield f"net speed {speed / 1000:g} Gbit/s is no standard rate: capped on purpose?"
    if topology.ports and not speeds:
        yield f"{len(topology.ports)} NICs without a rate in the file"
    for bus_id, limit in topology.links.items():
        if any(bus_id in (*gpu.path, gpu.bus_id) for gpu in topology.gpus):
            continue
        ports = [port for port in topology.ports if bus_id in (*port.path, port.bus_id)]
        total = sum(rate for port in ports if (rate := port.bytes_per_second) is not None)
        if total > limit * 1.05:
            names = ", ".join(port.name or port.bus_id for port in ports)
            yield f"{names} ({total / 1e9:g} GB/s) share one PCIe link of {limit / 1e9:g} GB/s at {bus_id}"
