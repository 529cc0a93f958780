"""Clusters: sizes, tiers on the way between nodes, and what cannot be a cluster."""

import pytest

from topologies.catalog import load_cluster
from topologies.cluster import Cluster, Fabric, Pool, Tier
from topologies.document import load
from topologies.errors import HeadwayError, Infeasible, InputError, MissingExtra


@pytest.fixture
def cluster(tmp_path):
    def read(text):
        path = tmp_path / "cluster.yaml"
        path.write_text(f"name: mine\n{text}")
        return load(path, Cluster)

    return read


def test_pools_add_up(cluster):
    found = cluster("pools:\n  - {node: dgx-h100, num_nodes: 3}\n  - {node: gb200-nvl72-tray, num_nodes: 18}\n")
    assert (found.num_nodes, found.num_gpus) == (21, 3 * 8 + 18 * 4)
    assert found.gpu.name == "H100 SXM"
    assert found.domain_size == 8


def test_one_pool_may_be_written_short(cluster):
    assert cluster("node: dgx-h100\nnum_nodes: 3\n") == cluster("pools: [{node: dgx-h100, num_nodes: 3}]\n")


def test_a_domain_is_never_larger_than_the_cluster(cluster):
    assert cluster("node: gb200-nvl72-tray\nnum_nodes: 2\n").domain_size == 8
    assert cluster("node: gb200-nvl72-tray\nnum_nodes: 40\n").domain_size == 72


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("node: dgx-h100\nnum_nodes: 0\n", ":3:1: num_nodes: input should be greater than or equal to 1"),
        ("node: dgx-h100\nnum_nodes: -4\n", ":3:1: num_nodes: input should be greater than or equal to 1"),
        ("node: dgx-h100\nnum_nodes: 2.5\n", ":3:1: num_nodes: input should be a valid integer"),
        ("node: dgx-h100\nnum_nodes: many\n", ":3:1: num_nodes: input should be a valid integer"),
        ("pools: []\n", ":2:1: pools: "),
        ("num_nodes: 3\n", "node: is missing; add this key"),
        ("node: dgx-h100\n", "num_nodes: is missing; add this key"),
        ("", "pools: is missing; add this key"),
        ("node: dgx-h100\nnum_nodes: 3\npools: []\n", "both 'pools' and 'node'/'num_nodes' are given; keep one form"),
        ("node: dgx-h100\nnum_nodes: 3\npower: {pue: 0.9}\n", ":4:9: power.pue: input should be greater than or equal"),
        ("node: dgx-h100\nnum_nodes: 3\npower: {facility: -3 MW}\n", "must be finite and not negative"),
        (
            "node: dgx-h100\nnum_nodes: 3\nfabric: {kind: torus}\n",
            ":4:10: fabric.kind: input should be 'rail-optimized'",
        ),
        (
            "node: dgx-h100\nnum_nodes: 3\nfabric: {kind: none, tiers: [{name: a, nodes: 4, oversubscription: 0.5}]}\n",
            "fabric.tiers.0.oversubscription: input should be greater than or equal to 1",
        ),
        (
            "node: dgx-h100\nnum_nodes: 3\nstorage: [{name: a, kind: local-nvme, write: 0 GB/s, read: 1 GB/s}]\n",
            "storage.0.write: input should be greater than 0",
        ),
    ],
)
def test_what_is_not_a_cluster_is_refused(cluster, text, words):
    with pytest.raises(InputError) as caught:
        cluster(text)
    assert words in str(caught.value)


def tiers(*rows):
    return Fabric(kind="fat-tree", tiers=tuple(Tier(name=n, nodes=k, oversubscription=o) for n, k, o in rows))


def test_the_tier_between_nodes_and_its_oversubscription():
    fabric = tiers(("rack", 2, 1.0), ("pod", 384, 2.0), ("building", 3072, 7.0))
    for nodes, name, factor in ((1, "rack", 1), (2, "rack", 1), (3, "pod", 2), (384, "pod", 2), (385, "building", 14)):
        tier = fabric.tier(nodes)
        assert tier is not None
        assert (tier.name, fabric.oversubscription(nodes)) == (name, factor)
    top = fabric.tier(99999)
    assert top is not None
    assert (top.name, fabric.oversubscription(99999)) == ("building", 14.0)
    assert Fabric(kind="none").tier(4) is None
    assert Fabric(kind="none").oversubscription(4) == 1.0


def test_llama3_pods_keep_a_seventh_between_them():
    fabric = load_cluster("llama3-roce-16k").fabric
    assert fabric.oversubscription(384) == 1.0
    assert fabric.oversubscription(385) == 7.0


def test_nics_and_their_number_belong_together(cluster):
    with pytest.raises(InputError, match="nic and nics_per_node belong together; give both or neither"):
        cluster("node: {from: dgx-h100, nics_per_node: 0}\nnum_nodes: 1\n")
    alone = load_cluster("laptop").node
    assert (alone.nic, alone.network_bytes_per_second_per_gpu) == (None, 0.0)


def test_a_cluster_survives_a_round_trip_through_its_own_fields():
    found = load_cluster("gb200-nvl72")
    again = Cluster.model_validate(found.model_dump())
    assert again == found
    assert Cluster(name="code", pools=(Pool(node=found.node, num_nodes=2),)).num_gpus == 8


# errors


def test_an_input_error_leaves_out_what_it_does_not_know():
    full = InputError("80 has no unit", hint="write '80 GB'", file="gpu.yaml", line=3, column=5, key="memory")
    assert str(full) == "gpu.yaml:3:5: memory: 80 has no unit; write '80 GB'"
    assert str(InputError("is odd")) == "is odd"
    assert str(InputError("is odd", key="a.b")) == "a.b: is odd"
    assert str(InputError("is odd", file="x.yaml", hint="look")) == "x.yaml: is odd; look"


def test_infeasible_tells_the_nearest_miss_and_what_to_relax():
    error = Infeasible(
        "memory", needed="92 GB", available="80 GB", nearest="tp=8 pp=4", relax=("use pp=8", "recompute activations")
    )
    assert str(error) == (
        "memory: needs 92 GB, has 80 GB; nearest miss: tp=8 pp=4; to relax: use pp=8 or recompute activations"
    )
    assert str(Infeasible("memory", needed="92 GB")) == "memory"


def test_exit_codes_and_the_pip_line():
    assert (HeadwayError.exit_code, InputError("x").exit_code, Infeasible("x").exit_code) == (2, 2, 1)
    assert "pip install 'headway-planner[runtime]'" in str(MissingExtra("headway run", "runtime"))
