"""Each rule against the numbers that practitioners reported (the thread is named where there is one)."""

from __future__ import annotations

from typing import Any

import pytest

from planner.candidates import legal_layouts
from planner.notes import notes, padded_vocab_size, stages_text
from planner.outlook import with_stages
from planner.placement import place
from planner.rules import broken
from scenarios.layout import Layout, Stage
from topologies.cluster import Pool


def rules_of(question: Any, **fields: Any) -> dict[str, str]:
    return {one.rule: one.sentence for one in broken(question, Layout(**fields))}


def test_a_layout_that_works_breaks_nothing(ask: Any) -> None:
    assert rules_of(ask(), tp=2, pp=2, dp=2, sequence_parallel=True) == {}


@pytest.mark.parametrize(
    ("layers", "pp", "sizes"),
    [
        (30, 4, (7, 8, 8, 7)),  # NVIDIA/Megatron-LM#1304 built 28
        (46, 4, (11, 12, 12, 11)),  # modelscope/ms-swift#5737
        (7, 2, None),  # NVIDIA/Megatron-LM#381
        (61, 4, None),  # pytorch/torchtitan#963
        (27, 4, None),
        (61, 8, None),  # ISEEKYAN/Megatron-LM#53
        (40, 16, None),  # NVIDIA/Megatron-LM#1303
        (126, 16, (7, *[8] * 14, 7)),  # Llama 3 405B, arXiv 2407.21783, section 3.3.2
    ],
)
def test_uneven_stages_keep_every_layer(ask: Any, make_model: Any, layers: int, pp: int, sizes: Any) -> None:
    question = ask(model=make_model(layers), batch=256)
    layout = with_stages(Layout(pp=pp, optimizer_sharding="none"), question.job.model)
    held = tuple(stage.layers for stage in layout.stages)
    assert sum(held) == layers
    assert max(held) == -(-layers // pp)
    assert held[-1] <= max(held)
    if sizes:
        assert held == sizes
    assert not {"stages", "layers"} & rules_of(question, **layout.model_dump()).keys()


@pytest.mark.parametrize(
    ("layers", "stages"),
    [
        (30, [7] * 4),  # Megatron-LM#1304: 28 of 30
        (80, [2] * 32),  # Megatron-LM#468: 64 of 80
        (40, [2] * 16),  # Megatron-LM#326 and #1303: 32 of 40
    ],
)
def test_lost_layers_are_refused(ask: Any, make_model: Any, layers: int, stages: list[int]) -> None:
    question = ask(model=make_model(layers), batch=256)
    pinned = tuple(Stage(layers=size) for size in stages)
    said = rules_of(question, pp=len(stages), stages=pinned)["stages"]
    assert f"hold {sum(stages)} layers" in said
    assert f"has {layers}" in said
    assert not len(legal_layouts(question, {"stages": pinned}).layouts)


def test_explicit_uneven_stages_are_accepted_and_fix_pp(ask: Any, make_model: Any) -> None:
    question = ask(model=make_model(30), batch=64)
    pinned = tuple(Stage(layers=size) for size in (8, 7, 7, 8))
    found = legal_layouts(question, {"stages": pinned}).layouts
    assert len(found)
    assert set((found.pp * found.vpp).tolist()) == {4}


def test_uneven_stages_are_told(ask: Any, make_model: Any, make_cluster: Any) -> None:
    question = ask(make_cluster(1, 4), make_model(30))
    layout = with_stages(Layout(pp=4), question.job.model)
    said = " ".join(notes(question, layout, place(question.cluster, layout)))
    assert "7/8/8/7" in said
    assert stages_text(with_stages(Layout(pp=16), make_model(126))) == "7 + 14 x 8 + 7"


def test_vocabulary_is_padded_to_the_common_multiple(ask: Any, make_model: Any) -> None:
    # hpcaitech/ColossalAI#6167: 65,535 tokens over tp 8
    assert padded_vocab_size(65_535, 8) == 65_536
    assert padded_vocab_size(65_535, 3) == 65_664  # lcm(128, 3) = 384; 171 x 384
    question = ask(model=make_model(vocab=65_535))
    layout = Layout(tp=8)
    assert rules_of(question, tp=8) == {}
    assert "65536" in " ".join(notes(question, layout, place(question.cluster, layout)))


@pytest.mark.parametrize("tp", [2, 4, 8])
def test_falcon_7b_has_71_heads(ask: Any, make_model: Any, tp: int) -> None:
    question = ask(model=make_model(heads=71, kv_heads=1, ffn=18_176))
    assert f"71 % {tp} = {71 % tp}" in rules_of(question, tp=tp, dp=8 // tp)["attention_heads"]


def test_kv_heads_split_or_repeat(ask: Any, make_model: Any) -> None:
    assert "kv_heads" not in rules_of(ask(model=make_model(heads=24, kv_heads=8)), tp=2, dp=4)
    assert "kv_heads" not in rules_of(ask(model=make_model(heads=24, kv_heads=2)), tp=8)
    assert "kv_heads" in rules_of(ask(model=make_model(heads=24, kv_heads=6)), tp=4, dp=2)


def test_ffn_must_split(ask: Any, make_model: Any) -> None:
    assert "4098 % 4 = 2" in rules_of(ask(model=make_model(ffn=4098)), tp=4, dp=2)["ffn_size"]


def test_tensor_parallelism_stays_in_the_domain_unless_allowed(ask: Any, make_cluster: Any, make_model: Any) -> None:
    cluster, model = make_cluster(2), make_model(heads=16, kv_heads=16)
    assert "8 GPUs" in rules_of(ask(cluster, model), tp=16)["nvlink_domain"]
    assert rules_of(ask(cluster, model, allow=("tp-across-domains",)), tp=16) == {}


def test_two_islands_of_six_and_two_cannot_host_tp_8(ask: Any, make_cluster: Any, make_node: Any) -> None:
    # volcano-sh/volcano#5751: eight free accelerators, and no place for one group of eight
    pools = (Pool(node=make_node(6), num_nodes=1), Pool(node=make_node(2), num_nodes=1))
    cluster = make_cluster().model_copy(update={"pools": pools})
    question = ask(cluster)
    assert cluster.num_gpus == 8
    assert "nvlink_domain" in rules_of(question, tp=8)
    assert "1 of 6 + 1 of 2" in rules_of(question, tp=4, dp=2)["domain_capacity"]
    assert rules_of(question, tp=2, dp=4) == {}


def test_gpus_must_all_be_used(ask: Any) -> None:
    assert "= 6 GPUs, the cluster has 8" in rules_of(ask(), tp=2, dp=3, micro_batch_size=1)["gpus"]
    assert "gpus" in rules_of(ask(least_gpus=1), tp=2, dp=8)
    assert "gpus" not in rules_of(ask(least_gpus=1), tp=2, dp=2)


def test_context_parallelism_needs_zigzag_blocks(ask: Any) -> None:
    assert "2050 % 8 = 2" in rules_of(ask(seq=2050), cp=4, dp=2)["sequence_over_cp"]
    assert rules_of(ask(seq=2048), cp=4, dp=2) == {}


def test_global_batch_must_divide(ask: Any) -> None:
    # NVIDIA/Megatron-LM#414: a world of 16 left in place, 24 % (1 x 16) != 0
    question = ask(batch=24, least_gpus=1)
    assert "24 % 16 = 8" in rules_of(question, dp=16)["global_batch"]


def test_too_few_microbatches_leave_stages_idle(ask: Any) -> None:
    assert "3 micro-batches for pp 4" in rules_of(ask(batch=6), pp=4, dp=2)["microbatches_fill_pipeline"]


def test_experts(ask: Any, make_model: Any) -> None:
    dense, moe = ask(), ask(model=make_model(experts=4))
    assert "dense" in rules_of(dense, dp=8, ep=2)["dense_has_no_experts"]
    assert "4 % 8 = 4" in rules_of(moe, dp=8, ep=8)["experts"]
    assert "expert_groups" in rules_of(moe, dp=2, pp=4, ep=4)
    assert "etp_inside_tp" in rules_of(moe, tp=2, dp=4, etp=4)
    assert rules_of(moe, dp=8, ep=4) == {}


def test_a_lonely_expert_is_warned_about(ask: Any, make_model: Any) -> None:
    # deepspeedai/DeepSpeed#5794: ep 4 with 4 experts hangs at the last MoE layer
    question, lonely, fine = ask(model=make_model(experts=4)), Layout(dp=8, ep=4), Layout(dp=8, ep=2)
    assert "hangs" in " ".join(notes(question, lonely, place(question.cluster, lonely)))
    assert "hangs" not in " ".join(notes(question, fine, place(question.cluster, fine)))


def test_expert_parallelism_inside_a_node_needs_no_special_dispatcher(
    ask: Any, make_model: Any, make_cluster: Any
) -> None:
    # NVIDIA/Megatron-LM#1456: DeepEP slower than all-to-all inside one machine
    question = ask(make_cluster(2), make_model(experts=16))
    inside, across = Layout(dp=16, ep=4), Layout(dp=16, ep=16)
    assert "plain all-to-all" in " ".join(notes(question, inside, place(question.cluster, inside)))
    assert "once per node" in " ".join(notes(question, across, place(question.cluster, across)))


@pytest.mark.parametrize(
    ("fields", "rule"),
    [
        ({"pp": 4, "dp": 2, "schedule": "interleaved", "vpp": 1}, "virtual_stages"),
        ({"pp": 4, "dp": 2, "schedule": "1f1b", "vpp": 2}, "virtual_stages"),
        ({"pp": 4, "dp": 2, "schedule": "zbv", "vpp": 1}, "virtual_stages"),
        ({"pp": 2, "dp": 4, "schedule": "dualpipe", "vpp": 3}, "virtual_stages"),
        ({"pp": 4, "dp": 2, "schedule": "dualpipe", "vpp": 1, "micro_batch_size": 2}, ""),
        ({"dp": 8, "schedule": "zb-h1"}, "pipeline_schedule"),
        ({"pp": 4, "dp": 2, "schedule": "interleaved", "vpp": 4}, "layers_per_virtual_stage"),
        ({"pp": 4, "dp": 2, "schedule": "dualpipe", "vpp": 2, "micro_batch_size": 8}, "two_microbatches_per_stage"),
        ({"pp": 4, "dp": 2, "optimizer_sharding": "zero3"}, "sharding_under_pp"),
        ({"pp": 4, "dp": 2, "optimizer_sharding": "zero2"}, "sharding_under_pp"),
        ({"dp": 8, "sequence_parallel": True}, "sequence_parallel"),
    ],
)
def test_schedules_and_sharding(ask: Any, fields: dict[str, Any], rule: str) -> None:
    assert list(rules_of(ask(), **fields)) == ([rule] if rule else [])


def test_interleaving_needs_rounds_of_microbatches(ask: Any) -> None:
    said = rules_of(ask(batch=12), pp=4, dp=2, schedule="interleaved", vpp=2)
    assert said == {
        "interleaved_microbatches": "the interleaved schedule needs micro-batches in rounds of pp: 6 % 4 = 2"
    }


def test_embedding_and_head_may_have_a_virtual_stage_of_their_own(ask: Any, make_model: Any, make_cluster: Any) -> None:
    # Llama 3 405B takes a layer away from both ends: 126 layers over 16 x 8 chunks (arXiv 2407.21783, section 3.3.2)
    question = ask(make_cluster(2), make_model(126))
    assert rules_of(question, pp=16, vpp=8, schedule="interleaved") == {}
    assert "layers_per_virtual_stage" in rules_of(question, pp=16, vpp=9, schedule="interleaved")


def test_precision_that_the_gpu_lacks(ask: Any, make_cluster: Any) -> None:
    question = ask(make_cluster(bf16=312e12), job={"precision": "fp8"})
    assert rules_of(question, dp=8)["precision"] == "test-gpu does not multiply matrices in fp8; it does bf16"
    assert legal_layouts(question).emptied_by == ("precision",)
