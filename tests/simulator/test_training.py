"""The event-driven step against the longest path, the closed form, and by hand."""

import time
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scenarios.layout import SCHEDULES, Layout, Stage
from scenarios.scenario import load_scenario
from simulator.longest_path import end_seconds, makespan, op_graph
from simulator.op_times import op_times
from simulator.outcome import BREAKDOWN
from simulator.schedule import op_orders, schedule_complaint
from simulator.step import StageCosts, predict_step, stage_costs
from simulator.step_path import longest_step
from simulator.training import explained_step, play, play_step


def costs_of(forward, backward, **changes):
    values = {
        "forward_seconds": tuple(forward),
        "backward_seconds": tuple(backward),
        "weight_gradient_seconds": tuple(0.4 * one for one in backward),
        "stage_ranks": tuple(range(len(forward))),
        "p2p_seconds": 0.0,
        "p2p_exposed_share": 1.0,
        "p2p_bytes": 1e6,
        "fsdp_seconds": 0.0,
        "dp_seconds": 0.0,
        "dp_exposed_seconds": 0.0,
        "dp_bytes": 0.0,
        "optimizer_seconds": 0.0,
        "straggler_factor": 1.0,
    }
    return StageCosts(**(values | changes))


def played(orders, costs, shares=None):
    graph = op_graph(orders)
    return play(graph, op_times(graph, costs), costs, shares or {})


PIPELINES = [
    (schedule, pp, vpp, m)
    for schedule in SCHEDULES
    for vpp in (1, 2, 3)
    for pp in (1, 2, 4)
    for m in (4, 8, 12)
    if schedule_complaint(schedule, pp, vpp, m) is None
]


@settings(max_examples=80, deadline=None)
@given(st.sampled_from(PIPELINES), st.randoms(use_true_random=False))
def test_events_give_the_longest_path_to_the_last_bit(pipeline, rng):
    orders = op_orders(*pipeline)
    graph = op_graph(orders)
    forward, backward = ([rng.uniform(0.5, 2) for _ in range(graph.num_stages)] for _ in range(2))
    costs = costs_of(forward, backward, p2p_seconds=rng.uniform(0, 0.3), p2p_exposed_share=rng.random())
    times = op_times(graph, costs)
    busy = [times.busy(i) for i in range(len(graph.ops))]
    assert played(orders, costs).step_seconds == max(end_seconds(graph, busy))


@given(st.integers(1, 6), st.integers(1, 12), st.floats(0.1, 2), st.floats(0.1, 4))
@settings(deadline=None)
def test_equal_stages_give_the_textbook_step(pp, m, forward, backward):
    """(m + pp - 1)(F + B), then gradients, then the optimizer."""
    costs = costs_of([forward] * pp, [backward] * pp, dp_seconds=3.0, dp_exposed_seconds=1.0, optimizer_seconds=0.5)
    for schedule in ("1f1b", "gpipe"):
        step = played(op_orders(schedule, pp, 1, m), costs).step_seconds
        assert step == pytest.approx((m + pp - 1) * (forward + backward) + 1.5)


def test_by_hand():
    """Two stages of F 1, 2 and B 2, 3; one micro-batch; the sender is held up 0.5: F 1 .5 F 2 B 3 .5 B 2."""
    costs = costs_of([1.0, 2.0], [2.0, 3.0], p2p_seconds=1.0, p2p_exposed_share=0.5)
    timeline = played(op_orders("1f1b", 2, 1, 1), costs)
    assert timeline.step_seconds == pytest.approx(9.0)
    found = [(span.rank, span.kind, span.start_seconds, span.duration_seconds) for span in timeline.spans]
    assert found == [
        (0, "forward", 0.0, 1.0),
        (0, "p2p", 1.0, 0.5),
        (0, "backward", 7.0, 2.0),
        (1, "forward", 1.5, 2.0),
        (1, "backward", 3.5, 3.0),
        (1, "p2p", 6.5, 0.5),
    ]


def test_the_straggler_factor_stretches_the_pipeline_only():
    calm, slow = (
        costs_of([1.0] * 4, [2.0] * 4, p2p_seconds=0.1, optimizer_seconds=7.0, straggler_factor=factor)
        for factor in (1.0, 1.05)
    )
    before, after = (played(op_orders("1f1b", 4, 1, 8), costs).step_seconds for costs in (calm, slow))
    assert after - 7.0 == pytest.approx(1.05 * (before - 7.0))


def test_gradient_traffic_hides_behind_the_end_of_each_rank():
    costs = costs_of([1.0] * 2, [2.0] * 2, dp_seconds=2.0, dp_exposed_seconds=0.5)
    timeline = played(op_orders("1f1b", 2, 1, 4), costs)
    traffic = [span for span in timeline.spans if span.kind == "dp_comm"]
    for span in traffic:
        last = max(
            one.start_seconds + one.duration_seconds
            for one in timeline.spans
            if one.rank == span.rank and one.kind == "backward"
        )
        assert span.start_seconds == pytest.approx(last - 1.5)
        assert span.duration_seconds == pytest.approx(2.0)
    assert timeline.step_seconds == pytest.approx((4 + 1) * 3 + 0.5)


def test_spans_do_not_overlap_on_a_stream_of_compute():
    rng = np.random.default_rng(3)
    for pipeline in PIPELINES:
        stages = op_graph(op_orders(*pipeline)).num_stages
        costs = costs_of(rng.uniform(0.5, 2, stages), rng.uniform(1, 3, stages), p2p_seconds=0.1)
        timeline = played(op_orders(*pipeline), costs, {"tp_comm": 0.1})
        for rank in {span.rank for span in timeline.spans}:
            mine = sorted(
                (span.start_seconds, span.duration_seconds)
                for span in timeline.spans
                if span.rank == rank and span.stream == "compute"
            )
            for (start, seconds), (following, _) in pairwise(mine):
                assert start + seconds <= following + 1e-9


LLAMA = load_scenario("llama3-405b-16k-h100")


@pytest.mark.parametrize(
    "degrees",
    [
        {"tp": 8, "pp": 2, "dp": 128, "schedule": "1f1b"},
        {"tp": 8, "pp": 9, "dp": 128, "schedule": "1f1b"},
        {"tp": 8, "pp": 14, "dp": 128, "schedule": "gpipe"},
        {"tp": 8, "pp": 6, "dp": 64, "schedule": "1f1b"},
        {"tp": 8, "pp": 2, "dp": 128, "vpp": 3, "schedule": "interleaved"},
        {"tp": 8, "pp": 2, "dp": 64, "vpp": 9, "schedule": "interleaved"},
        {"tp": 8, "dp": 2048, "optimizer_sharding": "zero3"},
    ],
    ids=str,
)
def test_equals_the_closed_form_where_all_stages_are_equal(degrees):
    """126 layers divide over these stages; the head makes the last one longer, which both forms see.

    What is left: the first and the last stage send one way only, and the closed form charges both.
    """
    layout = Layout(sequence_parallel=True, **degrees)
    step = play_step(LLAMA.cluster, LLAMA.job, layout).step_seconds
    assert step == pytest.approx(predict_step(LLAMA.cluster, LLAMA.job, layout).total_seconds, rel=0.01)


BATCHES = {"gpipe": 1, "1f1b": 1, "interleaved": 1, "zb-h1": 1, "zb-h2": 2, "zbv": 1, "dualpipe": 2}
"""Fewest micro-batches for each pipeline rank."""


@settings(max_examples=40, deadline=None)
@given(
    st.sampled_from(sorted(BATCHES)),
    st.sampled_from([2, 4, 5, 8, 10]),
    st.sampled_from([0, 1, 4]),
    st.sampled_from(["none", "zero1", "zero2", "zero3"]),
    st.sampled_from(["none", "selective", "full"]),
    st.sampled_from([1, 8]),
    st.booleans(),
)
def test_equals_the_closed_form_in_every_schedule(schedule, pp, more, sharding, recompute, tp, both_ways):
    """80 layers divide over these stages; the head makes one heavier, weights are gathered while a pipeline fills."""
    vpp = 2 if schedule in ("interleaved", "zbv") or (schedule == "dualpipe" and (pp % 2 or not both_ways)) else 1
    micro = pp * (BATCHES[schedule] + more)
    scenario = load_scenario("llama3-70b-512-h100")
    job = scenario.job.model_copy(update={"global_batch_size": 4 * micro})
    layout = Layout(
        tp=tp, pp=pp, vpp=vpp, dp=4, schedule=schedule, sequence_parallel=tp > 1, optimizer_sharding=sharding,
        recompute=recompute,
    )  # fmt: skip
    breakdown, closed = longest_step(scenario.cluster, job, layout)
    assert sum(breakdown.values()) == pytest.approx(closed.total_seconds, rel=0.005)


@pytest.mark.parametrize("name", ["laptop", "gpt3-175b-1024-a100"])
def test_every_shipped_schedule_is_near_the_closed_form(name):
    scenario = load_scenario(name)
    pp = 2
    for schedule, vpp in (("gpipe", 1), ("1f1b", 1), ("interleaved", 2)):
        dp = max(1, scenario.cluster.num_gpus // (8 * pp)) if name != "laptop" else 1
        layout = Layout(tp=1 if name == "laptop" else 8, pp=pp, dp=dp, vpp=vpp, schedule=schedule)
        step = play_step(scenario.cluster, scenario.job, layout).step_seconds
        assert step == pytest.approx(predict_step(scenario.cluster, scenario.job, layout).total_seconds, rel=0.01)


def test_unequal_stages_are_exact():
    """A stage that recomputes is slow; early it hides behind the warm-up, which the closed form cannot see."""
    sizes = [8] * 16
    sizes[0] = sizes[-1] = 7
    steps = []
    for slow in (0, 8, 15):
        stages = tuple(Stage(layers=n, recompute_layers=n if i == slow else 0) for i, n in enumerate(sizes))
        layout = Layout(tp=8, pp=16, dp=128, sequence_parallel=True, stages=stages)
        costs = stage_costs(LLAMA.cluster, LLAMA.job, layout)
        play_seconds = explained_step(LLAMA.cluster, LLAMA.job, layout).timeline.step_seconds
        held = costs.p2p_seconds * costs.p2p_exposed_share
        low, high = (
            makespan(
                op_orders("1f1b", 16, 1, 16),
                [one + extra for one in costs.forward_seconds],
                [one + extra for one in costs.backward_seconds],
            )
            for extra in (0.0, held)
        )
        pipeline = (play_seconds - costs.dp_exposed_seconds - costs.optimizer_seconds) / costs.straggler_factor
        assert low < pipeline <= high
        steps.append(play_seconds)
    assert steps[0] < steps[1] < steps[2]


@pytest.mark.parametrize(("schedule", "vpp"), [("1f1b", 1), ("interleaved", 8), ("zb-h1", 1), ("zbv", 2)])
def test_the_parts_add_up_to_the_step(schedule, vpp):
    layout = Layout(tp=8, pp=16, dp=128, vpp=vpp, schedule=schedule, sequence_parallel=True)
    step = explained_step(LLAMA.cluster, LLAMA.job, layout)
    assert tuple(step.breakdown_seconds) == BREAKDOWN
    assert sum(step.breakdown_seconds.values()) == pytest.approx(step.timeline.step_seconds)
    assert min(step.breakdown_seconds.values()) >= 0
    assert step.breakdown_seconds["compute"] == pytest.approx(step.predicted.compute_seconds, rel=0.02)
    assert step.mfu == pytest.approx(
        step.predicted.mfu * step.predicted.total_seconds / step.timeline.step_seconds, rel=1e-12
    )


def test_llama3_405b_takes_a_moment():
    layout = Layout(tp=8, pp=16, dp=128, sequence_parallel=True)
    play_step(LLAMA.cluster, LLAMA.job, layout)
    began = time.process_time()
    timeline = play_step(LLAMA.cluster, LLAMA.job, layout)
    assert time.process_time() - began < 0.5
    assert len({span.rank for span in timeline.spans}) == 16


def test_an_impossible_schedule_is_an_error_of_the_caller():
    with pytest.raises(ValueError, match="multiples of pp"):
        play_step(LLAMA.cluster, LLAMA.job, Layout(tp=8, pp=6, dp=128, vpp=3, schedule="interleaved"))
