"""A decoder as a list of layers: what the step model, the memory model and the runtime need to know about it.

A model file is a Hugging Face ``config.json`` (or the same keys in YAML), which ``scenarios.huggingface`` translates,
or a ModelSpec written out with ``layer_kinds`` and ``pattern``; a scenario may hold either in place of a file's name.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

from pydantic import Field, ValidationInfo, model_validator

from scenarios.counting import FLOP_PARTS, expert_params, feed_forward_params, layer_flops, mixer_params
from scenarios.huggingface import spec_from_config
from scenarios.layers import Attention, Layer, Mamba, Mla, Mlp, Moe
from topologies.document import FileDocument, InputFile, LoadContext, check, did_you_mean, read_mapping, resolve
from topologies.errors import InputError

__all__ = [
    "MODELS", "Attention", "Layer", "Mamba", "Mla", "Mlp", "ModelSpec", "Moe", "load_model", "read_model_file",
]  # fmt: skip

MODELS = Path(__file__).parent / "models"


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
    embedding_size: int | None = Field(default=None, ge=1)
    """Width of the token embedding where it is projected to hidden_size and back (OPT-350m)."""
    position_embeddings: int = Field(default=0, ge=0)
    """Rows of a learned position table."""
    head_bias: bool = False
    mtp_layers: int = Field(default=0, ge=0)
    """Multi-token prediction depth: each adds a layer of the last kind, three norms and a projection (DeepSeek-V3).
    Counted in ``mtp_params`` only, not in the totals."""
    max_seq_length: int | None = Field(default=None, ge=1)
    not_counted: tuple[str, ...] = ()
    """What of the original is not part of this model, such as a vision tower."""

    @model_validator(mode="before")
    @classmethod
    def _from_hugging_face_keys(cls, content: Any, info: ValidationInfo) -> Any:
        """A model written inside a scenario may have the keys of a config.json too."""
        if not isinstance(content, Mapping) or "model_type" not in content or "layer_kinds" in content:
            return content
        file = info.context.file if isinstance(info.context, LoadContext) else Path("model")
        return spec_from_config(content, name=f"a {content['model_type']} model", file=file)

    @model_validator(mode="after")
    def _pattern_names_kinds(self) -> ModelSpec:
        for name in self.pattern:
            if name not in self.layer_kinds:
                hint = did_you_mean(name, self.layer_kinds) or f"known: {', '.join(self.layer_kinds)}"
                raise ValueError(f"pattern names the layer kind {name!r}, which layer_kinds does not define; {hint}")
        return self

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

    @cached_property
    def num_params(self) -> int:
        """All weights of embedding, layers, final norm and head; exact, tied weights counted once."""
        return self._outer_params + sum(self.layer_params(kind) * n for kind, n in self.kind_counts.items())

    @cached_property
    def num_active_params(self) -> int:
        """Weights that one token meets: all but the routed experts that its router does not choose.

        Embedding, head, norms, router and shared experts count in full. This is the definition under which the
        published counts of MoE models agree with each other (Qwen3-30B-A3B 3.35e9, DeepSeek-V3 37.55e9; gpt-oss-120b
        is 5.71e9 so, and 5.13e9 in its own model card, which leaves the input table out).
        """
        return self._outer_params + sum(self.layer_active_params(kind) * n for kind, n in self.kind_counts.items())

    @property
    def embedding_params(self) -> int:
        """Weights of the input side: the token table, the position table, and projections between their widths."""
        width = self.embedding_size or self.hidden_size
        projections = 0 if width == self.hidden_size else 2 * width * self.hidden_size
        return self.vocab_size * width + self.position_embeddings * self.hidden_size + projections

    @property
    def head_params(self) -> int:
        """Weights of the output matrix that are its own: none of the matrix where it is the input table."""
        matrix = 0 if self.tied_embeddings else self.vocab_size * (self.embedding_size or self.hidden_size)
        return matrix + self.vocab_size * self.head_bias

    @property
    def mtp_params(self) -> int:
        """Weights of the multi-token prediction layers, which share embedding and head; not part of ``num_params``."""
        own = self.layer_params(self.pattern[-1]) + 2 * self.hidden_size * self.hidden_size + 3 * self._norm_params
        return self.mtp_layers * own

    def layer_params(self, kind: str) -> int:
        """Weights of one layer of a kind, all experts included."""
        layer = self.layer_kinds[kind]
        mixer = mixer_params(layer.mixer, self.hidden_size) if layer.mixer else 0
        block = feed_forward_params(layer.feed_forward, self.hidden_size) if layer.feed_forward else 0
        return mixer + block + layer.norms * self._norm_params

    def layer_expert_params(self, kind: str) -> int:
        """Weights of the routed experts of one layer of a kind."""
        block = self.layer_kinds[kind].feed_forward
        return block.num_experts * expert_params(block, self.hidden_size) if isinstance(block, Moe) else 0

    def layer_active_params(self, kind: str) -> int:
        """Weights of one layer of a kind that one token meets."""
        block = self.layer_kinds[kind].feed_forward
        if not isinstance(block, Moe):
            return self.layer_params(kind)
        idle = block.num_experts - block.top_k
        return self.layer_params(kind) - idle * expert_params(block, self.hidden_size)

    def layer_flops_per_token(self, kind: str, seq_length: int) -> dict[str, float]:
        """Forward FLOPs per token of one layer of a kind, by part; see ``scenarios.counting``."""
        return layer_flops(self.layer_kinds[kind], self.hidden_size, seq_length)

    def forward_flops_per_token(self, seq_length: int) -> dict[str, float]:
        """Forward FLOPs per token by part, averaged over the positions of a sequence.

        The parts are projections, attention (causal counted once, window and chunk respected), mlp, experts (chosen
        and shared), router, mamba and head; looking up an embedding costs none. OPT's embedding projections are in
        ``head``. Multi-token prediction is not included.
        """
        flops = dict.fromkeys(FLOP_PARTS, 0.0)
        for kind, count in self.kind_counts.items():
            for part, value in self.layer_flops_per_token(kind, seq_length).items():
                flops[part] += count * value
        width = self.embedding_size or self.hidden_size
        projections = 0 if width == self.hidden_size else 2 * width * self.hidden_size
        flops["head"] = 2.0 * (self.vocab_size * width + projections)
        return flops

    def flops_per_token(self, seq_length: int) -> float:
        """Model FLOPs of a training step per token: 3 x forward, nothing recomputed (the numerator of MFU)."""
        return 3.0 * sum(self.forward_flops_per_token(seq_length).values())

    @property
    def _norm_params(self) -> int:
        return self.hidden_size * (2 if self.norm_bias else 1)

    @property
    def _outer_params(self) -> int:
        norms = (self.final_norm + self.embedding_norm) * self._norm_params
        return self.embedding_params + norms + self.head_params


def read_model_file(path: Path, inputs: list[InputFile] | None) -> dict[str, Any]:
    """Read a model file into the raw mapping of a ModelSpec.

    Raises:
        InputError: the file is not readable, has no known form, or lacks a key that its architecture needs.
    """
    raw = read_mapping(path, inputs)
    if "layer_kinds" in raw:
        return raw
    if "model_type" not in raw:
        raise InputError(
            "is missing, so this is not the config.json of a decoder",
            hint="give a Hugging Face config.json, or a model with 'layer_kinds' and 'pattern'",
            file=path,
            key="model_type",
        )
    return spec_from_config(raw, name=path.parent.name if path.stem == "config" else path.stem, file=path)


def load_model(name: str, *, inputs: list[InputFile] | None = None) -> ModelSpec:
    """Read a model by its shipped name or from a path.

    Raises:
        InputError: no such model, or the file does not describe one.
    """
    path = Path(name)
    if not path.is_file():
        try:
            path = resolve(name, MODELS, LoadContext(Path()))
        except ValueError as error:
            what, _, hint = str(error).partition("; ")
            raise InputError(what, hint=hint or None) from None
    return check(read_model_file(path, inputs), ModelSpec, LoadContext(path, inputs if inputs is not None else []))
