"""DeepSpeed's own timer: ``0/50, SamplesPerSec=1292.6`` or ``RunningAvgSamplesPerSec=..., CurrSamplesPerSec=...``.

It tells samples per second and nothing about tokens.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from simulator.logs.lines import GIB, NUMBER, any_line, clock, largest, positive
from simulator.logs.trainer_log import StepRecord, TrainerLog

_OLD = re.compile(rf"\b\d+/(\d+), SamplesPerSec=({NUMBER})")
_NEW = re.compile(rf"global_step=(\d+), RunningAvgSamplesPerSec={NUMBER}, CurrSamplesPerSec=({NUMBER})")
_MEMORY = re.compile(rf"MaxMemAllocated=({NUMBER})GB")

TOKENS_UNKNOWN = "the log prints samples per second only: tokens follow from the sequence length of the plan alone"


def recognise(lines: Sequence[str]) -> bool:
    """Tell whether a line is one of DeepSpeed's timer."""
    return any_line(_OLD, lines) or any_line(_NEW, lines)


def read(lines: Sequence[str]) -> list[TrainerLog]:
    """Read one run; the older form prints the mean since the start, the newer one that of the last steps."""
    records = [
        StepRecord(step=int(match[1]), samples_per_second=positive(match[2]), clock_seconds=clock(line))
        for line in lines
        if (match := _NEW.search(line) or _OLD.search(line))
    ]
    memory = [value * GIB for line in lines if (match := _MEMORY.search(line)) and (value := positive(match[1]))]
    return [
        TrainerLog(
            format="DeepSpeed",
            steps=tuple(records),
            peak_memory_bytes=largest(memory),
            memory_kind="allocated" if memory else None,
            warnings=(TOKENS_UNKNOWN,),
        )
    ]
