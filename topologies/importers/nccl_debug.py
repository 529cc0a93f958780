"""NCCL_DEBUG=INFO logs: rings, channels, which NIC each hop used, GPUDirect, and what the environment forced."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from topologies.errors import InputError
from topologies.importers.text import numbered_lines, without_label

_PREFIX = re.compile(r"(?:\[[\d:. -]+\]\s*)?(\S+?):\d+:\d+ (?:\[(\d+)\] )?(?:\S+:\d+ )?NCCL (INFO|WARN) (.*)")
_VERSION = re.compile(r"NCCL version ([\w.+-]+)")
_RING = re.compile(r"Channel (\d+)/(\d+) :((?:\s+\d+)+)\s*$")
_RING_STEP = re.compile(r"Ring (\d+) : (-?\d+) -> (\d+) -> (-?\d+)")
_HOP = re.compile(r"Channel (\d+)(?:/\d+)? : (\d+)\[(\w+)\] -> (\d+)\[(\w+)\] (?:\[(send|receive)\] )?via (\S+)")
_NET = re.compile(r"NET/(\w+)/(\d+)(?:\((\d+)\))?(/GDRDMA)?")
_NICS = re.compile(r"\[(\d+)\](\w+):(\d+)/(\w+)")
_SETTING = re.compile(r"(NCCL_\w+) set by environment to (\S+)")
_TREES = re.compile(r"\[(\d+)\] -?\d+/")
_CHANNELS = re.compile(r"(\d+) coll channels, (?:(\d+) collnet channels, )?(\d+) nvls channels, (\d+) p2p channels")
_RANKS = re.compile(r"\bnranks[ =](\d+)")
_CHOICE = re.compile(r"(\w+): (\d+) Bytes -> Algo (\w+) proto (\w+)")
_GBPS = re.compile(r"busbw:\s*([\d.]+)\s*Gbps")


@dataclass(frozen=True, slots=True, kw_only=True)
class Hop:
    """One connection of a channel, as one of its ends reports it."""

    channel: int
    source: int
    target: int
    source_gpu: str
    """Index (or bus id, in old versions) of the GPU on its node."""
    target_gpu: str
    direction: str | None
    """``send`` or ``receive``; None between GPUs of a node."""
    via: str
    """Transport, such as P2P/IPC or NET/IB/0/GDRDMA."""
    nic: int | None = None
    proxy: int | None = None
    """Rank whose NIC is used; another than the source where PXN is at work."""
    gdr: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class NcclDebugLog:
    """What a log tells of one job."""

    version: str | None
    hosts: tuple[str, ...]
    ranks: int | None
    """Of the largest communicator; None where the log does not tell."""
    channels: int | None
    rings: dict[int, tuple[int, ...]]
    """Order of ranks by channel."""
    tree_channels: int
    nics: dict[int, str]
    """Device by NCCL's number."""
    network: str | None
    settings: dict[str, str]
    """Environment variables that NCCL reports as set."""
    hops: tuple[Hop, ...]
    nvls_channels: int | None
    algorithms: tuple[tuple[str, int, str, str], ...]
    """Collective, bytes, algorithm, protocol."""
    busbw_bytes_per_second: float | None
    """Where the job printed one in Gbps, which are bits."""
    warnings: tuple[str, ...] = ()

    @property
    def network_hops(self) -> tuple[Hop, ...]:
        """Hops between nodes."""
        return tuple(hop for hop in self.hops if hop.via.startswith("NET/"))

    @property
    def gdr(self) -> bool | None:
        """Whether all hops between nodes use GPUDirect RDMA; None without such hops."""
        return all(hop.gdr for hop in self.network_hops) if self.network_hops else None

    @property
    def nvls(self) -> bool | None:
        """Whether NVLS (reduction in the switch) was on; None where the log does not tell."""
        if self.settings.get("NCCL_NVLS_ENABLE") == "0":
            return False
        return None if self.nvls_channels is None else self.nvls_channels > 0

    @property
    def gpu_nics(self) -> dict[str, tuple[int, ...]]:
        """NICs by GPU of a node: where it receives, and where it sends through its own NIC or a proxy's."""
        gpu_of = {hop.target: hop.target_gpu for hop in self.hops} | {hop.source: hop.source_gpu for hop in self.hops}
        found: dict[str, set[int]] = {}
        for hop in self.network_hops:
            owner = hop.target if hop.direction == "receive" else hop.source if hop.proxy is None else hop.proxy
            if hop.nic is not None and owner in gpu_of:
                found.setdefault(gpu_of[owner], set()).add(hop.nic)
        return {gpu: tuple(sorted(nics)) for gpu, nics in sorted(found.items())}

    @property
    def used_nics(self) -> tuple[int, ...]:
        """NICs that carry traffic."""
        return tuple(sorted({hop.nic for hop in self.network_hops if hop.nic is not None}))

    @property
    def pxn_hops(self) -> tuple[Hop, ...]:
        """Sends that pass over NVLink to another GPU's NIC first (PXN)."""
        return tuple(hop for hop in self.network_hops if hop.proxy is not None and hop.proxy != hop.source)

    @property
    def crossings(self) -> tuple[tuple[Hop, Hop], ...]:
        """Connections whose sender and receiver report different NICs: rails cross."""
        received = {
            (hop.channel, hop.source, hop.target): hop for hop in self.network_hops if hop.direction == "receive"
        }
        pairs = [
            (hop, received.get((hop.channel, hop.source, hop.target)))
            for hop in self.network_hops
            if hop.direction == "send"
        ]
        return tuple((send, got) for send, got in pairs if got is not None and got.nic != send.nic)


def import_nccl_debug(text: str, file: str | Path | None = None) -> NcclDebugLog:
    """Read a log with NCCL's lines in it.

    Raises:
        InputError: no line of NCCL, or nothing but its warnings.
    """
    hosts: dict[str, None] = {}
    rings: dict[int, tuple[int, ...]] = {}
    nics: dict[int, str] = {}
    settings: dict[str, str] = {}
    hops: list[Hop] = []
    sizes: set[int] = set()
    channels: set[int] = set()
    trees: set[int] = set()
    choices: dict[tuple[str, int, str, str], None] = {}
    complaints: list[tuple[int, str]] = []
    version = network = None
    nvls = busbw = None
    informed = False
    for number, raw in numbered_lines(text, file):
        line = without_label(raw).strip()
        version = version or next(iter(_VERSION.findall(line)), None)
        gbps = _GBPS.search(line)
        busbw = float(gbps[1]) * 1e9 / 8 if gbps else busbw
        prefix = _PREFIX.match(line)
        if prefix is None:
            continue
        hosts[prefix[1]] = None
        said = prefix[4]
        if prefix[3] == "WARN":
            complaints.append((number, said))
            continue
        informed = True
        if ring := _RING.match(said):
            rings[int(ring[1])] = tuple(int(rank) for rank in ring[3].split())
            channels.add(int(ring[2]) - 1)
        elif hop := _HOP.match(said):
            hops.append(_hop(hop))
            channels.add(int(hop[1]))
        elif step := _RING_STEP.match(said):
            channels.add(int(step[1]))
            sizes.add(max(int(step[2]), int(step[3]), int(step[4])) + 1)
        elif said.startswith("Trees"):
            trees |= {int(channel) for channel in _TREES.findall(said)}
        elif counts := _CHANNELS.search(said):
            channels.add(int(counts[1]) - 1)
            nvls = int(counts[3])
        elif said.startswith("NET/") and "Using" in said:
            nics |= {int(index): name for index, name, _, _ in _NICS.findall(said)}
        elif said.startswith("Using network"):
            network = said.split()[-1]
        elif setting := _SETTING.match(said):
            settings[setting[1]] = setting[2].rstrip(".")
        elif choice := _CHOICE.search(said):
            choices[choice[1], int(choice[2]), choice[3], choice[4]] = None
        elif said.startswith("NVLS") and "Multicast" in said:
            nvls = nvls or 1
        sizes |= {int(size) for size in _RANKS.findall(said)}
    if not informed and version is None:
        where, what = complaints[0] if complaints else (None, "no line of NCCL")
        raise InputError(
            f"tells nothing but: {what}" if complaints else "holds no line of NCCL",
            hint="run with NCCL_DEBUG=INFO and keep the whole output",
            file=file,
            line=where,
        )
    sizes |= {len(ring) for ring in rings.values()} | {max(hop.source, hop.target) + 1 for hop in hops}
    log = NcclDebugLog(
        version=version,
        hosts=tuple(hosts),
        ranks=max(sizes, default=None),
        channels=max(channels) + 1 if channels else None,
        rings=rings,
        tree_channels=len(trees),
        nics=nics,
        network=network,
        settings=settings,
        hops=tuple(dict.fromkeys(hops)),
        nvls_channels=nvls,
        algorithms=tuple(choices),
        busbw_bytes_per_second=busbw,
    )
    return replace(log, warnings=(*_warnings(log), *(f"line {where}: {what}" for where, what in complaints)))


def _hop(match: re.Match[str]) -> Hop:
    net = _NET.match(match[7])
    return Hop(
        channel=int(match[1]),
        source=int(match[2]),
        target=int(match[4]),
        source_gpu=match[3],
        target_gpu=match[5],
        direction=match[6],
        via=match[7],
        nic=int(net[2]) if net else None,
        proxy=int(net[3]) if net and net[3] else None,
        gdr=net is not None and net[4] is not None,
    )


def _warnings(log: NcclDebugLog) -> Iterator[str]:
    hops = log.network_hops
    if log.crossings:
        send, got = log.crossings[0]
        yield (
            f"rails cross on {len(log.crossings)} connections, such as channel {send.channel}: rank {send.source} "
            f"sends on NIC {send.nic}, rank {got.target} receives on NIC {got.nic}"
        )
    if hops and not log.gdr:
        without = sum(not hop.gdr for hop in hops)
        yield f"{without} of {len(hops)} hops between nodes go without GPUDirect RDMA: through host memory"
    if any(hop.via.startswith("NET/Socket") for hop in hops):
        yield "traffic between nodes goes over TCP sockets, not RDMA"
    idle = [nic for nic in log.nics if nic not in log.used_nics]
    if hops and idle:
        yield f"NICs {', '.join(f'{nic} ({log.nics[nic]})' for nic in idle)} carry nothing: not for compute, or a fault"
    if log.pxn_hops:
        yield f"{len(log.pxn_hops)} sends use another GPU's NIC (PXN): normal on rail-optimized fabrics"
    shared = {gpu: nics for gpu, nics in log.gpu_nics.items() if len(nics) > 1}
    if shared:
        gpu, nics = next(iter(shared.items()))
        yield f"GPUs use several NICs, such as GPU {gpu}: {', '.join(map(str, nics))}"
    named = [(index, re.search(r"(\d+)$", name)) for index, name in log.nics.items()]
    if any(number is not None and int(number[1]) != index for index, number in named):
        yield "NCCL's NIC numbers are not the numbers in the device names"
    if log.nvls is False:
        yield "NVLS is off: all_reduce inside a node is a ring or tree, slower than the switch could"
    for name in (
        "NCCL_ALGO",
        "NCCL_PROTO",
        "NCCL_P2P_DISABLE",
        "NCCL_SHM_DISABLE",
        "NCCL_IB_DISABLE",
        "NCCL_MAX_NCHANNELS",
    ):
        if name in log.settings:
            yield f"{name} is forced to {log.settings[name]}"
    if log.channels is not None and log.channels <= 2 and len(log.hosts) > 1:
        yield f"only {log.channels} channels between nodes: few rings for the NICs"
    if log.busbw_bytes_per_second is not None:
        yield f"the busbw is printed in Gbit/s: {log.busbw_bytes_per_second / 1e9:.2f} GB/s"
