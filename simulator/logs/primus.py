"""Primus (Megatron on AMD): Megatron's iterations with pairs of the current and the mean value, ``13.1/13.2``."""

from __future__ import annotations

import re
from collections.abc import Sequence

from simulator.logs.lines import GIB, NUMBER, any_line, largest, positive, whole
from simulator.logs.megatron import megatron_facts
from simulator.logs.trainer_log import TrainerLog

_RANK = re.compile(r"\brank-\d+/(\d+)\b")
_PAIR = re.compile(rf"elapsed time per iteration \(ms\):\s*{NUMBER}/{NUMBER}")
_MEMORY = re.compile(rf"mem usage/free/total/usage_ratio:\s*({NUMBER})GB/{NUMBER}GB/({NUMBER})GB")


def recognise(lines: Sequence[str]) -> bool:
    """Tell whether a line is one of Primus's iterations."""
    return any_line(_PAIR, lines)


def read(lines: Sequence[str]) -> list[TrainerLog]:
    """Read one run; of a pair the first value is this iteration's."""
    facts = megatron_facts(lines)
    worlds = [int(match[1]) for line in lines if (match := _RANK.search(line))]
    memory = [match for line in lines if (match := _MEMORY.search(line))]
    gpus = worlds[-1] if worlds else facts["gpus"]
    sequence = facts["seq_length"]
    if sequence is None and gpus and facts["steps"]:
        last = facts["steps"][-1]
        if last.tokens_per_second_per_gpu and last.seconds and last.samples:
            per_sample = last.tokens_per_second_per_gpu * gpus * last.seconds / last.samples
            rounded = whole(round(per_sample / 64) * 64.0)
            sequence = rounded if rounded and abs(per_sample / rounded - 1) < 1e-3 else None
    facts |= {
        "gpus": gpus,
        "seq_length": sequence,
        "peak_memory_bytes": largest(value * GIB for match in memory if (value := positive(match[1]))),
        "device_memory_bytes": largest(value * GIB for match in memory if (value := positive(match[2]))),
        "memory_kind": "device" if memory else None,
    }
    return [TrainerLog(**facts, format="Primus", flops="model")]
