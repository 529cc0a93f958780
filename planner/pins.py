"""Pins from the command line: ``tp=8`` fixes a field of the layout."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

from scenarios.layout import Pins
from topologies.document import LoadContext, check
from topologies.errors import InputError

SOURCE = "--pin"


def parse_pins(texts: Iterable[str], already: dict[str, Any]) -> dict[str, Any]:
    """Read ``field=value`` texts into fields of a layout.

    Args:
        texts: one field each; the value is YAML.
        already: what the scenario pins; a different value for the same field is a contradiction.

    Raises:
        InputError: not of that form, not a field of a layout, a wrong value, or two values for one field.
    """
    raw: dict[str, Any] = {}
    for text in texts:
        name, separator, value = (part.strip() for part in text.partition("="))
        if not separator or not name or not value:
            raise InputError(f"{text!r} is not of the form field=value", hint="for example tp=8", file=SOURCE)
        try:
            parsed = YAML(typ="safe").load(value)
        except YAMLError:
            raise InputError(f"the value {value!r} is not valid YAML", file=SOURCE, key=name) from None
        if name in raw and raw[name] != parsed:
            raise InputError(f"is given twice, {raw[name]} and {parsed}", hint="keep one", file=SOURCE, key=name)
        raw[name] = parsed
    checked = check(raw, Pins, LoadContext(Path(SOURCE)))
    pins = {name: getattr(checked, name) for name in raw}
    for name, value in pins.items():
        if value is None:
            raise InputError("has no value", hint="leave the pin out", file=SOURCE, key=name)
        if name in already and already[name] != value:
            raise InputError(
                f"is pinned to {already[name]} by the scenario and to {value} here",
                hint=f"change the scenario's with --set layout.{name}={value}",
                file=SOURCE,
                key=name,
            )
    return pins
