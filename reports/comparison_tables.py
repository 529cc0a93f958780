"""Rows of predicted beside measured, as a reader wants them."""

from __future__ import annotations

from reports.comparison import Comparison, relative_error
from reports.goodput_comparison import RUNS, GoodputComparison
from reports.tables import PART_NAMES, number, percent, seconds, size


def comparison_rows(comparison: Comparison) -> list[tuple[str, str, str, str]]:
    """Predicted, measured and error of step time, tokens per second, MFU and memory."""
    predicted, measured, error = comparison.predicted, comparison.measured, comparison.error
    speeds = [side["tokens_per_second_per_gpu"] for side in (predicted, measured)]
    speed = ["-" if value is None else number(value) for value in speeds]
    speed_error = speeds[0] / speeds[1] - 1 if speeds[0] and speeds[1] else None
    cpu = ("CPU time of a rank", *_beside(predicted.get("cpu_seconds"), measured.get("cpu_seconds")))
    return [
        (
            "Step time",
            seconds(predicted["step_seconds"]),
            seconds(measured["step_seconds"]),
            _signed(error["step_seconds"]),
        ),
        *([cpu] if comparison.contended and error.get("cpu_seconds") is not None else []),
        ("Tokens/s per GPU", speed[0], speed[1], _signed(speed_error)),
        ("MFU", percent(predicted["mfu"]), percent(measured["mfu"]), _signed(error["mfu"])),
        ("Peak memory", size(predicted["memory_bytes"]), size(measured["memory_bytes"]), _signed(error["memory"])),
    ]


def phase_rows(comparison: Comparison) -> list[tuple[str, str, str, str]]:
    """Predicted, measured and error of each phase that the job timed."""
    return [
        (
            PART_NAMES.get(name, name.replace("_", " ").capitalize()),
            seconds(phase["predicted_seconds"]),
            seconds(phase["measured_seconds"]),
            _signed(phase["error"]),
        )
        for name, phase in comparison.phases.items()
    ]


def goodput_rows(found: GoodputComparison) -> list[tuple[str, str, str, str]]:
    """Predicted, measured and error of the goodput and wall time of a whole job, and the time lost to each cause."""
    predicted, measured = found.predicted, found.measured
    rows = [
        (
            "Goodput",
            f"{percent(predicted['goodput'])} ({percent(predicted['goodput_p10'])} to "
            f"{percent(predicted['goodput_p90'])})",
            percent(measured["goodput"]),
            _signed(relative_error(predicted["goodput"], measured["goodput"])),
        ),
        ("Wall time", *_beside(predicted["wall_seconds"], measured["wall_seconds"])),
    ]
    for cause in found.causes:
        lost = (side["lost_seconds"].get(cause, 0.0) for side in (predicted, measured))
        rows.append((f"Lost to {cause}", *_beside(*lost)))
    return rows


def goodput_words(found: GoodputComparison) -> str:
    """What the two goodputs are of."""
    inside = "inside" if found.within_band else "outside"
    return (
        f"goodput: predicted is that of {RUNS} simulated runs of as many steps, the measured one lies {inside} their "
        f"middle 80 %; for the whole training the plan expects {percent(found.promised)}"
    )


def _beside(predicted: float | None, measured: float | None) -> tuple[str, str, str]:
    return seconds(predicted), seconds(measured), _signed(relative_error(predicted, measured))


def _signed(value: float | None) -> str:
    return percent(value, sign=True)
