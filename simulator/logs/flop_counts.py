"""What a printed TFLOP/s counts: trainers differ in recomputed FLOPs and in the masked half of causal attention."""

from __future__ import annotations

from scenarios.model import ModelSpec

SAME_COUNT = 0.02
"""A printed figure is taken for a count of FLOPs when it differs by less; neighbouring counts differ by more."""

HEADWAYS = "model FLOPs, attention without the masked half"


def flop_counts(model: ModelSpec, seq_length: int) -> dict[str, float]:
    """Return FLOPs per token by way of counting.

    Backward is twice forward. Hardware counts repeat the forward of every layer and not that of the head, as
    96 B s l h^2 (1 + s/6h + V/16lh) does (Narayanan et al. 2021; 72 and s/6h, V/12lh without recomputation).
    """
    forward = model.forward_flops_per_token(seq_length)
    attention, head = forward.get("attention", 0.0), forward.get("head", 0.0)
    layers = sum(forward.values()) - head
    return {
        HEADWAYS: 3 * (layers + head),
        "model FLOPs, attention with the masked half": 3 * (layers + attention + head),
        "hardware FLOPs (all layers recomputed), attention without the masked half": 4 * layers + 3 * head,
        "hardware FLOPs (all layers recomputed), attention with the masked half": 4 * (layers + attention) + 3 * head,
        "6 FLOPs per parameter": 6.0 * model.num_active_params,
    }


def recognise_count(flops_per_token: float, model: ModelSpec, seq_length: int) -> str | None:
    """Name the count that a printed figure follows; None if it follows none."""
    counts = flop_counts(model, seq_length)
    nearest = min(counts, key=lambda name: abs(flops_per_token / counts[name] - 1))
    return nearest if abs(flops_per_token / counts[nearest] - 1) <= SAME_COUNT else None
