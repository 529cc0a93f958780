"""Memory against published byte counts, Korthikanti's formula, the op orders of the schedules and a traced rank."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from memory_models import LLAMA3_8B, LLAMA3_70B, SEVEN_BILLION, cluster_of, gpt, job_of, shares_of

from scenarios.layout import SCHEDULES, Layout, Stage
from scenarios.model import MODELS, Attention, Layer, Mla, Mlp, ModelSpec, Moe, read_model_file
from scenarios.stack import Stack
from simulator.activations import layer_bytes
from simulator.arrays import LayoutArrays
from simulator.live import live_microbatches
from simulator.memory import memory_use, peak_bytes, recipe_bytes
from simulator.outcome import MEMORY_PARTS
from simulator.schedule import live_vectors, op_orders, schedule_complaint

GB, GIB, MIB = 1e9, 2.0**30, 2.0**20


def states(stage):
    return stage.weights_bytes + stage.gradients_bytes + stage.optimizer_bytes


@pytest.mark.parametrize(("stage", "gigabytes"), [("none", 112.0), ("zero1", 38.5), ("zero2", 26.25), ("zero3", 14.0)])
def test_states_by_sharding_stage(stage, gigabytes):
    # 7e9 parameters on 8 ranks (deepspeedai/DeepSpeed issue 5102): 16 N; 4 N + 12 N/8; 2 N + 14 N/8; 16 N/8
    job = job_of(SEVEN_BILLION, gradient_precision="bf16")
    use = memory_use(cluster_of(), job, Layout(dp=8, optimizer_sharding=stage))
    assert states(use.stages[0]) / SEVEN_BILLION.num_params * 7e9 / GB == pytest.approx(gigabytes, rel=1e-9)


@pytest.mark.parametrize(("gradients", "bytes_each", "mebibytes"), [("fp32", 7.5, 57436.9), ("bf16", 5.5, 42120.4)])
def test_megatron_prints_the_same_states(gradients, bytes_each, mebibytes):
    # Llama-3.1-8B, TP 1, DP 8, distributed optimizer: 6 + 12/DP or 4 + 12/DP (NVIDIA/Megatron-LM issue 1345)
    job = job_of(LLAMA3_8B, gradient_precision=gradients)
    stage = memory_use(cluster_of(), job, Layout(dp=8, optimizer_sharding="zero1")).stages[0]
    assert LLAMA3_8B.num_params == 8_030_261_248
    assert states(stage) == pytest.approx(bytes_each * LLAMA3_8B.num_params, rel=1e-12)
    assert states(stage) / MIB == pytest.approx(mebibytes, abs=0.1)


def test_model_parallel_ranks_without_replicas_shard_nothing():
    # 40e9 parameters, eight-way model parallel, DP 1 (deepspeedai/DeepSpeed issue 237): 16 B x 40e9 / 8 = 80 GB
    model = gpt(51, 8192, 64)
    scale = 40e9 / model.num_params
    job = job_of(model, seq_length=1024, gradient_precision="bf16")
    alone = memory_use(cluster_of(), job, Layout(tp=8, dp=1, optimizer_sharding="zero2")).stages[0]
    assert states(alone) * scale / GB == pytest.approx(80.0, rel=1e-9)
    job = job_of(model, seq_length=1024, batch=6 * 64, gradient_precision="bf16")
    spread = memory_use(cluster_of(), job, Layout(tp=8, dp=6, optimizer_sharding="zero2")).stages[0]
    assert states(spread) * scale / GB == pytest.approx(2 * 40 / 8 + 14 * 40 / 48, rel=1e-9)  # 21.7 GB


def test_states_are_never_the_whole():
    # 6.8e9 parameters, ZeRO-3: an estimate of states alone missed most of the memory (deepspeedai/DeepSpeed 4527)
    use = memory_use(cluster_of(), job_of(SEVEN_BILLION, 2048), Layout(dp=64, optimizer_sharding="zero3"))
    stage = use.stages[0]
    assert stage.buffers_bytes > 3 * 2 * SEVEN_BILLION.layer_params("dense")  # two gathered layers and more
    assert stage.activations_bytes > states(stage)
    assert stage.reserve_bytes >= 1 * GIB
    assert any("allocator" in text for text in use.not_included)
    assert use.peak_bytes == pytest.approx(sum(getattr(stage, f"{part}_bytes") for part in MEMORY_PARTS))


# Korthikanti et al. 2022 (arXiv 2205.05198), table 3: 22B, 175B, 530B, 1T
@pytest.mark.parametrize(("hidden", "heads"), [(6144, 64), (12288, 96), (20480, 128), (25600, 160)])
@pytest.mark.parametrize("tp", [1, 8])
def test_korthikanti_activations_of_a_layer(hidden, heads, tp):
    s, b, h, a, t = 2048, 2, hidden, heads, tp
    job = job_of(gpt(1, hidden, heads), s, attention="unfused")
    layer = job.model.layer_kinds["dense"]
    plain = shares_of(job, Layout(tp=t, micro_batch_size=b))
    sequence = shares_of(job, Layout(tp=t, micro_batch_size=b, sequence_parallel=True))
    assert layer_bytes(job, layer, plain)[0][0] == pytest.approx(s * b * h * (10 + 24 / t + 5 * a * s / (h * t)))
    assert layer_bytes(job, layer, sequence)[0][0] == pytest.approx(s * b * h / t * (34 + 5 * a * s / h))
    assert layer_bytes(job, layer, sequence)[1][0] == pytest.approx(5 * a * s * s * b / t)


def test_selective_recompute_saves_the_scores_only_where_they_are_stored():
    # with flash attention it saved 2 % (NVIDIA/Megatron-LM issue 1225)
    def activations(attention, recompute):
        job = job_of(gpt(24, 6144, 64), 2048, attention=attention)
        return memory_use(cluster_of(), job, Layout(tp=8, recompute=recompute)).stages[0].activations_bytes

    flash = activations("flash", "selective") / activations("flash", "none")
    unfused = activations("unfused", "selective") / activations("unfused", "none")
    assert flash == pytest.approx(1.0, abs=1e-9)
    # 34 of 34 + 5 a s / h = 140.7 bytes, with TP 8 and no sequence parallelism 13 of 26.3
    assert unfused == pytest.approx(
        13.0 / (13.0 + 5 * 64 * 2048 / 6144 / 8), rel=0.06
    )  # and what the backward needs for a moment


def test_a_declared_kernel_decides_what_is_stored():
    job = job_of(gpt(4, 1024, 16), 2048)
    declared = job.model_copy(update={"stack": Stack(attention_kernel="unfused")})
    asked = job.model_copy(update={"attention": "unfused"})
    peaks = [memory_use(cluster_of(), one, Layout()).peak_bytes for one in (job, declared, asked)]
    assert peaks[0] < peaks[1] == peaks[2]


def test_fullest_recompute_keeps_inputs_and_one_layer():
    # peak(k) = L/k x input + k x layer for groups of k layers; headway recomputes layer by layer, k = 1
    # (NVIDIA/Megatron-LM issue 1226)
    job = job_of(LLAMA3_8B, 8192)
    full = memory_use(cluster_of(), job, Layout(dp=8, recompute="full")).stages[0].activations_bytes
    layer = job.model.layer_kinds["dense"]
    everything = layer_bytes(job, layer, shares_of(job, Layout(dp=8)))[0][0]
    entry = 2.0 * 8192 * 4096
    assert full >= 32 * entry + everything
    assert full <= 32 * entry + everything + 2.0 * 8192 * (2 * 14336 + 3 * 4096)
    none = memory_use(cluster_of(), job, Layout(dp=8)).stages[0].activations_bytes
    assert none == pytest.approx(32 * everything, rel=0.1)


@pytest.mark.parametrize(
    ("experts", "top_k", "ffn", "dense_ffn", "ratio"),
    [(8, 2, 14336, 14336, 2.0), (128, 8, 768, 6144, 1.0)],  # Mixtral 8x7B, Qwen3-30B-A3B (NVIDIA/Megatron-LM 6782)
)
def test_experts_keep_what_their_tokens_pass_through(experts, top_k, ffn, dense_ffn, ratio):
    mixer = Attention(heads=32, kv_heads=8, head_dim=128)
    sparse = Layer(mixer=mixer, feed_forward=Moe(num_experts=experts, top_k=top_k, ffn_hidden_size=ffn))
    dense = Layer(mixer=mixer, feed_forward=Mlp(ffn_hidden_size=dense_ffn, gated=True))
    model = ModelSpec(
        name="moe",
        hidden_size=4096,
        vocab_size=32000,
        layer_kinds={"moe": sparse, "mlp": dense},
        pattern=("moe", "mlp"),
    )
    job = job_of(model, 4096)
    share = shares_of(job, Layout(ep=8, dp=8))
    routed, plain = layer_bytes(job, sparse, share)[0][0], layer_bytes(job, dense, share)[0][0]
    copies = 2.0 * 4096 * top_k * 2 * 4096  # routed copies before and after the experts
    scores = 4.0 * 4096 * experts
    inner = 2.0 * 4096 * 3 * dense_ffn
    assert routed - copies - scores - (plain - inner) == pytest.approx(ratio * inner)


def test_headroom_follows_the_shape_of_the_job():
    # one flat figure of 4 layers was reused for 93 (ROCm/Megatron-LM issue 161)
    job, longer = job_of(LLAMA3_70B, 4096), job_of(LLAMA3_70B, 16384)
    base = Layout(tp=8, dp=2, recompute="full")

    def reserve(job, **changes):
        return memory_use(cluster_of(), job, base.model_copy(update=changes)).stages[0].reserve_bytes

    assert reserve(longer) > reserve(job)
    assert reserve(job, micro_batch_size=4) > reserve(job)
    assert reserve(longer, cp=4) < reserve(longer)
    assert reserve(job, pp=8, schedule="gpipe") != reserve(job)


def test_logits_lie_on_the_last_stage_only():
    # fp32 logits: s b V 4 / TP = 4.20 GB at TP 1 (NVIDIA/Megatron-LM issue 5869), beside the logits in bf16
    job = job_of(LLAMA3_8B, 8192)
    use = memory_use(cluster_of(), job, Layout(pp=4))
    assert [stage.logits_bytes / GB for stage in use.stages] == pytest.approx([0, 0, 0, 4.2027 * 1.5], abs=2e-3)
    split = memory_use(cluster_of(), job, Layout(pp=4, tp=8))
    assert split.stages[-1].logits_bytes == pytest.approx(use.stages[-1].logits_bytes / 8)


def test_a_tied_table_is_held_at_both_ends():
    tied, free = gpt(8, 1024, 16), gpt(8, 1024, 16, tied_embeddings=False)
    for pp, copies in ((1, 1), (2, 2)):
        held = [
            sum(stage.weights_bytes for stage in memory_use(cluster_of(), job_of(model, 1024), Layout(pp=pp)).stages)
            for model in (tied, free)
        ]
        assert held[0] == pytest.approx(2.0 * (tied.num_params + (copies - 1) * 51200 * 1024))
        assert held[1] == pytest.approx(2.0 * free.num_params)


def test_experts_have_their_own_replicas():
    mixer = Attention(heads=16, kv_heads=16, head_dim=64)
    layer = Layer(mixer=mixer, feed_forward=Moe(num_experts=16, top_k=2, ffn_hidden_size=1024))
    model = ModelSpec(name="m", hidden_size=1024, vocab_size=8, layer_kinds={"m": layer}, pattern=("m",) * 4)
    job = job_of(model, 1024, gradient_precision="bf16")
    experts = 4 * model.layer_expert_params("m")
    rest = model.num_params - experts
    use = memory_use(cluster_of(), job, Layout(tp=2, dp=8, ep=8, etp=1, optimizer_sharding="zero1")).stages[0]
    assert use.weights_bytes == pytest.approx(2 * (rest / 2 + experts / 8))
    assert use.optimizer_bytes == pytest.approx(12 * (rest / 2 / 8 + experts / 8 / 2))  # two replicas of each expert
    wide = memory_use(cluster_of(), job, Layout(tp=2, dp=8, ep=4, etp=2, optimizer_sharding="zero1")).stages[0]
    assert wide.weights_bytes == pytest.approx(use.weights_bytes)


def test_a_job_in_fp32_has_no_master_copy():
    recipe = recipe_bytes(job_of(SEVEN_BILLION, precision="fp32"))
    assert (recipe.weights, recipe.gradients, recipe.optimizer) == (4.0, 4.0, 8.0)
    plain = recipe_bytes(job_of(SEVEN_BILLION, precision="fp32", optimizer="sgd"))
    assert plain.optimizer == 0.0


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_live_microbatches_are_those_of_the_op_orders(schedule):
    checked = 0
    for vpp in (1, 2, 3, 4):
        for pp in (2, 3, 4, 6):
            for m in (1, 2, 4, 6, 8, 12, 24):
                if schedule_complaint(schedule, pp, vpp, m) or (schedule in ("gpipe", "1f1b") and vpp > 1):
                    continue
                arrays = LayoutArrays.of([Layout(pp=pp, vpp=vpp, schedule=schedule)])
                live = live_microbatches(arrays, np.arange(pp, dtype=float)[None], np.array([float(m)]))
                first, middle, last = (one[0] for one in live)
                for rank, order in enumerate(op_orders(schedule, pp, vpp, m)):
                    ends = (last[rank],) if vpp > 1 or schedule == "dualpipe" else ()
                    chunks = (first[rank], *[middle[rank]] * max(0, vpp - 2), *ends)
                    if schedule == "dualpipe" and vpp == 1 and rank >= pp / 2:
                        chunks = chunks[::-1]
                    vectors = live_vectors(order, "W")
                    assert sum(chunks) == max(map(sum, vectors)), (pp, vpp, m, rank)
                    assert chunks in vectors
                    checked += 1
    assert checked > 20


def test_first_stage_of_1f1b_holds_most():
    use = memory_use(cluster_of(), job_of(LLAMA3_70B, 4096), Layout(tp=8, pp=8))
    assert [stage.in_flight_microbatches for stage in use.stages] == [8, 7, 6, 5, 4, 3, 2, 1]
    activations = [stage.activations_bytes for stage in use.stages]
    assert activations == sorted(activations, reverse=True)


def test_uneven_stages_and_recomputed_layers_are_counted_as_written():
    job = job_of(LLAMA3_8B, 4096)
    even = memory_use(cluster_of(), job, Layout(pp=2))
    uneven = memory_use(cluster_of(), job, Layout(pp=2, stages=(Stage(layers=12), Stage(layers=20))))
    assert uneven.stages[0].activations_bytes < even.stages[0].activations_bytes
    assert uneven.stages[1].weights_bytes > even.stages[1].weights_bytes
    some = Layout(pp=2, recompute="full", stages=(Stage(layers=16, recompute_layers=8), Stage(layers=16)))
    part = memory_use(cluster_of(), job, some)
    full = memory_use(cluster_of(), job, Layout(pp=2, recompute="full"))
    assert full.stages[0].activations_bytes < part.stages[0].activations_bytes < even.stages[0].activations_bytes
    assert part.stages[1].activations_bytes == pytest.approx(even.stages[1].activations_bytes)


def test_a_traced_rank_of_llama_70b():
    # One rank of 1,024 traced with torch 2.13 and no weights: TP 8 with sequence parallelism, FSDP 128, bf16 mixed
    # precision, full recompute, 8,192 tokens, AdamW. Peak 4.483 GiB, of which parameters 0.257, AdamW 0.514,
    # gathered parameters 0.691 with the next gather 0.199, fp32 gradients of a layer 0.398, activations 1.234 and
    # temporaries of the backward 1.186.
    layout = Layout(tp=8, dp=128, sequence_parallel=True, optimizer_sharding="zero3", recompute="full")
    job = job_of(LLAMA3_70B, 8192, batch=128, stack=Stack(trainer="headway"))
    stage = memory_use(cluster_of(), job, layout).stages[0]
    assert stage.weights_bytes / GIB == pytest.approx(0.257, abs=0.002)
    assert stage.optimizer_bytes / GIB == pytest.approx(0.514, abs=0.004)
    whole = 8192 * 8192 * 2.0
    assert (stage.buffers_bytes - whole) / GIB == pytest.approx(0.691 + 0.199 + 0.398, rel=0.03)
    assert (stage.total_bytes - stage.reserve_bytes) / GIB == pytest.approx(4.483, rel=0.05)


LAYOUT = st.builds(
    Layout,
    tp=st.sampled_from([1, 2, 8]),
    cp=st.sampled_from([1, 2]),
    pp=st.sampled_from([1, 2, 4, 8]),
    vpp=st.just(1),
    dp=st.sampled_from([1, 2, 8]),
    micro_batch_size=st.sampled_from([1, 2]),
    sequence_parallel=st.booleans(),
    optimizer_sharding=st.sampled_from(["none", "zero1", "zero2", "zero3"]),
    schedule=st.sampled_from(["gpipe", "1f1b", "zb-h1"]),
    recompute=st.sampled_from(["none", "selective", "full"]),
)


@settings(max_examples=80, deadline=None)
@given(st.lists(LAYOUT, min_size=1, max_size=4))
def test_peaks_are_those_of_the_fullest_stage(layouts):
    job = job_of(LLAMA3_70B, 4096)
    layouts = [*layouts, Layout(pp=4, vpp=2, schedule="zbv"), Layout(pp=4, vpp=4, schedule="interleaved", tp=2)]
    peaks = peak_bytes(cluster_of(), job, LayoutArrays.of(layouts))
    for layout, peak in zip(layouts, peaks, strict=True):
        assert peak == pytest.approx(memory_use(cluster_of(), job, layout).peak_bytes, rel=1e-12)


def test_published_runs_fit_where_they_ran():
    # A100 of 80 GB: GPT-3 175B with TP 8, PP 12 and full recompute (Narayanan et al. 2021); 530B on 280 with selective
    # recompute and sequence parallelism (Korthikanti et al. 2022); without recompute the latter needs more than 80 GB
    cluster = cluster_of("dgx-a100")
    gpt3 = gpt(96, 12288, 96)
    old = {"attention": "unfused", "precision": "fp16"}
    layout = Layout(tp=8, pp=12, dp=4, recompute="full", optimizer_sharding="none")
    assert memory_use(cluster, job_of(gpt3, 2048, 1536, **old), layout).headroom_bytes > 0
    big = gpt(105, 20480, 128)
    kept = Layout(tp=8, pp=35, vpp=3, schedule="interleaved", sequence_parallel=True, optimizer_sharding="none")
    job = job_of(big, 2048, 280, **old)
    assert memory_use(cluster, job, kept.model_copy(update={"recompute": "selective"})).headroom_bytes > 0
    assert memory_use(cluster, job, kept).headroom_bytes < 0


def test_latent_attention_keeps_its_ranks():
    mla = Mla(heads=128, q_lora_rank=1536, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128)
    layer = Layer(mixer=mla, feed_forward=Mlp(ffn_hidden_size=18432, gated=True))
    model = ModelSpec(name="mla", hidden_size=7168, vocab_size=8, layer_kinds={"a": layer}, pattern=("a",))
    job = job_of(model, 4096)
    tokens = 4096
    kept = layer_bytes(job, layer, shares_of(job, Layout()))[0][0]
    heads = 128 * (192 + 192 + 128 + 128)  # queries, keys, values, output
    expected = 2.0 * tokens * (4 * 7168 + heads + 2 * 1536 + 2 * 512 + 64 + 3 * 18432) + 4.0 * tokens * 128
    assert kept == pytest.approx(expected)


def test_shipped_models_have_finite_memory():
    for path in sorted(MODELS.glob("*.yaml")):
        model = ModelSpec.model_validate(read_model_file(path, []), by_alias=True, by_name=False)
        use = memory_use(cluster_of(), job_of(model, 2048), Layout(tp=1, dp=8, optimizer_sharding="zero3"))
        assert math.isfinite(use.peak_bytes)
        assert states(use.stages[0]) == pytest.approx(16 * (model.num_params + model.mtp_params) / 8, rel=1e-6)
