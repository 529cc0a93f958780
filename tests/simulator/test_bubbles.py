"""Bubbles in closed form against the longest path through the ops, with stages that are alike but for the last."""

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from scenarios.layout import Layout
from simulator.arrays import LayoutArrays
from simulator.bubbles import Passes, split_bubble
from simulator.longest_path import busiest_span, end_seconds, op_graph, op_seconds
from simulator.schedule import op_orders, schedule_complaint

SPLITTING = [("zb-h1", 1), ("zb-h2", 1), ("zbv", 2), ("dualpipe", 1), ("dualpipe", 2)]


@settings(max_examples=150, deadline=None)
@given(
    st.sampled_from(SPLITTING),
    st.sampled_from([1, 2, 3, 4, 6, 8, 10]),
    st.sampled_from([1, 2, 5, 8, 12, 16, 20, 32]),
    st.floats(1.0, 2.2),
    st.floats(0.5, 1.0),
    st.one_of(st.just(0.0), st.floats(0, 0.2), st.floats(0, 2)),
)
def test_the_step_is_the_longest_path(schedule, pp, m, backward, weight, head):
    """Forward 1; backward up to that of full recompute, one forward more; no weight gradient beyond a forward."""
    schedule, vpp = schedule
    assume(schedule_complaint(schedule, pp, vpp, m) is None)
    graph = op_graph(op_orders(schedule, pp, vpp, m))
    usual, longer = (1.0, backward, weight), (head, 1.1 * head, 0.9 * head)
    parts = np.tile(usual, (graph.num_stages, 1))
    parts[-1] += longer
    seconds = op_seconds(graph, parts[:, 0], parts[:, 1] + parts[:, 2], parts[:, 2])
    ends = end_seconds(graph, seconds)
    played = busiest_span(graph, seconds, ends) if schedule == "zb-h2" else max(ends)
    halved = 0.5 if (schedule, vpp) == ("dualpipe", 1) and pp > 1 else 1.0  # the other half passes the mirrored rank
    slowest = Passes(*(np.array([vpp * a + halved * b]) for a, b in zip(usual, longer, strict=True)))
    rows = LayoutArrays.of([Layout(pp=pp, vpp=vpp, schedule=schedule)])
    one, more = Passes(*parts.sum(axis=0)[:, None]).each(rows, slowest, np.zeros(1))
    bubble = split_bubble(rows, np.array([float(m)]), one, more)
    assert m * slowest.total[0] + bubble[0] == pytest.approx(played, rel=0.015)


@pytest.mark.parametrize(
    ("schedule", "vpp", "expected"),
    [
        ("zb-h1", 1, 3 * (1 + 1.2 - 0.9)),  # (pp - 1)(F + B - W) and (pp - 1)(F + B - 2 W): Qi et al. 2024, table 1
        ("zb-h2", 1, 3 * (1 + 1.2 - 1.8)),
        ("zbv", 2, 3 * 1.2),  # a hop of the slower pass for each stage between
        ("gpipe", 1, 0.0),  # not theirs
    ],
)
def test_equal_stages_have_the_published_bubble(schedule, vpp, expected):
    rows = LayoutArrays.of([Layout(pp=4, vpp=vpp, schedule=schedule)])
    one, none = Passes(*np.array([[1.0], [1.2], [0.9]])), Passes(*np.zeros((3, 1)))
    assert split_bubble(rows, np.array([12.0]), one, none)[0] == pytest.approx(expected)
