"""Megatron-LM, Megatron-Core, Megatron-DeepSpeed, Megatron-Bridge: ``iteration 2/ 5 | consumed samples: 4096 | ...``.

The time of an iteration is in milliseconds or in seconds, as its name says. ``throughput per GPU`` counts model FLOPs;
``TFLOPs`` of Megatron-DeepSpeed counts recomputed FLOPs too where the run recomputes.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Literal

from simulator.logs.lines import MIB, NUMBER, any_line, clock, largest, number, positive, whole
from simulator.logs.trainer_log import StepRecord, TrainerLog

_ITERATION = re.compile(r"\biteration\s+(\d+)\s*/\s*\d+\s*\|(.*)")
_ELAPSED = re.compile(r"elapsed time per iteration \((ms|s)\)")
_BRIDGE_RATE = re.compile(rf"GPU utilization:\s*({NUMBER})\s*MODEL_TFLOP/s/GPU")
_ARGUMENT = re.compile(r"\b([a-z][a-z_]+) \.{3,} (\d+)\s*$")
_WORLD = re.compile(r"using world size: (\d+)")
_DEGREE = re.compile(r"\b(data|context|tensor-model|pipeline-model)-parallel[ -]size: (\d+)")
_PARAMETERS = re.compile(rf"Total number of parameters in billions: ({NUMBER})")
_RESERVED = (
    (re.compile(rf"memory \(MB\).*?max reserved: ({NUMBER})"), MIB),
    (re.compile(rf"mem-max-reserved-gigabytes: ({NUMBER})"), 1e9),
)
_EXPECTED = re.compile(rf"weight and optimizer=({NUMBER}) MB")
_TIMER = re.compile(rf"CurrSamplesPerSec=({NUMBER})")
_TIMER_TOLERANCE = 0.1

DEGREES = {
    "data": "dp",
    "context": "cp",
    "tensor-model": "tp",
    "pipeline-model": "pp",
    "tensor_model_parallel_size": "tp",
    "pipeline_model_parallel_size": "pp",
    "context_parallel_size": "cp",
    "expert_model_parallel_size": "ep",
    "data_parallel_size": "dp",
}
"""Layout fields by the names that Megatron prints."""


def recognise(lines: Sequence[str]) -> bool:
    """Tell whether a line is one of Megatron's iterations."""
    return any(_ELAPSED.search(line) and _ITERATION.search(line) for line in lines)


def read(lines: Sequence[str]) -> list[TrainerLog]:
    """Read one run."""
    facts = megatron_facts(lines)
    records: list[StepRecord] = facts["steps"]
    deepspeed = any_line(re.compile(r"\bTFLOPs:|\[deepspeed|log_dist\]"), lines)
    name = "Megatron-DeepSpeed" if deepspeed else "Megatron"
    warnings = _timer_warnings(lines, records, facts["global_batch_size"])
    flops: Literal["model"] | None = None if deepspeed else "model"
    return [TrainerLog(**facts, format=name, flops=flops, warnings=tuple(warnings))]


def megatron_facts(lines: Sequence[str]) -> dict[str, Any]:
    """Return iterations, batch, sequence, GPUs, layout, parameters and memory as fields of a TrainerLog."""
    arguments = {match[1]: int(match[2]) for line in lines if (match := _ARGUMENT.search(line))}
    arguments |= {match[1]: int(match[2]) for line in lines if "world size" in line for match in _DEGREE.finditer(line)}
    worlds = [int(match[1]) for line in lines if (match := _WORLD.search(line))]
    found = list(_iterations(lines))
    batches = {int(batch) for fields in found if (batch := positive(fields.get("global batch size")))}
    sequences = {length for fields in found if (length := _sequence(fields))}
    reserved = [
        value * unit
        for pattern, unit in _RESERVED
        for line in lines
        if (match := pattern.search(line)) and (value := positive(match[1]))
    ]
    expected = [value * MIB for line in lines if (match := _EXPECTED.search(line)) and (value := positive(match[1]))]
    parameters = [positive(match[1]) for line in lines if (match := _PARAMETERS.search(line))]
    return {
        "steps": tuple(_record(fields) for fields in found),
        "global_batch_size": _only(batches) or (None if batches else arguments.get("global_batch_size")),
        "seq_length": _only(sequences) or (None if sequences else arguments.get("seq_length")),
        "micro_batch_size": arguments.get("micro_batch_size"),
        "gpus": worlds[-1] if worlds else arguments.get("world_size"),
        "layout": {DEGREES[name]: value for name, value in arguments.items() if name in DEGREES},
        "num_params": parameters[-1] * 1e9 if parameters and parameters[-1] else None,
        "peak_memory_bytes": largest(reserved),
        "memory_kind": "reserved" if reserved else None,
        "weight_and_optimizer_bytes": largest(expected),
    }


def _iterations(lines: Iterable[str]) -> Iterator[dict[str, str]]:
    """Yield the fields of each iteration, with its number as ``iteration`` and the line's time as ``clock``."""
    rate = None
    for line in lines:
        if match := _BRIDGE_RATE.search(line):
            rate = match[1]
        if (match := _ITERATION.search(line)) is None:
            continue
        parts = (part.partition(":") for part in match[2].split("|"))
        fields = {key.strip(): value.strip() for key, colon, value in parts if colon}
        fields |= {"iteration": match[1], "clock": line[: match.start()]}
        if rate is not None:
            fields.setdefault("throughput per GPU (TFLOP/s/GPU)", rate)
            rate = None
        yield fields


def _record(fields: dict[str, str]) -> StepRecord:
    seconds = None
    for key, value in fields.items():
        if (match := _ELAPSED.search(key)) and (time := positive(value)):
            seconds = time / 1e3 if match[1] == "ms" else time
    sequence, batch = _sequence(fields), positive(fields.get("global batch size"))
    skipped = int(number(fields.get("number of skipped iterations")) or 0)
    return StepRecord(
        step=int(fields["iteration"]),
        seconds=seconds,
        samples=batch,
        tokens=batch * sequence if batch and sequence else None,
        loss=None if skipped else number(fields.get("lm loss")),
        tflops_per_gpu=positive(fields.get("throughput per GPU (TFLOP/s/GPU)") or fields.get("TFLOPs")),
        tokens_per_second_per_gpu=positive(fields.get("tokens per GPU (tokens/s/GPU)")),
        samples_per_second=positive(fields.get("samples per second")),
        skipped=skipped,
        clock_seconds=clock(fields["clock"]),
    )


def _sequence(fields: dict[str, str]) -> int | None:
    """Tokens of a sample: stated, or all tokens so far over all samples so far where that is whole."""
    stated = positive(fields.get("actual seqlen"))
    samples, tokens = positive(fields.get("consumed samples")), positive(fields.get("consumed tokens"))
    return whole(stated) or whole(tokens / samples if tokens and samples else None)


def _only(values: set[int]) -> int | None:
    """Return the value that all iterations share; None where it changes on the way (ramp-up)."""
    return next(iter(values)) if len(values) == 1 else None


def _timer_warnings(lines: Iterable[str], records: Sequence[StepRecord], batch: int | None) -> list[str]:
    """Compare DeepSpeed's own timer, which counts something else when a pipeline or accumulation is around it."""
    timer = [value for line in lines if (match := _TIMER.search(line)) and (value := positive(match[1]))]
    seconds = [one.seconds for one in records if one.seconds]
    if not timer or not seconds or not batch:
        return []
    rate = batch / seconds[-1]
    if abs(timer[-1] / rate - 1) <= _TIMER_TOLERANCE:
        return []
    return [f"DeepSpeed's timer says {timer[-1]:.1f} samples/s, the iterations say {rate:.1f}: the timer is not used"]
