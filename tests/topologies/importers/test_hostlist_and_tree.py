import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from topologies.errors import InputError
from topologies.importers.hostlist import expand
from topologies.importers.tree import Switch, make_tree


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("login", ("login",)),
        ("node[1-3]", ("node1", "node2", "node3")),
        ("node[08-11]", ("node08", "node09", "node10", "node11")),
        ("n[1-2,5],m[007]", ("n1", "n2", "n5", "m007")),
        ("rack[1-2]-node[1-2]", ("rack1-node1", "rack1-node2", "rack2-node1", "rack2-node2")),
        ("a[1]b, c", ("a1b", "c")),
    ],
)
def test_host_lists_expand_as_slurm_does(text: str, hosts: tuple[str, ...]) -> None:
    assert expand(text) == hosts


@given(st.integers(0, 500), st.integers(0, 500), st.integers(1, 5))
def test_a_range_is_every_number_of_the_width(low: int, extra: int, width: int) -> None:
    first = str(low).zfill(width)
    hosts = expand(f"n[{first}-{low + extra}]")
    assert [int(host[1:]) for host in hosts] == list(range(low, low + extra + 1))
    assert all(len(host) - 1 >= len(first) for host in hosts)


@pytest.mark.parametrize("text", ["", "n[1-2", "n1-2]", "n[]", "n[3-1]", "n[a-b]", "n[1-],m", ",", "n[[1]]"])
def test_a_broken_host_list_is_refused_with_its_place(text: str) -> None:
    with pytest.raises(InputError, match=r"^topology.conf:7: "):
        expand(text, file="topology.conf", line=7)


@pytest.mark.parametrize("text", ["n[1-999999999999]", "n[1-2000][1-2000]"])
def test_a_host_list_cannot_fill_the_memory(text: str) -> None:
    with pytest.raises(InputError):
        expand(text)


def test_tiers_are_the_fullest_switch_of_each_height() -> None:
    tree = make_tree(
        [
            Switch(name="core", switches=("s1", "s2")),
            Switch(name="s1", switches=("l1", "l2")),
            Switch(name="s2", switches=("l3",)),
            Switch(name="l1", nodes=("a", "b")),
            Switch(name="l2", nodes=("c",)),
            Switch(name="l3", nodes=("d", "e", "f")),
        ]
    )
    assert tree.roots == ("core",)
    assert tree.tiers("core") == [{"name": "leaf", "nodes": 3}, {"name": "core", "nodes": 6}]
    assert tree.tiers("s1") == [{"name": "leaf", "nodes": 2}, {"name": "spine", "nodes": 3}]
    assert set(tree.nodes_below("s1")) == {"a", "b", "c"}


def test_a_cycle_names_its_way_and_its_line() -> None:
    switches = [
        Switch(name="a", switches=("b",), line=1),
        Switch(name="b", switches=("c",), line=2),
        Switch(name="c", switches=("a",), line=3),
    ]
    with pytest.raises(InputError, match=r"^f:3: .*circle: a -> b -> c -> a"):
        make_tree(switches, "f")


def test_a_link_to_a_switch_that_nobody_describes_is_refused() -> None:
    with pytest.raises(InputError, match=r"^f:4: the switch a leads to b, which is not described"):
        make_tree([Switch(name="a", switches=("b",), line=4)], "f")


def test_a_chain_of_ten_thousand_switches_is_no_crash() -> None:
    chain = [Switch(name=str(number), switches=(str(number + 1),)) for number in range(10_000)]
    chain.append(Switch(name="10000", nodes=("n",)))
    random.Random(1).shuffle(chain)
    assert make_tree(chain).heights["0"] == 10_001


def test_trees_without_a_common_root_are_told() -> None:
    tree = make_tree([Switch(name="a", nodes=("x", "y")), Switch(name="b", nodes=("z",))])
    assert tree.roots == ("a", "b")
    assert any("more than 2 nodes cannot be placed in one tree" in warning for warning in tree.warnings)
