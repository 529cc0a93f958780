"""A step timeline as a Chrome trace, for ui.perfetto.dev and chrome://tracing.

Format: Trace Event Format (Google), JSON object form: complete events (ph X), counters (C) and metadata (M).
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Sequence
from typing import Any

from simulator.outcome import Counter, Span, StepTimeline

LANES = {
    "forward": "compute",
    "backward": "compute",
    "backward_input": "compute",
    "backward_weight": "compute",
    "recompute": "compute",
    "optimizer": "compute",
    "straggler": "compute",
    "tp_comm": "tp cp ep",
    "cp_comm": "tp cp ep",
    "ep_comm": "tp cp ep",
    "p2p": "pipeline p2p",
    "dp_comm": "data parallel",
}
"""Thread on which a span of each kind is drawn; other kinds are drawn on their stream."""


def chrome_trace(timeline: StepTimeline, name: str = "headway") -> dict[str, Any]:
    """Return the trace as plain data: a process per pipeline rank, a thread per lane, times in microseconds.

    Spans that overlap in one lane without nesting, which the format forbids, go to a further thread of that lane.
    """
    threads = _threads(timeline.spans)
    names = sorted(set(threads.values()), key=lambda one: (one[0], _sort_key(one[1])))
    number = {one: position + 1 for position, one in enumerate(names)}
    events: list[dict[str, Any]] = []
    for rank in sorted({rank for rank, _ in names}):
        named = timeline.rank_names[rank] if timeline.rank_names else f"pipeline rank {rank}"
        events.append(_metadata("process_name", rank, 0, name=named))
        events.append(_metadata("process_sort_index", rank, 0, sort_index=rank))
    for (rank, lane), thread in number.items():
        events.append(_metadata("thread_name", rank, thread, name=lane))
        events.append(_metadata("thread_sort_index", rank, thread, sort_index=thread))
    for i, span in enumerate(timeline.spans):
        start, end = _nanoseconds(span)
        arguments = {key: value for key, value in (("bytes", span.bytes), ("group", span.group)) if value}
        event = {
            "name": span.name,
            "cat": span.kind,
            "ph": "X",
            "ts": start / 1000,
            "dur": (end - start) / 1000,
            "pid": span.rank,
            "tid": number[threads[i]],
        }
        events.append(event | ({"args": arguments} if arguments else {}))
    events += _counters(timeline.counters, 1 + max((rank for rank, _ in names), default=0))
    return {
        "traceEvents": events,
        "displayTimeUnit": "ms",
        "otherData": {"title": name, "step_seconds": timeline.step_seconds, "source": "simulated"},
    }


def _counters(counters: Sequence[Counter], process: int) -> list[dict[str, Any]]:
    """A process of counter tracks, in per cent."""
    if not counters:
        return []
    events = [_metadata("process_name", process, 0, name="links in use (%)")]
    events.append(_metadata("process_sort_index", process, 0, sort_index=-1))
    for one in counters:
        last = None
        for start, value in zip(one.start_seconds, one.values, strict=True):
            shown = round(100 * value, 2)
            if shown != last:
                event = {"name": one.name, "ph": "C", "pid": process, "ts": round(start * 1e9) / 1000}
                events.append(event | {"args": {"used": shown}})
            last = shown
    return events


def trace_bytes(timeline: StepTimeline, name: str = "headway", *, compress: bool = True) -> bytes:
    """Return the trace as JSON text, gzipped unless told otherwise; equal timelines give equal bytes."""
    text = json.dumps(chrome_trace(timeline, name), separators=(",", ":"), allow_nan=False).encode()
    return gzip.compress(text, compresslevel=6, mtime=0) if compress else text


def _nanoseconds(span: Span) -> tuple[int, int]:
    """Start and end; rounded alike, so that spans that touch still touch."""
    return round(span.start_seconds * 1e9), round((span.start_seconds + span.duration_seconds) * 1e9)


def _metadata(kind: str, rank: int, thread: int, **arguments: Any) -> dict[str, Any]:
    return {"name": kind, "ph": "M", "pid": rank, "tid": thread, "args": arguments}


def _sort_key(lane: str) -> tuple[int, str]:
    known = list(dict.fromkeys(LANES.values()))
    base = lane.split(" #")[0]
    return known.index(base) if base in known else len(known), lane


def _threads(spans: Sequence[Span]) -> dict[int, tuple[int, str]]:
    """Give each span (by its index) a lane on which it nests in, or follows, the spans before it."""
    bounds = [_nanoseconds(span) for span in spans]
    ordered = sorted(range(len(spans)), key=lambda i: (bounds[i][0], -bounds[i][1]))
    open_ends: dict[tuple[int, str], list[int]] = {}
    threads: dict[int, tuple[int, str]] = {}
    for i in ordered:
        (start, end), span = bounds[i], spans[i]
        lane, copy = LANES.get(span.kind, span.stream), 1
        while True:
            thread = (span.rank, lane if copy == 1 else f"{lane} #{copy}")
            ends = open_ends.setdefault(thread, [])
            while ends and ends[-1] <= start:
                ends.pop()
            if not ends or end <= ends[-1]:
                break
            copy += 1
        ends.append(end)
        threads[i] = thread
    return threads
