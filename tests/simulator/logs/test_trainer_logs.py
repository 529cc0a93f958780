from __future__ import annotations

from pathlib import Path

import pytest

from simulator.logs.lines import number, read_lines
from simulator.logs.reading import FORMATS, parse_logs, read_logs
from simulator.logs.trainer_log import TrainerLog
from topologies.errors import InputError


def megatron(step: int, time: str, *, skipped: int = 0, loss: str = "2.5E+00", more: str = "", batch: int = 64) -> str:
    loss = "" if skipped else f" lm loss: {loss} |"
    return (
        f" iteration {step:8d}/ 1000 | consumed samples: {step * batch} | elapsed time per iteration {time} |"
        f" learning rate: 1.0E-05 | global batch size: {batch} |{loss} number of skipped iterations: {skipped} |"
        f" number of nan iterations: 0 |{more}"
    )


def titan(step: int, tps: str, clock: str, rank: int = 0) -> str:
    return (
        f"[rank{rank}]:\x1b[31m[titan] 2025-03-01 10:00:{clock} - root - INFO - step: {step:2d}  loss:  7.6  "
        f"memory: 40.{rank}0GiB(50.0%)  tps: {tps}  tflops: 400.0  mfu: 40.45%\x1b[0m"
    )


def one(text: str) -> TrainerLog:
    (log,) = parse_logs(text)
    return log


def test_seconds_and_milliseconds() -> None:
    lines = [megatron(step, "(ms): 4000.0") for step in (2, 3)]
    assert one("\n".join(lines)).step_seconds == pytest.approx(4.0)
    lines = [megatron(step, "(s): 4.00") for step in (2, 3)]
    assert one("\n".join(lines)).step_seconds == pytest.approx(4.0)


def test_prefixes_of_launchers_do_not_matter() -> None:
    plain = [megatron(step, "(ms): 4000.0") for step in (2, 3)]
    for prefix in ("node-001: ", "[default7]:", " 7: ", "[rank7]: ", "worker-0: [INFO 2020-02-06 19:53:56] ", "\ufeff"):
        log = one("\n".join(prefix + line for line in plain))
        assert [(step.step, step.seconds, step.loss) for step in log.steady] == [(2, 4.0, 2.5), (3, 4.0, 2.5)]


def test_sequence_length_follows_from_consumed_tokens() -> None:
    text = megatron(3, "(ms): 4000.0", more=" consumed tokens: 786432 |")
    assert one(text).seq_length == 4096
    ramp = megatron(3, "(ms): 4000.0", more=" consumed tokens: 500000 |")
    assert one(ramp).seq_length is None


def test_a_batch_that_grows_is_no_batch() -> None:
    log = one("\n".join(megatron(step, "(ms): 4000.0", batch=8 * step) for step in (2, 3, 4)))
    assert log.global_batch_size is None
    assert [step.samples for step in log.steps] == [16, 24, 32]


def test_arguments_give_gpus_and_layout() -> None:
    text = "\n".join(
        [
            "using world size: 64, data-parallel size: 4, context-parallel size: 1, tensor-model-parallel size: 8, "
            "pipeline-model-parallel size: 2",
            "  seq_length ...................................... 8192",
            "  micro_batch_size ................................ 1",
            "  expert_model_parallel_size ...................... 4",
            megatron(5, "(ms): 4000.0"),
        ]
    )
    log = one(text)
    assert (log.gpus, log.seq_length, log.micro_batch_size) == (64, 8192, 1)
    assert log.layout == {"dp": 4, "cp": 1, "tp": 8, "pp": 2, "ep": 4}
    assert log.tokens_per_second_per_gpu == pytest.approx(64 * 8192 / 4.0 / 64)


def test_a_rate_of_zero_is_missing() -> None:
    text = "Step Time : 4.00s GPU utilization: 0.0MODEL_TFLOP/s/GPU\n" + megatron(5, "(ms): 4000.0")
    assert one(text).tflops_per_gpu is None
    text = "Step Time : 4.00s GPU utilization: 512.5MODEL_TFLOP/s/GPU\n" + megatron(5, "(ms): 4000.0")
    assert one(text).tflops_per_gpu == 512.5


def test_printed_samples_per_second_that_contradict_the_step() -> None:
    good = megatron(5, "(s): 4.0", more=" samples per second: 16.0 | TFLOPs: 150.0 |")
    assert one(good).warnings == ()
    bad = megatron(5, "(s): 4.0", more=" samples per second: 160.0 | TFLOPs: 150.0 |")
    assert any("contradicts itself: it prints 160 samples/s" in told for told in one(bad).warnings)


def test_skipped_iterations_are_left_out_where_others_remain() -> None:
    lines = [megatron(2, "(ms): 3900.0", skipped=1), megatron(3, "(ms): 4000.0"), megatron(4, "(ms): 4000.0")]
    log = one("\n".join(lines))
    assert [step.step for step in log.steady] == [3, 4]
    assert log.losses == [2.5, 2.5]
    assert any("1 iterations skipped their update" in told for told in log.warnings)


def test_primus_pairs_take_the_current_value() -> None:
    text = (
        "[\x1b[36mrank-15/16\x1b[0m] : iteration 40/ 50 | elapsed time per iteration (ms): 2000.0/2100.0 | "
        "rocm mem usage/free/total/usage_ratio: 96.0GB/96.0GB/192.0GB/50.00% | "
        "throughput per GPU (TFLOP/s/GPU): 500.0/480.0 | tokens per GPU (tokens/s/GPU): 16384.0/15600.0 | "
        "global batch size: 128 | number of skipped iterations: 0 |"
    )
    log = one(text)
    assert (log.gpus, log.step_seconds, log.tflops_per_gpu, log.seq_length) == (16, 2.0, 500.0, 4096)
    assert log.peak_memory_bytes == 96 * 2**30


def test_torchtitan_counts_every_step_once_and_keeps_the_fullest_rank() -> None:
    lines = [titan(step, "10,000", f"{2 * step:02d},000", rank) for step in (5, 6, 7) for rank in (0, 1)]
    log = one("\n".join(lines))
    assert [step.step for step in log.steps] == [5, 6, 7]
    assert log.peak_memory_bytes == pytest.approx(40.10 * 2**30)
    assert log.tokens_per_second_per_gpu == 10_000
    assert log.steady[-1].seconds == pytest.approx(2.0)
    assert log.peak_flop_per_second == pytest.approx(988.9e12, rel=1e-3)


def test_a_slow_rank_is_no_restart() -> None:
    lines = [titan(step, tps, f"{2 * step:02d},000") for step in (5, 6, 7) for tps in ("10,000", "9,500")]
    log = one("\n".join(lines))
    assert [step.step for step in log.steps] == [5, 6, 7]
    assert not any("restarted" in told for told in log.warnings)


@pytest.mark.parametrize(
    ("text", "batch", "loss"),
    [
        # as NeMo 1 prints a bar whose steps count from 1 (NVIDIA's dgxc-benchmarking) and from 0
        ("Epoch 0: : 100%|##| 50/50 [04:55<00:00, reduced_train_loss=6.130, global_step=50.0, "
         "consumed_samples=76800.0, train_step_timing in s=5.900, val_loss=6.250]", 1536, 6.13),
        ("Epoch 0: : 99%|##| 99/100 [04:55<00:00, reduced_train_loss=6.130, global_step=99.00, "
         "consumed_samples=25600.0, train_step_timing in s=5.900]", 256, 6.13),
        ("Training epoch 0, iteration 5/99 | lr: 1e-07 | global_batch_size: 128 | global_step: 5 | "
         "reduced_train_loss: 11.03 | train_step_timing in s: 5.900", 128, 11.03),
    ],
)  # fmt: skip
def test_nemo_old_and_new(text: str, batch: int, loss: float) -> None:
    log = one(text)
    assert (log.step_seconds, log.global_batch_size) == (5.9, batch)
    assert log.losses == [loss]
    assert log.warnings == ()


def test_a_progress_bar_overwrites_its_line() -> None:
    bars = [f"1%| {step}/100 [01:00<09:00, global_step={step}.0, train_step_timing in s=2.5]" for step in (9, 9, 10)]
    log = one("\r".join(bars))
    assert [step.step for step in log.steps] == [9, 10]


def test_composer_prefers_what_has_digits() -> None:
    block = "[epoch=1][batch={step}/9]:\n\t Train time/batch: {done}\n\t Train time/sample: {samples}\n" + "\n".join(
        f"\t Train throughput/{name}: {value}"
        for name, value in (
            ("batches_per_sec", "0.0027"),
            ("samples_per_sec", "2.7330"),
            ("tokens_per_sec", "22388.7"),
            ("device/tokens_per_sec", "1399.29"),
        )
    )
    config = "num_gpus_per_node: 8\nnum_nodes: 4\n"
    log = one(config + "\n".join(block.format(step=n, done=n - 1, samples=1024 * (n - 1)) for n in (3, 4)))
    assert (log.global_batch_size, log.gpus) == (1024, 16)
    assert log.step_seconds == pytest.approx(1024 / 2.7330)
    assert any("states 32 GPUs, the throughput is that of 16" in told for told in log.warnings)


def test_deepspeed_timer_old_and_new() -> None:
    old = "\n".join(f"worker-0: [INFO 2020-02-06 19:53:5{n}] 0/{50 * n}, SamplesPerSec=1300.0" for n in (1, 2, 3))
    new = "\n".join(
        f"[timer.py:260:stop] epoch=0/micro_step={n}/global_step={n}, RunningAvgSamplesPerSec=10.0, "
        f"CurrSamplesPerSec=12.5, MemAllocated=17.5GB, MaxMemAllocated=66.0GB"
        for n in (3, 4)
    )
    assert one(old).samples_per_second == 1300
    log = one(new)
    assert (log.samples_per_second, log.peak_memory_bytes) == (12.5, 66 * 2**30)
    assert log.memory_kind == "allocated"


def test_internevo_counts_tokens_between_steps() -> None:
    lines = [
        f"tflops=128.0 step={n} loss=9.0 tgs (tokens/gpu/second)=1024.0 tgs/tgs_avg=900.0 "
        f"num_consumed_tokens={65536 * (n + 1)} inf_nan_skip_batches={n // 3}"
        for n in range(5)
    ]
    log = one("\n".join(lines))
    assert log.tokens_per_step == 65536
    assert [step.skipped for step in log.steps] == [0, 0, 0, 1, 0]
    assert one("\n".join(lines[2:])).steps[0].tokens is None  # what came before is not in the file


def test_a_table_skips_rows_that_are_not_complete() -> None:
    text = (
        "| Model | SeqLen (T) | # GPUs | GlobalBatchSize | Throughput (T/s) | MFU |\n|---|---|---|---|---|---|\n"
        "| 7b | 2048 | 8 | 64 | 32768 | 40.0 |\n| 7b | 2048 | 16 | 64 | OOM | |\n"
    )
    log = one(text)
    assert (log.step_seconds, log.gpus, log.run) == (4.0, 8, "7b on 8 GPUs, 2048 tokens")


def test_numbers() -> None:
    assert number("1,234.5e1x") == 12_345
    assert number("8.3E-02") == 0.083
    assert number("inf") is None
    assert number(None) is None


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty; give the output"),
        (b" \n\n", "is empty"),
        (b"\x7fELF\x02\x01\x00\x00iteration 1/ 2 |", "is not a text file"),
        (bytes(range(128, 256)) * 8, "is not a text file"),
        (b"Dear diary,\ntoday I trained a model.\n", r"holds no training step .*Megatron.*torchtitan.*NeMo"),
        (b"iteration 1/ 2 | consumed samples: 4 | lm loss: 2.0 |\n", "holds no training step"),
        (b"iteration 1/ 2 | elapsed time per iteration (ms): nan |\n", "looks like a log of Megatron.*no timed step"),
        (b"| SeqLen (T) | # GPUs | Throughput (T/s) |\n|---|---|---|\n", "looks like a log of benchmark tables"),
    ],
)
def test_what_is_no_log(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "train.log"
    path.write_bytes(content)
    with pytest.raises(InputError, match=message) as caught:
        read_logs(path)
    assert str(caught.value).startswith(str(path))


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot be read: No such file"):
        read_logs(tmp_path / "none.log")


def test_a_few_bytes_that_are_no_text_do_no_harm(tmp_path: Path) -> None:
    path = tmp_path / "train.log"
    path.write_bytes(megatron(5, "(ms): 4000.0").encode() + b"\n100%|\xe2\x96| 5/5\n")
    assert len(read_lines(path)) == 2
    assert read_logs(path)[0].step_seconds == 4.0
    path.write_text(megatron(5, "(ms): 4000.0"), encoding="utf-16")
    assert read_logs(path)[0].step_seconds == 4.0


def test_every_family_has_its_name() -> None:
    assert len({family.name for family in FORMATS}) == len(FORMATS) == 9
