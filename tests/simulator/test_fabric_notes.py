"""Which planned traffic crosses thin or lossy levels, by hand."""

from fabrics import cluster

from scenarios.layout import Layout
from simulator.fabric_notes import fabric_notes

THIN = cluster(16, 4, 16, ports=16, over=(1, 4))
"""Four nodes of eight GPUs a leaf; a NIC keeps a quarter of its rate above."""


def test_traffic_that_stays_below_is_not_told():
    assert fabric_notes(cluster(16, 4, 16, ports=16), Layout(tp=8, pp=2, dp=8)) == []
    assert fabric_notes(THIN, Layout(tp=8)) == []
    assert fabric_notes(THIN, Layout(tp=8, dp=4)) == []


def test_each_thin_level_names_what_crosses_it():
    (note,) = fabric_notes(THIN, Layout(tp=8, pp=4, dp=4))
    assert note.startswith("transfers between pipeline stages cross 'spine', where a NIC keeps 1/4")
    (note,) = fabric_notes(THIN, Layout(tp=8, pp=2, dp=8))
    assert note.startswith("transfers between pipeline stages and gradients cross")
    (note,) = fabric_notes(THIN, Layout(tp=1, pp=2, dp=64, ep=64))
    assert note.startswith("all-to-alls of experts, transfers between pipeline stages and gradients cross")


def test_two_thin_levels_multiply():
    machine = cluster(16, 2, 4, 16, ports=16, over=(1, 2, 3))
    first, second = fabric_notes(machine, Layout(tp=8, dp=16))
    assert "'spine', where a NIC keeps 1/2" in first
    assert "'core', where a NIC keeps 1/6" in second


def test_a_lossy_fabric_is_told_where_traffic_leaves_a_domain():
    lossy = cluster(4, 4, ports=16, lossless=False)
    (note,) = fabric_notes(lossy, Layout(tp=8, dp=4))
    assert note.startswith("the fabric drops packets under congestion, and gradients cross it")
    assert fabric_notes(lossy, Layout(tp=8)) == []
