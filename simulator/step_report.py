"""What ``headway simulate --step`` says of a step: as plain data, and as lines of text."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from simulator.critical_path import Segment, by_kind
from simulator.flows import NOT_MODELLED
from simulator.shared_step import SharedStep
from topologies.units import format_quantity

SHOWN_DELAYS = 5
NOT_PLAYED = (*NOT_MODELLED, "bursts inside a forward or backward: its traffic of one kind is spread evenly over it")
"""What a played step does not know."""
CAUSES = {
    "oversubscription": "levels of the fabric that the closed form charges to every NIC are charged to links instead",
    "schedule": "unequal stages and the ends of the pipeline, op by op",
    "paths": "traffic on its own way through the fabric takes longer than the closed form's",
    "stragglers": "slow GPUs and jitter",
    "contention": "traffic shares links",
}


def differences(found: SharedStep) -> dict[str, float]:
    """Split what lies between the closed form and the played step by cause; the parts add up."""
    closed, parts = found.predicted.total_seconds, found.breakdown_seconds
    stragglers = found.timeline.step_seconds - found.alone_seconds - parts["paths"] - parts["contention"]
    return {
        "oversubscription": found.untapered_seconds - closed,
        "schedule": found.alone_seconds - found.untapered_seconds,
        "paths": parts["paths"],
        "stragglers": stragglers,
        "contention": parts["contention"],
    }


def network_json(found: SharedStep) -> dict[str, Any]:
    """Return what the network floor adds to the answer: differences, critical path, links in use, events."""
    content: dict[str, Any] = {
        "difference_seconds": differences(found),
        "critical_path": {
            "seconds_by_kind": by_kind(found.path),
            "segments": [asdict(one) for one in found.path],
        },
        "network": {
            "flows": found.flows,
            "replica_classes": found.classes,
            "exact": found.exact,
            "transfers": found.counters.transfers,
            "solves": found.counters.solves,
            "looked_up": found.counters.looked_up,
            "others": found.others,
        },
        "not_modelled": list(NOT_PLAYED),
    }
    used = found.utilisation
    if used is not None:
        content["links"] = {
            "mean": used.mean,
            "peak": used.peak,
            "busiest": [{"link": name, "share": share} for name, share in used.busiest],
            "bytes": used.bytes_moved,
            "counters": [
                {"name": one.name, "seconds": one.start_seconds[1] - one.start_seconds[0], "shares": one.values}
                for one in used.counters
            ],
        }
    return content


def network_lines(found: SharedStep) -> Iterator[str]:
    """Tell why the step differs from the closed form, what decides its length, and which links it uses."""
    for cause, seconds in differences(found).items():
        if abs(seconds) > 1e-4 * found.timeline.step_seconds:
            yield f"{_signed(seconds)}: {CAUSES[cause]}"
    shares = ", ".join(
        f"{kind.replace('_', ' ')} {100 * seconds / found.timeline.step_seconds:.1f} %"
        for kind, seconds in by_kind(found.path).items()
    )
    yield f"critical path: {shares}"
    for one in sorted((part for part in found.path if part.link), key=_delay, reverse=True)[:SHOWN_DELAYS]:
        yield f"  {_where(one)}: {_told(one.seconds)} instead of {_told(one.alone_seconds or 0)}, held up by {one.link}"
    used = found.utilisation
    if used is None:
        yield "the network is not played: CPU cores play the part of GPUs, and what was measured holds what they share"
    else:
        yield "links in use, mean and busiest moment: " + "; ".join(_merged(used.mean, used.peak))
        yield "busiest links: " + ", ".join(f"{name} {100 * share:.1f} %" for name, share in used.busiest[:3])
    for name, rounds in found.others.items():
        through = f"went through {rounds} times" if rounds else "was not through at the end of the step"
        yield f"beside it: {name} {through}"
    if not found.exact:
        yield (
            f"hashed paths make every replica another: they are drawn into {found.classes:,} groups (by --seed), each "
            "at the pace of its slowest, which made steps up to 1 % too long where all could be played"
        )
    yield (
        f"{found.flows:,} flows, {found.classes:,} class{'es' * (found.classes > 1)} of replicas; "
        f"{found.counters.transfers:,} transfers that may be held up, {found.counters.solves:,} solves"
    )
    yield f"not modelled: {'; '.join(NOT_PLAYED)}"


def _delay(one: Segment) -> float:
    return one.seconds - (one.alone_seconds or 0.0)


def _where(one: Segment) -> str:
    rank = "" if one.rank < 0 else f" on pipeline rank {one.rank}"
    return f"{one.name}{rank}" + (f", replica {one.replica}" if one.replica >= 0 else "")


def _merged(mean: dict[str, float], peak: dict[str, float]) -> Iterator[str]:
    """Rails that are used alike are told once."""
    groups: dict[str, list[str]] = {}
    for name in mean:
        groups.setdefault(name.split(", rail")[0], []).append(name)
    for name, members in groups.items():
        low, high = min(mean[one] for one in members), max(mean[one] for one in members)
        spread = f"{100 * high:.1f} %" if high - low < 5e-4 else f"{100 * low:.1f} to {100 * high:.1f} %"
        yield f"{name} {spread} ({100 * max(peak[one] for one in members):.0f} %)"


def _told(seconds: float) -> str:
    return format_quantity(seconds, "seconds")


def _signed(seconds: float) -> str:
    return f"{'+' if seconds >= 0 else '-'}{_told(abs(seconds))}"
