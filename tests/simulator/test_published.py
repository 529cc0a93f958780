"""Rows of published runs become clusters, jobs and layouts, or are refused with a reason."""

import copy
import json
from pathlib import Path

import pytest

from simulator.published import compact_text, read_runs
from simulator.published_cases import case_of, cases
from simulator.published_hardware import NODES
from topologies.errors import InputError

SHARED = Path(__file__).resolve().parents[2].parent / "shared" / "data" / "published-runs.json"

ROW = {
    "id": "one",
    "source_group": "A trainer",
    "source": {"title": "A trainer", "repo": "someone/trainer"},
    "date": "2025-01",
    "task": "pretrain",
    "model": {
        "name": "eight",
        "layers": 32,
        "hidden": 4096,
        "ffn_hidden": 14336,
        "heads": 32,
        "kv_heads": 8,
        "head_dim": 128,
        "vocab": 128256,
        "gated_mlp": True,
        "tied_embeddings": False,
        "seq_len": 8192,
    },
    "hardware": {"gpu": "H100", "gpus": 64, "gpus_per_node": 8, "nvlink_domain": 8, "nic_gbps_per_gpu": 400},
    "precision": {"dtype": "bf16", "recipe": "bf16"},
    "layout": {
        "tp": 2,
        "sp": True,
        "pp": 1,
        "cp": 1,
        "dp": 32,
        "zero_stage": 1,
        "micro_batch": 1,
        "global_batch": 128,
        "recompute": "none",
        "schedule": "none",
    },
    "normalised": {"step_time_s": 5.0},
}


def run_of(tmp_path, **changes):
    row = copy.deepcopy(ROW)
    for path, value in changes.items():
        place = row
        *parents, last = path.split("__")
        for parent in parents:
            place = place[parent]
        if value is None:
            place.pop(last, None)
        else:
            place[last] = value
    file = tmp_path / "runs.json"
    file.write_text(json.dumps([row]))
    return read_runs(file)[0]


def test_a_complete_row_needs_no_assumption(tmp_path):
    case = case_of(run_of(tmp_path))
    assert case.assumptions == ()
    assert case.job.model.num_params == pytest.approx(8.03e9, rel=0.01)
    assert (case.layout.tp, case.layout.dp, case.layout.sequence_parallel) == (2, 32, True)
    assert case.cluster.num_gpus == 64
    assert case.cluster.node.network_bytes_per_second_per_gpu == pytest.approx(50e9)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model__hidden": None}, "model.hidden: is missing"),
        ({"model__kv_heads": 7}, "cannot share 7"),
        ({"hardware__gpu": "TPU v5p"}, "'TPU v5p' is not in the catalog"),
        ({"hardware__gpu": None}, "GPU is not stated"),
        ({"hardware__gpus": None}, "number of GPUs is not stated"),
        ({"hardware__gpu": "A100", "precision__dtype": "fp8"}, "A100.* has no fp8"),
        ({"precision__dtype": None}, "precision.dtype: is missing"),
        ({"layout__tp": None}, "layout.tp: is missing"),
        ({"layout__tp": 3}, "does not divide 64 GPUs"),
        ({"layout__dp": 16}, "is not 64 GPUs"),
        ({"layout__global_batch": 100}, "not a multiple of dp 32 x micro-batch 1"),
        ({"layout__global_batch": None}, "global_batch: is missing"),
        ({"layout__pp": 64, "layout__tp": 1, "layout__dp": 1}, "pp 64 is more than the 32 layers"),
        ({"layout__pp": 2, "layout__dp": 16, "layout__schedule": "hanayo"}, "'hanayo' is not modelled"),
        ({"normalised": {}}, "no step time"),
        ({"task": "distillation"}, "'distillation' is not modelled"),
        ({"stack": {"attention_kernel": "magic"}}, "is no stack"),
    ],
)
def test_rows_that_cannot_be_predicted_say_why(tmp_path, changes, words):
    run = run_of(tmp_path, **changes)
    with pytest.raises(InputError, match=words):
        case_of(run)
    known, skipped = cases([run])
    assert not known
    assert skipped[0].reason


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"layout__micro_batch": None}, "micro-batch 1 (not stated)"),
        ({"layout__cp": None}, "cp 1 (not stated)"),
        ({"layout__zero_stage": None}, "ZeRO stage 1 (not stated)"),
        ({"layout__sp": None}, "no sequence parallelism (not stated)"),
        ({"layout__recompute": None}, "no recompute (not stated, and it fits without)"),
        ({"model__tied_embeddings": None}, "an output matrix of its own (not stated)"),
        ({"hardware__nic_gbps_per_gpu": None}, "NIC rate 400 Gbit/s per GPU (not stated; DGX H100)"),
        ({"layout__pp": 4, "layout__dp": 8, "layout__schedule": "interleaved-1f1b"}, "vpp 8 (interleaved"),
        ({"layout__pp": 4, "layout__dp": 8, "layout__schedule": None}, "schedule 1f1b (not stated)"),
    ],
)
def test_what_a_row_leaves_open_is_assumed_and_said(tmp_path, changes, words):
    assumptions = case_of(run_of(tmp_path, **changes)).assumptions
    assert any(words in one for one in assumptions), assumptions


def test_unstated_recompute_is_full_where_nothing_else_fits(tmp_path):
    case = case_of(
        run_of(
            tmp_path,
            layout__recompute=None,
            layout__micro_batch=4,
            layout__tp=1,
            layout__dp=64,
            layout__global_batch=256,
        )
    )
    assert case.layout.recompute == "full"
    assert "full recompute (not stated; without it a GPU would need" in case.assumptions[-1]


def test_lora_and_offload_are_what_they_are(tmp_path):
    assert case_of(run_of(tmp_path, task="lora")).job.tuning == "lora"
    assert case_of(run_of(tmp_path, layout__offload="CPU AdamW offload")).job.stack.offload == "optimizer"


def test_a_declared_stack_wins_over_the_rules(tmp_path):
    assert case_of(run_of(tmp_path)).job.stack.tuned is False
    declared = {"trainer": "megatron", "tuned": True, "attention_kernel": "flash3-cudnn", "tp_overlap": True}
    stack = case_of(run_of(tmp_path, stack=declared)).job.stack
    assert {name: getattr(stack, name) for name in declared} == declared


def test_kernels_follow_the_time(tmp_path):
    kernels = [
        case_of(run_of(tmp_path, date=date)).job.stack.attention_kernel for date in ("2022-01", "2023-05", "2024-03")
    ]
    assert kernels == ["unfused", "early-flash", "flash2"]


def test_selective_recompute_names_its_modules(tmp_path):
    def modules(detail):
        run = run_of(tmp_path, layout__recompute="selective", layout__recompute_detail=detail)
        return case_of(run).layout.recompute_modules

    assert modules("layernorm, moe; moe dispatcher hybridep") == ("layernorm", "moe")
    assert modules("mla_up_proj,mlp; moe dispatcher deepep") == ("mla_up_proj", "mlp")
    assert modules("per-op SAC") == ("half_of_matmuls",)
    assert modules("norm, act, shared_expert") == ("layernorm", "act", "shared_experts")


def test_every_gpu_of_the_map_makes_a_cluster(tmp_path):
    for gpu in NODES:
        case = case_of(run_of(tmp_path, hardware__gpu=gpu, hardware__nvlink_domain=None))
        assert case.cluster.gpu.peak("bf16") > 1e14


def test_limits_of_power_and_domains_of_four_are_known(tmp_path):
    limited = case_of(run_of(tmp_path, hardware__sku="H100-SXM5-96GB HBM2e 500W")).cluster.gpu
    assert (limited.power_limit_watts, limited.memory_bandwidth_bytes_per_second) == (500.0, 2.4e12)
    assert case_of(run_of(tmp_path, hardware__system="Jean Zay")).cluster.domain_size == 4


@pytest.mark.parametrize("text", ["{}", "3", "not json"])
def test_files_that_hold_no_runs_are_refused(tmp_path, text):
    file = tmp_path / "runs.json"
    file.write_text(text)
    with pytest.raises(InputError):
        read_runs(file)


def test_rows_that_are_no_objects_are_skipped(tmp_path):
    file = tmp_path / "runs.json"
    file.write_text("[3, null, {}]")
    known, skipped = cases(read_runs(file))
    assert not known
    assert [one.run.id for one in skipped] == ["row 1", "row 2", "row 3"]


def test_few_of_the_shipped_rows_are_skipped_and_each_has_its_source():
    runs = read_runs()
    trusted = [run for run in runs if run.confidence in ("A", "B")]
    _, skipped = cases(trusted)
    assert len(trusted) > 1000
    assert len(skipped) / len(trusted) < 0.03
    assert all(run.source.get("title") for run in runs)
    assert len({run.id for run in runs}) == len(runs)


def test_the_shipped_table_is_the_compact_form_of_the_full_one(tmp_path):
    if not SHARED.exists():
        pytest.skip("the full table of published runs is not here")
    whole, shipped = read_runs(SHARED), read_runs()
    for full, short in zip(whole, shipped, strict=True):
        assert (full.id, full.measured_step_seconds, full.counted) == (
            short.id,
            short.measured_step_seconds,
            short.counted,
        )
    file = tmp_path / "again.json"
    file.write_text(compact_text(SHARED))
    assert file.read_text() == (Path(__file__).resolve().parents[2] / "simulator" / "published_runs.json").read_text()
    assert len(file.read_bytes()) < 1_000_000
