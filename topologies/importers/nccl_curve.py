"""What a log of nccl-tests means: how many ranks really ran, the latency, the bandwidth curve, and its traps.

algbw = size / time; busbw = algbw times a factor of the number of ranks n (nccl-tests, doc/PERFORMANCE.md), so that
busbw / algbw tells n whatever the text around the table says.
"""

from __future__ import annotations

import itertools
import math
import re
import statistics
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from topologies.cluster import CollectiveKind, CollectivePoint
from topologies.errors import InputError
from topologies.importers.nccl_tests import RawLog, Row, read_log
from topologies.units import format_quantity

KINDS: dict[str, CollectiveKind] = {
    "all_reduce": "all_reduce",
    "all_gather": "all_gather",
    "reduce_scatter": "reduce_scatter",
    "alltoall": "all_to_all",
    "broadcast": "broadcast",
    "sendrecv": "send_recv",
}
"""Programs of nccl-tests that headway has a model for."""

_SPELLINGS = {
    "all_reduce": r"all_?reduce",
    "all_gather": r"all_?gather",
    "reduce_scatter": r"reduce_?scatter",
    "alltoall": r"all_?to_?all",
    "broadcast": r"broadcast",
    "sendrecv": r"send_?recv",
    "hypercube": r"hypercube",
    "reduce": r"(?<!all)(?<!all_)reduce(?!_?scatter)",
}
_DOUBLE = {"all_reduce"}
_SINGLE = {"all_gather", "reduce_scatter", "alltoall", "gather", "scatter"}
_ELEMENT_BYTES = {
    "int8": 1, "uint8": 1, "f8e4m3": 1, "f8e5m2": 1, "fp8_e4m3": 1, "fp8_e5m2": 1, "half": 2, "bfloat16": 2,
    "int32": 4, "uint32": 4, "float": 4, "int64": 8, "uint64": 8, "double": 8,
}  # fmt: skip
SMALL_BYTES = 1024
"""Messages up to this size show the latency."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NcclRun:
    """One table, understood. Bandwidths in bytes per second."""

    collective: str | None
    """Program of nccl-tests, such as all_reduce; None where neither the log nor the file's name tells."""
    ranks: int | None
    ranks_low: int | None
    """Fewest and most ranks that busbw / algbw allows, given the two decimals that are printed; None: not inferable."""
    ranks_high: int | None
    hosts: int | None
    """From rank lines, where all ranks have one."""
    product: str | None
    latency_seconds: float | None
    """Median over messages up to 1 KiB; None where there are none."""
    log: RawLog
    outliers: tuple[Row, ...] = ()
    warnings: tuple[str, ...] = ()

    @property
    def rows(self) -> tuple[Row, ...]:
        """All sizes."""
        return self.log.rows

    @property
    def peak(self) -> Row:
        """The row of the highest out-of-place busbw."""
        return max(self.log.rows, key=lambda row: row.busbw)

    def first_size_at(self, share: float) -> int:
        """Return the smallest size whose busbw reaches a share of the peak; the first row may be past it already."""
        return next(row.size_bytes for row in self.log.rows if row.busbw >= share * self.peak.busbw)

    @property
    def points(self) -> tuple[CollectivePoint, ...]:
        """The curve as ``Measured.collectives`` holds it, without outliers; empty where kind or ranks are unknown."""
        if self.collective not in KINDS or self.ranks is None:
            return ()
        return tuple(
            CollectivePoint(
                kind=KINDS[self.collective], ranks=self.ranks, size_bytes=row.size_bytes, time_seconds=row.seconds
            )
            for row in self.log.rows
            if row not in self.outliers
        )


def import_nccl_tests(
    text: str, file: str | Path | None = None, *, collective: str | None = None, claimed_ranks: int | None = None
) -> NcclRun:
    """Read a log of nccl-tests or rccl-tests and say what it means.

    Args:
        text: the log.
        file: its name; ``allgather`` or the like in it names the collective where the log does not.
        collective: program of nccl-tests, where neither tells.
        claimed_ranks: how many ranks there should be.

    Raises:
        InputError: no rows, a failed run, wrong results, or hypercube (which fails on healthy machines).
    """
    log = read_log(text, file)
    name = log.name or collective or _from_file(file) or _from_rows(log)
    if name == "hypercube":
        raise InputError(
            "hypercube_perf fails its own validation on healthy machines", hint="measure all_reduce instead", file=file
        )
    low, high = rank_bounds(name, log.rows)
    run = NcclRun(
        collective=name,
        ranks=_ranks(log, name, low, high, claimed_ranks),
        ranks_low=low,
        ranks_high=high,
        hosts=_hosts(log),
        product=log.devices[0].product if log.devices else None,
        latency_seconds=_latency(log.rows),
        log=log,
        outliers=_outliers(log.rows),
    )
    claims = log.claimed_ranks if claimed_ranks is None else (*log.claimed_ranks, claimed_ranks)
    return replace(run, warnings=(*_rank_warnings(run, claims), *_curve_warnings(run)))


def _from_file(file: str | Path | None) -> str | None:
    plain = Path(file).name.lower().replace("-", "_") if file else ""
    return next((name for name, pattern in _SPELLINGS.items() if re.search(pattern, plain)), None)


def _from_rows(log: RawLog) -> str | None:
    """Tell the collective from its numbers where only one fits."""
    last = log.rows[-1]
    ratio, reduces = last.busbw / last.algbw if last.algbw else 1.0, (last.redop or "none") != "none"
    if ratio > 1.01:
        return "all_reduce"
    if reduces and ratio < 0.99:
        return "reduce_scatter"
    return None


def rank_bounds(name: str | None, rows: tuple[Row, ...]) -> tuple[int | None, int | None]:
    """Return the fewest and most ranks that the printed bandwidths allow, over all rows.

    all_reduce: n = 2 / (2 - busbw/algbw); all_gather, reduce_scatter, alltoall: n = 1 / (1 - busbw/algbw).
    """
    if name not in _DOUBLE | _SINGLE:
        return None, None
    top = 2.0 if name in _DOUBLE else 1.0
    low, high = 2.0, math.inf
    half = 0.5 * 10.0 ** (9 - 2)
    for row in rows:
        if row.algbw <= 100 * half:
            continue
        least = (row.busbw - half) / (row.algbw + half)
        most = (row.busbw + half) / (row.algbw - half)
        low = max(low, top / (top - least) if least < top else math.inf)
        high = min(high, top / (top - most) if most < top else math.inf)
    if not math.isfinite(low) or not math.isfinite(high):
        return None, None
    first, last = math.ceil(low - 1e-9), math.floor(high + 1e-9)
    return (first, last) if first <= last else (None, None)


def _ranks(log: RawLog, name: str | None, low: int | None, high: int | None, claimed: int | None) -> int | None:
    """The one number that the bandwidths allow; else what counts, rank lines or the user say, if they allow it."""
    if low is not None and low == high:
        return low
    listed = max((device.rank for device in log.devices), default=-1) + 1
    for candidate in (_from_counts(log, name), listed or None, claimed):
        if candidate is not None and (low is None or high is None or low <= candidate <= high):
            return candidate
    return None


def _from_counts(log: RawLog, name: str | None) -> int | None:
    """all_gather and its like print elements of one rank and bytes of all: size = count x bytes x n."""
    last = log.rows[-1]
    width = _ELEMENT_BYTES.get(last.type or "")
    if name not in _SINGLE or width is None or not last.count:
        return None
    ranks, rest = divmod(last.size_bytes, last.count * width)
    return ranks if rest == 0 and ranks > 1 else None


def _hosts(log: RawLog) -> int | None:
    listed = {device.rank for device in log.devices}
    return len({device.host for device in log.devices}) if listed and listed == set(range(max(listed) + 1)) else None


def _latency(rows: tuple[Row, ...]) -> float | None:
    small = [row.seconds for row in rows if row.size_bytes <= SMALL_BYTES]
    return statistics.median_high(small) if small else None


def _outliers(rows: tuple[Row, ...]) -> tuple[Row, ...]:
    """Rows slower than both neighbours by 30 %, which larger messages never are on a quiet machine."""
    return tuple(
        row
        for before, row, after in zip(rows, rows[1:], rows[2:], strict=False)
        if row.seconds > 1.3 * max(before.seconds, after.seconds)
    )


def _rank_warnings(run: NcclRun, claims: tuple[int, ...]) -> Iterator[str]:
    log, low, high = run.log, run.ranks_low, run.ranks_high
    allowed = "" if low is None else f"{low}" if low == high else f"{low} to {high}"
    wrong = [claim for claim in dict.fromkeys(claims) if run.ranks is not None and claim != run.ranks]
    if wrong:
        yield f"the text says {wrong[0]} ranks, the numbers say {run.ranks}: wrong rank count"
    listed = max((device.rank for device in log.devices), default=-1) + 1
    if listed and low is not None and high is not None and not low <= listed <= high:
        yield f"the rank lines count {listed}, busbw / algbw says {allowed}"
    if run.ranks is None:
        yield f"the number of ranks cannot be told{f' ({allowed} fit)' if allowed else ''}; say how many there were"
    elif low is None:
        told = "rank lines say" if listed else "was said"
        yield f"busbw / algbw does not tell the number of ranks; {run.ranks} is what {told}"
    if run.collective is None:
        yield "the log does not name its collective; say which it was"
    elif run.collective not in KINDS:
        yield f"{run.collective} is no collective of training that headway models"


def _curve_warnings(run: NcclRun) -> Iterator[str]:
    log, rows, peak = run.log, run.rows, run.peak
    for row in run.outliers:
        micro = row.seconds * 1e6
        yield f"outlier: {micro:.2f} us at {row.size_bytes} B (warm-up or a busy machine), left out of the curve"
    average = log.average_busbw
    if average is not None:
        if average < 0.9 * peak.busbw:
            yield (
                f"the average bus bandwidth {average / 1e9:.4g} GB/s covers all sizes: no link speed "
                f"(peak {peak.busbw / 1e9:.4g} GB/s)"
            )
        halves = [row.busbw for row in rows] + [row.in_place_busbw for row in rows if row.in_place_busbw is not None]
        halves += [0.0] * (2 * log.zero_rows)
        if abs(statistics.fmean(halves) - average) > 0.02 * average:
            yield "the average covers rows that are not shown"
    if log.max_bytes is not None and rows[-1].size_bytes > log.max_bytes:
        yield f"rows up to {rows[-1].size_bytes:,} B contradict maxBytes {log.max_bytes:,} of the header"
    for before, after in itertools.pairwise(rows):
        if after.busbw < 0.98 * before.busbw and before.busbw > 0.1 * peak.busbw and after not in run.outliers:
            yield (
                f"busbw falls from {before.busbw / 1e9:.2f} to {after.busbw / 1e9:.2f} GB/s at {after.size_bytes:,} B: "
                "a switch of protocol or algorithm"
            )
    if len(rows) > 1 and rows[-1].busbw > 1.05 * rows[-2].busbw:
        yield "not saturated: the largest message still gains more than 5 %; extrapolate with care"
    if log.skipped_lines:
        yield f"{len(log.skipped_lines)} rows are cut short, the first on line {log.skipped_lines[0]}: truncated"
    if not log.complete:
        yield "no summary at the end: the log may be truncated, and whether results were right is unknown"
    if log.more_tables:
        yield "another table follows and was not read; split the log to read it"
    if not all(_consistent(row) for row in rows):
        odd = next(row for row in rows if not _consistent(row))
        yield f"algbw is not size / time on line {odd.line}: edited, or units differ"


def _consistent(row: Row) -> bool:
    expected = row.size_bytes / row.seconds if row.seconds else 0.0
    return abs(row.algbw - expected) <= max(0.02 * expected, 0.02e9)


def explain_wire(
    run: NcclRun,
    *,
    num_nodes: int,
    node_network_bytes_per_second: float,
    scale_up_bytes_per_second: float,
    nvls: bool,
) -> str | None:
    """Say why a measured busbw lies above what the links carry; None where it does not.

    A ring moves busbw over every link. Two other algorithms do not: a tree between two nodes sends each byte over the
    NICs once (algbw is what the NICs see), and NVLS reduces in the switch, where each GPU sends and receives every byte
    once instead of 2(n-1)/n times.

    Args:
        run: an all_reduce.
        num_nodes: over which it ran.
        node_network_bytes_per_second: all NICs of a node, one direction.
        scale_up_bytes_per_second: of a GPU, one direction.
        nvls: whether GPUs and switches can reduce in the switch (Hopper and later with NVSwitch).
    """
    peak = run.peak
    wire = scale_up_bytes_per_second if num_nodes == 1 else node_network_bytes_per_second
    if peak.busbw <= wire * 1.005:
        return None
    links = "NVLink of a GPU" if num_nodes == 1 else "NICs of a node"
    reached, carried = (format_quantity(rate, "bytes_per_second") for rate in (peak.busbw, wire))
    said = f"busbw {reached} is above the {carried} of the {links}"
    if run.collective == "all_reduce" and peak.algbw <= wire:
        if num_nodes == 2:
            return f"{said}: a tree between two nodes sends each byte once; do not use it for more nodes"
        if nvls:
            return f"{said}: NVLS reduces in the switch; a ring reaches less"
    return f"{said}, and no algorithm explains it: check the number of ranks, nodes and NICs"


def measured(run: NcclRun, source: str) -> dict[str, Any]:
    """Return the raw ``measured`` mapping of a cluster with this curve in it.

    Raises:
        InputError: collective or ranks are unknown, or headway does not model the collective.
    """
    if not run.points:
        what = "names no collective that headway models" if run.collective not in KINDS else "does not tell its ranks"
        raise InputError(f"the log {what}", hint="give --collective or --ranks", file=source)
    environment = {"source": Path(source).name} | ({"gpu": run.product} if run.product else {})
    return {
        "date": "not stated in the log",
        "environment": environment,
        "collectives": [
            {
                "kind": one.kind,
                "ranks": one.ranks,
                "size": f"{one.size_bytes:.0f} B",
                "time": f"{one.time_seconds * 1e6:.6g} us",
            }
            for one in run.points
        ],
    }
