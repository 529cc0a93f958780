"""Op orders and the longest path against published bubbles, closed forms and brute force."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scenarios.layout import SCHEDULES
from simulator.longest_path import busiest_span, end_seconds, makespan, op_graph, op_seconds
from simulator.schedule import Op, in_flight, live_vectors, op_orders, schedule_complaint, stage_rank

DEGREES = {"zbv": (2,), "dualpipe": (1, 2), "interleaved": (1, 2, 3, 4)}


@st.composite
def pipelines(draw, schedules=SCHEDULES):
    schedule = draw(st.sampled_from(schedules))
    vpp = draw(st.sampled_from(DEGREES.get(schedule, (1,))))
    pp = draw(st.integers(1, 6))
    if schedule == "zb-h2":
        m = 2 * pp - 1 + draw(st.integers(0, 6))
    elif schedule == "dualpipe":
        pp = 2 * math.ceil(pp / 2) if vpp == 1 else pp
        m = 2 * draw(st.integers(pp, 2 * pp))
    elif schedule == "interleaved" and vpp > 1:
        m = pp * draw(st.integers(1, 4))
    else:
        m = draw(st.integers(1, 14))
    return schedule, pp, vpp, m


def stages_of(schedule, pp, vpp):
    """Virtual stages, and ops that one rank does for each micro-batch that it sees."""
    return pp if schedule == "dualpipe" and vpp == 1 else pp * vpp


@given(pipelines())
def test_every_op_once_on_its_rank_and_no_deadlock(pipeline):
    schedule, pp, vpp, m = pipeline
    orders = op_orders(*pipeline)
    graph = op_graph(orders)  # refuses duplicates, gaps and deadlocks
    assert sorted((op.stage, op.microbatch) for op in graph.ops if op.kind == "F") == [
        (stage, i) for stage in range(stages_of(schedule, pp, vpp)) for i in range(m)
    ]
    weights = [(op.stage, op.microbatch) for op in graph.ops if op.kind == "W"]
    assert len(weights) == len(set(weights))
    if schedule in {"zb-h1", "zb-h2", "zbv"}:
        assert len(weights) == m * stages_of(schedule, pp, vpp)
    for rank, order in enumerate(orders):
        for op in order:
            home = stage_rank(schedule, pp, vpp, op.stage)
            mirrored = schedule == "dualpipe" and vpp == 1 and op.microbatch >= m // 2
            assert rank == (pp - 1 - home if mirrored else home)
        position = {(op.kind, op.stage, op.microbatch): i for i, op in enumerate(order)}
        for (kind, stage, i), at in position.items():
            before = {"F": None, "B": ("F", stage, i), "W": ("B", stage, i)}[kind]
            assert before is None or position[before] < at


# F = W = 1 and B (input gradient) = 1 on a whole rank, so the whole backward is 2. Sources: Narayanan et al. 2021
# (1F1B, interleaved), Qi et al. 2024 (ZB-H1: a third of 1F1B; ZBV: none on a device, half a chunk per hop over all),
# DeepSeek-V3 report, table 2 (DualPipe: (pp/2 - 1)(F&B + B - 3W)), DualPipe's README (DualPipeV on pp/2 devices).
BUBBLES = {
    ("gpipe", 1): lambda pp: 3 * (pp - 1),
    ("1f1b", 1): lambda pp: 3 * (pp - 1),
    ("interleaved", 2): lambda pp: 3 * (pp - 1) / 2,
    ("interleaved", 4): lambda pp: 3 * (pp - 1) / 4,
    ("zb-h1", 1): lambda pp: pp - 1,
    ("zbv", 2): lambda pp: (pp - 1) / 2,
    ("dualpipe", 1): lambda pp: 2 * (pp // 2 - 1),
    ("dualpipe", 2): lambda pp: pp - 1,
}


@pytest.mark.parametrize(("schedule", "vpp"), BUBBLES)
@pytest.mark.parametrize(("pp", "m"), [(4, 8), (8, 16), (16, 32), (4, 20)])
def test_bubbles_are_the_published_ones(schedule, vpp, pp, m):
    stages, chunks = stages_of(schedule, pp, vpp), 1 if (schedule, vpp) == ("dualpipe", 1) else vpp
    orders = op_orders(schedule, pp, vpp, m)
    total = makespan(orders, [1 / chunks] * stages, [2 / chunks] * stages)
    assert total == pytest.approx(3 * m + BUBBLES[schedule, vpp](pp))


def test_zbv_leaves_no_bubble_on_any_device():
    graph = op_graph(op_orders("zbv", 8, 2, 16))
    seconds = op_seconds(graph, [1.0] * 16, [2.0] * 16)
    ends = end_seconds(graph, seconds)
    for rank in range(8):
        mine = [i for i, one in enumerate(graph.ranks) if one == rank]
        busy = sum(seconds[i] for i in mine)
        assert max(ends[i] for i in mine) - min(ends[i] - seconds[i] for i in mine) == pytest.approx(busy)


@pytest.mark.parametrize(("forward", "inputs", "weight"), [(1, 1, 1), (1, 1.2, 0.9), (1, 1.5, 1)])
@pytest.mark.parametrize(("pp", "m"), [(2, 3), (4, 8), (8, 15), (8, 40)])
def test_zb_h2_idles_as_published_where_steps_overlap(forward, inputs, weight, pp, m):
    # Qi et al. 2024, table 1: (pp - 1)(F + B - 2 W), with 2 pp - 1 micro-batches alive on every rank
    orders = op_orders("zb-h2", pp, 1, m)
    graph = op_graph(orders)
    seconds = op_seconds(graph, [forward] * pp, [inputs + weight] * pp, [weight] * pp)
    span = busiest_span(graph, seconds, end_seconds(graph, seconds))
    assert span == pytest.approx(m * (forward + inputs + weight) + (pp - 1) * max(forward + inputs - 2 * weight, 0))
    assert [live_vectors(order, "W") for order in orders] == [((2 * pp - 1,),)] * pp


@given(pipelines(("gpipe", "1f1b")), st.floats(0.1, 3), st.floats(0.1, 5), st.floats(0, 1))
def test_makespan_of_equal_stages_is_the_closed_form(pipeline, forward, backward, hop):
    schedule, pp, _, m = pipeline
    total = makespan(op_orders(*pipeline), [forward] * pp, [backward] * pp, hop)
    closed = (m + pp - 1) * (forward + backward)
    if schedule == "gpipe" or hop == 0:
        assert total == pytest.approx(closed + 2 * (pp - 1) * hop)
    else:  # a hop delays every round trip between neighbours once the pipeline is full
        assert closed + 2 * (pp - 1) * hop - 1e-9 <= total <= closed + 2 * (m + pp) * hop + 1e-9


@given(st.integers(1, 6), st.integers(1, 4), st.integers(1, 4), st.floats(0.1, 3), st.floats(0.1, 5))
def test_interleaving_divides_the_bubble(pp, vpp, rounds, forward, backward):
    orders = op_orders("interleaved", pp, vpp, pp * rounds)
    total = makespan(orders, [forward / vpp] * (pp * vpp), [backward / vpp] * (pp * vpp))
    assert total == pytest.approx((pp * rounds + (pp - 1) / vpp) * (forward + backward))


def test_interleaving_follows_megatron():
    """The worked order of Narayanan et al. 2021, figure 4: 4 devices, 2 chunks, 8 micro-batches."""
    first, last = (op_orders("interleaved", 4, 2, 8)[rank] for rank in (0, 3))
    assert [(op.kind, op.stage, op.microbatch) for op in first[:10]] == [
        *[("F", 0, i) for i in range(4)],
        *[("F", 4, i) for i in range(4)],
        ("F", 0, 4),
        ("F", 0, 5),
    ]
    assert [(op.kind, op.stage, op.microbatch) for op in last[:8]] == [
        *[("F", 3, i) for i in range(4)],
        ("F", 7, 0),
        ("B", 7, 0),
        ("F", 7, 1),
        ("B", 7, 1),
    ]


@given(st.integers(1, 8), st.integers(1, 20))
def test_live_microbatches_of_1f1b_and_gpipe(pp, m):
    assert in_flight("1f1b", pp, 1, m) == tuple((min(m, pp - stage),) for stage in range(pp))
    assert in_flight("gpipe", pp, 1, m) == ((m,),) * pp
    assert in_flight("zb-h1", pp, 1, m) == in_flight("1f1b", pp, 1, m)


@given(st.integers(1, 6), st.integers(2, 4), st.integers(2, 4))
def test_live_chunks_of_interleaving(pp, vpp, rounds):
    """Warm-up of 2 (pp - rank - 1) + (vpp - 1) pp forwards and one more in the steady phase (Megatron-LM)."""
    live = in_flight("interleaved", pp, vpp, pp * rounds)
    assert [sum(one) for one in live] == [
        min(2 * (pp - rank - 1) + (vpp - 1) * pp + 1, pp * rounds * vpp) for rank in range(pp)
    ]


def test_zero_bubble_schedules_hold_what_1f1b_holds():
    """ZBV: pp micro-batches of two half chunks on every rank; DualPipe: pp + 1 (their papers' memory columns)."""
    assert [sum(one) / 2 for one in in_flight("zbv", 8, 2, 24)] == [8.0] * 8
    assert [sum(one) for one in in_flight("dualpipe", 8, 1, 24)] == [9] * 8
    assert all(sum(one) / 2 <= 8 for one in in_flight("zbv", 8, 2, 24, release="W"))


def test_live_vectors_keep_every_maximum():
    order = [Op("F", 0, 0), Op("F", 0, 1), Op("B", 0, 0), Op("B", 0, 1), Op("F", 3, 0), Op("F", 3, 1), Op("F", 0, 2)]
    assert live_vectors(order) == ((2, 0), (1, 2))
    late = [Op("F", 0, 0), Op("B", 0, 0), Op("F", 0, 1), Op("W", 0, 0), Op("B", 0, 1), Op("W", 0, 1)]
    assert live_vectors(late) == ((1,),)
    assert live_vectors(late, release="W") == ((2,),)


@settings(max_examples=40)
@given(pipelines(), st.randoms(use_true_random=False))
def test_longest_path_is_the_slowest_of_all_paths(pipeline, rng):
    """An independent computation: relax every edge until nothing changes (Bellman-Ford on the negative graph)."""
    orders = op_orders(*pipeline)
    graph = op_graph(orders)
    seconds = [rng.uniform(0.1, 2) for _ in graph.ops]
    hops = [rng.uniform(0, 1) for _ in range(graph.num_stages)]
    edges = []
    for i, op in enumerate(graph.ops):
        if graph.previous[i] >= 0:
            edges.append((graph.previous[i], i, 0.0))
        for j in graph.inputs[i]:
            sender = graph.ops[j]
            crossed = sender.stage if sender.kind == "F" else sender.stage - 1
            same_rank = graph.ranks[i] == graph.ranks[j]
            assert same_rank or abs(sender.stage - op.stage) == 1 or op.fused
            edges.append((j, i, 0.0 if same_rank else hops[crossed]))
    start = [0.0] * len(seconds)
    changed = True
    while changed:
        changed = False
        for source, target, delay in edges:
            if start[source] + seconds[source] + delay > start[target] + 1e-12:
                start[target] = start[source] + seconds[source] + delay
                changed = True
    assert end_seconds(graph, seconds, hops) == pytest.approx([a + b for a, b in zip(start, seconds, strict=True)])


@given(pipelines(), st.randoms(use_true_random=False))
def test_a_slower_stage_never_helps(pipeline, rng):
    orders = op_orders(*pipeline)
    stages = op_graph(orders).num_stages
    forward, backward = ([rng.uniform(0.5, 2) for _ in range(stages)] for _ in range(2))
    before = makespan(orders, forward, backward, 0.1)
    forward[rng.randrange(stages)] += 0.3
    assert makespan(orders, forward, backward, 0.1) >= before - 1e-12


def test_a_damaged_order_is_noticed():
    orders = op_orders("1f1b", 4, 1, 8)
    with pytest.raises(ValueError, match="listed twice"):
        op_graph((orders[0] + orders[0][-1:], *orders[1:]))
    with pytest.raises(ValueError, match="not every micro-batch"):
        op_graph((orders[0][:-1], *orders[1:]))
    stuck = list(orders[1])
    first_backward = next(i for i, op in enumerate(stuck) if op.kind == "B")
    stuck.insert(0, stuck.pop(first_backward))
    with pytest.raises(ValueError, match="deadlock"):
        op_graph((orders[0], tuple(stuck), *orders[2:]))


@pytest.mark.parametrize(
    ("degrees", "rule"),
    [
        (("interleaved", 4, 2, 6), "multiples of pp 4"),
        (("1f1b", 4, 2, 8), "vpp 1, not 2"),
        (("zbv", 4, 1, 8), "vpp 2"),
        (("dualpipe", 3, 1, 8), "even pp"),
        (("dualpipe", 4, 2, 7), "2 x pp = 8"),
        (("zb-h2", 4, 1, 6), "2 x pp - 1 = 7"),
        (("gpipe", 0, 1, 8), "at least 1"),
    ],
)
def test_impossible_schedules_name_their_rule(degrees, rule):
    assert rule in schedule_complaint(*degrees)
    with pytest.raises(ValueError, match=rule.split(",")[0]):
        op_orders(*degrees)
