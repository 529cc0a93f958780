"""The runs of a calibration: models too small for their arithmetic to matter, or just large enough, in real layouts.

The simulator predicts the same runs (``runtime.fixed_costs``): what they take beyond that is a cost of the software.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from scenarios.job import Job
from scenarios.layout import Layout, Stage
from scenarios.model import Attention, Layer, Mlp, ModelSpec, Moe
from scenarios.stack import Stack

TINY, WIDE = 32, 512
"""Hidden sizes: of a layer whose arithmetic costs next to nothing, and of one whose weights leave the caches."""
SEQ_LENGTH, SEQUENCES = 128, 3
"""Of wide models; micro-batches are of one sequence, where weights are what is moved, or of so many."""
VOCABULARY, LARGE_VOCABULARY = 8192, 24576
"""Of runs with a head that counts, and with gradients in buffers that come from the kernel anew (100 MB)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """One run: a small model under a layout."""

    layers: int = 1
    hidden_size: int = TINY
    seq_length: int = 8
    sequences: int = 1
    """Of a micro-batch."""
    vocab_size: int = 64
    experts: int = 0
    """Routed experts of each layer, two for a token; 0: a dense model."""
    microbatches: int = 1
    degrees: dict[str, Any] = field(default_factory=lambda: {"dp": 2, "optimizer_sharding": "none"})
    """Fields of the layout; by default two replicas, so that both cores are busy."""

    @property
    def tokens(self) -> int:
        """Of a micro-batch."""
        return self.seq_length * self.sequences

    @property
    def layout(self) -> Layout:
        """The layout, with as many layers on each stage."""
        layout = Layout.model_validate(self.degrees | {"micro_batch_size": self.sequences})
        slots = layout.pp * layout.vpp
        each = self.layers // slots
        stage = Stage(layers=each, recompute_layers=each if layout.recompute == "full" else 0)
        return layout.model_copy(update={"stages": (stage,) * slots})

    @property
    def job(self) -> Job:
        """What is trained: fp32, so many micro-batches."""
        return Job(
            model=self.model,
            seq_length=self.seq_length,
            global_batch_size=self.microbatches * self.sequences * self.layout.dp,
            precision="fp32",
            stack=Stack(trainer="headway"),
        )

    @property
    def model(self) -> ModelSpec:
        """A Llama-style decoder, or a Mixtral-style one of as many FLOPs a token."""
        heads = 4 if self.hidden_size == TINY else 8
        ffn = 2 * self.hidden_size
        block = (
            Moe(num_experts=self.experts, top_k=2, ffn_hidden_size=ffn // 2, gated=True)
            if self.experts
            else Mlp(ffn_hidden_size=ffn, gated=True)
        )
        layer = Layer(mixer=Attention(heads=heads, kv_heads=4, head_dim=self.hidden_size // heads), feed_forward=block)
        return ModelSpec(
            name="small",
            hidden_size=self.hidden_size,
            vocab_size=self.vocab_size,
            layer_kinds={"layer": layer},
            pattern=("layer",) * self.layers,
        )


TP: dict[str, Any] = {"tp": 2}
SP: dict[str, Any] = {"tp": 2, "sequence_parallel": True}
SHARDED: dict[str, Any] = {"dp": 2, "optimizer_sharding": "zero3"}
SPREAD: dict[str, Any] = {"dp": 2, "ep": 2, "optimizer_sharding": "none"}
ALIKE: dict[str, Any] = {"dp": 2, "optimizer_sharding": "none"}
FULL: dict[str, Any] = {"recompute": "full"}
WIDE_FEW: dict[str, Any] = {"hidden_size": WIDE, "seq_length": SEQ_LENGTH}
WIDE_MANY: dict[str, Any] = WIDE_FEW | {"sequences": SEQUENCES}
SHALLOW, DEEP = 1, 3

LAYERS: dict[str, dict[str, Any]] = {
    "layer": {"microbatches": 2},
    "recompute": {"microbatches": 2, "degrees": ALIKE | FULL},
    "tp": {"degrees": TP},
    "tp_recompute": {"degrees": TP | FULL},
    "sp": {"degrees": SP},
    "dp": {"degrees": SHARDED},
    "moe": {"experts": 8},
    "few_experts": {"experts": 2},
    "ep": {"experts": 8, "degrees": SPREAD},
    "wide_few": WIDE_FEW,
    "wide": WIDE_MANY,
    "wide_tp": WIDE_MANY | {"degrees": TP},
    "wide_sp": WIDE_MANY | {"degrees": SP},
    "wide_dp": WIDE_FEW | {"degrees": SHARDED},
    "wide_moe": WIDE_MANY | {"experts": 4},
    "wide_ep": WIDE_MANY | {"experts": 4, "degrees": SPREAD},
}
"""Runs whose slope over the depth is the cost of one layer and micro-batch."""
PAIRS: dict[str, tuple[Trial, Trial]] = {
    **{name: (Trial(layers=SHALLOW, **more), Trial(layers=DEEP, **more)) for name, more in LAYERS.items()},
    "head": (Trial(**WIDE_MANY), Trial(**WIDE_MANY, vocab_size=VOCABULARY)),
    "tp_head": (Trial(**WIDE_MANY, degrees=TP), Trial(**WIDE_MANY, vocab_size=VOCABULARY, degrees=TP)),
    "microbatch": (Trial(microbatches=2), Trial(microbatches=6)),
    "pp": (Trial(layers=2, microbatches=4, degrees={"pp": 2}), Trial(layers=2, microbatches=8, degrees={"pp": 2})),
    **{
        name: (
            Trial(hidden_size=WIDE, degrees=degrees),
            Trial(hidden_size=WIDE, vocab_size=LARGE_VOCABULARY, degrees=degrees),
        )
        for name, degrees in (("flat", ALIKE), ("flat_sharded", ALIKE | {"optimizer_sharding": "zero1"}))
    },
}
"""Two runs each, of which the second does more of one thing."""
