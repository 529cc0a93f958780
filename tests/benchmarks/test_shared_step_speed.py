"""How long one step on shared links takes to play; prints one line per case."""

import time
from dataclasses import replace

import pytest

from scenarios.layout import Layout
from scenarios.scenario import load_scenario
from simulator.disturbances import Disturbances
from simulator.shared_step import shared_step
from topologies.console import say

LLAMA, DEEPSEEK = load_scenario("llama3-405b-16k-h100"), load_scenario("deepseek-v3-2048-h800")
PLAIN = Layout(tp=8, pp=16, dp=128, sequence_parallel=True)
INTERLEAVED = PLAIN.model_copy(update={"vpp": 8, "schedule": "interleaved"})
EXPERTS = Layout(pp=16, dp=128, ep=64)


def routed(cluster, routing):
    return cluster.model_copy(update={"fabric": cluster.fabric.model_copy(update={"routing": routing})})


@pytest.mark.parametrize(
    ("name", "scenario", "layout", "routing", "wish", "limit"),
    [
        ("Llama 3 405B, 16,384 GPUs, 1F1B", LLAMA, PLAIN, "adaptive", {}, 1.0),
        ("Llama 3 405B, 16,384 GPUs, 1F1B, hashed paths", LLAMA, PLAIN, "ecmp", {}, 2.0),
        ("Llama 3 405B, 16,384 GPUs, 8 chunks", LLAMA, INTERLEAVED, "adaptive", {}, 1.5),
        ("Llama 3 405B, 16,384 GPUs, a slow GPU", LLAMA, PLAIN, "adaptive", {"slow_gpus": {9000: 0.8}}, 2.0),
        ("DeepSeek-V3, 2,048 GPUs, ep 64", DEEPSEEK, EXPERTS, "adaptive", {}, 3.0),
    ],
)
def test_one_step(name, scenario, layout, routing, wish, limit):
    cluster, best, found = routed(scenario.cluster, routing), float("inf"), None
    for _ in range(3):
        began = time.perf_counter()
        found = shared_step(cluster, scenario.job, layout, replace(Disturbances(), **wish))
        best = min(best, time.perf_counter() - began)
    counters, step = found.counters, found.timeline.step_seconds
    say(
        f"\n{name}: {best:.2f} s; {found.flows:,} flows, {found.classes} classes of replicas, {counters.transfers:,} "
        f"transfers, {counters.solves:,} solves, {counters.looked_up:,} looked up; step {step:.3f} s, "
        f"contention {100 * found.breakdown_seconds['contention'] / step:+.2f} %"
    )
    assert best < limit
