"""Parameters of a model by where they lie: outside and inside routed experts, at the first and at the last stage."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from scenarios.model import ModelSpec
from simulator.arrays import Floats
from simulator.stages import Column, StageTables


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """Parameter counts, by layer kind and at the ends."""

    dense: dict[str, float]
    """Of one layer, without its routed experts."""
    expert: dict[str, float]
    """Of the routed experts of one layer."""
    embedding: float
    head: float
    """Final norm, own output matrix, and prediction layers without their routed experts."""
    head_expert: float
    tied_copy: float
    """Output matrix of the last stage where it is the input table and lies on another rank."""


def weights_of(model: ModelSpec) -> Weights:
    """Count the parameters of each part."""
    kinds = model.kind_counts
    expert = {kind: float(model.layer_expert_params(kind)) for kind in kinds}
    dense = {kind: float(model.layer_params(kind)) - expert[kind] for kind in kinds}
    layers = sum(model.layer_params(kind) * count for kind, count in kinds.items())
    head_expert = model.mtp_layers * expert[model.pattern[-1]]
    return Weights(
        dense=dense,
        expert=expert,
        embedding=float(model.embedding_params),
        head=float(model.num_params - layers - model.embedding_params + model.mtp_params) - head_expert,
        head_expert=head_expert,
        tied_copy=float(model.vocab_size * (model.embedding_size or model.hidden_size))
        if model.tied_embeddings
        else 0.0,
    )


def columns_weights(weights: Weights, columns: tuple[Column, ...]) -> tuple[Floats, Floats]:
    """Parameters of one layer of every column, outside and inside routed experts."""
    dense = np.array([weights.dense[column.kind] for column in columns])
    return dense, np.array([weights.expert[column.kind] for column in columns])


def rank_weights(weights: Weights, tables: StageTables) -> tuple[Floats, Floats, Floats]:
    """Parameters on the ranks of every pipeline, before any split: outside experts, inside, and embedding and head.

    Each has shape (pipelines, ranks); the third is part of the first.
    """
    dense, expert = columns_weights(weights, tables.columns)
    layers, embedding, head = tables.chunks.sum(axis=2), tables.ends[:, :, 0], tables.ends[:, :, 1]
    outer = embedding * weights.embedding + head * (weights.head + np.where(embedding > 0, 0.0, weights.tied_copy))
    return layers @ dense + outer, layers @ expert + head * weights.head_expert, outer
