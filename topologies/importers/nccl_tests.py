"""Logs of nccl-tests and rccl-tests: the table of sizes, times and bandwidths, in any version and as people paste it.

A row is read from the header of its table: columns that a version leaves out or leaves empty are allowed for. GB is 1e9
bytes there, and the size column is the whole buffer (nccl-tests, doc/PERFORMANCE.md).
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from topologies.errors import InputError
from topologies.importers.text import numbered_lines, without_label

_COLUMNS = {
    "size",
    "count",
    "type",
    "redop",
    "root",
    "time",
    "cputime",
    "algbw",
    "busbw",
    "#wrong",
    "error",
    "timestamp",
}
_RANK = re.compile(r"#\s+Rank\s+(\d+)\s+(?:Group\s+(\d+)\s+)?Pid\s+\d+ on\s+(\S+)\s+device\s+(\d+)\s+\[[^\]]*\]\s*(.*)")
_NAME = re.compile(r"\b(\w+)_perf\b")
_SETUP = re.compile(r"#\s*nThread (\d+) nGpus (\d+) minBytes (\d+) maxBytes (\d+)")
_AVERAGE = re.compile(r"#\s*Avg bus bandwidth\s*:\s*([\d.]+)")
_BOUNDS = re.compile(r"#\s*Out of bounds values\s*:\s*(\d+)\s*(OK|FAILED)?")
_CLAIM = re.compile(
    r"\b(\d+)\s*GPUs?\b(?!\s*(?:/|per|each|a)\b)(?!\s*/)|\bNGPUS\s*=\s*(\d+)|--?n(?:p|tasks)[ =](\d+)\b", re.IGNORECASE
)
_FAILURE = re.compile(
    r"Test (?:NCCL|CUDA) failure|Test failure|unhandled (?:cuda|system) error|"
    r"Segmentation fault|srun: error|slurmstepd: error|MPI_ABORT|ncclInvalidUsage",
    re.IGNORECASE,
)
_NUMBER = re.compile(r"-?(?:\d[\d_]*\.?\d*(?:[eE][+-]?\d+)?|nan|inf|N/A)", re.IGNORECASE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One size. Bandwidths are in bytes per second; the in-place half is None where the tool gives none."""

    line: int
    size_bytes: int
    count: int | None
    type: str | None
    redop: str | None
    seconds: float
    algbw: float
    busbw: float
    in_place_seconds: float | None = None
    in_place_busbw: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """One rank line."""

    rank: int
    host: str
    device: int
    product: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RawLog:
    """What the text holds, before anything is concluded."""

    name: str | None
    """Of the program, such as all_reduce; None where the log does not tell."""
    rows: tuple[Row, ...]
    """Rows with a size above 0."""
    devices: tuple[Device, ...]
    gpus_per_process: int | None
    min_bytes: int | None
    max_bytes: int | None
    average_busbw: float | None
    claimed_ranks: tuple[int, ...]
    """Numbers of GPUs or processes that the text around the table names."""
    complete: bool
    """The log ends with its summary."""
    skipped_lines: tuple[int, ...]
    """Rows cut short."""
    zero_rows: int = 0
    """Rows of size 0, which the tool counts in its average."""
    more_tables: bool = False
    """Another table follows, which was not read."""


def read_log(text: str, file: str | Path | None = None) -> RawLog:
    """Read the first table of a log, or the JSON that ``-J`` writes.

    Raises:
        InputError: no rows, a run that failed, or results that were wrong.
    """
    if text.lstrip().startswith("{"):
        return _read_json(text, file)
    lines = [(number, without_label(line)) for number, line in numbered_lines(text, file)]
    columns: list[str] = []
    rows: list[Row] = []
    devices: list[Device] = []
    skipped: list[int] = []
    claims: list[int] = []
    name: str | None = None
    setup: re.Match[str] | None = None
    average: re.Match[str] | None = None
    failure: tuple[int, str] | None = None
    complete = more = False
    zeros = 0
    for number, line in lines:
        plain = line.strip()
        tokens = plain.replace("#wrong", "wrong").replace("#", " ").split()
        bounds = _BOUNDS.search(plain)
        if len(tokens) > 3 and tokens[0] == "size" and "busbw" in tokens:
            more = bool(rows)
            if more:
                break
            columns = tokens
        elif columns and tokens and not plain.startswith("#") and re.fullmatch(r"\d[\d_]*", tokens[0]):
            row = _row(tokens, columns, number, file)
            if row is None:
                skipped.append(number)
            elif row.size_bytes:
                rows.append(row)
            else:
                zeros += 1
        elif bounds is not None:
            complete = True
            if int(bounds[1]) or bounds[2] == "FAILED":
                failure = failure or (number, f"{bounds[1]} values were wrong (Out of bounds values FAILED)")
        elif device := _RANK.search(plain):
            devices.append(
                Device(rank=int(device[1]), host=device[3], device=int(device[4]), product=device[5].strip())
            )
        else:
            name = name or next((match for match in _NAME.findall(plain)), None)
            setup = setup or _SETUP.search(plain)
            average = average or _AVERAGE.search(plain)
            if _FAILURE.search(plain):
                failure = failure or (number, plain)
            if not rows:
                claims += [int(next(filter(None, found))) for found in _CLAIM.findall(plain)]
    if failure is not None:
        raise InputError(
            f"the run failed: {failure[1].split(' / ')[0]}",
            hint="do not use its numbers; repeat the test",
            file=file,
            line=failure[0],
        )
    if not rows:
        raise InputError(
            "holds no row of a table of sizes, times and bandwidths",
            hint="give the output of nccl-tests with its header line",
            file=file,
            line=skipped[0] if skipped else None,
        )
    return RawLog(
        name=name,
        rows=tuple(rows),
        devices=tuple(devices),
        gpus_per_process=int(setup[1]) * int(setup[2]) if setup else None,
        min_bytes=int(setup[3]) if setup else None,
        max_bytes=int(setup[4]) if setup else None,
        average_busbw=float(average[1]) * 1e9 if average else None,
        claimed_ranks=tuple(dict.fromkeys(claims)),
        complete=complete,
        skipped_lines=tuple(skipped),
        zero_rows=zeros,
        more_tables=more,
    )


def _row(tokens: list[str], columns: list[str], line: int, file: str | Path | None) -> Row | None:
    """Fit tokens to the columns: the left part may lack columns, the rest follows the header; None where cut short."""
    start = next(index for index, name in enumerate(columns) if name in ("time", "cputime"))
    left, names = columns[:start], columns[start:]
    position, words = 1, []
    count = None
    if "count" in left and position < len(tokens) and tokens[position].replace("_", "").isdigit():
        count, position = int(tokens[position].replace("_", "")), position + 1
    while position < len(tokens) and not _NUMBER.fullmatch(tokens[position]):
        words.append(tokens[position])
        position += 1
    if "root" in left and position < len(tokens) and re.fullmatch(r"-?\d+", tokens[position]):
        position += 1
    values = tokens[position:]
    wanted = names.index("busbw") + 1
    if len(values) < wanted or not all(_NUMBER.fullmatch(value) for value in values[:wanted]):
        return None
    halves: list[dict[str, float | None]] = []
    for name, value in zip(names, values, strict=False):
        if name in ("time", "cputime"):
            halves.append({})
            name = "time"
        if halves:
            halves[-1].setdefault(name, _number(value))
    wrong = next((half[key] for half in halves for key in ("wrong", "error") if half.get(key)), None)
    out, second = halves[0], halves[1] if len(halves) > 1 else {}
    if wrong or any(isinstance(half.get("busbw"), float) and math.isnan(half["busbw"] or 0) for half in halves):
        raise InputError(
            f"the results are wrong at {int(tokens[0].replace('_', '')):,} bytes",
            hint="a bandwidth of wrong results says nothing; mend the machine and repeat the test",
            file=file,
            line=line,
        )
    seconds, algbw, busbw = out.get("time"), out.get("algbw"), out.get("busbw")
    if seconds is None or algbw is None or busbw is None:
        return None
    busbw_in_place, time_in_place = second.get("busbw"), second.get("time")
    return Row(
        line=line,
        size_bytes=int(tokens[0].replace("_", "")),
        count=count,
        type=words[0] if words else None,
        redop=words[1] if len(words) > 1 else None,
        seconds=seconds * 1e-6,
        algbw=algbw * 1e9,
        busbw=busbw * 1e9,
        in_place_seconds=None if time_in_place is None else time_in_place * 1e-6,
        in_place_busbw=None if busbw_in_place is None else busbw_in_place * 1e9,
    )


def _number(text: str) -> float | None:
    return float(text.replace("_", "")) if _NUMBER.fullmatch(text) and text.upper() != "N/A" else None


def _read_json(text: str, file: str | Path | None) -> RawLog:
    """Read what ``-J`` writes (nccl-tests 2.17 and later)."""
    try:
        content = json.loads(text)
    except json.JSONDecodeError as error:
        raise InputError(
            f"is not complete JSON: {error.msg}", hint="the run was cut off; repeat it", file=file, line=error.lineno
        ) from None
    results = content.get("results") if isinstance(content, Mapping) else None
    if not isinstance(results, list) or not results:
        raise InputError("holds no results of nccl-tests", hint="give the file that -J wrote", file=file)
    bounds = content.get("out_of_bounds") or {}
    if bounds.get("count") or str(bounds.get("okay", "true")) != "true" or content.get("errors"):
        raise InputError(
            f"the run failed: {content.get('errors') or bounds}", hint="do not use its numbers; repeat it", file=file
        )
    config = content.get("config") or {}
    programs = [match[1] for word in content.get("args") or () if (match := _NAME.search(str(word)))]
    rows = [_json_row(one, file) for one in results]
    devices = [
        Device(
            rank=int(one["rank"]),
            host=str(one.get("hostname", "")),
            device=int(one.get("device", 0)),
            product=str(one.get("device_info", "")),
        )
        for one in config.get("devices") or ()
    ]
    return RawLog(
        name=programs[0] if programs else None,
        rows=tuple(row for row in rows if row.size_bytes),
        zero_rows=sum(not row.size_bytes for row in rows),
        devices=tuple(devices),
        gpus_per_process=int(config.get("nthreads", 1)) * int(config.get("ngpus", 1)),
        min_bytes=config.get("minimum_bytes"),
        max_bytes=config.get("maximum_bytes"),
        average_busbw=(content.get("average_bus_bandwidth") or {}).get("bandwidth", 0.0) * 1e9 or None,
        claimed_ranks=(),
        complete="out_of_bounds" in content,
        skipped_lines=(),
    )


def _json_row(one: Mapping[str, Any], file: str | Path | None) -> Row:
    half, second = one.get("out_of_place") or one.get("in_place"), one.get("in_place") or {}
    if half is None:
        raise InputError("a result has neither out-of-place nor in-place numbers", file=file)
    try:
        return Row(
            line=0,
            size_bytes=int(one["size"]),
            count=int(one["count"]),
            type=str(one["type"]),
            redop=str(one["redop"]),
            seconds=float(half.get("time", half.get("cpu_time"))) * 1e-6,
            algbw=float(half["alg_bw"]) * 1e9,
            busbw=float(half["bus_bw"]) * 1e9,
            in_place_seconds=float(second["time"]) * 1e-6 if "time" in second else None,
            in_place_busbw=float(second["bus_bw"]) * 1e9 if "bus_bw" in second else None,
        )
    except (KeyError, TypeError, ValueError):
        raise InputError("a result lacks size, time or bandwidth", hint="the run was cut off", file=file) from None
