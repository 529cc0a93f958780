"""The step against published runs, laws that it must obey, and its own array form."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scenarios.job import Job
from scenarios.layout import Layout, Stage
from scenarios.model import Attention, Layer, Mlp, ModelSpec, Moe
from scenarios.scenario import load_scenario
from scenarios.stack import Stack
from simulator.arrays import LayoutArrays
from simulator.longest_path import makespan
from simulator.outcome import BREAKDOWN
from simulator.parameters import shipped_parameters
from simulator.schedule import op_orders
from simulator.step import predict_step, stage_costs, step_seconds
from topologies.cluster import Cluster
from topologies.document import LoadContext, check
from topologies.errors import InputError

MEGATRON = Stack(trainer="megatron", attention_kernel="flash3-cudnn")


def cluster_of(node="dgx-h100", num_nodes=256, **changes):
    content = {"name": "test", "node": {"from": node, **changes}, "num_nodes": num_nodes}
    content["fabric"] = {"kind": "rail-optimized", "rails": 8}
    return check(content, Cluster, LoadContext(Path("test.yaml")))


def model_of(layers=80, hidden=8192, heads=64, kv_heads=8, ffn=28672, vocab=128256, gated=True, **changes):
    layer = Layer(
        mixer=Attention(heads=heads, kv_heads=kv_heads, head_dim=hidden // heads),
        feed_forward=Mlp(ffn_hidden_size=ffn, gated=gated),
    )
    return ModelSpec(
        name="m", hidden_size=hidden, vocab_size=vocab, layer_kinds={"a": layer}, pattern=("a",) * layers, **changes
    )


def gpt(layers, hidden, heads):
    return model_of(layers, hidden, heads, heads, 4 * hidden, 51200, gated=False, tied_embeddings=True)


def sparse_model(layers=32):
    layer = Layer(
        mixer=Attention(heads=32, kv_heads=8, head_dim=128),
        feed_forward=Moe(num_experts=64, top_k=4, ffn_hidden_size=2048, shared_ffn_hidden_size=2048),
    )
    return ModelSpec(name="moe", hidden_size=4096, vocab_size=128256, layer_kinds={"a": layer}, pattern=("a",) * layers)


def job_of(model=None, seq_length=8192, batch=1024, stack=MEGATRON, **changes):
    return Job(model=model or model_of(), seq_length=seq_length, global_batch_size=batch, stack=stack, **changes)


BASE = Layout(tp=8, pp=4, dp=64, sequence_parallel=True)


def total(cluster=None, job=None, layout=BASE, **changes):
    return predict_step(cluster or cluster_of(), job or job_of(), layout.model_copy(update=changes)).total_seconds


# ---- published runs -------------------------------------------------------------------------------------------------


def test_llama_3_405b_as_meta_ran_it():
    # 400 TFLOP/s a GPU on 16,384 H100: TP 8, PP 16, DP 128 (The Llama 3 Herd of Models, table 4), interleaved stages
    # by a trainer of their own, whose tensor parallel traffic was not overlapped
    scenario = load_scenario("llama3-405b-16k-h100")
    layout = Layout(tp=8, pp=16, vpp=8, dp=128, sequence_parallel=True, schedule="interleaved")
    step = predict_step(scenario.cluster, scenario.job, layout)
    assert step.tflops_per_gpu == pytest.approx(400, rel=0.05)
    assert step.mfu == pytest.approx(step.tflops_per_gpu / 989.5)
    assert (
        step.low_seconds
        < scenario.job.tokens_per_step
        * 3
        * sum(scenario.job.model.forward_flops_per_token(8192).values())
        / (16384 * 400e12)
        < step.high_seconds
    )


# Narayanan et al. 2021 (arXiv 2104.04473), table 1: layers, hidden, heads, TP, PP, GPUs, micro-batch, batch, TFLOP/s
SC21 = [
    (24, 2304, 24, 1, 1, 32, 16, 512, 137),
    (30, 3072, 32, 2, 1, 64, 16, 512, 138),
    (36, 4096, 32, 4, 1, 128, 16, 512, 142),
    (60, 10240, 80, 8, 4, 1024, 2, 1792, 140),
    (80, 12288, 96, 8, 8, 1536, 2, 2304, 148),
]


@pytest.mark.parametrize(("layers", "hidden", "heads", "tp", "pp", "gpus", "size", "batch", "tflops"), SC21)
def test_megatron_runs_of_2021(layers, hidden, heads, tp, pp, gpus, size, batch, tflops):
    stack = Stack(trainer="megatron", attention_kernel="unfused", tp_overlap=False, dp_overlap=False)
    job = job_of(gpt(layers, hidden, heads), 2048, batch, stack, precision="fp16", gradient_precision="bf16")
    job = job.model_copy(update={"attention": "unfused"})
    vpp = {4: 3, 8: 2}.get(pp, 1)
    layout = Layout(
        tp=tp, pp=pp, vpp=vpp, dp=gpus // tp // pp, micro_batch_size=size, optimizer_sharding="none",
        schedule="interleaved" if vpp > 1 else "1f1b", recompute="full",
    )  # fmt: skip
    step = predict_step(cluster_of("dgx-a100"), job, layout)
    # the paper's FLOPs count the recomputed forward and the whole square of the scores (equation 3)
    flops = 96 * batch * 2048 * layers * hidden**2 * (1 + 2048 / (6 * hidden) + 51200 / (16 * layers * hidden))
    assert flops / step.total_seconds / gpus / 1e12 == pytest.approx(tflops, rel=0.12)


@pytest.mark.parametrize(
    ("layers", "hidden", "heads", "pp", "vpp", "size", "batch"),
    [(48, 6144, 64, 1, 1, 4, 4), (96, 12288, 96, 8, 3, 1, 64), (105, 20480, 128, 35, 3, 1, 280)],
)
def test_selective_recompute_against_full(layers, hidden, heads, pp, vpp, size, batch):
    # Korthikanti et al. 2022, table 5: with sequence parallelism 0.757 to 0.775 of the time of full recompute
    stack = Stack(trainer="megatron", attention_kernel="unfused", tp_overlap=False, dp_overlap=False)
    job = job_of(gpt(layers, hidden, heads), 2048, batch, stack, precision="fp16", attention="unfused")
    schedule = "interleaved" if vpp > 1 else "1f1b"
    layout = Layout(tp=8, pp=pp, vpp=vpp, micro_batch_size=size, schedule=schedule, optimizer_sharding="none")
    cluster = cluster_of("dgx-a100")
    selective = total(cluster, job, layout, recompute="selective", sequence_parallel=True)
    full = total(cluster, job, layout, recompute="full")
    assert selective / full == pytest.approx(0.76, abs=0.03)


def test_weak_scaling_costs_little():
    # Nemotron-4 15B: 32 to 2,048 H100 costs 2.2 % with the batch in proportion (Megatron-LM, published runs)
    model = model_of(32, 6144, 48, 8, 24576, 256000, gated=False)
    small = total(job=job_of(model, 4096, 256), layout=Layout(tp=4, dp=8))
    large = total(job=job_of(model, 4096, 256 * 64), layout=Layout(tp=4, dp=512))
    assert 1.0 < large / small < 1.06


# ---- laws -----------------------------------------------------------------------------------------------------------

LAYOUT = st.builds(
    Layout,
    tp=st.sampled_from([1, 2, 4, 8]),
    cp=st.sampled_from([1, 2, 4]),
    pp=st.sampled_from([1, 2, 4, 8]),
    dp=st.sampled_from([1, 2, 8, 16]),
    ep=st.sampled_from([1, 2]),
    micro_batch_size=st.sampled_from([1, 2, 4]),
    sequence_parallel=st.booleans(),
    optimizer_sharding=st.sampled_from(["none", "zero1", "zero2", "zero3"]),
    schedule=st.sampled_from(["gpipe", "1f1b", "zb-h1"]),
    recompute=st.sampled_from(["none", "selective", "full"]),
)
MODELS = {"dense": model_of(), "moe": sparse_model()}


@settings(max_examples=80, deadline=None)
@given(LAYOUT, st.sampled_from(sorted(MODELS)), st.sampled_from(["dgx-a100", "dgx-h100", "gb200-nvl72-tray"]))
def test_parts_add_up_and_none_is_negative(layout, model, node):
    step = predict_step(cluster_of(node), job_of(MODELS[model], 4096), layout)
    assert step.total_seconds == pytest.approx(sum(step.breakdown_seconds.values()))
    assert all(step.breakdown_seconds[name] >= 0 for name in BREAKDOWN)
    assert sum(step.compute_parts_seconds.values()) == pytest.approx(step.compute_seconds)
    assert all(seconds >= 0 for seconds in step.compute_parts_seconds.values())
    assert step.mfu is not None
    assert 0 < step.mfu < 0.85
    assert step.hfu >= step.mfu
    assert step.low_seconds < step.total_seconds < step.high_seconds


@settings(max_examples=30, deadline=None)
@given(st.lists(LAYOUT, min_size=1, max_size=6), st.sampled_from(sorted(MODELS)))
def test_a_layout_alone_is_its_row_of_the_array(layouts, model):
    job = job_of(MODELS[model], 4096)
    arrays = step_seconds(cluster_of(), job, LayoutArrays.of(layouts))
    for i, layout in enumerate(layouts):
        assert predict_step(cluster_of(), job, layout).total_seconds == arrays.total_seconds[i]


def test_a_large_space_is_cut_into_passes(monkeypatch):
    layouts = [Layout(tp=tp, dp=dp, pp=pp) for tp in (1, 2, 4, 8) for dp in (1, 2, 4) for pp in (1, 2, 4)]
    arrays = LayoutArrays.of(layouts)
    whole = step_seconds(cluster_of(), job_of(), arrays).total_seconds
    monkeypatch.setattr("simulator.step.CHUNK_ROWS", 5)
    assert np.array_equal(step_seconds(cluster_of(), job_of(), arrays).total_seconds, whole)


@pytest.mark.parametrize(
    "changes",
    [
        {"nic": {"name": "fast", "bandwidth": "800 Gbit/s"}},
        {"scale_up": {"bandwidth": "900 GB/s", "bus_bandwidth": "730 GB/s"}},
        {"gpu": {"memory_bandwidth": "6.7 TB/s"}},
        {"gpu": {"peak": {"bf16": "1979 TFLOP/s"}}},
    ],
)
def test_better_hardware_is_never_slower(changes):
    layouts = [BASE, Layout(dp=64, optimizer_sharding="zero3"), Layout(tp=8, cp=4, pp=2, dp=4)]
    better, plain = ([total(one, layout=layout) for layout in layouts] for one in (cluster_of(**changes), cluster_of()))
    assert all(one <= other for one, other in zip(better, plain, strict=True))
    assert better != plain


def test_dense_models_do_not_see_expert_parallelism():
    assert total(ep=8, etp=8) == total()
    step = predict_step(cluster_of(), job_of(), BASE.model_copy(update={"ep": 8}))
    assert step.ep_comm_seconds == 0


def test_one_rank_has_no_traffic():
    step = predict_step(cluster_of(), job_of(model_of(2)), Layout(sequence_parallel=True))
    for name in ("tp_comm", "cp_comm", "ep_comm", "pp_bubble", "pp_comm", "dp_comm", "straggler"):
        assert step.breakdown_seconds[name] == 0, name


def test_schedules_in_their_published_order():
    # Qi et al. 2024, figure 5: 6.2B on 16 A100, zero bubble < interleaved < 1F1B; GPipe has the bubble of 1F1B
    job = job_of(gpt(32, 4096, 32), 1024, 3 * 64)
    layout = Layout(pp=8, dp=1, micro_batch_size=3)
    cluster = cluster_of("dgx-a100")

    def bubble(schedule, vpp=1):
        changed = layout.model_copy(update={"schedule": schedule, "vpp": vpp})
        return predict_step(cluster, job, changed).pp_bubble_seconds

    assert bubble("gpipe") == bubble("1f1b")
    assert bubble("zbv", 2) < bubble("zb-h1") < bubble("interleaved", 2) < bubble("1f1b")
    assert bubble("interleaved", 4) == pytest.approx(bubble("1f1b") / 4, rel=0.2)
    assert bubble("dualpipe", 2) < bubble("1f1b") / 2


@pytest.mark.parametrize(
    ("schedule", "pp", "vpp"),
    [
        ("gpipe", 4, 1),
        ("1f1b", 4, 1),
        ("interleaved", 4, 2),
        ("zb-h1", 4, 1),
        ("zbv", 4, 2),
        ("dualpipe", 4, 2),
        ("dualpipe", 8, 1),
    ],
)
def test_the_pipeline_is_that_of_the_op_orders(schedule, pp, vpp):
    # equal stages: no embedding to speak of, a small vocabulary
    job = job_of(model_of(64, vocab=128), batch=32 * 32)
    layout = Layout(tp=8, pp=pp, vpp=vpp, dp=32, schedule=schedule)
    costs = stage_costs(cluster_of(), job, layout)
    step = predict_step(cluster_of(), job, layout)
    played = makespan(
        op_orders(schedule, pp, vpp, 32),
        costs.forward_seconds,
        costs.backward_seconds,
        0.0,
        costs.weight_gradient_seconds,
    )
    closed = sum(step.breakdown_seconds[name] for name in ("compute", "tp_comm", "cp_comm", "ep_comm", "pp_bubble"))
    assert closed == pytest.approx(played, rel=0.015)


def test_stage_costs_are_the_step_before_it_is_added_up():
    job = job_of()
    step, costs = predict_step(cluster_of(), job, BASE), stage_costs(cluster_of(), job, BASE)
    micro = BASE.num_microbatches(job)
    work = max(f + b for f, b in zip(costs.forward_seconds, costs.backward_seconds, strict=True))
    assert micro * work == pytest.approx(step.compute_seconds + step.tp_comm_seconds)
    assert costs.optimizer_seconds == step.optimizer_seconds
    assert costs.dp_exposed_seconds == step.dp_comm_seconds
    assert micro * 2 * costs.p2p_seconds * costs.p2p_exposed_share == pytest.approx(step.pp_comm_seconds)


def test_uneven_stages_cost_their_slowest():
    def stages(*layers):
        return Layout(tp=8, pp=4, dp=64, stages=tuple(Stage(layers=one) for one in layers))

    # a vocabulary of a million makes the head as heavy as several layers
    job = job_of(model_of(vocab=2**20))
    even, light_head, bad = stages(20, 20, 20, 20), stages(21, 21, 21, 17), stages(14, 22, 22, 22)
    assert total(job=job, layout=even) == pytest.approx(total(job=job, layout=Layout(tp=8, pp=4, dp=64)))
    assert total(job=job, layout=light_head) < total(job=job, layout=even) < total(job=job, layout=bad)


def test_recomputing_some_layers_costs_in_proportion():
    def layout(count, recompute="full"):
        stages = tuple(Stage(layers=20, recompute_layers=count) for _ in range(4))
        return Layout(tp=8, pp=4, dp=64, recompute=recompute, stages=stages)

    none, half, full = total(layout=layout(0, "none")), total(layout=layout(10)), total(layout=layout(20))
    assert half == pytest.approx((none + full) / 2, rel=1e-3)
    assert full == pytest.approx(total(layout=Layout(tp=8, pp=4, dp=64, recompute="full")), rel=1e-6)
    some = predict_step(cluster_of(), job_of(), layout(10))
    assert some.hfu > some.mfu


def test_full_recompute_costs_a_forward():
    assert 1.20 < total(recompute="full") / total() < 1.36


def test_gathers_of_sharded_weights_hide_behind_enough_tokens():
    few, many = job_of(model_of(32), 1024, 64), job_of(model_of(32), 8192, 512)

    def share(job, size):
        layout = Layout(dp=64, micro_batch_size=size, optimizer_sharding="zero3")
        step = predict_step(cluster_of(), job, layout)
        return step.dp_comm_seconds / step.total_seconds

    assert share(few, 1) > 0.5
    assert share(many, 8) < 0.15


def test_overlap_switches_hide_traffic():
    on = job_of(stack=Stack(trainer="megatron", tp_overlap=True, dp_overlap=True))
    off = job_of(stack=Stack(trainer="megatron", tp_overlap=False, dp_overlap=False))
    layout = BASE.model_copy(update={"optimizer_sharding": "none"})
    hidden, waited = predict_step(cluster_of(), on, layout), predict_step(cluster_of(), off, layout)
    assert 0.3 < hidden.tp_comm_seconds / waited.tp_comm_seconds < 0.8
    assert hidden.dp_comm_seconds < waited.dp_comm_seconds


def test_experts_across_nodes_pay_for_it():
    job = job_of(sparse_model(), 4096)

    def ep_comm(ep, stack=MEGATRON):
        layout = Layout(dp=64, ep=ep)
        return predict_step(cluster_of(), job.model_copy(update={"stack": stack}), layout).ep_comm_seconds

    assert ep_comm(1) == 0 < ep_comm(8) < ep_comm(32)
    dedup = Stack(trainer="megatron", moe_dispatcher="deduplicating")
    assert ep_comm(64, dedup) < ep_comm(64)
    assert ep_comm(32, Stack(trainer="megatron", ep_overlap=True)) == pytest.approx(ep_comm(32) * 0.4 / 0.9)


def test_cuda_graphs_matter_where_kernels_are_short():
    job = job_of(sparse_model(), 1024)
    layout = Layout(dp=64, ep=8)

    def host(graph):
        stack = Stack(trainer="megatron", cuda_graph=graph)
        step = predict_step(cluster_of(), job.model_copy(update={"stack": stack}), layout)
        return step.compute_parts_seconds["host"]

    assert host("full") < 0.2 * host("none")
    long = predict_step(cluster_of(), job_of(), BASE)
    assert long.compute_parts_seconds["host"] < 0.01 * long.total_seconds


# ---- what is said ---------------------------------------------------------------------------------------------------


def test_assumptions_widen_the_band_and_are_named():
    declared = predict_step(
        cluster_of(), job_of(stack=Stack(trainer="nemo", attention_kernel="flash3-cudnn", tp_overlap=True)), BASE
    )
    silent = predict_step(cluster_of(), job_of(stack=Stack()), BASE)
    assert silent.high_seconds / silent.total_seconds > declared.high_seconds / declared.total_seconds
    width = shipped_parameters().band["dense tuned"].value
    assert declared.high_seconds / declared.total_seconds == pytest.approx(1 + width)
    assert any("GEMM efficiency 0.7" in text for text in silent.basis)
    assert any(text.startswith("assumed: attention kernel") for text in silent.basis)
    assert any("+-" in text for text in silent.basis)
    amd = predict_step(cluster_of("mi300x-node"), job_of(), BASE)
    assert amd.high_seconds / amd.total_seconds > 1.5


def test_a_precision_that_the_gpu_lacks_is_refused():
    with pytest.raises(InputError, match="no fp8 peak"):
        predict_step(cluster_of("dgx-a100"), job_of(precision="fp8"), BASE)


def test_lower_precision_is_faster_but_not_twice():
    half, quarter = total(), total(job=job_of(precision="fp8"))
    assert 1.2 < half / quarter < 1.9
