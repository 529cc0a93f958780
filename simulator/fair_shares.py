"""Max-min fair shares of storage: of one that everybody uses, and of two where a copy reads here, writes there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence


def shared_rates(caps: Sequence[float], capacity: float = 1.0) -> list[float]:
    """Max-min fair rates of flows with a cap each on one shared capacity: fill from the smallest cap up."""
    rates = [0.0] * len(caps)
    left = capacity
    for place, index in enumerate(sorted(range(len(caps)), key=caps.__getitem__)):
        rates[index] = min(caps[index], left / (len(caps) - place))
        left -= rates[index]
    return rates


def crossing_shares(
    caps: Sequence[float], loads: Sequence[Mapping[str, float]], capacities: Mapping[str, float]
) -> list[float]:
    """Max-min fair shares of flows that load one store each, and of one that loads several.

    A flow of share x takes ``x * load`` of a store's time. Each store divides its time as ``shared_rates`` does; the
    flow that crosses moves at the pace of the store that gives it least, and the others get what it leaves.

    Args:
        caps: largest share of each flow.
        loads: of each flow, by store; one flow at most may have several.
        capacities: share of each store's time that is there.
    """
    shares = list(caps)
    for _ in range(1 + any(len(one) > 1 for one in loads)):
        limits = [share if len(one) > 1 else cap for share, cap, one in zip(shares, caps, loads, strict=True)]
        shares = list(limits)
        for store, room in capacities.items():
            here = [index for index, one in enumerate(loads) if store in one]
            given = shared_rates([limits[index] * loads[index][store] for index in here], room)
            for index, share in zip(here, given, strict=True):
                shares[index] = min(shares[index], share / loads[index][store])
    return shares
