"""Deductions from a few measurements: bad nodes from pair tests, oversubscription, and what fits into free GPUs."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class PairVerdict:
    """What pair tests say of nodes."""

    bad: tuple[str, ...]
    """Slow with a partner that is fast elsewhere."""
    suspects: tuple[tuple[str, str], ...]
    """Slow pairs of which one or both are bad, and no other test tells which."""
    paths: tuple[tuple[str, str], ...]
    """Slow pairs of two nodes that are fast elsewhere: the way between them is at fault."""
    good: tuple[str, ...]
    """Fast with some partner."""
    untested: tuple[str, ...]
    """Tested only with bad nodes, which tells nothing of them."""


def deduce_bad_nodes(pairs: Iterable[tuple[str, str, float]], *, slow_share: float = 0.75) -> PairVerdict:
    """Find bad nodes among pairs (node, node, bandwidth in any unit); the fastest pair is the norm.

    A node that is fast with anyone is good. The partner of a good node in a slow pair is bad. A slow pair with a bad
    node is explained by it.

    Args:
        pairs: at least one.
        slow_share: below this share of the fastest pair, a pair is slow.

    Raises:
        ValueError: no pair, or a bandwidth that is not above 0.

    >>> deduce_bad_nodes([("a", "b", 49.4), ("c", "d", 88.4), ("b", "d", 86.8)]).bad
    ('a',)
    """
    tests = list(pairs)
    if not tests or not all(rate > 0 for _, _, rate in tests):
        raise ValueError("give at least one pair, each with a bandwidth above 0")
    norm = max(rate for _, _, rate in tests)
    slow = [(one, other) for one, other, rate in tests if rate < slow_share * norm]
    good = {node for one, other, rate in tests if rate >= slow_share * norm for node in (one, other)}
    bad = {one if other in good else other for one, other in slow if (one in good) != (other in good)}
    open_pairs = [pair for pair in slow if not good & set(pair) and not bad & set(pair)]
    nodes = dict.fromkeys(node for one, other, _ in tests for node in (one, other))
    suspected = {node for pair in open_pairs for node in pair}
    return PairVerdict(
        bad=tuple(node for node in nodes if node in bad),
        suspects=tuple(open_pairs),
        paths=tuple(pair for pair in slow if good >= set(pair)),
        good=tuple(node for node in nodes if node in good),
        untested=tuple(node for node in nodes if node not in good | bad | suspected),
    )


def oversubscription_between(near: float, far: float) -> float:
    """Return the oversubscription that two measured bandwidths imply: within one switch, and across switches.

    The same collective, the same number of nodes and large messages are assumed; at least 1.

    Raises:
        ValueError: a bandwidth is not above 0.

    >>> round(oversubscription_between(43.5, 19.5), 1)
    2.2
    """
    if near <= 0 or far <= 0:
        raise ValueError(f"bandwidths must be above 0, got {near} and {far}")
    return max(1.0, near / far)


def free_per_domain(domains: Mapping[str, Sequence[str]], free: Collection[str]) -> dict[str, int]:
    """Count free GPUs by NVLink (or other scale-up) domain.

    >>> free_per_domain({"left": ["g0", "g1"], "right": ["g2", "g3"]}, {"g0", "g2", "g3"})
    {'left': 1, 'right': 2}
    """
    return {name: sum(gpu in free for gpu in gpus) for name, gpus in domains.items()}


def groups_that_fit(free: Mapping[str, int], size: int) -> int:
    """Return how many groups of ``size`` GPUs fit without crossing a domain.

    Raises:
        ValueError: a size below 1.

    >>> groups_that_fit({"island 0": 6, "island 1": 2}, 8)
    0
    """
    if size < 1:
        raise ValueError(f"a group has at least 1 GPU, got {size}")
    return sum(count // size for count in free.values())
