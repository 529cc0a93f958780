"""NeMo 1 and 2: ``train_step_timing in s=3.130`` in a progress bar, or ``train_step_timing in s: 3.13`` in a line."""

from __future__ import annotations

import re
from collections.abc import Sequence

from simulator.logs.lines import NUMBER, any_line, number, positive, whole
from simulator.logs.trainer_log import StepRecord, TrainerLog

_TIMING = re.compile(rf"train_step_timing in s\s*[=:]\s*({NUMBER})")
_VALUE = re.compile(
    rf"\b(global_step|consumed_samples|reduced_train_loss|global_batch_size|TFLOPS_per_GPU)\s*[=:]\s*({NUMBER})"
)
_BAR = re.compile(r"\b\d+/\d+ \[((?:\d+:)?\d+:\d\d)<")
_SLOWER_CLOCK = 1.1


def recognise(lines: Sequence[str]) -> bool:
    """Tell whether a line holds NeMo's time of a step."""
    return any_line(_TIMING, lines)


def read(lines: Sequence[str]) -> list[TrainerLog]:
    """Read one run."""
    found = [(line, match[1]) for line in lines if (match := _TIMING.search(line))]
    values = [{name: number(text) for name, text in _VALUE.findall(line)} for line, _ in found]
    batches = {batch for one in values if (batch := _batch(one))}
    batch = next(iter(batches)) if len(batches) == 1 else None
    records = [
        StepRecord(
            step=int(one.get("global_step") or 0),
            seconds=positive(timing),
            samples=batch,
            loss=one.get("reduced_train_loss"),
            tflops_per_gpu=one.get("TFLOPS_per_GPU") or None,
        )
        for one, (_, timing) in zip(values, found, strict=True)
    ]
    warnings = _bar_warning(found[-1][0], records[-1])
    return [
        TrainerLog(
            format="NeMo", steps=tuple(records), global_batch_size=batch, flops="model", warnings=tuple(warnings)
        )
    ]


def _batch(values: dict[str, float | None]) -> int | None:
    """Samples of a step: stated, or all so far over the steps, which count from 0 or from 1."""
    stated, samples, step = (values.get(name) for name in ("global_batch_size", "consumed_samples", "global_step"))
    if stated or not samples or step is None:
        return whole(stated)
    from_one = whole(samples / step, 1e-9) if step else None
    from_zero = whole(samples / (step + 1), 1e-9)
    return from_one or from_zero if not (from_one and from_zero) else None


def _bar_warning(line: str, last: StepRecord) -> list[str]:
    """The bar's own clock covers validation, checkpoints and the start."""
    match = _BAR.search(line)
    if match is None or not last.seconds or last.step < 1:
        return []
    elapsed = 0
    for part in match[1].split(":"):
        elapsed = 60 * elapsed + int(part)
    mean = elapsed / last.step
    if mean < _SLOWER_CLOCK * last.seconds:
        return []
    return [
        f"the progress bar took {mean:.2f} s per step, the step itself {last.seconds:.2f} s: "
        "the rest is start, validation and saving"
    ]
