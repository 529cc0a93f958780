"""CPU cores as GPUs: what was measured on them decides the step."""

from pathlib import Path

import pytest

from scenarios.job import Job
from scenarios.layout import Layout
from scenarios.model import Attention, Layer, Mlp, ModelSpec, Moe
from scenarios.stack import Stack
from simulator.step import predict_step
from topologies.cluster import Cluster, CollectivePoint, GemmPoint, Measured
from topologies.document import LoadContext, check


def calibrated(**changes):
    plain = check({"name": "cpu", "node": "laptop-core", "num_nodes": 1}, Cluster, LoadContext(Path("test.yaml")))
    measured = Measured(
        date="2026-01-01",
        gemms=(GemmPoint(m=128, n=512, k=512, precision="fp32", rate_flop_per_second=50e9),),
        collectives=tuple(
            CollectivePoint(kind=kind, ranks=2, size_bytes=size, time_seconds=1e-4 + size / 1e9)
            for kind in ("all_reduce", "all_gather", "reduce_scatter", "send_recv")
            for size in (1e3, 1e6, 1e8)
        ),
        memory_bandwidth_bytes_per_second=8e9,
        host_seconds={"layer": 1e-3, "tp_layer": 2e-3, "dp_layer": 3e-3, "pp_microbatch": 4e-3, "step": 5e-3},
    )
    return plain.model_copy(update={"measured": measured, **changes})


LAYER = Layer(mixer=Attention(heads=8, kv_heads=8, head_dim=64), feed_forward=Mlp(ffn_hidden_size=1536, gated=True))
SMALL = ModelSpec(name="m", hidden_size=512, vocab_size=4096, layer_kinds={"a": LAYER}, pattern=("a",) * 8)


def small_job():
    return Job(model=SMALL, seq_length=128, global_batch_size=16, precision="fp32", stack=Stack(trainer="headway"))


def test_fixed_costs_are_added_per_layer_and_micro_batch():
    free = calibrated()
    free = free.model_copy(update={"measured": free.measured.model_copy(update={"host_seconds": {}})})

    def added(layout):
        seconds = [predict_step(cluster, small_job(), layout).total_seconds for cluster in (calibrated(), free)]
        return seconds[0] - seconds[1]

    assert added(Layout()) == pytest.approx(16 * 8 * 1e-3 + 5e-3)
    assert added(Layout(tp=2)) == pytest.approx(16 * 8 * (1e-3 + 2e-3) + 5e-3)
    assert added(Layout(dp=2, optimizer_sharding="zero3")) == pytest.approx(8 * 8 * (1e-3 + 3e-3) + 5e-3)
    assert added(Layout(dp=2, optimizer_sharding="none")) == pytest.approx(8 * 8 * 1e-3 + 5e-3)
    # 16 micro-batches and one stage of ramp on two stages of four layers
    assert added(Layout(pp=2)) == pytest.approx(17 * (4 * 1e-3 + 4e-3) + 5e-3, rel=0.01)


MIXTURE = SMALL.model_copy(
    update={
        "layer_kinds": {"a": LAYER.model_copy(update={"feed_forward": Moe(num_experts=8, top_k=2, ffn_hidden_size=64)})}
    }
)


@pytest.mark.parametrize(
    ("cost", "layout", "model", "paid"),
    [
        ("layer_gigabyte", {"tp": 2}, SMALL, 16 * 8 * SMALL.layer_params("a") * 4e-9 / 2),
        ("tp_sequence_mebibyte", {"tp": 2, "sequence_parallel": True}, SMALL, 16 * 8 * 0.25),
        ("tp_mebibyte", {"tp": 2, "recompute": "full"}, SMALL, 16 * 8 * 0.25 * 1.5),
        ("moe_layer", {"dp": 2}, MIXTURE, 8 * 8),
        ("expert", {"dp": 2, "ep": 2}, MIXTURE, 8 * 8 * 4),
        ("moe_mebibyte", {"tp": 2}, MIXTURE, 16 * 8 * 0.25 * 2 / 2),
        ("ep_layer", {"dp": 2}, MIXTURE, 0.0),
        ("ep_mebibyte", {"dp": 2, "ep": 2, "micro_batch_size": 4}, MIXTURE, 2 * 8 * 1.0 * 2),
        ("head_mebibyte", {"tp": 2}, SMALL, 16 * 2048 * 128 * 4 / 2**20),
        ("tp_head_mebibyte", {"dp": 2}, SMALL, 0.0),
        ("flat_gigabyte", {"dp": 2, "optimizer_sharding": "none"}, SMALL, 4e-9 * SMALL.num_params),
        ("flat_gigabyte", {"dp": 2, "optimizer_sharding": "zero3"}, SMALL, 0.0),
        ("shard_gigabyte", {"dp": 2, "optimizer_sharding": "zero1"}, SMALL, 4e-9 * SMALL.num_params),
    ],
)
def test_each_cost_is_paid_as_often_as_what_it_is_of(cost, layout, model, paid):
    job = small_job().model_copy(update={"model": model})
    machine = calibrated()
    costly = machine.model_copy(update={"measured": machine.measured.model_copy(update={"host_seconds": {cost: 1.0}})})
    free = machine.model_copy(update={"measured": machine.measured.model_copy(update={"host_seconds": {}})})
    seconds = [predict_step(one, job, Layout(**layout)).total_seconds for one in (costly, free)]
    assert seconds[0] - seconds[1] == pytest.approx(paid, abs=1e-9)


def test_nothing_is_hidden_on_a_cpu():
    step = predict_step(calibrated(), small_job(), Layout(dp=2, optimizer_sharding="none"))
    gradients = SMALL.num_params * 4.0
    assert step.dp_comm_seconds == pytest.approx(1e-4 + gradients / 1e9, rel=0.02)
    tp = predict_step(calibrated(), small_job(), Layout(tp=2))
    assert tp.tp_comm_seconds == pytest.approx(16 * 8 * 4 * (1e-4 + 128 * 512 * 4 / 1e9), rel=0.02)
    assert step.straggler_seconds == 0


def test_ranks_that_share_a_core_compute_at_half_speed():
    alone = predict_step(calibrated(), small_job(), Layout(dp=2))
    shared = predict_step(calibrated(oversubscribed_cores=2.0), small_job(), Layout(dp=2))
    assert shared.compute_seconds == pytest.approx(2 * alone.compute_seconds)
    assert any("no traffic is hidden" in text for text in alone.basis)
