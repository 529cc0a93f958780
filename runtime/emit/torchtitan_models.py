"""Which model flavours torchtitan ships, and by which sizes a ModelSpec is recognised as one of them.

Sizes: torchtitan b5bcd76 (2026-08-21), torchtitan/models/*/__init__.py; functions: */config_registry.py.
"""

from __future__ import annotations

from dataclasses import dataclass

from runtime.emit.recipe import refuse
from scenarios.model import Attention, ModelSpec, Moe


@dataclass(frozen=True, slots=True, kw_only=True)
class Flavour:
    """A model of torchtitan, and the function that returns its configuration."""

    family: str
    flavor: str
    base: str
    """Function in the family's config_registry; where the flavour has none, one of the same family."""
    num_layers: int
    hidden_size: int
    vocab_size: int
    num_experts: int = 0


FLAVOURS = (
    Flavour(family="llama3", flavor="8B", base="llama3_8b", num_layers=32, hidden_size=4096, vocab_size=128256),
    Flavour(family="llama3", flavor="70B", base="llama3_70b", num_layers=80, hidden_size=8192, vocab_size=128256),
    Flavour(family="llama3", flavor="405B", base="llama3_405b", num_layers=126, hidden_size=16384, vocab_size=128256),
    Flavour(family="qwen3", flavor="0.6B", base="qwen3_0_6b", num_layers=28, hidden_size=1024, vocab_size=151936),
    Flavour(family="qwen3", flavor="1.7B", base="qwen3_1_7b", num_layers=28, hidden_size=2048, vocab_size=151936),
    Flavour(family="qwen3", flavor="8B", base="qwen3_14b", num_layers=36, hidden_size=4096, vocab_size=151936),
    Flavour(family="qwen3", flavor="14B", base="qwen3_14b", num_layers=40, hidden_size=5120, vocab_size=151936),
    Flavour(family="qwen3", flavor="32B", base="qwen3_32b", num_layers=64, hidden_size=5120, vocab_size=151936),
    Flavour(
        family="qwen3",
        flavor="30B-A3B",
        base="qwen3_30b_a3b",
        num_layers=48,
        hidden_size=2048,
        vocab_size=151936,
        num_experts=128,
    ),
    Flavour(
        family="qwen3",
        flavor="235B-A22B",
        base="qwen3_30b_a3b",
        num_layers=94,
        hidden_size=4096,
        vocab_size=151936,
        num_experts=128,
    ),
    Flavour(
        family="deepseek_v3",
        flavor="671B",
        base="deepseek_v3_671b",
        num_layers=61,
        hidden_size=7168,
        vocab_size=129280,
        num_experts=256,
    ),
)


def flavour_of(model: ModelSpec) -> Flavour:
    """Recognise a model by layers, width, vocabulary and experts.

    Raises:
        InputError: torchtitan ships no such model.
    """
    experts = max((part.num_experts for part in _experts(model)), default=0)
    sizes = (model.num_layers, model.hidden_size, model.vocab_size, experts)
    for flavour in FLAVOURS:
        if sizes == (flavour.num_layers, flavour.hidden_size, flavour.vocab_size, flavour.num_experts) and (
            flavour.family != "qwen3" or _has_qk_norm(model)
        ):
            return flavour
    known = ", ".join(f"{flavour.family} {flavour.flavor}" for flavour in FLAVOURS)
    raise refuse(
        "torchtitan",
        f"it ships no model of {model.num_layers} layers, hidden size {model.hidden_size}, vocabulary "
        f"{model.vocab_size} and {experts} experts",
        f"known: {known}",
        "model",
    )


def _experts(model: ModelSpec) -> list[Moe]:
    return [layer.feed_forward for layer in model.layer_kinds.values() if isinstance(layer.feed_forward, Moe)]


def _has_qk_norm(model: ModelSpec) -> bool:
    return all(not isinstance(layer.mixer, Attention) or layer.mixer.qk_norm for layer in model.layer_kinds.values())
