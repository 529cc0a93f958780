"""Logs as practitioners have them, beside figures worked out from them by hand (see the README beside them)."""

from __future__ import annotations

from pathlib import Path

import pytest

from simulator.logs.reading import read_logs
from simulator.logs.trainer_log import TrainerLog

LOGS = Path(__file__).resolve().parents[3].parent / "shared" / "data" / "practitioner-files" / "train_logs"

pytestmark = pytest.mark.skipif(not LOGS.is_dir(), reason="the practitioners' files are not beside this checkout")

BLOOM = {"l": 70, "h": 14336, "V": 250880, "s": 2048, "B": 2048}


def one(name: str) -> TrainerLog:
    (log,) = read_logs(LOGS / name)
    return log


def told(log: TrainerLog, text: str) -> bool:
    return any(text in warning for warning in log.warnings)


def bloom_hardware_flops() -> float:
    """96 B s l h^2 (1 + s/6h + V/16lh), Narayanan et al. 2021."""
    batch, s, layers, h, v = (BLOOM[name] for name in "BslhV")
    return 96 * batch * s * layers * h**2 * (1 + s / (6 * h) + v / (16 * layers * h))


def test_every_file_is_covered() -> None:
    names = {path.name for path in LOGS.iterdir()}
    assert {name for name in names if name[:2].isdigit()} == names
    assert len(names) == 16
    for path in LOGS.iterdir():
        assert all(any(one.pace for one in log.steps) for log in read_logs(path)), path.name


def test_01_bloom_in_seconds_with_hardware_flops() -> None:
    log = one("01_megads_bloom176b_384a100_seconds_tflops.txt")
    first = log.steps[0]
    assert log.format == "Megatron-DeepSpeed"
    assert (first.step, first.seconds, log.global_batch_size, log.seq_length) == (12695, 105.22, 2048, 2048)
    assert first.tokens is not None
    assert first.seconds is not None
    assert first.tokens / first.seconds == pytest.approx(39_862, rel=1e-5)
    assert first.tokens / first.seconds / 384 == pytest.approx(103.8, rel=1e-3)
    assert first.tflops_per_gpu == pytest.approx(bloom_hardware_flops() / first.seconds / 384 / 1e12, rel=1e-4)
    assert log.step_seconds == pytest.approx((105.90 + 106.40) / 2)
    assert log.flops is None  # depends on recomputation, which the line does not tell
    assert log.warnings == ()


def test_02_restarts_of_one_iteration() -> None:
    log = one("02_megads_bloom176b_half_nodes_after_reshape.txt")
    assert [step.seconds for step in log.steps] == [215.82, 215.99, 234.72, 261.08]
    assert [step.seconds for step in log.steady] == [215.82, 215.99]
    assert told(log, "restarted at iteration 94768")
    for step in log.steps:
        assert step.seconds is not None
        assert step.tflops_per_gpu is not None
        assert bloom_hardware_flops() / step.seconds / step.tflops_per_gpu / 1e12 == pytest.approx(192.0, rel=1e-3)


def test_04_skipped_iterations_have_a_time_and_no_loss() -> None:
    log = one("04_megatronlm_256s_iteration_skipped.txt")
    assert log.steps[0].seconds == pytest.approx(255.9405)
    assert log.step_seconds == pytest.approx((243.4383 + 243.3444) / 2)
    assert log.losses == []
    assert all(step.skipped == 1 for step in log.steps)
    assert told(log, "every update was skipped")
    assert log.global_batch_size == 288


def test_05_a_first_iteration_is_no_pace() -> None:
    log = one("05_megatron_bridge_llama3_8b_memory_lines.txt")
    assert log.steps[0].seconds == pytest.approx(20.2891)
    assert log.step_seconds is None
    assert told(log, "no steady iteration")
    assert log.peak_memory_bytes == pytest.approx(216.89e9)
    assert log.num_params == pytest.approx(8.03e9)
    assert log.weight_and_optimizer_bytes is not None
    assert log.weight_and_optimizer_bytes / 8.0305e9 == pytest.approx(6 + 12 / 8, rel=1e-3)


def test_08_all_updates_skipped_at_an_implausible_rate() -> None:
    log = one("08_megatroncore_gpt3_7b_8gpu_all_skipped.txt")
    assert log.step_seconds == pytest.approx(13.0353)
    assert log.tflops_per_gpu == 812.5
    assert log.steps[0].skipped == 10
    assert told(log, "every update was skipped")
    assert log.num_params is not None
    assert log.global_batch_size is not None
    six_n_d = 6 * log.num_params * log.global_batch_size * 2048 / log.step_seconds / 8 / 1e12
    assert six_n_d == pytest.approx(777, rel=1e-2)


def test_09_primus_pairs() -> None:
    log = one("09_primus_mi300x_inst_avg_pairs_ansi.txt")
    assert (log.format, log.gpus, log.seq_length, log.global_batch_size) == ("Primus", 8, 8192, 128)
    assert (log.step_seconds, log.tflops_per_gpu, log.tokens_per_second_per_gpu) == (13.1, 579.4, 10005.5)
    assert log.flops_per_token == pytest.approx(6 * 9.65e9, rel=1e-3)
    assert log.peak_memory_bytes == pytest.approx(153.81 * 2**30)
    assert log.device_memory_bytes == pytest.approx(255.98 * 2**30)
    assert log.warnings == ()


def test_10_two_hosts_and_a_timer_that_contradicts() -> None:
    log = one("10_megads_6b_16gpu_pdsh_prefix.txt")
    assert (log.gpus, log.global_batch_size, log.seq_length, log.micro_batch_size) == (16, 2048, 2048, 2)
    assert [step.step for step in log.steady] == [2, 3, 4, 5]
    assert log.steps[1].seconds == pytest.approx(75.254)
    assert log.steps[1].tokens is not None
    assert log.steps[1].tokens / log.steps[1].seconds / 16 == pytest.approx(3_484, rel=1e-3)
    assert log.peak_memory_bytes == pytest.approx(90_178 * 2**20)
    assert log.device is None
    assert told(log, "DeepSpeed's timer says 329.5 samples/s, the iterations say 27.5")
    assert log.samples_per_second == pytest.approx(27.2, rel=2e-3)


def test_11_ranks_that_print_the_same_step() -> None:
    log = one("11_torchtitan_b200_moe_interleaved_ranks.txt")
    assert [step.step for step in log.steps] == [4, 5]
    assert told(log, "2 lines repeat an iteration")
    assert log.tokens_per_second_per_gpu == pytest.approx((10_050 + 10_007) / 2)
    assert log.tokens_per_second is None  # tps is of one GPU, and the log does not say how many there are
    assert log.peak_flop_per_second == pytest.approx(2_250e12, rel=1e-3)
    assert log.flops_per_token == pytest.approx(31.3e9, rel=1e-3)
    assert log.steady[-1].seconds == pytest.approx(1.637)
    assert log.timed_by_clock
    assert log.peak_memory_bytes == pytest.approx(66.91 * 2**30)


def test_12_a_peak_of_another_gpu() -> None:
    log = one("12_torchtitan_peak_flops_fallback.txt")
    assert log.peak_is_guess
    assert told(log, "the printed MFU means nothing")
    assert log.device == "Tesla T4"
    assert log.num_params == 6_163_712
    assert log.peak_memory_bytes is None  # 0.00 GiB is nothing measured
    assert log.steps[1].tokens_per_second_per_gpu == 35_051


def test_14_nemo_progress_bar() -> None:
    log = one("14_nemo1_progress_bar_15b.txt")
    assert log.format == "NeMo"
    assert (log.step_seconds, log.global_batch_size) == (3.13, 256)
    assert log.seq_length is None
    assert log.samples_per_second is not None
    assert 4096 * log.samples_per_second == pytest.approx(335_008, rel=1e-5)
    assert told(log, "the progress bar took 6.5")


def test_16_internevo() -> None:
    log = one("16_internevo_20b_tflops_tgs.txt")
    assert [step.step for step in log.steps] == list(range(6))
    assert [step.step for step in log.steady] == [2, 3, 4, 5]  # step 0 is three times slower, step 1 a tenth
    assert log.tokens_per_second_per_gpu == pytest.approx(1031.7, rel=1e-3)
    assert log.tflops_per_gpu == pytest.approx(127.9, rel=1e-3)
    assert log.flops_per_token == pytest.approx(6 * 20.66e9, rel=1e-3)
    assert log.tokens_per_step == 65_536
    assert log.losses[0] == pytest.approx(11.5426, rel=1e-4)


def test_17_samples_without_tokens() -> None:
    log = one("17_deepspeed_samplespersec_cifar.txt")
    assert log.samples_per_second == pytest.approx(1288.6, rel=2e-3)
    assert log.timed_by_clock
    assert log.step_seconds == pytest.approx((20 * 3600 + 35 * 60 + 23 - 19 * 3600 - 53 * 60 - 56) / (24_550 - 150))
    assert (log.tokens_per_step, log.tokens_per_second, log.global_batch_size) == (None, None, None)
    assert told(log, "samples per second only")


def test_19_table_rows() -> None:
    logs = read_logs(LOGS / "19_llmfoundry_benchmark_table_rows.txt")
    assert [log.gpus for log in logs] == [512, 256, 128, 512, 256, 128]
    log = logs[0]
    assert log.tokens_per_second == pytest.approx(515_636)
    assert log.tokens_per_second_per_gpu == pytest.approx(1_007, rel=1e-3)
    assert log.step_seconds == pytest.approx(8_388_608 / 515_636)
    assert log.num_params is not None
    assert log.tokens_per_second_per_gpu is not None
    assert 6 * log.num_params * log.tokens_per_second_per_gpu / 1e12 == pytest.approx(391.9, rel=1e-3)
    assert log.steps[0].mfu == pytest.approx(0.4125)
    assert log.peak_flop_per_second == pytest.approx(989.5e12, rel=1e-3)
    assert told(log, "HFU 55 % counts recomputed FLOPs")


def test_20_logbook_with_full_width_colons() -> None:
    logs = read_logs(LOGS / "20_glm130b_logbook_fullwidth_colon.txt")
    assert [log.step_seconds for log in logs] == [88.5, 122.5]
    assert [log.steps[0].samples for log in logs] == [pytest.approx(4_248), pytest.approx(6_125)]
    assert [log.tflops_per_gpu for log in logs] == [134, 141]
    assert logs[0].run == "glm-130B-2022.05.05-19:34:16"
    assert all(log.global_batch_size is None for log in logs)


@pytest.mark.parametrize(
    ("name", "gpus", "step", "rate", "seconds", "tflops"),
    [
        ("22_composer_mpt30b_16_mi300x.txt", 16, 5, 1255.1776, 374.7, 225.6),
        ("23_composer_mpt30b_8_mi300x.txt", 8, 3, 1293.4943, 715.7, 232.5),
    ],
)
def test_22_23_composer(name: str, gpus: int, step: int, rate: float, seconds: float, tflops: float) -> None:
    log = one(name)
    assert (log.format, log.gpus, log.global_batch_size, log.micro_batch_size) == ("Composer", gpus, 1024, 8)
    assert [record.step for record in log.steps] == [step]
    assert log.tokens_per_second_per_gpu == pytest.approx(rate)
    assert log.step_seconds == pytest.approx(seconds, rel=1e-3)
    assert 6 * 29_957_200_896 * rate / 1e12 == pytest.approx(tflops, rel=1e-3)
    assert log.seq_length is None
    if gpus == 16:
        assert log.tokens_per_sample == pytest.approx(7_142, rel=1e-3)
        assert told(log, "batches_per_sec 0.0027 is rounded to 370 s per step")


def test_22_over_23_is_the_scaling_of_tokens_not_of_rounded_batches() -> None:
    two, single = one("22_composer_mpt30b_16_mi300x.txt"), one("23_composer_mpt30b_8_mi300x.txt")
    assert two.tokens_per_second is not None
    assert single.tokens_per_second is not None
    assert two.tokens_per_second / single.tokens_per_second == pytest.approx(1.941, rel=1e-3)
