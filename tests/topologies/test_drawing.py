"""The picture of a fabric: valid SVG, the cables that exist, the counts of the whole."""

import xml.etree.ElementTree as ElementTree

import pytest
from click.testing import CliRunner
from fabrics import cluster, node

from planner.cli import headway
from topologies.catalog import load_cluster
from topologies.drawing import BOX, fabric_svg
from topologies.fabric import count
from topologies.fabric_graph import graph

SVG = "{http://www.w3.org/2000/svg}"


def words(picture):
    return [element.text for element in picture.iter(f"{SVG}text")]


@pytest.mark.parametrize("name", ["dgx-h100-superpod", "llama3-roce-16k", "gb200-nvl72", "mi300x-64", "laptop"])
def test_counts_stand_beside_the_rows(name):
    described = load_cluster(name)
    picture = ElementTree.fromstring(fabric_svg(described))
    counts = count(described)
    said = " ".join(words(picture))
    assert f"{described.num_nodes:,} node" in said
    for level in counts.levels if counts else ():
        assert f"{level.switches:,} {level.name[:3]}" in said
        assert f"{level.links:,} cables" in said
    for box in picture.iter(f"{SVG}rect"):
        assert 0 <= float(box.get("x")) <= float(box.get("x")) + float(box.get("width")) <= 1000
    assert max(float(text.get("y")) for text in picture.iter(f"{SVG}text")) < float(picture.get("height"))


FOUR = node(gpus=4, nics=2)
WHOLE = {
    "one leaf": cluster(4, 4, of=FOUR, ports=8),
    "two tiers": cluster(8, 2, 8, of=FOUR, ports=16),
    "three tiers": cluster(8, 2, 4, 8, of=FOUR, ports=8),
    "rail-only": cluster(8, 2, 8, of=FOUR, kind="rail-only", ports=8),
    "dual-plane": cluster(4, 2, 4, of=FOUR, kind="dual-plane", ports=8),
    "fat tree": cluster(8, 2, 4, 8, of=FOUR, kind="fat-tree", ports=16),
}


@pytest.mark.parametrize("name", WHOLE)
def test_lines_are_the_edges_of_the_graph(name):
    """Where everything is drawn, each line joins two boxes that the graph joins, and none is missing."""
    view = graph(WHOLE[name])
    picture = ElementTree.fromstring(fabric_svg(WHOLE[name]))
    assert ". . ." not in words(picture)
    assert len(list(picture.iter(f"{SVG}rect"))) == view.number_of_nodes()
    boxes = {}
    for box, text in zip(picture.iter(f"{SVG}rect"), _labels(picture), strict=True):
        middle = float(box.get("x")) + float(box.get("width")) / 2
        boxes[round(middle, 0), round(float(box.get("y")), 0)] = text
    degrees = dict.fromkeys(boxes.values(), 0)
    for line in picture.iter(f"{SVG}line"):
        low = boxes[round(float(line.get("x1")), 0), round(float(line.get("y1")), 0)]
        high = boxes[round(float(line.get("x2")), 0), round(float(line.get("y2")) - BOX, 0)]
        degrees[low] += 1
        degrees[high] += 1
    assert sorted(degrees.values()) == sorted(dict(view.degree()).values())
    for kind in ("node", "leaf", "spine", "core"):
        drawn = sorted(degree for text, degree in degrees.items() if text.startswith(kind))
        real = sorted(degree for vertex, degree in view.degree() if view.nodes[vertex]["kind"] == kind)
        assert drawn == real


def _labels(picture):
    return [text.text for text in picture.iter(f"{SVG}text") if text.get("text-anchor") == "middle"]


def test_on_the_command_line(tmp_path):
    target = tmp_path / "fabric.svg"
    done = CliRunner().invoke(headway, ["topology", "show", "dgx-h100-superpod", "--svg", str(target)])
    assert done.exit_code == 0
    assert ElementTree.parse(target).getroot().tag == f"{SVG}svg"
    assert "storage network of its own" in target.read_text()
    shown = CliRunner().invoke(headway, ["topology", "show", "laptop", "--svg", "-"])
    assert shown.stdout.startswith("<svg")
    assert shown.stdout.endswith("</svg>\n")
    refused = CliRunner().invoke(headway, ["topology", "show", "400g", "--svg", "-"])
    assert refused.exit_code == 2
    assert "only a cluster has a fabric to draw" in refused.stderr
