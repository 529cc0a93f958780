from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from planner.contents import runs_of
from planner.paths import PathPools
from planner.question import Question
from planner.stage_problem import StageProblem
from scenarios.job import Job
from scenarios.layout import Layout
from scenarios.model import Attention, Layer, Mlp, ModelSpec, Moe
from scenarios.scenario import Scenario
from simulator.pieces import pieces
from simulator.stages import tail_layers
from topologies.cluster import Cluster, Fabric, Pool, Storage, Tier
from topologies.hardware import Gpu, Nic, Node, ScaleUp


def build_model(
    layers: int = 8,
    *,
    heads: int = 16,
    kv_heads: int = 8,
    head_dim: int = 64,
    ffn: int = 4096,
    vocab: int = 32_000,
    experts: int = 0,
) -> ModelSpec:
    feed: Mlp | Moe = Mlp(ffn_hidden_size=ffn, gated=True)
    if experts:
        feed = Moe(num_experts=experts, top_k=2, ffn_hidden_size=ffn)
    block = Layer(mixer=Attention(heads=heads, kv_heads=kv_heads, head_dim=head_dim), feed_forward=feed)
    return ModelSpec(
        name="small",
        hidden_size=heads * head_dim,
        vocab_size=vocab,
        layer_kinds={"block": block},
        pattern=("block",) * layers,
    )


def build_node(gpus_per_node: int = 8, domain: int | None = None, memory: float = 79e9, **peaks: float) -> Node:
    gpu = Gpu(
        name="test-gpu",
        vendor="test",
        architecture="hopper",
        peak_flop_per_second=peaks or {"bf16": 989.5e12, "fp8": 1979e12},  # type: ignore[arg-type]
        memory_bytes=max(memory, 80e9),
        usable_memory_bytes=memory,
        memory_bandwidth_bytes_per_second=3.35e12,
        power_watts=700.0,
    )
    scale_up = ScaleUp(
        kind="nvswitch",
        bandwidth_bytes_per_second=450e9,
        bus_bandwidth_bytes_per_second=370e9,
        latency_seconds=1e-6,
        domain_size=domain or gpus_per_node,
    )
    nic = Nic(name="400g", bandwidth_bytes_per_second=50e9, latency_seconds=2e-6)
    return Node(
        name="test-node",
        gpu=gpu,
        gpus_per_node=gpus_per_node,
        scale_up=scale_up,
        nic=nic,
        nics_per_node=gpus_per_node,
        power_watts=10_200.0,
    )


def build_cluster(num_nodes: int = 1, gpus_per_node: int = 8, **node: Any) -> Cluster:
    return Cluster(
        name="test-cluster",
        pools=(Pool(node=build_node(gpus_per_node, **node), num_nodes=num_nodes),),
        fabric=Fabric(kind="rail-optimized", rails=gpus_per_node, tiers=(Tier(name="leaf", nodes=4096),)),
        storage=(
            Storage(name="pfs", kind="parallel-file-system", write_bytes_per_second=100e9, read_bytes_per_second=100e9),
        ),
    )


def build_question(
    cluster: Cluster | None = None, model: ModelSpec | None = None, *, seq: int = 2048, batch: int = 64, **more: Any
) -> Question:
    job = Job(model=model or build_model(), seq_length=seq, global_batch_size=batch, **more.pop("job", {}))
    return Question(cluster=cluster or build_cluster(), job=job, **more)


@pytest.fixture
def make_model() -> Callable[..., ModelSpec]:
    return build_model


@pytest.fixture
def make_cluster() -> Callable[..., Cluster]:
    return build_cluster


@pytest.fixture
def make_node() -> Callable[..., Node]:
    return build_node


@pytest.fixture
def ask() -> Callable[..., Question]:
    return build_question


@pytest.fixture
def problem_of() -> Callable[[Scenario, Layout], StageProblem]:
    def make(scenario: Scenario, layout: Layout) -> StageProblem:
        parts = pieces(scenario.cluster, scenario.job, layout)
        pool = PathPools().of(layout.schedule, layout.pp, layout.vpp, parts.num_microbatches)
        return StageProblem(layout, parts, runs_of(scenario.model.pattern), pool, 2, tail_layers(scenario.model))

    return make
