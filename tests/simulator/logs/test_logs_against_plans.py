from __future__ import annotations

from dataclasses import replace

import pytest

from scenarios.huggingface import spec_from_config
from scenarios.layout import Layout
from scenarios.model import ModelSpec
from scenarios.scenario import load_scenario
from simulator.logs.against import choose_run, contradictions, hold_against
from simulator.logs.flop_counts import HEADWAYS, flop_counts, recognise_count
from simulator.logs.reading import parse_logs
from simulator.logs.steady import settle
from simulator.logs.trainer_log import StepRecord, TrainerLog
from topologies.errors import InputError

SCENARIO = load_scenario("llama3-70b-512-h100")
CLUSTER, JOB = SCENARIO.cluster, SCENARIO.job
LAYOUT = Layout(tp=4, pp=4, dp=32)
BATCH, LENGTH = JOB.global_batch_size, JOB.seq_length

BLOOM = {
    "model_type": "bloom", "n_head": 112, "n_layer": 70, "hidden_size": 14336, "vocab_size": 250880, "seq_length": 2048,
    "layer_norm_epsilon": 1e-5,
}  # fmt: skip


def bloom() -> ModelSpec:
    return ModelSpec.model_validate(spec_from_config(BLOOM, "BLOOM", "config.json"))


def log(*seconds: float, **changes: object) -> TrainerLog:
    facts = {"gpus": 512, "global_batch_size": BATCH, "seq_length": LENGTH} | changes
    steps = tuple(StepRecord(step=step, seconds=time) for step, time in enumerate(seconds, 10))
    return settle(replace(TrainerLog(format="test", steps=steps), **facts))  # type: ignore[arg-type]


def test_bloom_prints_hardware_flops() -> None:
    """149.02 TFLOP/s in the log of BLOOM-176B on 384 A100 at 105.22 s: 111.8 to 112.3 of them are the model's."""
    tokens = 2048 * 2048
    printed = 149.02e12 * 105.22 * 384 / tokens
    count = recognise_count(printed, bloom(), 2048)
    assert count is not None
    assert count.startswith("hardware FLOPs")
    assert count.endswith("with the masked half")
    counts = flop_counts(bloom(), 2048)
    assert counts[count] == pytest.approx(printed, rel=2e-3)
    model = counts["model FLOPs, attention with the masked half"] * tokens / 105.22 / 384 / 1e12
    assert model == pytest.approx(112.3, rel=2e-3)
    assert recognise_count(2 * printed, bloom(), 2048) is None


def test_flop_counts_differ_by_what_their_names_say() -> None:
    forward = JOB.model.forward_flops_per_token(LENGTH)
    counts = flop_counts(JOB.model, LENGTH)
    assert counts[HEADWAYS] == pytest.approx(JOB.model.flops_per_token(LENGTH))
    model = counts["model FLOPs, attention with the masked half"]
    assert model - counts[HEADWAYS] == pytest.approx(3 * forward["attention"])
    hardware = counts["hardware FLOPs (all layers recomputed), attention without the masked half"]
    assert hardware - counts[HEADWAYS] == pytest.approx(sum(forward.values()) - forward["head"])


def test_a_log_that_states_everything() -> None:
    run = hold_against(log(4.0, 4.0, 4.4), CLUSTER, JOB, LAYOUT)
    assert run.step_seconds == 4.0
    assert run.tokens_per_second_per_gpu == pytest.approx(JOB.tokens_per_step / 4.0 / 512)
    peak = CLUSTER.gpu.peak("bf16")
    assert peak is not None
    assert run.mfu == pytest.approx(JOB.model.flops_per_token(LENGTH) * JOB.tokens_per_step / (4.0 * 512 * peak))
    assert run.contradictions == ()
    assert not any("does not state" in note for note in run.notes)


def test_what_a_log_leaves_open_is_taken_from_the_plan_and_said() -> None:
    run = hold_against(log(4.0, 4.0, gpus=None, seq_length=None), CLUSTER, JOB, LAYOUT)
    assert run.tokens_per_second_per_gpu == pytest.approx(JOB.tokens_per_step / 4.0 / 512)
    assert f"the log does not state GPUs (512), sequence length ({LENGTH:,}): taken from the plan" in run.notes


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"gpus": 256}, "GPUs: 256 in the log, 512 in the plan"),
        ({"global_batch_size": 8}, "global batch: 8 in the log"),
        ({"seq_length": 2048}, "sequence length: 2,048 in the log"),
        ({"micro_batch_size": 4}, "micro-batch: 4 in the log, 1 in the plan"),
        ({"layout": {"tp": 8}}, "tp: 8 in the log, 4 in the plan"),
        ({"num_params": 8.03e9}, "parameters: 8.03 B in the log, 70.6 B in the plan"),
        ({"device": "Tesla T4"}, "GPU: Tesla T4 in the log, H100 SXM in the plan"),
    ],
)
def test_contradictions(changes: dict[str, object], text: str) -> None:
    (told,) = contradictions(log(4.0, 4.0, **changes), CLUSTER, JOB, LAYOUT)
    assert told.startswith(text)


def test_the_same_gpu_under_other_names() -> None:
    for device in ("h100_80gb", "NVIDIA H100 80GB HBM3", "a card without a number"):
        assert contradictions(log(4.0, 4.0, device=device), CLUSTER, JOB, LAYOUT) == []


def test_rates_become_seconds_of_the_plan() -> None:
    """tps is of one GPU; samples per second are of all."""
    rate = JOB.tokens_per_step / 4.0 / 512
    titan = TrainerLog(
        format="torchtitan",
        steps=tuple(StepRecord(step=n, tokens_per_second_per_gpu=rate, clock_seconds=4.0 * n) for n in (5, 6, 7)),
    )
    run = hold_against(settle(titan), CLUSTER, JOB, LAYOUT)
    assert run.step_seconds == pytest.approx(4.0)
    assert not any("apart" in note for note in run.notes)
    halved = tuple(replace(one, clock_seconds=2.0 * one.step) for one in titan.steps)
    contradicting = hold_against(settle(replace(titan, steps=halved)), CLUSTER, JOB, LAYOUT)
    assert any("lines are 2 s per step apart, the printed rate gives 4 s" in note for note in contradicting.notes)
    samples = tuple(StepRecord(step=n, samples_per_second=BATCH / 4.0) for n in (5, 6))
    assert hold_against(
        settle(TrainerLog(format="DeepSpeed", steps=samples)), CLUSTER, JOB, LAYOUT
    ).step_seconds == pytest.approx(4.0)


def test_a_rate_that_no_gpu_reaches_is_flagged() -> None:
    peak = CLUSTER.gpu.peak("bf16")
    assert peak is not None
    at_peak = JOB.model.flops_per_token(LENGTH) * JOB.tokens_per_step / (512 * peak)
    run = hold_against(log(at_peak / 0.82, at_peak / 0.82), CLUSTER, JOB, LAYOUT)
    assert any(note.startswith("this would be 82 % of the dense peak") for note in run.notes)


def test_no_peak_means_no_mfu() -> None:
    job = JOB.model_copy(update={"precision": "nvfp4"})
    assert hold_against(log(4.0, 4.0), CLUSTER, job, LAYOUT).mfu is None


def test_no_steady_iteration_needs_acceptance() -> None:
    first = settle(TrainerLog(format="test", steps=(StepRecord(step=1, seconds=20.0),)))
    with pytest.raises(InputError, match=r"run\.log: .*no steady iteration.*--force"):
        hold_against(first, CLUSTER, JOB, LAYOUT, file="run.log")
    assert hold_against(first, CLUSTER, JOB, LAYOUT, accept_unsteady=True).step_seconds == 20.0


def test_the_row_of_a_table_that_fits_the_plan() -> None:
    head = "| SeqLen (T) | # GPUs | GlobalBatchSize | Throughput (T/s) |\n|---|---|---|---|\n"
    rows = [f"| {LENGTH} | {gpus} | {BATCH} | 1000000 |\n" for gpus in (256, 512)]
    table = parse_logs(head + "".join(rows))
    assert choose_run(table, CLUSTER, JOB, LAYOUT, "table.md").gpus == 512
    for wrong, text in ((rows[0] * 2, "none of them fits"), (rows[1] * 2, "2 of them fit")):
        with pytest.raises(InputError, match=rf"table\.md: holds 2 runs .*{text} the plan's 512 GPUs"):
            choose_run(parse_logs(head + wrong), CLUSTER, JOB, LAYOUT, "table.md")


def test_no_mfu_where_gpu_or_model_are_others() -> None:
    assert hold_against(log(4.0, 4.0, device="Tesla T4"), CLUSTER, JOB, LAYOUT).mfu is None
    assert hold_against(log(4.0, 4.0, num_params=8e9), CLUSTER, JOB, LAYOUT).mfu is None
    assert hold_against(log(0.01, 0.01), CLUSTER, JOB, LAYOUT).mfu is None  # far beyond the peak
    assert hold_against(log(4.0, 4.0, device="NVIDIA H100 80GB HBM3"), CLUSTER, JOB, LAYOUT).mfu is not None
