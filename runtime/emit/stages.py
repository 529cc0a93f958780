"""The stages of a layout as every trainer needs them: layers and recompute letters in model order."""

from __future__ import annotations

from scenarios.layout import Layout
from scenarios.model import ModelSpec
from simulator.stages import stage_layers, tail_layers

LETTER = {"full": "f", "selective": "s", "none": "n"}


def stage_letters(model: ModelSpec, layout: Layout) -> tuple[str, ...]:
    """One text per virtual stage, in model order, with the recompute letter of each layer: f, s or n.

    >>> from scenarios.model import load_model
    >>> stage_letters(load_model("llama3-8b"), Layout(pp=5, recompute="full"))[0]
    'ffffff'
    """
    if any(stage.recompute_layers or stage.recompute for stage in layout.stages):
        return tuple(stage.modes(layout.recompute) for stage in layout.stages)
    counts = [stage.layers for stage in layout.stages]
    counts = counts or list(stage_layers(model.num_layers, layout.pp, layout.vpp, tail_layers(model)))
    return tuple(LETTER[layout.recompute] * count for count in counts)


def equal_stages(model: ModelSpec, layout: Layout) -> bool:
    """Whether every virtual stage holds the same number of layers, and nothing else than layers is placed by hand."""
    return len({len(letters) for letters in stage_letters(model, layout)}) == 1 and model.mtp_layers == 0
