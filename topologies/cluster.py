"""A cluster: pools of nodes, the fabric between them, storage, power, and what was measured on it."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from topologies.curves import CollectiveKind as CollectiveKind
from topologies.document import Document, FileDocument, Reference
from topologies.hardware import CATALOG, Gpu, Node, Precision, ScaleUp
from topologies.units import Bytes, BytesPerSecond, FlopPerSecond, Ratio, Seconds, Watts


class Pool(Document):
    """Nodes of one kind."""

    node: Annotated[Node, Reference(CATALOG / "nodes")]
    num_nodes: int = Field(ge=1)


class Tier(Document):
    """One level of the scale-out fabric, from near to far."""

    name: str
    nodes: int = Field(ge=1)
    """Nodes that reach each other without leaving this level."""
    oversubscription: float = Field(default=1.0, ge=1.0)
    """Capacity below divided by capacity into this level: 7 means that each NIC keeps 1/7 of its rate across it."""
    latency_seconds: Seconds = 0.0
    """One message across this level, NIC to NIC: switches and cables, without the NICs themselves."""
    switch_ports: int | None = Field(default=None, ge=2)
    """Ports of a switch of this level; None: as the fabric says."""


class Fabric(Document):
    """How nodes are joined. A level's bandwidth is the NIC rate divided by the oversubscription on the way."""

    kind: Literal["rail-optimized", "fat-tree", "rail-only", "dual-plane", "none"]
    rails: int = Field(default=1, ge=1)
    """NICs of a node that lead to different leaf switches."""
    switch_ports: int = Field(default=64, ge=2)
    """Ports of a switch (its radix) at the rate of a NIC."""
    tiers: tuple[Tier, ...] = ()
    efficiency: Ratio = Field(default=1.0, gt=0, le=1)
    """Measured share of the line rate that large collectives reach."""
    routing: Literal["adaptive", "ecmp"] = "adaptive"
    """adaptive: switches spread packets over all equal paths; ecmp: each queue pair is hashed onto one of them."""
    queue_pairs: int = Field(default=1, ge=1, le=64)
    """Hashed flows over which the library spreads one connection evenly; matters for ecmp only."""
    lossless: bool = True
    """InfiniBand credits or Ethernet with priority flow control; False: packets are dropped under congestion."""

    def tier(self, num_nodes: int) -> Tier | None:
        """Return the lowest level that holds ``num_nodes`` nodes (the top one if none does; None without levels)."""
        return next((tier for tier in self.tiers if tier.nodes >= num_nodes), self.tiers[-1] if self.tiers else None)

    def oversubscription(self, num_nodes: int) -> float:
        """Return the product of the oversubscriptions on the way between ``num_nodes`` nodes."""
        factor = 1.0
        for tier in self.tiers:
            factor *= tier.oversubscription
            if tier.nodes >= num_nodes:
                break
        return factor


class Storage(Document):
    """A place for checkpoints and data."""

    name: str
    kind: Literal["peer-memory", "local-nvme", "parallel-file-system", "object-store"]
    write_bytes_per_second: BytesPerSecond = Field(gt=0)
    """Of the whole tier, or of each node where ``per_node``."""
    read_bytes_per_second: BytesPerSecond = Field(gt=0)
    per_node: bool = False
    capacity_bytes: Bytes = 0.0


class StorageNetwork(Document):
    """A network of its own to storage and management, beside the training fabric."""

    bandwidth_bytes_per_second: BytesPerSecond = Field(gt=0)
    """Line rate of one node, one direction."""
    oversubscription: float = Field(default=1.0, ge=1.0)
    """Rate of all nodes divided by what the network carries towards storage."""
    switch_ports: int = Field(default=64, ge=2)


class Power(Document):
    """What the facility gives and loses."""

    pue: float = Field(default=1.0, ge=1.0)
    """Facility power divided by IT power."""
    facility_watts: Watts = 0.0
    """Limit of the facility; 0: not stated."""
    node_cap_watts: Watts = 0.0
    """Power cap of one node; 0: none."""
    cap_exponent: float | None = Field(default=None, ge=1.0)
    """Under a cap, dynamic power goes with the speed of compute to this power (3: voltage follows frequency); None: by
    the curve that was measured on an A100."""


class GemmPoint(Document):
    """One measured matrix multiplication (m,k) x (k,n) on one GPU."""

    m: int
    n: int
    k: int
    precision: Precision
    rate_flop_per_second: FlopPerSecond


class AttentionPoint(Document):
    """One measured causal attention core on one GPU: ``batch`` sequences, ``heads`` query heads."""

    batch: int
    seq_length: int
    heads: int
    head_dim: int
    precision: Precision
    forward_seconds: Seconds
    backward_seconds: Seconds


class CollectivePoint(Document):
    """One measured collective. ``size_bytes`` is the whole buffer, as in nccl-tests."""

    kind: CollectiveKind
    ranks: int
    size_bytes: Bytes
    time_seconds: Seconds


class Residual(Document):
    """What one run says about one fixed cost of the software."""

    cost: str
    """Key of ``host_seconds``."""
    implied_seconds: Seconds
    """The cost with which the predicted step would have been the measured one; at least 0."""
    predicted_seconds: Seconds
    """Of the step, before the run."""
    measured_seconds: Seconds
    layout: str
    plan_sha256: str
    date: str
    contended: bool = False
    """Others used the cores too: kept, not believed."""


class Measured(Document):
    """What ``headway calibrate`` found on a machine; takes the place of fitted efficiencies where present."""

    date: str
    environment: dict[str, str] = Field(default_factory=dict)
    gemms: tuple[GemmPoint, ...] = ()
    attention: tuple[AttentionPoint, ...] = ()
    collectives: tuple[CollectivePoint, ...] = ()
    memory_bandwidth_bytes_per_second: BytesPerSecond = 0.0
    """Rate of elementwise operations, as a layer shows it that holds them beside its products; 0: not measured."""
    update_bandwidth_bytes_per_second: BytesPerSecond = 0.0
    """Rate of the optimizer's update; 0: not measured."""
    host_seconds: dict[str, Seconds] = Field(default_factory=dict)
    """Costs of the software around the arithmetic, beyond what the rates above and the collectives say.

    Per layer and micro-batch: ``layer``, and on top of it ``tp_layer``, ``tp_sequence_layer``, ``dp_layer`` (FSDP),
    ``moe_layer``, ``expert`` (each on the rank), ``ep_layer``; what full recompute adds, ``recompute_layer``, and with
    tensor parallelism ``tp_recompute_layer``. In proportion to what is moved: ``layer_gigabyte`` (1 GB of fp32 weights
    that leave the caches), ``dp_gigabyte`` (of weights under FSDP), ``tp_mebibyte`` and ``tp_sequence_mebibyte`` (1 MiB
    of activations of a tensor parallel layer), ``moe_mebibyte`` and ``ep_mebibyte`` (of routed tokens),
    ``head_mebibyte`` and ``tp_head_mebibyte`` (of fp32 logits). Per micro-batch: ``microbatch``; on a pipeline stage
    ``pp_microbatch`` too. Per step: ``step``, ``flat_gigabyte`` and ``shard_gigabyte`` (1 GB of fp32 gradients that
    are all-reduced, or reduced and gathered as zero1 does). What runs have taught of rates: seconds for each calibrated
    second of ``products`` (matrices and attention), ``collectives`` and ``update``; 1 where they are missing."""
    residuals: tuple[Residual, ...] = ()
    """Runs that were compared with their plans since the calibration, oldest first."""
    calibrated_seconds: dict[str, Seconds] = Field(default_factory=dict)
    """Those of ``host_seconds`` that the residuals have moved, as they were calibrated."""


class Cluster(FileDocument):
    """The machine that a job runs on.

    A document gives either ``pools``, or ``node`` and ``num_nodes`` for the usual case of one pool.
    """

    pools: tuple[Pool, ...] = Field(min_length=1)
    node_names: str = ""
    """Host list of all nodes in the order of the pools (``gpu[000-127]``), neighbours in the fabric side by side.

    Empty: nodes are known by number only."""
    fabric: Fabric = Fabric(kind="none")
    storage: tuple[Storage, ...] = ()
    storage_network: StorageNetwork | None = None
    """None: traffic to storage shares the training fabric."""
    power: Power = Power()
    oversubscribed_cores: float = Field(default=1.0, ge=1.0)
    """Ranks that share one core, where CPU cores play the part of GPUs; the compute time is multiplied by it."""
    measured: Measured | None = None

    @model_validator(mode="before")
    @classmethod
    def _one_pool(cls, content: Any) -> Any:
        if not isinstance(content, dict) or not ({"node", "num_nodes"} & content.keys()):
            return content
        if "pools" in content:
            raise ValueError("both 'pools' and 'node'/'num_nodes' are given; keep one form")
        pool = {key: content[key] for key in ("node", "num_nodes") if key in content}
        return {key: value for key, value in content.items() if key not in pool} | {"pools": [pool]}

    @property
    def node(self) -> Node:
        """The node of the first pool."""
        return self.pools[0].node

    @property
    def gpu(self) -> Gpu:
        """The GPU of the first pool."""
        return self.node.gpu

    @property
    def scale_up(self) -> ScaleUp:
        """The network inside a node (or rack) of the first pool."""
        return self.node.scale_up

    @property
    def kinds(self) -> tuple[str, ...]:
        """Names of the different nodes; several: layouts that treat all nodes alike do not describe this cluster."""
        return tuple(dict.fromkeys(pool.node.name for pool in self.pools))

    @property
    def num_nodes(self) -> int:
        """Nodes of all pools."""
        return sum(pool.num_nodes for pool in self.pools)

    @property
    def num_gpus(self) -> int:
        """GPUs of all pools."""
        return sum(pool.num_nodes * pool.node.gpus_per_node for pool in self.pools)

    @property
    def domain_size(self) -> int:
        """GPUs that reach each other without a NIC."""
        return min(self.scale_up.domain_size, self.num_gpus)
