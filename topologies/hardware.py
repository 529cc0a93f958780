"""GPUs, NICs and nodes as their data sheets describe them: dense peaks, usable memory, power."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, model_validator

from topologies.curves import Curves
from topologies.document import Document, FileDocument, Reference
from topologies.units import Bytes, BytesPerSecond, FlopPerSecond, Seconds, Watts

CATALOG = Path(__file__).parent

Precision = Literal["fp32", "tf32", "fp16", "bf16", "fp8", "mxfp8", "nvfp4"]
"""Formats in which matrix multiplications run."""


class Gpu(FileDocument):
    """One accelerator (or one CPU core that plays the part of one)."""

    vendor: str
    architecture: Literal["ampere", "hopper", "blackwell", "cdna3", "cdna4", "cpu"]
    """Generation; efficiencies are fitted per generation."""
    peak_flop_per_second: dict[Precision, FlopPerSecond] = Field(min_length=1)
    """Dense matrix peak by precision, never the figure with structured sparsity."""
    memory_bytes: Bytes = Field(gt=0)
    """Nominal memory."""
    usable_memory_bytes: Bytes = Field(gt=0)
    """What the driver offers to all processes (torch's total capacity); the context of a process comes out of it."""
    memory_bandwidth_bytes_per_second: BytesPerSecond = Field(gt=0)
    power_watts: Watts = Field(gt=0)
    """Board power limit."""
    power_limit_watts: Watts | None = Field(default=None, gt=0)
    """Lower limit that an operator has set; clocks follow it."""
    idle_power_watts: Watts = 0.0

    def peak(self, precision: Precision) -> float | None:
        """Dense peak in FLOP/s, or None where the GPU lacks the precision (an unknown peak means no MFU)."""
        return self.peak_flop_per_second.get(precision)


class Nic(FileDocument):
    """One network port."""

    bandwidth_bytes_per_second: BytesPerSecond = Field(gt=0)
    """Line rate of one direction."""
    latency_seconds: Seconds = 0.0
    """One message from memory to memory through one switch."""


class ScaleUp(Document):
    """The fast network inside an NVLink, Infinity Fabric or shared-memory domain."""

    kind: Literal["nvswitch", "nvlink-mesh", "infinity-fabric", "pcie", "shared-memory", "none"]
    bandwidth_bytes_per_second: BytesPerSecond
    """Per GPU and direction, as the data sheet says (H100: 450 GB/s)."""
    bus_bandwidth_bytes_per_second: BytesPerSecond
    """Large-message ring all-reduce bus bandwidth that was measured (nccl-tests convention)."""
    latency_seconds: Seconds
    """One hop."""
    domain_size: int = Field(ge=1)
    """GPUs that reach each other over it; more than a node holds in a rack-scale domain."""


class Node(FileDocument):
    """A server: GPUs, the network inside, NICs, host memory and local disk."""

    gpu: Annotated[Gpu, Reference(CATALOG / "gpus")]
    gpus_per_node: int = Field(ge=1)
    scale_up: ScaleUp
    nic: Annotated[Nic, Reference(CATALOG / "nics")] | None = None
    """None: the node stands alone."""
    nics_per_node: int = Field(default=0, ge=0)
    host_memory_bytes: Bytes = 0.0
    local_storage_bytes: Bytes = 0.0
    local_write_bytes_per_second: BytesPerSecond = 0.0
    local_read_bytes_per_second: BytesPerSecond = 0.0
    power_watts: Watts = 0.0
    """Largest draw of the whole server, GPUs included."""
    idle_power_watts: Watts = 0.0
    curves: tuple[Annotated[Curves, Reference(CATALOG / "curves")], ...] = ()
    """Published logs that speak for collectives of such nodes, inside one and across."""

    @model_validator(mode="after")
    def _ports_need_a_kind(self) -> Node:
        if (self.nic is None) != (self.nics_per_node == 0):
            raise ValueError("nic and nics_per_node belong together; give both or neither")
        return self

    @property
    def network_bytes_per_second_per_gpu(self) -> float:
        """Line rate of all NICs of the node, one direction, divided by its GPUs; 0 without NICs."""
        return (
            0.0 if self.nic is None else self.nics_per_node * self.nic.bandwidth_bytes_per_second / self.gpus_per_node
        )
