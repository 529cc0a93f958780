"""The models that a calibration runs in real layouts: too small for the arithmetic to matter, or just large enough."""

from __future__ import annotations

from scenarios.model import Attention, Layer, Mlp, ModelSpec

TINY, WIDE = 32, 512
"""Hidden sizes: of a layer whose arithmetic costs next to nothing, and of one whose weights are worth copying."""
WIDE_TOKENS = 512
"""Tokens of a micro-batch where activations are worth moving."""


def small_model(layers: int, hidden_size: int, part: int = 1) -> ModelSpec:
    """A model of few layers; ``part`` divides heads and feed-forward width as a tensor parallel rank sees them."""
    heads = 4 if hidden_size == TINY else 8
    layer = Layer(
        mixer=Attention(heads=heads // part, kv_heads=4 // part, head_dim=hidden_size // heads),
        feed_forward=Mlp(ffn_hidden_size=2 * hidden_size // part, gated=True),
    )
    return ModelSpec(
        name="small", hidden_size=hidden_size, vocab_size=64, layer_kinds={"dense": layer}, pattern=("dense",) * layers
    )
