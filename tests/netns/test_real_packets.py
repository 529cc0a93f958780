"""Real gloo collectives over shaped links in network namespaces, against the prediction for that fabric in YAML.

A shaped link is never faster than its rate, while busy cores only add time: a measurement is the lower quartile of its
repeats, and the least of up to three rounds.
"""

from pathlib import Path

import namespaces
import pytest
from ruamel.yaml import YAML

from simulator.flows import play_collective
from simulator.sharing import collective_load, play_together
from topologies.cluster import Cluster
from topologies.console import say
from topologies.document import LoadContext, check
from topologies.link_map import link_map

pytestmark = [pytest.mark.netns, pytest.mark.xdist_group("netns")]

MBIT = 100
MIB = 2**20
ROUNDS = 3

FABRIC = """
name: hosts in namespaces
node:
  name: host
  gpu: cpu-core
  gpus_per_node: 2
  scale_up: {{kind: none, bandwidth: 0 B/s, bus_bandwidth: 0 B/s, latency: 0 s, domain_size: 1}}
  nic: {{name: veth, bandwidth: 100 Mbit/s, latency: 0.2 ms}}
  nics_per_node: {rails}
num_nodes: {hosts}
fabric:
  kind: rail-only
  rails: {rails}
  efficiency: 0.9564
  tiers:
    - {{name: leaf, nodes: {half}}}
    - {{name: spine, nodes: {hosts}, oversubscription: {taper}}}
source:
  node.nic.latency: "a step of gloo between processes of one machine, 0.1 to 0.3 ms"
  fabric.efficiency: "1448 bytes of payload in an Ethernet frame of 1514"
"""


def described(hosts=4, rails=2, taper=1):
    text = FABRIC.format(hosts=hosts, rails=rails, half=hosts // 2, taper=taper)
    return link_map(check(YAML(typ="rt").load(text), Cluster, LoadContext(Path("hosts.yaml"))))


@pytest.fixture(scope="module")
def _possible():
    reason = namespaces.why_not()
    if reason:
        pytest.skip(reason)
    pytest.importorskip("torch", reason="needs torch for gloo")


@pytest.fixture(scope="module")
def four(_possible):
    """Four hosts, one rank each on rail 0, in an order in which every ring edge crosses the spine."""
    with namespaces.Hosts(4, 2) as hosts:
        hosts.shape_all(MBIT)
        hosts.start([(0, 0), (2, 0), (1, 0), (3, 0)])
        yield hosts
    assert not namespaces.left_over(hosts.prefix)


@pytest.fixture(scope="module")
def two(_possible):
    """Two hosts of two ranks, each rank on its own rail."""
    with namespaces.Hosts(2, 2) as hosts:
        hosts.shape_all(MBIT)
        hosts.start([(0, 0), (0, 1), (1, 0), (1, 1)])
        yield hosts
    assert not namespaces.left_over(hosts.prefix)


RING = [0, 4, 2, 6]
"""GPUs of the ranks of ``four``."""


def measured(hosts, operation, size, near, within, **options):
    """The time of a collective, measured again while it is not within its gate; and the bytes that each rank sent."""
    best, sent = float("inf"), []
    for _ in range(ROUNDS):
        seconds, sent = hosts.measure(operation, size, repeats=5 if size < 4 * MIB else 3, **options)
        best = min(best, sorted(seconds)[len(seconds) // 4])
        if abs(best / near - 1) <= 0.8 * within:
            break
    say(f"{operation} {size / MIB:g} MiB {options or ''}: predicted {near * 1e3:.1f} ms, measured {best * 1e3:.1f} ms")
    return best, sent


@pytest.mark.parametrize(
    ("operation", "mib", "within"),
    [
        ("all_reduce", 1, 0.10),
        ("all_reduce", 4, 0.10),
        ("send_recv", 1, 0.10),
        ("send_recv", 4, 0.10),
        ("reduce_scatter", 2, 0.15),
        ("all_gather", 4, 0.15),
    ],
)
def test_collectives_of_four_hosts(four, operation, mib, within):
    network = described()
    ranks = [RING[0], RING[-1]] if operation == "send_recv" else RING
    predicted = play_collective(network, operation, ranks, mib * MIB).seconds
    found, sent = measured(four, operation, mib * MIB, predicted, within)
    assert found == pytest.approx(predicted, rel=within)
    volume = {"all_reduce": 1.5, "reduce_scatter": 1.5, "all_gather": 0.75, "send_recv": 1.0}[operation] * mib * MIB
    senders = sent[:1] if operation == "send_recv" else sent
    assert senders == pytest.approx([volume] * len(senders), rel=0.06)


def test_all_to_all_is_reported_and_not_gated(four):
    """Gloo exchanges pair by pair without keeping step, so that receivers are hit by two senders: some 70 % slower."""
    predicted = play_collective(described(), "all_to_all", RING, 2 * MIB).seconds
    found, _ = measured(four, "all_to_all", 2 * MIB, predicted, 1.0)
    assert found > 0.85 * predicted


def test_a_rail_at_half_the_rate(four):
    four.shape(1, 0, MBIT / 2)
    try:
        network = described()
        slow = [network.first[way] + 2 for way in ("nic_up", "nic_down")]  # host 1, rail 0
        network = network.degraded(slow, 0.5)
        assert network.name(slow[0]) == "node1.nic0 to leaf0.0.0"
        predicted = play_collective(network, "all_reduce", RING, MIB).seconds
        found, _ = measured(four, "all_reduce", MIB, predicted, 0.10)
    finally:
        four.shape(1, 0, MBIT)
    healthy = play_collective(described(), "all_reduce", RING, MIB).seconds
    assert found == pytest.approx(predicted, rel=0.10)
    assert found > 1.7 * healthy


def test_an_oversubscribed_spine(four):
    """Both leaves send two ring edges over a spine that carries one."""
    four.shape_spine(0, MBIT)
    try:
        predicted = play_collective(described(taper=2), "all_reduce", RING, MIB).seconds
        found, _ = measured(four, "all_reduce", MIB, predicted, 0.10)
    finally:
        four.shape_spine(0, 2 * MBIT)
    healthy = play_collective(described(), "all_reduce", RING, MIB).seconds
    assert predicted > 1.8 * healthy
    assert found == pytest.approx(predicted, rel=0.10)


def both_rails(network, size, groups):
    loads = [collective_load(str(number), "all_reduce", gpus, size) for number, gpus in enumerate(groups)]
    return max(play_together(network, loads).end_seconds.values()) + 2 * 0.2e-3


def test_two_rails_at_once_are_as_fast_as_one(two):
    network, size = described(hosts=2), 2 * MIB
    one, both = [[0, 2]], [[0, 2], [1, 3]]
    predicted = [both_rails(network, size, groups) for groups in (one, both)]
    assert predicted[0] == pytest.approx(predicted[1])
    alone, _ = measured(two, "all_reduce", size, predicted[0], 0.10, groups=one)
    together, _ = measured(two, "all_reduce", size, predicted[1], 0.10, groups=both)
    assert alone == pytest.approx(predicted[0], rel=0.10)
    assert together == pytest.approx(predicted[1], rel=0.10)


def test_both_ranks_on_one_rail_are_half_as_fast(two):
    network, size = described(hosts=2, rails=1), 2 * MIB
    groups = [[0, 2], [1, 3]]
    predicted = both_rails(network, size, groups)
    assert predicted == pytest.approx(2 * both_rails(network, size, groups[:1]), rel=0.01)
    found, _ = measured(two, "all_reduce", size, predicted, 0.10, groups=groups, device="rail0")
    assert found == pytest.approx(predicted, rel=0.10)


def test_everything_is_removed_when_a_test_fails(_possible):
    with pytest.raises(RuntimeError, match="broken on purpose"), namespaces.Hosts(2, 1) as hosts:
        hosts.start([(0, 0), (1, 0)])
        workers = list(hosts.workers)
        raise RuntimeError("broken on purpose")
    assert all(worker.poll() is not None for worker in workers)
    assert not namespaces.left_over(hosts.prefix)
