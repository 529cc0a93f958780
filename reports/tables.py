"""Numbers and rows as a reader wants them: three digits, units, parts by their full names."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from pydantic import ValidationError

from planner.plan import Plan
from planner.waterfall import Part
from scenarios.layout import Layout
from simulator.outcome import BREAKDOWN, MEMORY_PARTS
from topologies.errors import InputError

PART_NAMES = {
    "ideal": "Model FLOPs at dense peak",
    "below_peak": "Compute above that",
    "gemm": "Matrix products",
    "gemm_below_peak": "Matrix products below peak",
    "attention": "Attention",
    "attention_below_peak": "Attention below peak",
    "memory_bound": "Norms, activations (memory-bound)",
    "recompute": "Recomputation",
    "head": "Output head and loss",
    "host": "Kernel launch, host",
    "compute": "Compute",
    "tp_comm": "Tensor parallel traffic",
    "cp_comm": "Context parallel traffic",
    "ep_comm": "Expert parallel traffic",
    "pp_bubble": "Pipeline bubble",
    "pp_comm": "Pipeline traffic",
    "dp_comm": "Data parallel traffic",
    "optimizer": "Optimizer",
    "straggler": "Stragglers",
    "forward_backward": "Forward and backward",
    "gradient_reduction": "Gradient reduction",
    "weights": "Weights",
    "gradients": "Gradients",
    "activations": "Activations",
    "logits": "Logits",
    "buffers": "Communication buffers",
    "reserve": "Allocator reserve",
}
"""What the parts of a step and of memory are called in reports."""

MOST_STAGES = 16
"""Rows of memory that a reader can take in."""


def number(value: float, digits: int = 3) -> str:
    """Write a number with ``digits`` significant digits, never in exponent form.

    >>> number(1234567), number(0.04567), number(2.5)
    ('1,234,567', '0.0457', '2.5')
    """
    if value == 0 or not math.isfinite(value):
        return "0" if value == 0 else str(value)
    decimals = max(0, digits - 1 - math.floor(math.log10(abs(value))))
    text = f"{value:,.{decimals}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def seconds(value: float | None) -> str:
    """Write a duration.

    >>> seconds(6.1234), seconds(0.0123), seconds(90), seconds(7200), seconds(None)
    ('6.12 s', '12.3 ms', '90 s', '2 h', '-')
    """
    if value == 0:
        return "0 s"
    scales = ((1e-3, 1e-6, "µs"), (0.1, 1e-3, "ms"), (600, 1, "s"), (7200, 60, "min"), (172800, 3600, "h"))
    return _scaled(value, scales, (86400, "days"))


def seconds_beside(value: float, whole: float) -> str:
    """Write a part of ``whole`` seconds in the unit and with the decimals of the whole, so that a column adds up.

    >>> seconds_beside(0.05, 4.0), seconds_beside(4.0, 4.0), seconds_beside(0.0016, 0.0123)
    ('0.050 s', '4.000 s', '1.60 ms')
    """
    factor, unit = (1.0, "s") if whole >= 0.1 else (1e3, "ms")
    decimals = max(0, 3 - math.floor(math.log10(whole * factor)))
    return f"{value * factor:,.{decimals}f} {unit}"


def size(value: float | None) -> str:
    """Write a size in decimal units (1 GB is 1e9 bytes).

    >>> size(71.4e9), size(512e6)
    ('71.4 GB', '512 MB')
    """
    scales = ((1e3, 1, "B"), (1e6, 1e3, "kB"), (1e9, 1e6, "MB"), (1e12, 1e9, "GB"), (1e15, 1e12, "TB"))
    return _scaled(value, scales, (1e15, "PB"))


def usd(value: float | None) -> str:
    """Write an amount of US dollars.

    >>> usd(61_400_000), usd(12.5)
    ('$61.4 M', '$12.5')
    """
    scales = ((1e4, 1, ""), (1e6, 1e3, "k"), (1e9, 1e6, "M"))
    return "-" if value is None else "$" + _scaled(value, scales, (1e9, "B")).strip()


def energy(value_kwh: float | None) -> str:
    """Write an energy that is given in kWh.

    >>> energy(12_300_000)
    '12.3 GWh'
    """
    scales = ((1, 1e-3, "Wh"), (1e3, 1, "kWh"), (1e6, 1e3, "MWh"))
    return _scaled(value_kwh, scales, (1e6, "GWh"))


def watts(value: float | None) -> str:
    """Write a power.

    >>> watts(17.3e6)
    '17.3 MW'
    """
    return _scaled(value, ((1e3, 1, "W"), (1e6, 1e3, "kW")), (1e6, "MW"))


def tokens(value: float | None) -> str:
    """Write a count of tokens.

    >>> tokens(15.6e12)
    '15.6 T tokens'
    """
    scales = ((1e6, 1, "tokens"), (1e9, 1e6, "M tokens"), (1e12, 1e9, "B tokens"))
    return _scaled(value, scales, (1e12, "T tokens"))


def parameters(count: int) -> str:
    """Write a number of weights.

    >>> parameters(405_853_388_800), parameters(29_368_832)
    ('406 B parameters', '29.4 M parameters')
    """
    return _scaled(count, ((1e6, 1, "parameters"), (1e9, 1e6, "M parameters")), (1e9, "B parameters"))


def percent(value: float | None, *, sign: bool = False) -> str:
    """Write a ratio.

    >>> percent(0.4132), percent(-0.03, sign=True), percent(None)
    ('41.3 %', '-3.0 %', '-')
    """
    if value is None:
        return "-"
    rounded = round(100 * value, 1) + 0.0  # -0.0 becomes 0.0
    return f"{rounded:+.1f} %" if sign else f"{rounded:.1f} %"


def _scaled(value: float | None, scales: Iterable[tuple[float, float, str]], largest: tuple[float, str]) -> str:
    if value is None:
        return "-"
    factor, unit = next(((factor, unit) for limit, factor, unit in scales if abs(value) < limit), largest)
    return f"{number(value / factor)} {unit}".strip()


def part_name(part: Part) -> str:
    """Full name of a part."""
    return PART_NAMES.get(part.key, part.key.replace("_", " "))


def absent_parts(predicted: dict[str, Any]) -> list[str]:
    """Name the parts of a step that take no time in this layout."""
    breakdown = predicted["breakdown_seconds"]
    return [PART_NAMES[part] for part in BREAKDOWN if not breakdown.get(part)]


def memory_parts(stage: dict[str, Any]) -> list[Part]:
    """Return the parts of a stage's peak memory that are not zero."""
    parts = [Part(key=part, value=float(stage.get(f"{part}_bytes", 0.0))) for part in MEMORY_PARTS]
    return [part for part in parts if part.value > 0]


def stage_groups(stages: list[dict[str, Any]]) -> list[tuple[str, dict[str, Any]]]:
    """Join neighbouring stages whose memory is the same: ``("1-14", stage)``.

    >>> stage_groups([{"weights_bytes": 2.0}, {"weights_bytes": 1.0}, {"weights_bytes": 1.0}])
    [('0', {'weights_bytes': 2.0}), ('1-2', {'weights_bytes': 1.0})]
    """
    groups: list[tuple[int, int, dict[str, Any]]] = []
    for index, stage in enumerate(stages):
        if groups and groups[-1][2] == stage:
            groups[-1] = (groups[-1][0], index, stage)
        else:
            groups.append((index, index, stage))
    return [(str(first) if first == last else f"{first}-{last}", stage) for first, last, stage in groups]


def some_stages(stages: list[dict[str, Any]]) -> list[tuple[str, dict[str, Any]]]:
    """Groups of stages for a picture or a table; of very many some, among them the first, the last and the fullest."""
    groups = stage_groups(stages)
    if len(groups) <= MOST_STAGES:
        return groups
    fullest = max(range(len(groups)), key=lambda index: sum(part.value for part in memory_parts(groups[index][1])))
    step = (len(groups) - 1) / (MOST_STAGES - 2)
    chosen = {round(index * step) for index in range(MOST_STAGES - 1)} | {fullest}
    return [groups[index] for index in sorted(chosen)]


def layout_label(layout: Any) -> str:
    """Short name of a layout as it stands in a plan file.

    Raises:
        InputError: it is not a layout.
    """
    if isinstance(layout, str):
        return layout
    try:
        fields = {key: value for key, value in layout.items() if key in Layout.model_fields}
        return Layout.model_validate(fields).label()
    except (ValidationError, AttributeError):
        raise InputError(
            "holds something that is not a layout", hint="make the plan again", key="alternatives"
        ) from None


def alternative_rows(plan: Plan) -> list[dict[str, Any]]:
    """The chosen layout and those that lost, with the step time beside the chosen one's."""
    best = plan.predicted["step_seconds"]
    chosen = {"layout": plan.layout.label(), "step_seconds": best, "mfu": plan.predicted["mfu"], "lost_because": None}
    rows = [chosen, *({**one, "layout": layout_label(one["layout"])} for one in plan.alternatives)]
    slowest = max((row["step_seconds"] for row in rows if row["step_seconds"] is not None), default=best)
    return [
        {
            "layout": row["layout"],
            "step": seconds(row["step_seconds"]),
            "slower": None
            if index == 0 or row["step_seconds"] is None
            else percent(row["step_seconds"] / best - 1, sign=True),
            "share": 0 if row["step_seconds"] is None else round(100 * row["step_seconds"] / slowest, 1),
            "mfu": percent(row.get("mfu")),
            "lost_because": row.get("lost_because"),
        }
        for index, row in enumerate(rows)
    ]


def facts(content: dict[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    """Flatten plain data into rows of key and text.

    >>> facts({"mode": "async", "bytes": 5e12, "tiers": [{"name": "nvme"}], "gap": None})
    [('mode', 'async'), ('bytes', '5 TB'), ('tiers', 'name nvme'), ('gap', '-')]
    """
    rows: list[tuple[str, str]] = []
    for key, value in content.items():
        if isinstance(value, dict):
            rows += facts(value, f"{prefix}{key}.")
        else:
            rows.append((f"{prefix}{key}", fact(value, key)))
    return rows


def fact(value: Any, key: str = "") -> str:
    """Write one value; the ending of its key tells the unit."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, dict):
        return ", ".join(f"{inner} {fact(entry, inner)}" for inner, entry in value.items())
    if isinstance(value, list | tuple):
        return "; ".join(fact(entry) for entry in value) or "none"
    if isinstance(value, int | float):
        if key.endswith("bytes"):
            return size(value)
        if key.endswith("seconds"):
            return seconds(value)
        if key == "gap" or key.endswith("goodput"):
            return percent(value)
        return f"{value:,}" if isinstance(value, int) else number(value, 4)
    return "-" if value is None else str(value)
