"""torchtitan: ``step:  4  loss:  7.62585  memory: 66.91GiB(37.51%)  tps: 10,050  tflops: 314.71  mfu: 13.99%``.

``tps`` is tokens per second of one GPU; every rank may write the same step; an unknown GPU gets the peak of an A100.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from simulator.logs.lines import GIB, NUMBER, any_line, clock, largest, number, positive
from simulator.logs.trainer_log import StepRecord, TrainerLog

_STEP = re.compile(rf"\bstep:\s*(\d+)\s+loss:\s*({NUMBER}|nan)(.*)")
_VALUE = re.compile(rf"\b(memory|tps|tflops|mfu):\s*({NUMBER})")
_DEVICE = re.compile(r"capacity: (.+?) with ([\d.]+)GiB memory")
_FALLBACK = re.compile(r"Peak flops undefined for: (.+?), fallback to (\S+)")
_PARAMETERS = re.compile(rf"\bsize: ({NUMBER}) total parameters")


def recognise(lines: Sequence[str]) -> bool:
    """Tell whether a line is one of torchtitan's steps."""
    return any((match := _STEP.search(line)) and "tps:" in match[3] for line in lines)


def read(lines: Sequence[str]) -> list[TrainerLog]:
    """Read one run."""
    records = [_record(match, line) for line in lines if (match := _STEP.search(line))]
    devices = [match for line in lines if (match := _DEVICE.search(line))]
    parameters = [number(match[1]) for line in lines if (match := _PARAMETERS.search(line))]
    fallback = [match for line in lines if (match := _FALLBACK.search(line))]
    memory = largest(one.memory_bytes for one in records)
    warnings = [
        f"torchtitan does not know {match[1]} and took the peak of {match[2]}: the printed MFU means nothing"
        for match in fallback[:1]
    ]
    return [
        TrainerLog(
            format="torchtitan",
            steps=tuple(records),
            num_params=parameters[-1] if parameters else None,
            device=devices[-1][1] if devices else None,
            device_memory_bytes=float(devices[-1][2]) * GIB if devices else None,
            peak_memory_bytes=memory,
            memory_kind="reserved" if memory else None,
            flops="model",
            peak_is_guess=any_line(_FALLBACK, lines),
            warnings=tuple(warnings),
        )
    ]


def _record(match: re.Match[str], line: str) -> StepRecord:
    values = {name: positive(value) for name, value in _VALUE.findall(match[3])}
    memory, mfu = values.get("memory"), values.get("mfu")
    return StepRecord(
        step=int(match[1]),
        loss=number(match[2]),
        tokens_per_second_per_gpu=values.get("tps"),
        tflops_per_gpu=values.get("tflops"),
        mfu=mfu / 100 if mfu else None,
        memory_bytes=memory * GIB if memory else None,
        clock_seconds=clock(line),
    )
