"""The parts of a decoder layer, as their papers parametrise them: token mixers and feed-forward blocks."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from topologies.document import Document


class Attention(Document):
    """Softmax attention with ``kv_heads`` groups (MHA: equal to ``heads``; MQA: 1)."""

    type: Literal["attention"] = "attention"
    heads: int = Field(ge=1)
    kv_heads: int = Field(ge=1)
    head_dim: int = Field(ge=1)
    window: int | None = Field(default=None, ge=1)
    """Tokens that a query sees, itself included; None: all before it."""
    chunk: int | None = Field(default=None, ge=1)
    """Size of the blocks that attention stays inside of (Llama 4); None: no blocks."""
    qkv_bias: bool = False
    output_bias: bool = False
    qk_norm: bool = False
    """RMSNorm on each query and key head (2 * head_dim weights)."""
    qk_norm_whole: bool = False
    """That norm has weights for all query and key heads, (heads + kv_heads) * head_dim of them (OLMo 2, MiniMax M2)."""
    sinks: bool = False
    """One learned logit per head."""

    @model_validator(mode="after")
    def _groups_are_whole(self) -> Attention:
        if self.heads % self.kv_heads:
            raise ValueError(
                f"{self.heads} heads cannot share {self.kv_heads} key-value heads evenly; make heads a multiple of them"
            )
        return self


class Mla(Document):
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1)."""

    type: Literal["mla"] = "mla"
    heads: int = Field(ge=1)
    q_lora_rank: int | None = Field(ge=1)
    """None: queries are projected straight from the hidden state."""
    kv_lora_rank: int = Field(ge=1)
    qk_nope_head_dim: int = Field(ge=1)
    qk_rope_head_dim: int = Field(ge=0)
    v_head_dim: int = Field(ge=1)
    indexer_heads: int = Field(default=0, ge=0)
    """DeepSeek sparse attention: heads of the indexer; 0: none."""
    indexer_head_dim: int = Field(default=0, ge=0)
    indexer_top_k: int = Field(default=0, ge=0)
    """Tokens that the indexer lets a query see."""


class Mamba(Document):
    """A state-space mixer: version 1 (Gu and Dao 2023) or 2 (Dao and Gu 2024)."""

    type: Literal["mamba"] = "mamba"
    generation: Literal[1, 2]
    inner_size: int = Field(ge=1)
    state_size: int = Field(ge=1)
    conv_kernel: int = Field(ge=1)
    dt_rank: int = Field(default=0, ge=0)
    """Version 1 only."""
    heads: int = Field(default=0, ge=0)
    """Version 2 only."""
    groups: int = Field(default=1, ge=1)
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
    shared_ffn_hidden_size: int = Field(default=0, ge=0)
    """Of all shared experts together."""
    gated: bool = True
    bias: bool = False
    router_bias: bool = False
    """A bias or correction vector of num_experts weights."""
    shared_gate: bool = False
    """A learned gate on the shared expert (hidden_size weights)."""
    score_function: Literal["softmax", "sigmoid"] = "softmax"
    """What makes scores of the router's logits. With sigmoid the router_bias corrects the choice of experts only."""
    route_norm: bool = True
    """The scores of the chosen experts are divided by their sum."""
    route_scale: float = Field(default=1.0, gt=0)
    """Factor on the scores of the chosen experts."""
    expert_groups: int = Field(default=1, ge=1)
    """Groups that the experts are divided into."""
    limited_groups: int = Field(default=1, ge=1)
    """Groups that a token's experts come from (DeepSeek-V2, arXiv 2405.04434, section 2.2.2)."""
    score_before_experts: bool = False
    """Scores multiply what the experts take instead of what they give (Llama 4)."""

    @model_validator(mode="after")
    def _enough_experts(self) -> Moe:
        if self.top_k > self.num_experts:
            raise ValueError(f"a token cannot visit {self.top_k} of {self.num_experts} experts; lower top_k")
        return self

    @model_validator(mode="after")
    def _groups_hold_the_experts(self) -> Moe:
        size, rest = divmod(self.num_experts, self.expert_groups)
        if rest:
            raise ValueError(f"{self.num_experts} experts do not divide into {self.expert_groups} groups")
        if self.limited_groups > self.expert_groups or self.top_k > size * self.limited_groups:
            raise ValueError(
                f"{self.limited_groups} of {self.expert_groups} groups of {size} experts cannot give a token "
                f"{self.top_k} experts; raise limited_groups"
            )
        return self


class Layer(Document):
    """One block: a token mixer and a feed-forward part, either of which may be absent."""

    mixer: Attention | Mla | Mamba | None = Field(default=None, discriminator="type")
    feed_forward: Mlp | Moe | None = Field(default=None, discriminator="type")
    norms: int = Field(default=2, ge=0)
    """Norms over the hidden size."""

    @property
    def kind(self) -> str:
        """Name of the kind for tables: ``attention+moe``, ``mamba``, ``mla+mlp``."""
        return "+".join(part.type for part in (self.mixer, self.feed_forward) if part is not None)
