"""Logbooks kept by hand: ``glm-130B-2022.05.05-19:34:16: 134TFLOPS, 88.5s/iter, 48samples/s``, one run a line.

The colon may be the full-width one of East Asian keyboards. The batch follows from rounded samples per second only.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from simulator.logs.lines import NUMBER, any_line, positive
from simulator.logs.trainer_log import StepRecord, TrainerLog

_ENTRY = re.compile(
    rf"^(?P<name>.*?)[:\uff1a]\s*(?:(?P<tflops>{NUMBER})\s*TFLOPS?)?[,\uff0c\s]*(?P<seconds>{NUMBER})\s*s/iter"
    rf"(?:[,\uff0c\s]+(?P<samples>{NUMBER})\s*samples?/s)?",
    re.IGNORECASE,
)


def recognise(lines: Sequence[str]) -> bool:
    """Tell whether a line states seconds per iteration."""
    return any_line(_ENTRY, lines)


def read(lines: Sequence[str]) -> list[TrainerLog]:
    """Read one run from each line."""
    return [_run(match) for line in lines if (match := _ENTRY.search(line))]


def _run(match: re.Match[str]) -> TrainerLog:
    seconds, rate = positive(match["seconds"]), positive(match["samples"])
    batch = seconds * rate if seconds and rate else None
    record = StepRecord(
        step=1,
        seconds=seconds,
        samples=batch,
        tflops_per_gpu=positive(match["tflops"]),
        samples_per_second=rate,
    )
    warnings = []
    if batch:
        warnings.append(f"the batch is about {batch:,.0f} samples: it follows from rounded samples per second")
    return TrainerLog(
        format="logbook",
        steps=(record,),
        run=match["name"].strip(" -*\t"),
        averaged=True,
        warnings=tuple(warnings),
    )
