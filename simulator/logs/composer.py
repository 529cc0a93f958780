"""Composer and llm-foundry: a line ``[epoch=1][batch=5/5]:`` and below it ``Train throughput/tokens_per_sec: 20082.8``.

``batch`` counts from 1, ``time/batch`` counts the finished ones; the four decimals of ``batches_per_sec`` are too few.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from simulator.logs.lines import NUMBER, any_line, clock, largest, number, positive, whole
from simulator.logs.trainer_log import StepRecord, TrainerLog

_BATCH = re.compile(r"\[batch=(\d+)/\d+\]")
_VALUE = re.compile(rf"\bTrain ([\w/.-]+): ({NUMBER})\s*$")
_NODES, _PER_NODE = re.compile(r"\bnum_nodes: (\d+)"), re.compile(r"\bnum_gpus_per_node: (\d+)")
_GPU_TOLERANCE = 0.01
_COARSE = 0.01


def recognise(lines: Sequence[str]) -> bool:
    """Tell whether the log has Composer's blocks."""
    return any_line(_BATCH, lines) and any_line(_VALUE, lines)


def read(lines: Sequence[str]) -> list[TrainerLog]:
    """Read one run."""
    blocks: list[tuple[int, float | None, dict[str, float]]] = []
    for line in lines:
        if match := _BATCH.search(line):
            blocks.append((int(match[1]), clock(line), {}))
        elif blocks and (match := _VALUE.search(line)) and (value := number(match[2])) is not None:
            blocks[-1][2][match[1]] = value
    values = [block for _, _, block in blocks]
    batch = next((found for block in values if (found := whole(_ratio(block, "time/sample", "time/batch")))), None)
    gpus, warnings = _gpus(lines, values)
    records = tuple(_record(step, seen, block, batch) for step, seen, block in blocks)
    memory = largest(_memory(block) for block in values)
    micro = values[-1].get("trainer/device_train_microbatch_size")
    return [
        TrainerLog(
            format="Composer",
            steps=records,
            global_batch_size=batch,
            tokens_per_sample=_ratio(values[-1], "time/token", "time/sample"),
            micro_batch_size=whole(micro),
            gpus=gpus,
            peak_memory_bytes=memory,
            memory_kind="reserved" if memory else None,
            warnings=(*warnings, *_coarse(values[-1], records[-1])),
        )
    ]


def _record(step: int, seen: float | None, block: dict[str, float], batch: int | None) -> StepRecord:
    """Seconds come from samples per second, which has more digits than batches per second."""
    samples = block.get("throughput/samples_per_sec")
    per_batch = block.get("throughput/batches_per_sec")
    seconds = batch / samples if batch and samples else 1 / per_batch if per_batch else None
    return StepRecord(
        step=step,
        seconds=seconds,
        samples=batch,
        loss=block.get("loss/train/total"),
        mfu=block.get("throughput/device/mfu"),
        tokens_per_second_per_gpu=block.get("throughput/device/tokens_per_sec") or None,
        samples_per_second=samples or None,
        memory_bytes=_memory(block),
        clock_seconds=seen,
    )


def _ratio(block: dict[str, float], above: str, below: str) -> float | None:
    return block[above] / block[below] if block.get(above) and block.get(below) else None


def _memory(block: dict[str, float]) -> float | None:
    """Composer's gigabytes are decimal."""
    gigabytes = block.get("memory/peak_reserved_mem") or block.get("memory/current_reserved_mem")
    return gigabytes * 1e9 if gigabytes else None


def _gpus(lines: Sequence[str], values: Sequence[dict[str, float]]) -> tuple[int | None, list[str]]:
    """Total over per-device throughput, beside what the configuration states."""
    ratios = [
        found
        for one in values
        if (found := _ratio(one, "throughput/tokens_per_sec", "throughput/device/tokens_per_sec"))
    ]
    seen = whole(ratios[-1], _GPU_TOLERANCE * ratios[-1]) if ratios else None
    nodes, per_node = (
        next((positive(match[1]) for line in lines if (match := pattern.search(line))), None)
        for pattern in (_NODES, _PER_NODE)
    )
    stated = whole(nodes * per_node) if nodes and per_node else None
    if seen and stated and seen != stated:
        return seen, [f"the configuration states {stated} GPUs, the throughput is that of {seen}: {seen} is used"]
    return seen or stated, []


def _coarse(block: dict[str, float], record: StepRecord) -> list[str]:
    per_batch = block.get("throughput/batches_per_sec")
    if not per_batch or not record.seconds or abs(1 / per_batch / record.seconds - 1) <= _COARSE:
        return []
    return [
        f"batches_per_sec {per_batch:g} is rounded to {1 / per_batch:.0f} s per step; samples_per_sec gives "
        f"{record.seconds:.1f} s"
    ]
