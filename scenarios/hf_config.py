"""Reading single keys of a Hugging Face config.json: aliases, checks, and a record of the defaults that were used."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ruamel.yaml.comments import CommentedMap

from topologies.document import did_you_mean
from topologies.errors import InputError

ALIASES: dict[str, tuple[str, ...]] = {
    "hidden_size": ("n_embd", "n_embed", "d_model"),
    "num_hidden_layers": ("n_layer", "n_layers", "num_layers"),
    "num_attention_heads": ("n_head", "n_heads"),
    "num_key_value_heads": ("num_kv_heads", "n_head_kv", "kv_n_heads"),
    "head_dim": ("attention_head_dim",),
    "intermediate_size": ("n_inner", "ffn_dim", "ffn_hidden_size"),
    "max_position_embeddings": ("n_positions", "n_ctx", "seq_length", "max_seq_len"),
    "num_experts": ("num_local_experts", "n_routed_experts", "moe_num_experts"),
    "num_experts_per_tok": ("experts_per_token", "moe_top_k", "moe_k"),
}
"""Other spellings of a key, by the spelling that the messages use."""

LARGEST_SIZE = 2**24
"""Sizes above this are refused as typing errors; the largest tables known have about 1e6 rows."""
LARGEST_DEPTH = 10_000
_SPELLINGS = {spelling for key, others in ALIASES.items() for spelling in (key, *others)}


class HfConfig:
    """One mapping of a config, read key by key; ``defaults`` tells which format defaults were used."""

    def __init__(self, content: Mapping[str, Any], family: str, file: str | Path, *, prefix: str = "") -> None:
        self.content, self.family, self.file, self.prefix = dict(content), family, file, prefix
        self.defaults: dict[str, str] = {}
        self._places = (content.lc.data or {}) if isinstance(content, CommentedMap) else {}

    def inner(self, key: str) -> HfConfig:
        """Open a nested mapping; the defaults are recorded together."""
        content = self.content.get(key)
        if not isinstance(content, Mapping):
            raise self.error(key, "is missing" if content is None else "is not a mapping", self._needed(key))
        inner = HfConfig(content, self.family, self.file, prefix=f"{self.prefix}{key}.")
        inner.defaults = self.defaults
        return inner

    def size(self, key: str, default: int | None = None) -> int:
        """Read a whole number of at least 1."""
        return self._whole(key, default, least=1)

    def count(self, key: str, default: int | None = None) -> int:
        """Read a whole number of at least 0."""
        return self._whole(key, default, least=0)

    def size_or_none(self, key: str, default: int | None = None, *, required: bool = False) -> int | None:
        """Read a size where null means "none"; a missing key takes the format's default unless it is required."""
        found = self._spelling(key)
        if found is None and not required:
            self._take_default(key, default)
            return default
        return None if found and self.content[found] is None else self._whole(key, None, least=1)

    def flag(self, key: str, default: bool | None = None) -> bool:
        """Read true or false."""
        value, spelled = self._value(key, default)
        if not isinstance(value, bool):
            raise self.error(spelled, f"{value!r:.60} is not true or false")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """Read a number above 0."""
        value, spelled = self._value(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
            raise self.error(spelled, f"{value!r:.60} is not a number above 0")
        return float(value)

    def text(self, key: str, default: str | None = None) -> str:
        """Read a text."""
        value, spelled = self._value(key, default)
        if not isinstance(value, str):
            raise self.error(spelled, f"{value!r:.60} is not a text")
        return value

    def items(self, key: str) -> list[Any] | None:
        """Read a list, or None where the key is missing or null."""
        value = self.content.get(key)
        if value is not None and not isinstance(value, list):
            raise self.error(key, f"{value!r:.60} is not a list")
        return value

    def assume(self, key: str, default: int) -> None:
        """Put the format's default where a key is missing."""
        if self._spelling(key) is None:
            self._take_default(key, default)
            self.content[key] = default

    def has(self, key: str) -> bool:
        """Say whether a key is present and not null."""
        found = self._spelling(key)
        return found is not None and self.content[found] is not None

    def refuse(self, key: str, reason: str) -> None:
        """Refuse a key that changes the architecture in a way that is not modelled, where it is set."""
        if self.content.get(key):
            raise self.error(key, f"{reason} is not modelled", "write the model out with 'layer_kinds' and 'pattern'")

    def error(self, key: str, what: str, hint: str | None = None) -> InputError:
        """Build a complaint about a key, with its position where the file has one."""
        where = self._places.get(key)
        line, column = (where[0] + 1, where[1] + 1) if where else (None, None)
        return InputError(what, hint=hint, file=self.file, line=line, column=column, key=self.prefix + key)

    def _spelling(self, key: str) -> str | None:
        return next((one for one in (key, *ALIASES.get(key, ())) if one in self.content), None)

    def _value(self, key: str, default: Any) -> tuple[Any, str]:
        found = self._spelling(key)
        if found is not None and (self.content[found] is not None or default is None):
            return self.content[found], found
        if default is None:
            raise self.error(key, "is missing", self._needed(key))
        self._take_default(key, default)
        return default, key

    def _take_default(self, key: str, default: Any) -> None:
        unread = [name for name in self.content if name not in _SPELLINGS]
        if key not in self.content and (near := difflib.get_close_matches(key, unread, n=1, cutoff=0.93)):
            raise self.error(near[0], f"is not a key of {self.family}", f"did you mean {key!r}?")
        shown = "none" if default is None else str(default).lower()
        self.defaults[key] = f"default of {self.family}: {shown}"

    def _needed(self, key: str) -> str:
        near = did_you_mean(key, [name for name in self.content if name not in _SPELLINGS])
        others = f" (or {', '.join(ALIASES[key])})" if key in ALIASES else ""
        return f"a config of {self.family} needs {key}{others}" + (f"; {near}" if near else "")

    def _whole(self, key: str, default: int | None, *, least: int) -> int:
        value, spelled = self._value(key, default)
        if isinstance(value, bool) or not isinstance(value, int):
            raise self.error(spelled, f"{value!r:.60} is not a whole number")
        limit = LARGEST_DEPTH if key == "num_hidden_layers" else LARGEST_SIZE
        if not least <= value <= limit:
            raise self.error(spelled, f"{value} is out of range", f"give a number from {least} to {limit}")
        return value
