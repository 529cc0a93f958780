"""Peak memory against what frameworks printed on real GPUs."""

import pytest

from simulator.memory import memory_use
from simulator.published import read_runs
from simulator.published_cases import case_of

GIB = 2.0**30

MEGATRON_LM = {
    "llama3_405b_l4_tp1_pp2_dp4": 87.08,
    "llama3_405b_l4_tp2_pp1_dp4": 81.59,
    "llama3_405b_l4_tp4_pp1_dp2": 52.89,
    "llama3_405b_l4_tp8_pp1_dp1": 38.57,
    "llama3_405b_l4_tp2_cp4_pp1_dp1_seq32768": 87.03,
    "llama3_405b_l4_tp1_cp8_pp1_dp1_seq32768": 139.22,
    "llama3_405b_l4_tp2_cp4_pp1_dp1_seq131072": 118.13,
    "deepseekv2_tp1_ep8_pp1_dp8_l4": 45.63,
    "deepseekv2_tp1_ep4_pp2_dp4_l4": 44.70,
    "deepseekv3_l4_tp1_ep8_pp1_dp8": 104.30,
    "deepseekv3_l4_tp1_ep4_pp2_dp4": 114.00,
}
"""Peak allocated GiB of Megatron-LM on 8 B200, bf16, fp32 gradients, ZeRO-1, no recompute: MooreThreads/SimuMax,
docs/b200/b200_release_v1.2_summary.md, column "real alloc GiB"."""

TORCHTITAN = {
    "titan-Table1-8b-8g-c1q0": 77.0,
    "titan-Table1-8b-8g-c1q1": 76.8,
    "titan-Table3-8b-128g-c1q0": 62.0,
    "titan-Table3-8b-128g-c1q1": 61.8,
    "titan-Table2-8b-8g-cp1": 83.9,
    "titan-Table2-8b-8g-cp2": 84.2,
    "titan-Table2-8b-8g-cp4": 84.0,
    "titan-Table2-8b-8g-cp8": 84.5,
    "titan-Table4-70b-2D": 71.9,
    "titan-Table4-70b-2D+AsyncTP": 67.6,
}
"""Peak reserved GiB of torchtitan under torch.compile on H100: pytorch/torchtitan,
benchmarks/llama3_h100_202412_torchtitan.md, tables 1 to 4: FSDP, FSDP x TP, per-operator and full recompute."""


@pytest.fixture(scope="module")
def runs():
    return {run.id: run for run in read_runs()}


@pytest.mark.parametrize("name", MEGATRON_LM)
def test_megatron_allocates(runs, name):
    case = case_of(runs[f"simumax-b200-{name}_mbc4_cef"])
    use = memory_use(case.cluster, case.job, case.layout)
    allocated = max(
        use.stages, key=lambda stage: stage.total_bytes - stage.reserve_bytes
    )  # the reserve is not the framework's
    assert (allocated.total_bytes - allocated.reserve_bytes) / GIB == pytest.approx(MEGATRON_LM[name], rel=0.055)


@pytest.mark.parametrize("name", TORCHTITAN)
def test_torchtitan_reserves(runs, name):
    case = case_of(runs[name])
    use = memory_use(case.cluster, case.job, case.layout)
    assert use.peak_bytes / GIB == pytest.approx(TORCHTITAN[name], rel=0.10)
