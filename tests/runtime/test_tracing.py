"""The memory model against torch itself: one rank of a job traced on shapes alone.

What torch's own parts keep beyond the formulas of ``simulator.activations`` is written out here, term by term, so that
an error of either side shows.
"""

from __future__ import annotations

import math
import os
from typing import Any

import pytest
import torch.distributed as dist
from plans import plan_of

from runtime.tracing import TracedMemory, extrapolate, trace_rank, traced_memory
from scenarios.job import Job
from scenarios.layout import Layout
from scenarios.model import Attention, ModelSpec, load_model
from scenarios.scenario import load_scenario
from simulator.memory import memory_use
from simulator.outcome import StageMemory
from topologies.errors import InputError

SEQ = 8192


def job_of(model: str, layout: Layout, num_microbatches: int = 1) -> Job:
    return Job(model=load_model(model), seq_length=SEQ, global_batch_size=layout.dp * num_microbatches)


def traced_and_predicted(job: Job, layout: Layout) -> tuple[TracedMemory, StageMemory]:
    predicted = memory_use(load_scenario("laptop").cluster, job, layout).stages[0]
    return trace_rank(job, layout), predicted


def kept_by_torch(job: Job, layout: Layout) -> float:
    """Bytes that the layers keep without recompute, from the operations of the runtime's transformer (bf16)."""
    model, mixer = job.model, job.model.layers[0].mixer
    assert isinstance(mixer, Attention)
    hidden, width = model.hidden_size, mixer.heads * mixer.head_dim
    keys = mixer.kv_heads * mixer.head_dim
    ffn = model.layers[0].feed_forward.ffn_hidden_size  # type: ignore[union-attr]
    norm_tokens = SEQ // layout.tp if layout.sequence_parallel else SEQ
    norms = 2 * (4 + 4) * norm_tokens * hidden  # fp32: input and normalised input, where no fused kernel runs (CPU)
    inputs = 2 * 2 * SEQ * hidden  # of attention and mlp, gathered: torch keeps the whole of it on each rank
    heads = 2 * SEQ * (2 * width + 2 * keys) / layout.tp  # query, key, value, output
    copied = 2 * SEQ * width / layout.tp  # output, made contiguous for the projection
    scores = 4 * SEQ * mixer.heads / layout.tp  # log-sum-exp
    tables = 2 * 2 * 2 * SEQ * mixer.head_dim / 2  # cos and sin, of queries and of keys
    swiglu = 2 * SEQ * 4 * ffn / layout.tp
    return model.num_layers * (norms + inputs + heads + copied + scores + tables + swiglu)


CASES: dict[str, tuple[str, dict[str, Any], int]] = {
    "8B TP8": ("llama3-8b", {"tp": 8, "sequence_parallel": True}, 1),
    "8B FSDP8": ("llama3-8b", {"dp": 8, "optimizer_sharding": "zero3"}, 1),
    "8B TP2 x FSDP4, two micro-batches": (
        "llama3-8b",
        {"tp": 2, "dp": 4, "sequence_parallel": True, "optimizer_sharding": "zero3"},
        2,
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_without_recompute(case: str) -> None:
    name, axes, num_microbatches = CASES[case]
    layout = Layout(**axes)
    job = job_of(name, layout, num_microbatches)
    traced, predicted = traced_and_predicted(job, layout)
    model, sharded = job.model, layout.optimizer_sharding == "zero3"
    # not sharded, the simulator counts the fp32 weight as master copy in the optimizer and bf16 copies as weights
    master = 0.0 if sharded else 2.0 * predicted.weights_bytes
    assert traced.weights_bytes == pytest.approx(predicted.weights_bytes if sharded else master, rel=1e-3)
    assert traced.gradients_bytes == pytest.approx(predicted.gradients_bytes, rel=1e-3)
    assert traced.optimizer_bytes == pytest.approx(predicted.optimizer_bytes - master, rel=1e-3)
    assert traced.peak_parts_bytes["weight_copies"] == (
        # all but the embedding, which is looked up in fp32
        0.0 if sharded else pytest.approx(2 * (model.num_params - model.embedding_params) / layout.tp, rel=1e-3)
    )
    kept = kept_by_torch(job, layout)
    assert traced.kept_bytes == pytest.approx(kept, rel=0.01)
    # the simulator describes fused norms and a Megatron-style gather, which keep less; never more than torch keeps
    assert 0.35 * kept < predicted.activations_bytes < kept
    # fullest in the loss: fp32 logits, gradient of the loss, gradient of the logits; the split loss makes one more
    assert traced.peak_moment == "forward"
    loss = (4 if layout.tp > 1 else 3) * 4 * SEQ * model.vocab_size / layout.tp
    loss += SEQ * model.hidden_size * (2 + (4 + 4) / layout.tp)  # input of the head, and the final norm as above
    state = traced.weights_bytes + traced.optimizer_bytes + traced.peak_parts_bytes["weight_copies"]
    waiting = 0.0
    if num_microbatches > 1:  # fp32 gradients of embedding and head on their way to their shards
        waiting = traced.gradients_bytes + 4 * (model.embedding_params + model.head_params) / layout.tp
    assert traced.peak_bytes == pytest.approx(state + kept + loss + waiting, rel=0.01)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "axes"),
    [
        ("llama3-8b", {"dp": 8}),
        ("llama3-70b", {"tp": 8, "dp": 128, "sequence_parallel": True}),
    ],
)
def test_with_full_recompute(name: str, axes: dict[str, Any]) -> None:
    layout = Layout(**axes, optimizer_sharding="zero3", recompute="full")
    job = job_of(name, layout)
    traced, predicted = traced_and_predicted(job, layout)
    model, layers = job.model, job.model.num_layers
    for part in ("weights", "gradients", "optimizer"):
        assert getattr(traced, f"{part}_bytes") == pytest.approx(getattr(predicted, f"{part}_bytes"), rel=1e-3)
    boundary = 2 * SEQ // layout.tp * model.hidden_size
    assert traced.kept_bytes == pytest.approx((layers + 1) * boundary, rel=0.01)
    assert traced.peak_bytes == pytest.approx(predicted.total_bytes - predicted.reserve_bytes, rel=0.05)
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
            "collectives": [["all_gather", "dp", "bfloat16", 8, 2 * layers + 1, 4 * layers + 1]],
        }

    traced = extrapolate([depth(3), depth(4)], layers=10, num_microbatches=5)
    assert traced.peak_moment == "backward of the first layer"
    assert traced.peak_bytes == 200
    assert (traced.weights_bytes, traced.optimizer_bytes, traced.kept_bytes) == (100, 200, 1010)
    assert [one.count for one in traced.collectives] == [2 * 10 * 5 + 1]


@pytest.mark.parametrize(
    ("name", "axes", "says"),
    [
        ("llama3-8b", {"pp": 2}, "without a pipeline"),
        ("mixtral-8x7b", {"ep": 2, "dp": 2}, "cannot run here"),
    ],
)
def test_what_cannot_be_traced_is_refused(name: str, axes: dict[str, Any], says: str) -> None:
    layout = Layout(**axes)
    with pytest.raises(InputError, match=says):
        trace_rank(job_of(name, layout, 2), layout)


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
