import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from topologies.importers.diagnosis import (
    deduce_bad_nodes,
    free_per_domain,
    groups_that_fit,
    oversubscription_between,
)

# NVIDIA/nccl-tests issue 106: all_reduce between pairs of nodes, GB/s.
PAIRS = [("644", "699", 49.4), ("632", "641", 88.4), ("284", "678", 49.3), ("641", "644", 49.3), ("404", "699", 86.8)]


def test_the_bad_node_of_a_published_case() -> None:
    verdict = deduce_bad_nodes(PAIRS)
    assert verdict.bad == ("644",)
    assert verdict.suspects == (("284", "678"),)
    assert verdict.paths == ()
    assert set(verdict.good) == {"699", "632", "641", "404"}


def test_two_good_nodes_with_a_slow_pair_accuse_the_path() -> None:
    verdict = deduce_bad_nodes([("a", "b", 90), ("c", "d", 90), ("a", "c", 40)])
    assert (verdict.bad, verdict.paths) == ((), (("a", "c"),))


def test_a_partner_of_a_bad_node_only_is_not_accused() -> None:
    verdict = deduce_bad_nodes([("a", "b", 90), ("a", "x", 40), ("x", "y", 40)])
    assert (verdict.bad, verdict.suspects, verdict.untested) == (("x",), (), ("y",))


@given(st.integers(3, 8), st.data())
def test_all_pairs_always_find_all_bad_nodes(count: int, data: st.DataObject) -> None:
    nodes = [f"n{index}" for index in range(count)]
    bad = set(data.draw(st.lists(st.sampled_from(nodes), max_size=count - 2, unique=True)))
    pairs = [(one, other, 49.0 if bad & {one, other} else 88.0) for one, other in itertools.combinations(nodes, 2)]
    verdict = deduce_bad_nodes(pairs)
    assert set(verdict.bad) == bad
    assert verdict.suspects == verdict.paths == ()


def test_nothing_to_judge_is_an_error() -> None:
    with pytest.raises(ValueError, match="at least one pair"):
        deduce_bad_nodes([])


def test_oversubscription_of_a_published_case() -> None:
    """NVIDIA/nccl issue 319: 8 nodes on one switch 43.5 GB/s, over two switches 19.5."""
    assert oversubscription_between(43.5, 19.5) == pytest.approx(2.23, abs=0.005)
    assert oversubscription_between(19.5, 43.5) == 1.0
    with pytest.raises(ValueError, match="above 0"):
        oversubscription_between(1.0, 0.0)


def test_six_and_two_free_do_not_hold_eight() -> None:
    """volcano-sh/volcano issue 5751."""
    domains = {"island 0": [f"g{index}" for index in range(8)], "island 1": [f"g{index}" for index in range(8, 16)]}
    free = {f"g{index}" for index in (0, 1, 2, 3, 4, 5, 8, 9)}
    counts = free_per_domain(domains, free)
    assert counts == {"island 0": 6, "island 1": 2}
    assert [groups_that_fit(counts, size) for size in (8, 4, 2)] == [0, 1, 4]
