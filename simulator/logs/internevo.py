"""InternEvo: ``tflops=127.9 step=2 loss=10.1 tgs (tokens/gpu/second)=1031.72 ... num_consumed_tokens=196608``."""

from __future__ import annotations

import re
from collections.abc import Sequence

from simulator.logs.lines import NUMBER, any_line, clock, number, positive
from simulator.logs.trainer_log import StepRecord, TrainerLog

_STEP = re.compile(rf"\bstep=(\d+)\b.*?tgs \(tokens/gpu/second\)=({NUMBER})")
_VALUE = re.compile(
    rf"(?<![\w/])(tflops|loss|num_consumed_tokens|micro_num|inf_nan_skip_batches|largest_length)=({NUMBER})"
)


def recognise(lines: Sequence[str]) -> bool:
    """Tell whether a line is one of InternEvo's steps."""
    return any_line(_STEP, lines)


def read(lines: Sequence[str]) -> list[TrainerLog]:
    """Read one run; tokens of a step are the difference of all tokens so far. Steps count from 0."""
    records: list[StepRecord] = []
    consumed, skipped = 0.0, 0
    for line in lines:
        match = _STEP.search(line)
        if match is None:
            continue
        values = {name: number(text) for name, text in _VALUE.findall(line)}
        total = values.get("num_consumed_tokens")
        skips = int(values.get("inf_nan_skip_batches") or 0)
        first = not records and match[1] != "0"
        tokens = total - consumed if total and total > consumed and not first else None
        records.append(
            StepRecord(
                step=int(match[1]),
                tokens=tokens,
                loss=None if skips > skipped else values.get("loss"),
                tflops_per_gpu=values.get("tflops"),
                tokens_per_second_per_gpu=positive(match[2]),
                skipped=max(0, skips - skipped),
                clock_seconds=clock(line),
            )
        )
        consumed, skipped = total or consumed, skips
    return [TrainerLog(format="InternEvo", steps=tuple(records))]
