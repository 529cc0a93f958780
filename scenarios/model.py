"""A decoder as a list of layers: what the step model, the memory model and the runtime need to know about it.

A model file is a Hugging Face ``config.json`` (or the same keys in YAML); ``scenarios.huggingface`` translates it.
"""

from __future__ import annotations

from collections import Counter
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from topologies.document import Document, FileDocument, InputFile

MODELS = Path(__file__).parent / "models"


class Attention(Document):
    """Softmax attention with ``kv_heads`` groups (MHA: equal to ``heads``; MQA: 1)."""

    type: Literal["attention"] = "attention"
    heads: int = Field(ge=1)
    kv_heads: int = Field(ge=1)
    head_dim: int = Field(ge=1)
    window: int | None = None
    """Tokens that a query sees, itself included; None: all before it."""
    chunk: int | None = None
    """Size of the blocks that attention stays inside of (Llama 4); None: no blocks."""
    qkv_bias: bool = False
    output_bias: bool = False
    qk_norm: bool = False
    """RMSNorm on each query and key head (2 * head_dim weights)."""
    sinks: bool = False
    """One learned logit per head."""


class Mla(Document):
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1)."""

    type: Literal["mla"] = "mla"
    heads: int = Field(ge=1)
    q_lora_rank: int | None
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    indexer_heads: int = 0
    """DeepSeek sparse attention: heads of the indexer; 0: none."""
    indexer_head_dim: int = 0
    indexer_top_k: int = 0


class Mamba(Document):
    """A state-space mixer: version 1 (Gu and Dao 2023) or 2 (Dao and Gu 2024)."""

    type: Literal["mamba"] = "mamba"
    generation: Literal[1, 2]
    inner_size: int
    state_size: int
    conv_kernel: int
    dt_rank: int = 0
    """Version 1 only."""
    heads: int = 0
    """Version 2 only."""
    groups: int = 1
    """Version 2 only."""
    conv_bias: bool = True
    projection_bias: bool = False
    inner_norms: bool = False
    """RMSNorm on dt, B and C (Jamba), or on the gated output (version 2)."""


class Mlp(Document):
    """A dense feed-forward block."""

    type: Literal["mlp"] = "mlp"
    ffn_hidden_size: int = Field(ge=1)
    gated: bool
    """Three matrices (SwiGLU and the like) instead of two."""
    bias: bool = False


class Moe(Document):
    """Routed experts, and shared experts that see every token."""

    type: Literal["moe"] = "moe"
    num_experts: int = Field(ge=1)
    top_k: int = Field(ge=1)
    ffn_hidden_size: int = Field(ge=1)
    """Of one routed expert."""
    shared_ffn_hidden_size: int = 0
    """Of all shared experts together."""
    gated: bool = True
    bias: bool = False
    router_bias: bool = False
    """A bias or correction vector of num_experts weights."""
    shared_gate: bool = False
    """A learned gate on the shared expert (hidden_size weights)."""


class Layer(Document):
    """One block: a token mixer and a feed-forward part, either of which may be absent."""

    mixer: Attention | Mla | Mamba | None = Field(default=None, discriminator="type")
    feed_forward: Mlp | Moe | None = Field(default=None, discriminator="type")
    norms: int = 2
    """Norms over the hidden size."""

    @property
    def kind(self) -> str:
        """Name of the kind for tables: ``attention+moe``, ``mamba``, ``mla+mlp``."""
        return "+".join(part.type for part in (self.mixer, self.feed_forward) if part is not None)


class ModelSpec(FileDocument):
    """A decoder-only model. ``pattern`` names a layer kind of ``layer_kinds`` for each layer, in order."""

    hidden_size: int = Field(ge=1)
    vocab_size: int = Field(ge=1)
    layer_kinds: dict[str, Layer] = Field(min_length=1)
    pattern: tuple[str, ...] = Field(min_length=1)
    tied_embeddings: bool = False
    norm_bias: bool = False
    """LayerNorm (weight and bias) instead of RMSNorm."""
    final_norm: bool = True
    embedding_norm: bool = False
    """A norm after the embedding (BLOOM)."""
    embedding_size: int | None = None
    """Width of the token embedding where it is projected to hidden_size (OPT-350m)."""
    position_embeddings: int = 0
    """Rows of a learned position table."""
    head_bias: bool = False
    mtp_layers: int = 0
    """Multi-token prediction depth: each adds a layer of the last kind, two norms and a projection (DeepSeek-V3)."""
    max_seq_length: int | None = None
    not_counted: tuple[str, ...] = ()
    """What of the original is not part of this model, such as a vision tower."""

    @cached_property
    def layers(self) -> tuple[Layer, ...]:
        """The layers in order."""
        return tuple(self.layer_kinds[name] for name in self.pattern)

    @property
    def num_layers(self) -> int:
        """Blocks between embedding and head, MTP not counted."""
        return len(self.pattern)

    @cached_property
    def kind_counts(self) -> dict[str, int]:
        """Layers of each kind, in the order of ``layer_kinds``."""
        counts = Counter(self.pattern)
        return {name: counts[name] for name in self.layer_kinds if counts[name]}


def read_model_file(path: Path, inputs: list[InputFile]) -> dict[str, Any]:
    """Read a model file into the raw mapping of a ModelSpec."""
    raise NotImplementedError
