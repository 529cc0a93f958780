"""Copies of shards (HSDP), and the three ways of context parallelism, against arithmetic by hand."""

import numpy as np
import pytest

from scenarios.job import Job
from scenarios.layout import Layout
from scenarios.model import load_model
from simulator.arrays import LayoutArrays
from simulator.collectives import groups_of
from simulator.links import links
from simulator.memory import memory_use
from simulator.parameters import shipped_parameters
from simulator.step import predict_step, stage_costs
from simulator.traffic import ranks_of
from topologies.catalog import load_cluster

SUPERPOD = load_cluster("dgx-h100-superpod")


def job_of(name="llama3-8b", **changes):
    return Job(**{"model": load_model(name), "seq_length": 8192, "global_batch_size": 512, **changes})


def seconds(kind, ranks, stride, size):
    """One collective of training traffic."""
    groups = groups_of(links(SUPERPOD, shipped_parameters()), np.array([float(ranks)]), np.array([float(stride)]))
    return float(groups.seconds(kind, np.array([size]))[0])


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


@pytest.mark.parametrize(
    ("ep", "copies", "shards", "held"), [(1, 8, 8, 8), (16, 2, 2, 2), (16, 8, 1, 4), (64, 2, 1, 1)]
)
def test_experts_are_copied_no_more_often_than_ranks_hold_them(ep, copies, shards, held):
    """64 ranks: 64 / ep of them hold the same experts, in shards and in copies."""
    layout = Layout(dp=64, ep=ep, dp_replicate=copies, optimizer_sharding="zero1")
    ranks = ranks_of(LayoutArrays.of([layout]))
    assert (ranks.expert_shards[0], ranks.expert_replicas[0]) == (shards, held)
    assert ranks.replicas[0] == copies


def test_gradients_are_reduced_inside_and_then_between_copies():
    job = job_of(gradient_precision="fp32")
    layout = Layout(dp=64, dp_replicate=8, optimizer_sharding="zero1")
    found = stage_costs(SUPERPOD, job, layout).dp_seconds
    bucket = 40e6  # parameters of a collective
    scattered = seconds("reduce_scatter", 8, 1, 4 * bucket) + seconds("all_gather", 8, 1, 2 * bucket)
    between = seconds("all_reduce", 8, 8, 4 * bucket / 8)  # of an eighth, over one NIC of each node
    assert between > 2 * 7 / 8 * 4 * bucket / 8 / (0.75 * SUPERPOD.node.network_bytes_per_second_per_gpu)
    assert found == pytest.approx(job.model.num_params / bucket * (scattered + between), rel=1e-6)


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
    times = 8 * 32  # micro-batches and layers
    one = seconds("all_to_all", 8, 1, kept / 2)  # before attention and after it, forward and backward
    assert one > kept / 2 * 7 / 8 / (0.6 * SUPERPOD.scale_up.bandwidth_bytes_per_second)
    assert exchanged == pytest.approx(2 * 2 * one * times, rel=1e-6)
    held = 2 * 2 * 8 * 128 * 131072  # keys and values of all tokens
    assert gathered == pytest.approx(2 * seconds("all_gather", 8, 1, held) * times)
    assert ring == pytest.approx(0.3 * 3 * 7 * seconds("send_recv", 8, 1, held / 8) * times)
    # across nodes only the exchange keeps falling with the ranks
    wide = layout.model_copy(update={"cp": 32, "dp": 1})
    wide_job = job.model_copy(update={"global_batch_size": 8})
    costs = {
        kind: predict_step(SUPERPOD, wide_job, wide.model_copy(update={"cp_comm": kind})).cp_comm_seconds
        for kind in ("all-gather", "all-to-all")
    }
    assert costs["all-to-all"] < costs["all-gather"]
