"""The memory model against torch itself: one rank of a job traced on shapes alone."""

from __future__ import annotations

import math
import os
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist
from plans import plan_of

from runtime.tracing import TracedMemory, extrapolate, trace_rank, traced_memory
from scenarios.job import Job
from scenarios.layout import Layout
from scenarios.model import ModelSpec, load_model
from scenarios.scenario import load_scenario
from scenarios.stack import Stack
from simulator.activations import activation_bytes
from simulator.arrays import LayoutArrays
from simulator.layers import shares
from simulator.memory import memory_use
from simulator.outcome import StageMemory
from simulator.schedule import in_flight
from simulator.traffic import ranks_of
from topologies.errors import InputError

SEQ = 8192


def job_of(model: str, layout: Layout, num_microbatches: int = 1) -> Job:
    return Job(
        model=load_model(model),
        seq_length=SEQ,
        global_batch_size=layout.dp * num_microbatches,
        stack=Stack(trainer="headway"),
    )


def traced_and_predicted(job: Job, layout: Layout) -> tuple[TracedMemory, StageMemory]:
    predicted = memory_use(load_scenario("laptop").cluster, job, layout).stages[0]
    return trace_rank(job, layout), predicted


def kept_bytes(job: Job, layout: Layout) -> float:
    """What the simulator says that the layers keep."""
    rows = LayoutArrays.of([layout])
    share, kinds = shares(job, rows, ranks_of(rows)), job.model.layer_kinds
    mode = np.asarray(rows.recompute)
    each = {
        name: float(activation_bytes(job, kind, share, mode, layout.recompute_modules)[0][0])
        for name, kind in kinds.items()
    }
    return sum(each[name] for name in job.model.pattern)


FSDP: dict[str, Any] = {"optimizer_sharding": "zero3"}
TP: dict[str, Any] = {"tp": 8, "sequence_parallel": True}
CASES: dict[str, tuple[str, dict[str, Any], int]] = {
    "8B, TP": ("llama3-8b", TP, 1),
    "8B, TP without sequence parallelism, zero1": ("llama3-8b", {"tp": 8, "dp": 4, "optimizer_sharding": "zero1"}, 1),
    "8B, TP, recompute": ("llama3-8b", {**TP, "recompute": "full"}, 1),
    "8B, FSDP": ("llama3-8b", {"dp": 8, **FSDP}, 1),
    "8B, FSDP that keeps gathered weights": ("llama3-8b", {"dp": 8, "optimizer_sharding": "zero2"}, 1),
    "8B, FSDP, recompute of the core": ("llama3-8b", {"dp": 8, **FSDP, "recompute": "selective"}, 1),
    "8B, TP x FSDP, two micro-batches": ("llama3-8b", {**TP, "tp": 2, "dp": 4, **FSDP}, 2),
    "8B, TP, zero1, two micro-batches": (
        "llama3-8b",
        {**TP, "tp": 2, "dp": 4, "optimizer_sharding": "zero1"},
        2,
    ),
    "70B, TP": ("llama3-70b", TP, 1),
    "70B, FSDP, recompute": ("llama3-70b", {"dp": 64, **FSDP, "recompute": "full"}, 1),
    "70B, TP x FSDP": ("llama3-70b", {**TP, "dp": 16, **FSDP}, 1),
    "70B, TP x FSDP, recompute": ("llama3-70b", {**TP, "dp": 16, **FSDP, "recompute": "full"}, 1),
    "Mixtral, EP": ("mixtral-8x7b", {"dp": 1024, "ep": 8, "optimizer_sharding": "zero1"}, 1),
    "Mixtral, EP x FSDP": ("mixtral-8x7b", {"dp": 64, "ep": 4, **FSDP}, 1),
    "Qwen3-MoE, EP, two micro-batches": (
        "qwen3-30b-a3b",
        {"dp": 1024, "ep": 32, "optimizer_sharding": "zero1"},
        2,
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_memory_of_a_rank(case: str) -> None:
    name, axes, num_microbatches = CASES[case]
    layout = Layout(**axes)
    job = job_of(name, layout, num_microbatches)
    traced, predicted = traced_and_predicted(job, layout)
    assert traced.weights_bytes == pytest.approx(predicted.weights_bytes, rel=1e-3)
    assert traced.optimizer_bytes == pytest.approx(predicted.optimizer_bytes, rel=1e-3)
    assert traced.gradients_bytes == pytest.approx(predicted.gradients_bytes, rel=1e-3)
    # the input of the first layer is an output of none
    boundary = 2 * SEQ * job.model.hidden_size / (layout.tp if layout.sequence_parallel else 1)
    assert traced.kept_bytes - boundary == pytest.approx(kept_bytes(job, layout), rel=0.01)
    state = predicted.weights_bytes + predicted.gradients_bytes + predicted.optimizer_bytes
    rest = predicted.activations_bytes + predicted.logits_bytes + predicted.buffers_bytes
    assert traced.peak_bytes == pytest.approx(state + rest, rel=0.05)
    # gradients are whole only when most activations are gone, so the traced rest may be smaller
    assert traced.peak_bytes - state == pytest.approx(rest, rel=0.20, abs=0.03 * traced.peak_bytes)


@pytest.mark.slow
def test_collectives_of_a_rank() -> None:
    layout = Layout(tp=8, dp=128, sequence_parallel=True, optimizer_sharding="zero3", recompute="full")
    job = job_of("llama3-70b", layout)
    traced, predicted = traced_and_predicted(job, layout)
    for part in ("weights", "gradients", "optimizer"):
        assert getattr(traced, f"{part}_bytes") == pytest.approx(getattr(predicted, f"{part}_bytes"), rel=1e-3)
    assert traced.peak_bytes == pytest.approx(predicted.total_bytes - predicted.reserve_bytes, rel=0.06)
    assert_collectives_follow_from_the_model(traced, job, layout)


def assert_collectives_follow_from_the_model(traced: TracedMemory, job: Job, layout: Layout) -> None:
    """Weights are gathered for forward and backward, gradients scattered once; activations at each block's ends."""
    model, layers, tp = job.model, job.model.num_layers, layout.tp
    counts = {(one.operation, one.axis, one.dtype, one.bytes): one.count for one in traced.collectives}
    norms = 2 * model.hidden_size
    layer = (model.layer_params(model.pattern[0]) - norms) // tp + norms
    rows = math.ceil(model.vocab_size / tp / layout.dp) * layout.dp  # FSDP pads to equal shards
    ends = 2 * rows * model.hidden_size + model.hidden_size
    assert counts["all_gather", "dp", "bfloat16", 2 * layer] == 2 * layers
    assert counts["all_gather", "dp", "bfloat16", 2 * ends] == 2
    assert sum(n for (what, axis, *_), n in counts.items() if (what, axis) == ("reduce_scatter", "dp")) == layers + 1
    if tp > 1:
        whole = 2 * SEQ * model.hidden_size
        assert counts["all_gather", "tp", "bfloat16", whole] == 6 * layers + 2
        assert counts["reduce_scatter", "tp", "bfloat16", whole] == 5 * layers + 2


@pytest.mark.slow
def test_a_straight_line_over_layers_is_the_whole_model() -> None:
    layout = Layout(tp=2, dp=2, sequence_parallel=True, optimizer_sharding="zero3", recompute="full")
    model = load_model("llama-30m")
    six = ModelSpec.model_validate(model.model_dump() | {"pattern": model.pattern[:1] * 6})
    job = Job(model=six, seq_length=64, global_batch_size=8, precision="fp32")
    short, whole = trace_rank(job, layout), trace_rank(job, layout, depths=(6,))
    assert short.collectives == whole.collectives
    assert short.kept_bytes == whole.kept_bytes
    assert short.peak_bytes == pytest.approx(whole.peak_bytes, rel=0.01)
    assert (short.weights_bytes, short.optimizer_bytes) == (whole.weights_bytes, whole.optimizer_bytes)


def test_extrapolation_takes_the_moment_that_is_fullest_at_full_depth() -> None:
    def depth(layers: int) -> dict[str, Any]:
        return {
            "depth": layers,
            "state": {"weights": 10 * layers, "gradients": 10 * layers, "optimizer": 20 * layers},
            "peaks": {
                "forward": {"activations": 100 + layers},
                "layer 0": {"activations": 20 * layers},
                "kept": {"activations": 1000 + layers},
            },
            "collectives": [
                ["all_gather", "dp", "bfloat16", 8, 2 * layers + 1, 4 * layers + 1],
                ["all_reduce", "dp", "float32", 100 + 40 * layers, 1, 1],
            ],
            "num_microbatches": (1, 2),
        }

    traced = extrapolate([depth(3), depth(4)], layers=10, num_microbatches=5)
    assert traced.peak_moment == "backward of the first layer"
    assert traced.peak_bytes == 200
    assert (traced.weights_bytes, traced.optimizer_bytes, traced.kept_bytes) == (100, 200, 1010)
    # what is done for each layer and micro-batch, and one buffer of all layers
    assert [(one.bytes, one.count) for one in traced.collectives] == [(8, 2 * 10 * 5 + 1), (500, 1)]


@pytest.mark.parametrize(
    ("name", "axes", "says"),
    [("llama3-8b", {"pp": 2, "vpp": 2, "schedule": "zbv"}, "splits the backward pass")],
)
def test_what_cannot_be_traced_is_refused(name: str, axes: dict[str, Any], says: str) -> None:
    layout = Layout(**axes)
    with pytest.raises(InputError, match=says):
        trace_rank(job_of(name, layout, 2), layout)


@pytest.mark.slow
@pytest.mark.parametrize(
    "degrees",
    [
        {"tp": 2, "pp": 4, "dp": 2, "sequence_parallel": True, "optimizer_sharding": "none"},
        {"pp": 2, "vpp": 2, "schedule": "interleaved"},
    ],
)
def test_the_first_rank_of_a_pipeline(degrees: dict[str, Any]) -> None:
    layout = Layout(**degrees, recompute="full")
    job = job_of("llama3-8b", layout, 8)
    traced = trace_rank(job, layout)
    boundary = 2 * SEQ // layout.tp * job.model.hidden_size
    here = job.model.num_layers // layout.pp
    alive = in_flight(layout.schedule, layout.pp, layout.vpp, 8)[0]
    # each layer keeps its input, each stage its result; what a neighbour sent counts as a buffer
    kept = sum(count * (here // layout.vpp + (chunk == 0)) for chunk, count in enumerate(alive)) * boundary
    assert traced.kept_bytes == pytest.approx(kept, rel=0.01)
    counts = {(one.operation, one.axis, one.bytes): one.count for one in traced.collectives}
    # every chunk sends its result and, but for the first, the gradient of its input; it receives as much
    assert counts["send", "pp", boundary] == counts["recv", "pp", boundary] == 8 * (2 * layout.vpp - 1)
    if layout.tp > 1:  # with recompute 6 gathers and 5 scatters of a layer and micro-batch (Korthikanti et al. 2022)
        whole = boundary * layout.tp
        assert counts["all_gather", "tp", whole] == 6 * here * 8
        assert counts["reduce_scatter", "tp", whole] == 5 * here * 8
        assert counts["all_reduce", "dp", round(traced.gradients_bytes)] == 1


@pytest.mark.slow
def test_experts_exchange_all_copies_of_all_tokens() -> None:
    layout = Layout(dp=1024, ep=64, optimizer_sharding="zero1")
    model = load_model("deepseek-v3")
    sparse = ModelSpec.model_validate(model.model_dump() | {"pattern": model.pattern[-2:], "mtp_layers": 0})
    job = Job(model=sparse, seq_length=1024, global_batch_size=2048, stack=Stack(trainer="headway"))
    traced = trace_rank(job, layout)
    counts = {(one.operation, one.axis, one.dtype, one.bytes): one.count for one in traced.collectives}
    copies = 1024 * 8 * sparse.hidden_size * 2
    # there and back, forward and backward, for both layers and micro-batches; before it the numbers of tokens
    assert counts["all_to_all", "ep", "bfloat16", copies] == 4 * 2 * 2
    assert counts["all_to_all", "ep", "int64", 256 * 8] == 2 * 2
    experts = 256 // 64 * 3 * sparse.hidden_size * 2048 * 2
    assert counts["reduce_scatter", "edp", "float32", 4 * experts] == 1
    assert counts["all_gather", "edp", "float32", 4 * experts] == 1


@pytest.mark.slow
def test_many_chunks_that_are_alive_hold_no_copy_of_their_weights() -> None:
    layout = Layout(
        tp=4, pp=4, vpp=5, dp=32, sequence_parallel=True, optimizer_sharding="zero1", schedule="interleaved"
    )
    model = load_model("llama3-70b")
    short = ModelSpec.model_validate(model.model_dump() | {"pattern": model.pattern[:20]})
    job = Job(model=short, seq_length=2048, global_batch_size=32 * 8, stack=Stack(trainer="headway"))
    traced, predicted = traced_and_predicted(job, layout)
    assert traced.peak_parts_bytes["weight_copies"] < 0.02 * traced.weights_bytes
    assert traced.gradients_bytes == pytest.approx(predicted.gradients_bytes, rel=1e-3)
    assert traced.peak_bytes == pytest.approx(predicted.total_bytes - predicted.reserve_bytes, rel=0.05)


@pytest.mark.slow
def test_a_pipeline_of_sharded_stages_holds_shards_of_gradients_only() -> None:
    layout = Layout(pp=2, dp=16, schedule="1f1b", recompute="full", **FSDP)
    model = load_model("llama3-8b")
    short = ModelSpec.model_validate(model.model_dump() | {"pattern": model.pattern[:8]})
    job = Job(model=short, seq_length=2048, global_batch_size=16 * 8, stack=Stack(trainer="headway"))
    traced, predicted = traced_and_predicted(job, layout)
    assert traced.gradients_bytes == pytest.approx(predicted.gradients_bytes, rel=1e-3)
    assert traced.peak_bytes == pytest.approx(predicted.total_bytes - predicted.reserve_bytes, rel=0.05)


@pytest.mark.slow
def test_a_plan_is_traced_beside_its_prediction_and_nothing_leaks_into_the_caller() -> None:
    before = dict(os.environ)
    told = traced_memory(plan_of(tp=2, dp=2, optimizer_sharding="none"))
    traced, predicted = told["traced_memory"], told["predicted_memory"]
    # fp32: weights, gradients and both moments are whole on each replica
    for part in ("weights", "gradients", "optimizer"):
        assert traced[f"{part}_bytes"] == pytest.approx(predicted[f"{part}_bytes"], rel=0.02)
    flat = max(one["bytes"] for one in told["collectives"] if one["axis"] == "dp")
    assert flat == traced["gradients_bytes"]
    assert not dist.is_initialized()
    assert dict(os.environ) == before
