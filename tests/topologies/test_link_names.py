"""Links and switches by name: what a fault leaves, in the names that bottlenecks carry."""

import numpy as np
import pytest
from fabrics import SMALL, cluster

from topologies.errors import InputError
from topologies.link_map import link_map
from topologies.link_names import with_faults
from topologies.outages import without_switch

CABLES = link_map(cluster(16, 2, 4, 16, ports=8, routing="ecmp"))


@pytest.mark.parametrize("name", [name for name, one in SMALL.items() if one.fabric.tiers])
def test_every_link_outside_a_domain_is_found_by_its_name(name):
    network = link_map(SMALL[name], bundled=False)
    for link in range(network.num_links):
        block, _ = network.block(link)
        if block.split("_")[0] not in ("nic", "leaf", "spine"):
            continue
        lower, upper = sorted(
            network.ends(link),
            key=lambda end: ("node", "leaf", "spine", "core").index(
                end.rstrip("0123456789.").removesuffix(".nic").rstrip("0123456789.")
            ),
        )
        named = lower if block.startswith("nic") else f"{lower}-{upper}"
        slower = with_faults(network, [(named, 0.5)])
        left = slower.capacities_bytes_per_second / network.capacities_bytes_per_second
        assert left[link] == 0.5
        if network.planes == 1:  # else a NIC has a port on each plane
            assert {network.ends(k)[0] for k in np.flatnonzero(left < 1)} <= {*network.ends(link)}


def test_a_switch_is_dead_as_outages_say():
    for kind, name, number in (("leaf", "leaf0.3.1", 3 * 8 + 1), ("spine", "spine0.1.1", 1 * CABLES.spines + 1)):
        assert with_faults(CABLES, [(name, 0.0)]).capacities_bytes_per_second == pytest.approx(
            without_switch(CABLES, kind, number).capacities_bytes_per_second
        )


def test_a_cable_of_a_bundle_takes_its_part():
    network = link_map(cluster(16, 4, 16, ports=8))
    assert network.bundled and network.wires.spines_per_pod == 4
    damaged = with_faults(network, [("leaf0.0.1-spine0.0.3", 0.0)])
    left = damaged.capacities_bytes_per_second / network.capacities_bytes_per_second
    assert sorted(set(left)) == [0.75, 1.0]
    assert [network.name(k) for k in np.flatnonzero(left < 1)] == [
        "leaf0.0.1 to spines0.0",
        "spines0.0 to leaf0.0.1",
    ]


def test_a_gpu_loses_its_scale_up_links_in_both_directions():
    for name in ("rail, two tiers", "mesh"):
        network = link_map(SMALL[name])
        left = with_faults(network, [("gpu9", 0.0)]).capacities_bytes_per_second
        hit = np.flatnonzero((left == 0) & (network.capacities_bytes_per_second > 0))
        assert all("gpu9" in network.ends(k) for k in hit)
        assert len(hit) == (16 if name == "mesh" else 2) or len(hit) == 15


@pytest.mark.parametrize(
    "name",
    [
        "",
        "node",
        "node1",
        "node1.nic",
        "node1.nic8",
        "node99.nic0",
        "nodex.nic1",
        "leaf1",
        "leaf0.0.99",
        "leaf0.0.0-",
        "leaf0.0.0-leaf0.0.1",
        "leaf0.0.0-spine0.1.0",
        "spine0.0.0-core0.1.0",
        "gpu128",
        "core0.0.99",
        "switch7",
    ],
)
def test_what_is_not_there_is_one_sentence(name):
    with pytest.raises(InputError) as told:
        with_faults(CABLES, [(name, 0.0)])
    assert "\n" not in str(told.value)
