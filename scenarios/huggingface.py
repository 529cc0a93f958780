"""A Hugging Face config.json read as a ModelSpec: one table of architectures, one small function for each family.

Only what decides parameters and FLOPs is read. What the config leaves to its format (a default of the architecture's
configuration class in the transformers library) is used and recorded in ``source``; everything else that is missing is
an error. The families are in ``scenarios.hf_dense``, ``scenarios.hf_plain``, ``scenarios.hf_moe`` and
``scenarios.hf_hybrid``.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from scenarios.hf_config import HfConfig
from scenarios.hf_dense import DENSE
from scenarios.hf_hybrid import HYBRID
from scenarios.hf_moe import MOE
from scenarios.hf_plain import PLAIN
from topologies.document import did_you_mean

FAMILIES = {**DENSE, **PLAIN, **MOE, **HYBRID}
"""The function that reads a config, by ``model_type``."""

NESTED = {
    "gemma3": "gemma3_text",
    "llama4": "llama4_text",
    "qwen3_vl_moe": "qwen3_vl_moe_text",
    "qwen3_vl": "qwen3_vl_text",
}
"""Multimodal configs whose decoder stands under ``text_config``, and its type where that is not written."""


def spec_from_config(config: Mapping[str, Any], name: str, file: str | Path) -> dict[str, Any]:
    """Translate the keys of a Hugging Face config into the raw mapping of a ModelSpec.

    Args:
        config: the parsed config; ``name`` and ``source`` in it are kept.
        name: what the model is called where the config does not say.
        file: for messages.

    Raises:
        InputError: the architecture is not known, or a key is missing, of the wrong type or contradicts another.
    """
    outer = HfConfig(config, "this architecture", file)
    outer.family = outer.text("model_type")
    decoder, not_counted = _decoder_of(outer)
    family = FAMILIES.get(decoder.family)
    if family is None:
        known = sorted({*FAMILIES, *NESTED})
        hint = did_you_mean(decoder.family, known) or f"known: {', '.join(known)}"
        raise decoder.error("model_type", f"the architecture {decoder.family!r} is not known", hint)
    spec = family(decoder)
    if spec.get("mtp_layers"):
        not_counted.append(f"{spec['mtp_layers']} multi-token prediction layer(s): weights and FLOPs")
    given = config.get("source") or {}
    return {
        "name": config.get("name", name),
        "source": {**given, **decoder.defaults} if isinstance(given, Mapping) else given,
        "not_counted": not_counted,
        **({"version": config["version"]} if "version" in config else {}),
        **spec,
    }


def _decoder_of(outer: HfConfig) -> tuple[HfConfig, list[str]]:
    """Step into ``text_config`` where there is one; what stays outside is not counted."""
    if "text_config" not in outer.content and outer.family not in NESTED:
        return outer, []
    inner = outer.inner("text_config")
    inner.family = NESTED.get(outer.family, outer.family)
    inner.family = inner.text("model_type", inner.family)
    if "tie_word_embeddings" in outer.content and "tie_word_embeddings" not in inner.content:
        inner.content["tie_word_embeddings"] = outer.content["tie_word_embeddings"]
    return inner, [f"everything of {outer.family} but its text decoder (vision or audio encoder and projector)"]
