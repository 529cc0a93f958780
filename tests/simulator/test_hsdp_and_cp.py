"""Copies of shards (HSDP), and the three ways of context parallelism, against arithmetic by hand."""

import pytest

from scenarios.job import Job
from scenarios.layout import Layout
from scenarios.model import load_model
from simulator.memory import memory_use
from simulator.step import predict_step, stage_costs
from topologies.catalog import load_cluster

SUPERPOD = load_cluster("dgx-h100-superpod")


def job_of(name="llama3-8b", **changes):
    return Job(**{"model": load_model(name), "seq_length": 8192, "global_batch_size": 512, **changes})


def test_a_copy_in_each_node_gathers_inside_it():
    job = job_of(global_batch_size=128)
    whole = Layout(dp=64, optimizer_sharding="zero3")
    hybrid = whole.model_copy(update={"dp_replicate": 8})
    before, after = (memory_use(SUPERPOD, job, one).stages[0] for one in (whole, hybrid))
    # shards over 8 GPUs instead of 64
    for part in ("weights_bytes", "gradients_bytes", "optimizer_bytes"):
        assert getattr(after, part) == pytest.approx(8 * getattr(before, part))
    # gathers no longer leave the node; frozen weights have no gradients to reduce
    frozen = job_of(global_batch_size=128, tuning="lora")
    assert (
        predict_step(SUPERPOD, frozen, hybrid).dp_comm_seconds < predict_step(SUPERPOD, frozen, whole).dp_comm_seconds
    )


def test_gradients_are_reduced_inside_and_then_between_copies():
    job = job_of(gradient_precision="fp32")
    layout = Layout(dp=64, dp_replicate=8, optimizer_sharding="zero1")
    found = stage_costs(SUPERPOD, job, layout).dp_seconds
    size, inside = job.model.num_params, SUPERPOD.scale_up.bus_bandwidth_bytes_per_second
    network = 0.75 * SUPERPOD.node.network_bytes_per_second_per_gpu
    scattered = 7 / 8 * size * (4 + 2) / inside  # fp32 gradients, 16-bit weights
    between = 2 * 7 / 8 * size * 4 / 8 / network  # an all-reduce of an eighth
    assert found == pytest.approx(scattered + between, rel=1e-6)


def test_copies_change_nothing_where_nothing_is_sharded():
    job = job_of()
    plain = Layout(dp=64, optimizer_sharding="none")
    copies = plain.model_copy(update={"dp_replicate": 8})
    assert predict_step(SUPERPOD, job, plain).total_seconds == predict_step(SUPERPOD, job, copies).total_seconds


def test_copies_must_divide_the_replicas():
    with pytest.raises(ValueError, match="dp 64 does not divide into dp_replicate 3"):
        Layout(dp=64, dp_replicate=3)


def test_heads_are_exchanged_instead_of_keys():
    job = job_of(seq_length=131072, global_batch_size=32)
    layout = Layout(cp=8, dp=4, optimizer_sharding="zero3")
    ring, gathered, exchanged = (
        predict_step(SUPERPOD, job, layout.model_copy(update={"cp_comm": kind})).cp_comm_seconds
        for kind in ("ring", "all-gather", "all-to-all")
    )
    # 32 query and 2 x 8 key-value heads and 32 outputs of 16,384 tokens against 2 x 8 heads of 131,072 tokens
    kept = 2 * 16384 * (32 + 16 + 32) * 128
    parameters_share = 0.6
    speed = SUPERPOD.scale_up.bus_bandwidth_bytes_per_second * parameters_share
    one = kept * 7 / 8 / speed + 2 * (5e-6 + 2e-6 * 8)
    micro_batches, layers = 8, 32
    assert exchanged == pytest.approx(2 * one * layers * micro_batches, rel=1e-6)
    assert gathered == pytest.approx(ring * 2.0 / (3 * 0.3))
    # across nodes only the exchange keeps falling with the ranks
    wide = layout.model_copy(update={"cp": 32, "dp": 1})
    wide_job = job.model_copy(update={"global_batch_size": 8})
    costs = {
        kind: predict_step(SUPERPOD, wide_job, wide.model_copy(update={"cp_comm": kind})).cp_comm_seconds
        for kind in ("all-gather", "all-to-all")
    }
    assert costs["all-to-all"] < costs["all-gather"]
