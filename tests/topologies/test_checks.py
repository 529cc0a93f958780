"""Checks of a cluster, and ``headway topology`` as its users call it."""

import json

import pytest
from click.testing import CliRunner

from planner.cli import headway
from topologies.catalog import load_cluster
from topologies.checks import check_cluster, power_watts
from topologies.cluster import Cluster
from topologies.document import load

LEAF, SPINE = "{name: leaf, nodes: 32}", "{name: spine, nodes: 256}"
SOURCE = "source: {'*': invented for this test}\n"


@pytest.fixture
def write(tmp_path):
    def to_file(fabric, nodes=64, node="dgx-h100", more="", source=SOURCE):
        path = tmp_path / "mine.yaml"
        path.write_text(f"name: mine\nnode: {node}\nnum_nodes: {nodes}\nfabric: {fabric}\n{more}{source}")
        return path

    return to_file


def findings(path):
    return {(finding.level, finding.rule): finding.text for finding in check_cluster(load(path, Cluster))}


def test_a_sound_cluster_has_no_findings(write):
    assert findings(write(f"{{kind: rail-optimized, rails: 8, tiers: [{LEAF}, {SPINE}]}}")) == {}


@pytest.mark.parametrize(
    ("fabric", "options", "rule", "words"),
    [
        (
            f"{{kind: rail-optimized, rails: 8, tiers: [{LEAF}]}}",
            {},
            "size",
            "64 nodes, and the top level 'leaf' holds 32",
        ),
        (f"{{kind: rail-optimized, rails: 4, tiers: [{LEAF}, {SPINE}]}}", {}, "rails", "4 rails and 8 NICs a node"),
        (f"{{kind: rail-only, rails: 3, tiers: [{LEAF}, {SPINE}]}}", {}, "rails", "3 rails and 8 NICs a node"),
        ("{kind: fat-tree}", {}, "tiers", "a fat-tree fabric without tiers joins nothing"),
        ("{kind: none}", {}, "fabric", "64 nodes and no fabric between them"),
        (
            f"{{kind: rail-optimized, rails: 8, switch_ports: 40, tiers: [{LEAF}, {SPINE}]}}",
            {},
            "ports",
            "a leaf switch needs 64 ports and has 40",
        ),
        (
            "{kind: fat-tree, tiers: [{name: a, nodes: 80}, {name: b, nodes: 64}]}",
            {},
            "tiers",
            "'b' holds 64 nodes, fewer",
        ),
        (
            f"{{kind: rail-optimized, rails: 8, tiers: [{LEAF}, {SPINE}]}}",
            {"more": "power: {pue: 1.5, facility: 0.9 MW}\n"},
            "power",
            "can draw 979 kW with cooling, and the facility gives 900 kW",
        ),
        (
            f"{{kind: rail-optimized, rails: 8, tiers: [{LEAF}, {SPINE}]}}",
            {"node": "{from: dgx-h100, power: 5 kW}"},
            "power",
            "the node draws less than its GPUs together",
        ),
        (
            f"{{kind: rail-optimized, rails: 8, tiers: [{LEAF}, {SPINE}]}}",
            {"node": "{from: dgx-h100, scale_up: {bus_bandwidth: 1 TB/s}}"},
            "bus bandwidth",
            "more than twice the link",
        ),
        (
            f"{{kind: rail-optimized, rails: 8, tiers: [{LEAF}, {SPINE}]}}",
            {"node": "{from: dgx-h100, gpu: {usable_memory: 90 GiB}}"},
            "memory",
            "more usable than nominal memory",
        ),
    ],
)
def test_what_cannot_be_built_is_a_failure(write, fabric, options, rule, words):
    assert words in findings(write(fabric, **options))[("failure", rule)]


@pytest.mark.parametrize(
    ("fabric", "options", "rule", "words"),
    [
        (
            "{kind: fat-tree, tiers: [{name: rack, nodes: 2}, {name: pod, nodes: 64, oversubscription: 3}]}",
            {},
            "oversubscription",
            "across 'pod' each NIC keeps 1/3 of its rate",
        ),
        (
            f"{{kind: rail-optimized, rails: 8, lossless: false, tiers: [{LEAF}, {SPINE}]}}",
            {},
            "lossy",
            "packets are dropped under congestion",
        ),
        (
            f"{{kind: rail-optimized, rails: 8, routing: ecmp, tiers: [{LEAF}, {SPINE}]}}",
            {},
            "hashing",
            "use more queue pairs",
        ),
        ("{kind: fat-tree, tiers: [{name: a, nodes: 3}, {name: b, nodes: 64}]}", {}, "tiers", "not a multiple of 'a'"),
        (
            "{kind: fat-tree, tiers: [{name: a, nodes: 4, latency: 2 us}, {name: b, nodes: 64, latency: 1 us}]}",
            {},
            "latency",
            "'b' has a lower latency than 'a'",
        ),
        (
            f"{{kind: rail-optimized, rails: 8, efficiency: 0.9, tiers: [{LEAF}, {SPINE}]}}",
            {"source": "source: {num_nodes: made up, fabric.tiers: made up, fabric.rails: made up}\n"},
            "source",
            "mine: fabric.efficiency has no source",
        ),
        (
            f"{{kind: rail-optimized, rails: 8, tiers: [{LEAF}, {SPINE}]}}",
            {"source": "source: {'*': made up, fabrik: made up}\n"},
            "source",
            "the source 'fabrik' names no number here; did you mean 'fabric.rails'",
        ),
    ],
)
def test_what_deserves_a_look_is_a_warning(write, fabric, options, rule, words):
    assert words in findings(write(fabric, **options))[("warning", rule)]


def test_power_counts_every_pool_and_the_cooling():
    cluster = load_cluster("dgx-h100-superpod")
    assert power_watts(cluster) == pytest.approx(128 * 10.2e3 * 1.2)


# the commands


def run(*arguments):
    return CliRunner().invoke(headway, ["topology", *map(str, arguments)])


def test_list_as_table_and_as_json():
    table, data = run("list"), run("list", "--json")
    assert (table.exit_code, data.exit_code) == (0, 0)
    assert "llama3-roce-16k" in table.stdout
    assert "2.25 PFLOP/s" in table.stdout
    found = json.loads(data.stdout)
    assert list(found) == ["clusters", "nodes", "gpus", "nics", "curves"]
    assert {row["name"]: row["num_gpus"] for row in found["clusters"]}["llama3-roce-16k"] == 16384
    assert {row["name"]: row["fp8_flop_per_second"] for row in found["gpus"]}["a100-80gb"] is None


def test_show_a_log_of_collectives():
    shown, data = run("show", "efa-p5"), json.loads(run("show", "efa-p5", "--json").stdout)
    assert (shown.exit_code, data["curves"][0]["times_seconds"]["64 MiB"]) == (0, pytest.approx(601.5e-6))
    assert "602 us" in shown.stdout
    assert "aws-samples" in shown.stdout
    assert json.loads(run("show", "dgx-a100", "--json").stdout)["curves"] == "8 A100 behind NVSwitch"


def test_show_a_cluster_as_json():
    found = json.loads(run("show", "llama3-roce-16k", "--json").stdout)
    assert (found["num_gpus"], found["num_nodes"], found["domain_size"]) == (16384, 2048, 8)
    rates = {level["name"]: level["bytes_per_second_per_gpu"] for level in found["levels"]}
    assert rates == pytest.approx({"nvswitch domain": 450e9, "rack": 50e9, "pod": 50e9, "building": 50e9 / 7})
    usable = {level["name"]: level["usable_bytes_per_second_per_gpu"] for level in found["levels"]}
    assert usable["building"] == pytest.approx(50e9 / 7 * 0.92)
    assert [level["gpus"] for level in found["levels"]] == [8, 16, 3072, 16384]
    assert found["fabric"]["counts"]["levels"][0]["switches"] == 1024
    assert found["storage"][-1]["write_bytes_per_second"] == 2e12
    assert "arXiv 2407.21783" in found["sources"]["Llama 3 RoCE cluster, 16,384 H100"]["storage"]
    assert found["gpu"]["usable_memory_bytes"] == pytest.approx(79.1 * 2**30)


@pytest.mark.parametrize("name", ["llama3-roce-16k", "gb200-nvl72", "laptop", "dgx-b200", "mi355x", "800g"])
def test_show_says_the_essentials_on_one_page(name):
    result = run("show", name)
    assert result.exit_code == 0
    assert "sources" in result.stdout
    assert len(result.stdout.splitlines()) < 60
    assert "_bytes" not in result.stdout


def test_show_a_cluster_for_people():
    text = run("show", "llama3-roce-16k").stdout
    for words in (
        "16,384 GPUs in 2,048 nodes",
        "7:1",
        "7.14 GB/s",
        "1,024",
        "bisection 58.5 TB/s",
        "23 MW",
        "PUE of 1.1",
    ):
        assert words in text


def test_show_hardware_as_json():
    found = json.loads(run("show", "dgx-h100", "--json").stdout)
    assert (found["gpu"], found["nic"], found["nics_per_node"]) == ("H100 SXM", "400G port", 8)
    assert found["scale_up"]["bus_bandwidth_bytes_per_second"] == 365e9
    assert "NVLS" in found["source"]["scale_up.bus_bandwidth"]


def test_check_exits_with_one_where_the_answer_is_no(write):
    path = write(f"{{kind: rail-optimized, rails: 4, tiers: [{LEAF}]}}")
    result = run("check", path)
    assert result.exit_code == 1
    assert "failure: rails: 4 rails and 8 NICs a node" in result.stdout
    assert "mine: 2 failures, 0 warnings" in result.stdout
    found = json.loads(run("check", path, "--json").stdout)
    assert (found["ok"], {finding["rule"] for finding in found["findings"]}) == (False, {"rails", "size"})
    assert run("check", "llama3-roce-16k").exit_code == 0


def test_trouble_exits_with_two_and_tells_json_readers(write, tmp_path):
    for arguments in (("show", "h101"), ("check", "h101"), ("check", tmp_path / "absent.yaml"), ("check", tmp_path)):
        result = run(*arguments, "--json")
        assert result.exit_code == 2
        assert json.loads(result.stdout)["error"]["kind"] == "InputError"
        assert result.stderr.startswith("error: ")
    result = run("check", write("{kind: fat-tre}"))
    assert (result.exit_code, result.stdout) == (2, "")
    assert "mine.yaml:4:10: fabric.kind: input should be 'rail-optimized'" in result.stderr
