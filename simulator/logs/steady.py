"""From all lines of a log to its steady iterations, and what in it contradicts itself."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import replace

from simulator.logs.lines import largest
from simulator.logs.trainer_log import StepRecord, TrainerLog

ALIKE = 0.02
"""Ranks and hosts that print the same iteration differ by less; another attempt at it differs by more."""
AT_ONCE_SECONDS = 1.0
"""Lines of one iteration that are written within this time come from several ranks; no job restarts as fast."""
SLOW_START = 1.05
"""Leading iterations that are slower than the later ones by more belong to the start: compilation, autotuning."""
OUTLIER = 1.3
"""Iterations that take longer than the median by this factor hold something else: a save, an evaluation, a stall."""
MOST_OUTLIERS = 0.2
CONTRADICTION = 0.03
"""Printed figures that should be equal may differ by this much (rounding, averages over different windows)."""


def settle(log: TrainerLog) -> TrainerLog:
    """Count every iteration once, time it by the clock where the log prints no time, and find the steady ones."""
    attempts, repeated = _attempts(log.steps)
    warnings = list(log.warnings)
    if repeated:
        warnings.append(f"{repeated} lines repeat an iteration (several ranks or hosts write): each is counted once")
    if len(attempts) > 1:
        again = ", ".join(str(attempt[0].step) for attempt in attempts[1:4])
        warnings.append(f"the run was restarted at iteration {again}: the first one after a restart is left out")
    steps = tuple(itertools.chain.from_iterable(attempts))
    steady, told = (steps, []) if log.averaged else _steady(attempts)
    by_clock = not log.averaged and not any(one.seconds for one in steps)
    if by_clock:
        times = {id(one): seconds for attempt in attempts for one, seconds in _gaps(attempt)}
        steady = tuple(replace(one, seconds=times.get(id(one))) for one in steady)
        by_clock = any(one.seconds for one in steady)
    settled = replace(log, steps=steps, steady=steady, timed_by_clock=by_clock)
    return replace(settled, warnings=tuple(dict.fromkeys([*warnings, *told, *_contradictions(settled)])))


def _attempts(records: Sequence[StepRecord]) -> tuple[list[list[StepRecord]], int]:
    """Split where the count of iterations goes back; lines that only repeat an iteration are merged and counted."""
    attempts: list[dict[int, StepRecord]] = []
    repeated = 0
    for record in records:
        same = attempts[-1].get(record.step) if attempts else None
        if same is not None and _alike(same, record):
            memory = largest((same.memory_bytes, record.memory_bytes))
            attempts[-1][record.step] = replace(same, memory_bytes=memory)
            repeated += 1
        elif not attempts or record.step <= next(reversed(attempts[-1])):
            attempts.append({record.step: record})
        else:
            attempts[-1][record.step] = record
    return [list(attempt.values()) for attempt in attempts], repeated


def _alike(one: StepRecord, other: StepRecord) -> bool:
    if one.pace is None or other.pace is None:
        return True
    if one.clock_seconds is not None and other.clock_seconds is not None:
        return abs(one.clock_seconds - other.clock_seconds) < AT_ONCE_SECONDS
    return abs(one.pace / other.pace - 1) <= ALIKE


def _gaps(attempt: Sequence[StepRecord]) -> Iterator[tuple[StepRecord, float]]:
    """Yield every iteration but the first with the time since the line before, by iteration."""
    for before, one in itertools.pairwise(attempt):
        if before.clock_seconds is not None and one.clock_seconds is not None:
            seconds = (one.clock_seconds - before.clock_seconds) / (one.step - before.step)
            if seconds > 0:
                yield one, seconds


def _steady(attempts: Sequence[Sequence[StepRecord]]) -> tuple[tuple[StepRecord, ...], list[str]]:
    """Drop what is no steady iteration, with what a reader must know about the rest."""
    warnings: list[str] = []
    kept: list[StepRecord] = []
    for index, attempt in enumerate(attempts):
        warm = [one for one in attempt if one.pace is not None and one.step > 1]
        if warm and index > 0 and warm[0] is attempt[0]:
            warm = warm[1:]
        while len(warm) > 2 and _pace(warm[0]) > SLOW_START * statistics.median(map(_pace, warm[1:])):
            warm = warm[1:]
        kept += warm
    if not kept:
        return (), ["no steady iteration is logged: a first one compiles, autotunes or captures graphs"]
    middle = statistics.median(map(_pace, kept))
    close = [one for one in kept if 1 / OUTLIER <= _pace(one) / middle <= OUTLIER]
    outside = len(kept) - len(close)
    if outside > MOST_OUTLIERS * len(kept):
        warnings.append(
            f"{outside} of {len(kept)} iterations differ from the median by more than 30 %: it is uncertain"
        )
    elif outside:
        warnings.append(f"{outside} of {len(kept)} iterations are outliers (a save, an evaluation, a stall): left out")
        kept = close
    whole = [one for one in kept if not one.skipped]
    if not whole:
        warnings.append("every update was skipped: forward and backward are timed, the optimizer and the loss are not")
    elif len(whole) < len(kept):
        warnings.append(f"{len(kept) - len(whole)} iterations skipped their update: left out")
    return tuple(whole or kept), warnings


def _pace(record: StepRecord) -> float:
    assert record.pace is not None
    return record.pace


def _contradictions(log: TrainerLog) -> list[str]:
    """Compare figures of the log that should agree."""
    told = []
    seconds = log.step_seconds

    def check(what: str, printed: float | None, expected: float | None) -> None:
        if printed and expected and abs(printed / expected - 1) > CONTRADICTION:
            told.append(
                f"the log contradicts itself: it prints {printed:,.5g} {what}, its step time gives {expected:,.5g}"
            )

    def printed(name: str) -> float | None:
        values = [value for one in log.steady if (value := getattr(one, name)) is not None]
        return statistics.median(values) if values else None

    if seconds and not log.averaged and not log.timed_by_clock:
        batch, gpus = log.global_batch_size, log.gpus
        tokens = log.tokens_per_step if log.seq_length else None
        check("samples/s", printed("samples_per_second"), batch / seconds if batch else None)
        check(
            "tokens/s per GPU",
            printed("tokens_per_second_per_gpu"),
            tokens / seconds / gpus if tokens and gpus else None,
        )
    return told
