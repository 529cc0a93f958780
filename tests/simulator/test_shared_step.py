"""The step on shared links: against the closed form, against itself unfolded, by hand, and what must never happen."""

import json
from itertools import pairwise

import numpy as np
import pytest
from fabrics import cluster, node
from hypothesis import given, settings
from hypothesis import strategies as st

from scenarios.layout import Layout
from scenarios.scenario import load_scenario
from simulator.critical_path import by_kind
from simulator.disturbances import Disturbances, Drain, OtherJob
from simulator.outcome import BREAKDOWN
from simulator.rank_places import rank_gpus
from simulator.shared_step import shared_step
from simulator.step import predict_step
from simulator.traces import chrome_trace
from simulator.training import explained_step
from topologies.cluster import Storage, StorageNetwork
from topologies.errors import InputError

LLAMA = load_scenario("llama3-70b-512-h100")
DEEPSEEK = load_scenario("deepseek-v3-2048-h800")
JOB = LLAMA.job.model_copy(update={"global_batch_size": 64})
SMALL = cluster(16, 4, 16, ports=16)
"""128 GPUs: 4 nodes a leaf, 8 rails, full bisection."""
TAPERED = cluster(16, 4, 16, ports=16, over=(1, 4))


def lay(**degrees):
    return Layout(**({"tp": 8, "sequence_parallel": True} | degrees))


SCHEDULES = [
    {"pp": 1},
    {"pp": 2, "schedule": "gpipe"},
    {"pp": 4, "schedule": "1f1b"},
    {"pp": 4, "vpp": 5, "schedule": "interleaved"},
    {"pp": 4, "schedule": "zb-h1"},
    {"pp": 4, "vpp": 2, "schedule": "zbv"},
    {"pp": 4, "schedule": "zb-h2"},
    {"pp": 4, "schedule": "dualpipe"},
    {"pp": 4, "vpp": 2, "schedule": "dualpipe"},
    {"pp": 2, "dp": 4, "schedule": "1f1b", "optimizer_sharding": "none"},
    {"pp": 2, "dp": 4, "optimizer_sharding": "zero2"},
    {"pp": 1, "dp": 8, "optimizer_sharding": "zero3"},
    {"pp": 2, "cp": 2, "dp": 2},
    {"pp": 2, "cp": 2, "dp": 2, "cp_comm": "all-to-all"},
    {"pp": 1, "dp": 8, "dp_replicate": 2, "optimizer_sharding": "zero3"},
    {"pp": 2, "dp": 8, "dp_replicate": 4},
]


@pytest.mark.parametrize("degrees", SCHEDULES, ids=str)
def test_equals_the_closed_form_where_nothing_is_shared(degrees):
    """80 layers divide over these stages; what is left are the ends, which send one way only."""
    layout = lay(**degrees)
    found = shared_step(SMALL, JOB, layout)
    closed = predict_step(SMALL, JOB, layout).total_seconds
    alone = explained_step(SMALL, JOB, layout).timeline.step_seconds
    assert found.alone_seconds == pytest.approx(alone, rel=1e-12)
    assert found.timeline.step_seconds == pytest.approx(alone, rel=0.01)
    assert found.timeline.step_seconds == pytest.approx(closed, rel=0.01)
    assert found.breakdown_seconds["paths"] == pytest.approx(0.0, abs=1e-9)


@pytest.mark.parametrize(
    ("degrees", "wish"),
    [
        ({"pp": 2, "dp": 8}, {}),
        ({"pp": 2, "dp": 8, "vpp": 2, "schedule": "interleaved"}, {"slow_gpus": {5: 0.7}}),
        ({"pp": 2, "dp": 8}, {"faults": (("node3.nic2", 0.3),)}),
        ({"pp": 2, "dp": 8}, {"faults": (("leaf0.0.1-spine0.0.0", 0.4), ("node9.nic0", 0.5)), "slow_gpus": {64: 0.9}}),
        ({"pp": 4, "dp": 4}, {"others": (OtherJob(kind="all_reduce", gpus=tuple(range(40)), size_bytes=4e9),)}),
        ({"tp": 4, "pp": 2, "dp": 16}, {"slow_gpus": {0: 0.8}}),
        ({"pp": 2, "cp": 2, "dp": 4}, {"faults": (("node1.nic1", 0.5),)}),
        ({"pp": 1, "dp": 16, "optimizer_sharding": "zero3"}, {"faults": (("node1.nic1", 0.5),)}),
    ],
)
def test_replicas_that_are_alike_are_played_once_and_nothing_changes(degrees, wish):
    wish = Disturbances(**wish)
    for machine in (SMALL, TAPERED):
        folded = shared_step(machine, JOB, lay(**degrees), wish)
        whole = shared_step(machine, JOB, lay(**degrees), wish, every_replica=True)
        assert folded.exact
        assert folded.classes <= whole.classes == degrees["dp"] or whole.classes == 1
        assert folded.timeline.step_seconds == pytest.approx(whole.timeline.step_seconds, rel=1e-9)
        assert folded.utilisation.bytes_moved == pytest.approx(whole.utilisation.bytes_moved, rel=1e-9)
        assert by_kind(folded.path) == pytest.approx(by_kind(whole.path), rel=1e-6, abs=1e-7)


def test_experts_whose_replicas_exchange_tokens_are_one_unit():
    machine = cluster(32, 4, 32, ports=16, of=node(scale_up=200e9))
    job = DEEPSEEK.job.model_copy(update={"global_batch_size": 512, "precision": "bf16"})
    layout = Layout(pp=4, dp=64, ep=16)
    wish = Disturbances(slow_gpus={40: 0.8})
    folded = shared_step(machine, job, layout, wish)
    whole = shared_step(machine, job, layout, wish, every_replica=True)
    assert whole.classes == 4
    assert folded.classes == 3  # the slow one, and those whose exchange leaves a leaf or not
    assert folded.timeline.step_seconds == pytest.approx(whole.timeline.step_seconds, rel=1e-9)
    assert folded.breakdown_seconds["contention"] > 0


def test_another_job_halves_the_gradients_rate_by_hand():
    """Two lone GPUs: gradients and weights pass each NIC at 3/4 of its rate (the pace of training traffic); a job that
    sends all the time takes half of the NIC, so what is exposed after the last op takes 3/2 of its time, but for the
    starts of its collectives."""
    machine = cluster(2, 2, of=node(gpus=1))
    job = LLAMA.job.model_copy(update={"global_batch_size": 2})
    layout = Layout(dp=2)
    alone = shared_step(machine, job, layout)
    other = OtherJob(kind="send_recv", gpus=(0, 1), size_bytes=1e9)
    beside = shared_step(machine, job, layout, Disturbances(others=(other,)))
    costs = explained_step(machine, job, layout).predicted
    assert alone.breakdown_seconds["contention"] == pytest.approx(0.0, abs=1e-9)
    gradients = [one for one in beside.path if one.kind == "dp_comm"]
    for one in gradients:
        assert 1.45 * one.alone_seconds < one.seconds < 1.5 * one.alone_seconds
        assert "nic0" in one.link
    assert beside.breakdown_seconds["contention"] == pytest.approx(
        sum(one.seconds - one.alone_seconds for one in gradients), rel=1e-6
    )
    assert beside.timeline.step_seconds > costs.total_seconds
    assert beside.others["send_recv on GPUs 0 to 1"] > 10


def test_bytes_on_the_nics_are_those_of_the_rings():
    """A ring over n members passes (n - 1) / n of fp32 gradients and bf16 weights: 6 bytes a parameter of the rank."""
    layout = lay(dp=16)
    found = shared_step(SMALL, JOB, layout)
    params = JOB.model.num_params / 8
    rate = 50e9 * SMALL.fabric.efficiency
    carried = found.utilisation.mean["NICs out, rail 3"] * rate * found.timeline.step_seconds
    assert carried == pytest.approx(15 / 16 * 6 * params, rel=0.01)
    assert found.utilisation.mean["NICs in, rail 3"] == pytest.approx(found.utilisation.mean["NICs out, rail 3"])


@pytest.mark.parametrize("sharding", ["zero1", "zero2", "zero3"])
@pytest.mark.parametrize(("tp", "dp", "copies"), [(8, 16, 1), (8, 16, 4), (1, 32, 4)])
def test_bytes_of_shards_and_of_their_copies(sharding, tp, dp, copies):
    """Shards of n ranks: (n - 1) / n of what is gathered and reduced; r copies of them: 2 (r - 1) / r of a shard's fp32
    gradients. With tp 1 shards lie inside a node, and only the copies' sum leaves it."""
    layout = lay(tp=tp, dp=dp, dp_replicate=copies, optimizer_sharding=sharding, sequence_parallel=tp > 1)
    found = shared_step(SMALL, JOB, layout)
    params, shards, micro = JOB.model.num_params / tp, dp // copies, layout.num_microbatches(JOB)
    copied = 2 * (copies - 1) / copies * 4 * params / shards
    reduced, gathered = (0.0 if tp == 1 else (shards - 1) / shards * width * params for width in (4, 2))
    times, gathers = {"zero1": (1, 1), "zero2": (micro, 1), "zero3": (micro, 2 * micro)}[sharding]
    rate = 50e9 * SMALL.fabric.efficiency * found.timeline.step_seconds
    out = [share * rate for name, share in found.utilisation.mean.items() if name.startswith("NICs out")]
    assert np.mean(out) == pytest.approx(times * (reduced + copied) + gathers * gathered, rel=1e-3)
    if sharding != "zero2":  # whose reductions meet the weights that the first forward waits for
        assert found.breakdown_seconds["contention"] == pytest.approx(0.0, abs=1e-9)
        assert found.timeline.step_seconds == pytest.approx(predict_step(SMALL, JOB, layout).total_seconds, rel=1e-6)


def test_experts_that_few_ranks_hold_have_fewer_copies():
    """Two ranks hold the same experts: four copies of dense shards leave them whole, and summed over two."""
    job = DEEPSEEK.job.model_copy(update={"global_batch_size": 128, "precision": "bf16"})
    machine = cluster(16, 4, 16, ports=16, of=node(scale_up=200e9))
    two, four = (shared_step(machine, job, Layout(pp=4, dp=32, ep=16, dp_replicate=copies)) for copies in (2, 4))
    for found in (two, four):
        assert found.timeline.step_seconds == pytest.approx(found.predicted.total_seconds, rel=0.05)


def test_counters_stay_between_nothing_and_full_and_go_into_the_trace():
    found = shared_step(TAPERED, JOB, lay(pp=2, dp=8))
    for one in found.timeline.counters:
        assert -1e-9 <= min(one.values) <= max(one.values) <= 1 + 1e-9
        assert found.utilisation.peak[one.name] == max(one.values)
    events = json.loads(json.dumps(chrome_trace(found.timeline)))["traceEvents"]
    counters = [event for event in events if event["ph"] == "C"]
    assert {event["name"] for event in counters} == set(found.utilisation.mean)
    for before, after in pairwise([event for event in counters if event["name"] == "NICs out, rail 0"]):
        assert before["ts"] < after["ts"] and before["args"] != after["args"]
    assert len({event["pid"] for event in counters} & {event["pid"] for event in events if event["ph"] == "X"}) == 0


@pytest.mark.parametrize("wish", [{}, {"slow_gpus": {70: 0.5}}, {"faults": (("node3.nic2", 0.2),)}], ids=str)
def test_the_critical_path_adds_up_to_the_step_and_names_what_is_slow(wish):
    found = shared_step(SMALL, JOB, lay(pp=4, dp=4), Disturbances(**wish))
    assert sum(by_kind(found.path).values()) == pytest.approx(found.timeline.step_seconds, rel=1e-12)
    for one, following in pairwise(found.path):
        assert one.start_seconds + one.seconds == pytest.approx(following.start_seconds, abs=1e-12)
    assert sum(found.breakdown_seconds.values()) == pytest.approx(found.timeline.step_seconds, rel=1e-12)
    assert set(found.breakdown_seconds) == {*BREAKDOWN, "paths", "contention"}
    if "slow_gpus" in wish:  # GPU 70 is in node 8: pipeline rank 2, replica 0
        busy = {one.replica for one in found.path if one.kind in ("forward", "backward") and one.rank == 2}
        assert busy == {0}
        assert found.breakdown_seconds["straggler"] > 0.5 * found.alone_seconds
        assert len(found.timeline.rank_names) == 8
    if "faults" in wish:
        assert any("node3.nic2" in (one.link or "") for one in found.path)


def test_a_slow_gpu_costs_what_its_stage_takes_longer():
    """One stage, one replica: the step's compute and the traffic inside it stretch by 1 / 0.8."""
    layout = lay(dp=2)
    calm = shared_step(SMALL, JOB, layout)
    slow = shared_step(SMALL, JOB, layout, Disturbances(slow_gpus={11: 0.8}))
    parts = calm.breakdown_seconds
    work = sum(parts[name] for name in ("compute", "tp_comm", "straggler"))
    assert slow.timeline.step_seconds - calm.timeline.step_seconds == pytest.approx(0.25 * work, rel=1e-3)


@given(st.integers(0, 15), st.integers(0, 7), st.floats(0.1, 0.9), st.floats(0.2, 1.0))
@settings(deadline=None, max_examples=25)
def test_less_link_never_makes_a_step_faster(place, nic, share, lower):
    layout = lay(pp=2, dp=8)
    some = shared_step(TAPERED, JOB, layout, Disturbances(faults=((f"node{place}.nic{nic}", share),)))
    less = shared_step(TAPERED, JOB, layout, Disturbances(faults=((f"node{place}.nic{nic}", share * lower),)))
    whole = shared_step(TAPERED, JOB, layout)
    wide = shared_step(SMALL, JOB, layout)
    ends = [one.timeline.step_seconds for one in (wide, whole, some, less)]
    assert all(a <= b * (1 + 1e-9) for a, b in pairwise(ends))
    assert min(less.breakdown_seconds[name] for name in ("paths", "contention")) >= -1e-9


def test_where_ranks_stand_matters_only_for_what_they_cross():
    """Nodes in any order: the same where the fabric has full bisection, slower where rings cross a thin spine often."""
    layout = lay(pp=2, dp=8)
    nodes = np.random.default_rng(4).permutation(16)
    gpus = rank_gpus(layout, 8, nodes.tolist())
    assert sorted(gpus) == list(range(128))
    ordered, shuffled = (shared_step(SMALL, JOB, layout, gpus=one).timeline.step_seconds for one in (None, gpus))
    assert shuffled == pytest.approx(ordered, rel=1e-3)
    ordered, shuffled = (shared_step(TAPERED, JOB, layout, gpus=one) for one in (None, gpus))
    assert shuffled.timeline.step_seconds > 1.01 * ordered.timeline.step_seconds
    slow = shared_step(SMALL, JOB, layout, Disturbances(slow_gpus={int(gpus[70]): 0.5}), gpus=gpus)
    same = shared_step(SMALL, JOB, layout, Disturbances(slow_gpus={70: 0.5}))
    assert slow.breakdown_seconds["straggler"] == pytest.approx(same.breakdown_seconds["straggler"], rel=1e-3)


def test_jitter_is_drawn_by_its_seed_and_slows():
    layout = lay(pp=2, dp=4)
    steps = [
        shared_step(SMALL, JOB, layout, Disturbances(jitter=jitter, seed=seed))
        for jitter, seed in ((0.02, 1), (0.02, 1), (0.02, 2), (0.1, 1))
    ]
    first, again, other, strong = (one.timeline.step_seconds for one in steps)
    assert first == again != other
    assert first < strong
    beside = shared_step(TAPERED, JOB, lay(pp=4, dp=4), Disturbances(jitter=0.02, faults=(("node2.nic1", 0.5),)))
    assert min(beside.breakdown_seconds[name] for name in ("paths", "contention")) >= 0
    assert sum(beside.breakdown_seconds.values()) == pytest.approx(beside.timeline.step_seconds, rel=1e-12)
    assert steps[0].classes == 4


def test_a_checkpoint_drains_over_shared_links_and_not_over_a_network_of_its_own():
    store = Storage(name="files", kind="parallel-file-system", write_bytes_per_second=1e13, read_bytes_per_second=1e13)
    shared = SMALL.model_copy(update={"storage": (store,)})
    own = shared.model_copy(update={"storage_network": StorageNetwork(bandwidth_bytes_per_second=50e9)})
    layout = lay(dp=16)
    wish = Disturbances(drain=Drain(store=0, node_bytes=1e15))
    calm, beside, apart = (
        shared_step(shared, JOB, layout),
        shared_step(shared, JOB, layout, wish),
        shared_step(own, JOB, layout, wish),
    )
    assert beside.timeline.step_seconds > calm.timeline.step_seconds * 1.0001
    assert apart.timeline.step_seconds == pytest.approx(calm.timeline.step_seconds, rel=1e-12)
    assert beside.utilisation.mean["NICs out, rail 0"] > 0.9
    assert apart.utilisation.mean["storage network up"] > 0.9
    assert beside.others == {"checkpoint to files": 0}


def test_hashed_paths_of_many_replicas_are_played_in_groups(monkeypatch):
    """An estimate: too long by little, and by less the more groups there are; as many as replicas are all of them."""
    machine = cluster(32, 4, 32, routing="ecmp")
    job, layout = JOB.model_copy(update={"global_batch_size": 32}), lay(tp=1, pp=8, dp=32, sequence_parallel=False)
    whole = shared_step(machine, job, layout)
    assert (whole.exact, whole.classes) == (True, 32)
    monkeypatch.setattr("simulator.shared_step.MOST_OPS", 1)
    ends = {}
    for groups in (1, 8, 32):
        monkeypatch.setattr("simulator.shared_step.GROUPED_OPS", 16 * groups)  # a forward and a backward on each rank
        found = shared_step(machine, job, layout)
        assert (found.exact, found.classes) == (False, groups)
        ends[groups] = found.timeline.step_seconds / whole.timeline.step_seconds
    assert 1.01 > ends[1] > ends[8] > ends[32] == pytest.approx(1, rel=1e-9)
    assert ends[8] < 1.005


def test_what_cannot_be_played_is_told():
    layout = lay(pp=2, dp=4)
    for wish, match in (
        ({"slow_gpus": {100: 0.5}}, "does not use GPU 100"),
        ({"faults": (("node0.nic0", 0.0),)}, "no live NIC"),
        ({"faults": (("node99.nic0", 0.0),)}, "nodes are 0 to 15"),
        ({"others": (OtherJob(kind="all_reduce", gpus=(0, 200), size_bytes=1.0),)}, "GPU 200"),
    ):
        with pytest.raises(InputError, match=match):
            shared_step(SMALL, JOB, layout, Disturbances(**wish))


def test_cpu_ranks_are_played_without_links():
    scenario = load_scenario("laptop")
    found = shared_step(scenario.cluster, scenario.job, Layout(pp=2))
    alone = explained_step(scenario.cluster, scenario.job, Layout(pp=2)).timeline.step_seconds
    assert found.timeline.step_seconds == pytest.approx(alone, rel=1e-12)
    assert found.utilisation is None
    assert np.isfinite(found.timeline.step_seconds)
