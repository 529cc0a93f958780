"""From the time at peak to the predicted step: what each cause adds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from planner.reasons import PARTS

GEMM_PARTS = ("gemm", "head")
"""Parts of compute that, with attention, do the model's FLOPs: what they take above the ideal is time below peak."""
NAMES = PARTS | {
    "ideal": "model FLOPs at the dense peak",
    "gemm_below_peak": "matrix products below the peak (shapes, clocks) and the longest stage's extra work",
    "attention_below_peak": "attention below the peak",
    "below_peak": "compute above that",
    "other compute": "other compute",
}
SMALLEST = 1e-6
"""Parts below this share of the step are left out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One part of a whole, for a chart and the table beside it."""

    key: str
    value: float

    @property
    def words(self) -> str:
        """What it is, in the middle of a sentence."""
        return NAMES.get(self.key, self.key.replace("_", " "))


def waterfall(predicted: dict[str, Any]) -> list[Part]:
    """Split a predicted step into what the hardware's peak would need and what comes on top; the parts add up.

    The first part is the time of the model's FLOPs at the dense peak (MFU times step), where the peak is known; the
    matrix products count as what they take above it.
    """
    breakdown: dict[str, float] = predicted["breakdown_seconds"]
    causes: dict[str, float] = dict(predicted.get("compute_parts_seconds") or {})
    compute = breakdown.get("compute", 0.0)
    ideal = predicted["mfu"] * predicted["step_seconds"] if predicted["mfu"] is not None else None
    parts: list[Part] = []
    if causes:
        causes["other compute"] = compute - sum(causes.values())
        if ideal is not None:
            scores = ideal * predicted.get("attention_flops_share", 0.0)
            gemms = sum(causes.pop(part, 0.0) for part in GEMM_PARTS) - (ideal - scores)
            parts += [Part(key="ideal", value=ideal), Part(key="gemm_below_peak", value=gemms)]
            parts.append(Part(key="attention_below_peak", value=causes.pop("attention", 0.0) - scores))
        parts += [Part(key=key, value=value) for key, value in causes.items()]
    elif ideal is not None:
        parts += [Part(key="ideal", value=ideal), Part(key="below_peak", value=compute - ideal)]
    else:
        parts.append(Part(key="compute", value=compute))
    parts += [Part(key=key, value=value) for key, value in breakdown.items() if key != "compute"]
    return [part for part in parts if abs(part.value) > SMALLEST * predicted["step_seconds"]]
