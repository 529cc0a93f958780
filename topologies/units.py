"""Human units at the door, SI inside: a closed table, one spelling for each unit.

Code holds seconds, bytes, bytes per second, FLOP per second, watts, joules, US dollars, and ratios between 0 and 1.
Documents say ``80 GB``, ``400 Gbit/s``, ``3.35 TB/s``, ``15.6 T tokens``; a bare number is refused
where a quantity is due.
"""

from __future__ import annotations

import math
import re
from typing import Annotated, Any

from pydantic import BeforeValidator, ValidationInfo, WithJsonSchema

_BINARY = {"KiB": 2.0**10, "MiB": 2.0**20, "GiB": 2.0**30, "TiB": 2.0**40, "PiB": 2.0**50}
_BYTES = {"B": 1.0, "kB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12, "PB": 1e15, **_BINARY}
_HOUR, _DAY, _YEAR = 3600.0, 86400.0, 365.25 * 86400.0

UNITS: dict[str, dict[str, float]] = {
    "bytes": _BYTES,
    "bytes_per_second": {f"{unit}/s": factor for unit, factor in _BYTES.items()}
    | {"Mbit/s": 1e6 / 8, "Gbit/s": 1e9 / 8, "Tbit/s": 1e12 / 8},
    "seconds": {"ns": 1e-9, "us": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0, "h": _HOUR, "d": _DAY, "years": _YEAR},
    "flop_per_second": {"GFLOP/s": 1e9, "TFLOP/s": 1e12, "PFLOP/s": 1e15},
    "watts": {"W": 1.0, "kW": 1e3, "MW": 1e6},
    "usd": {"USD": 1.0},
    "usd_per_second": {"USD/h": 1 / _HOUR},
    "usd_per_joule": {"USD/kWh": 1 / 3.6e6, "USD/MWh": 1 / 3.6e9},
    "tokens": {"tokens": 1.0, "M tokens": 1e6, "B tokens": 1e9, "T tokens": 1e12},
    "per_second": {"/s": 1.0, "/h": 1 / _HOUR, "/d": 1 / _DAY, "/year": 1 / _YEAR, "%/year": 0.01 / _YEAR},
    "ratio": {"%": 0.01},
}
"""Factor to the SI unit, by dimension and spelling. GB is 1e9 bytes and GiB is 2**30: they are never mixed."""

_NUMBER = r"[+-]?(?:\d+(?:[_]\d+)*\.?\d*|\.\d+)(?:[eE][+-]?\d+)?"
_QUANTITY = re.compile(rf"\s*({_NUMBER})\s*(.*?)\s*")


def parse_quantity(text: str, dimension: str) -> float:
    """Read a quantity such as ``80 GB`` and return it in the SI unit of ``dimension``.

    Raises:
        ValueError: the text is not a finite, non-negative number followed by a unit of this dimension.

    >>> parse_quantity("400 Gbit/s", "bytes_per_second")
    50000000000.0
    """
    accepted = ", ".join(UNITS[dimension])
    match = _QUANTITY.fullmatch(text)
    if match is None:
        raise ValueError(f"{text!r} is not a number with a unit; write a number and one of: {accepted}")
    number, unit = float(match[1].replace("_", "")), match[2]
    if unit not in UNITS[dimension]:
        what = f"the unit {unit!r} is not known here" if unit else f"{text!r} has no unit"
        raise ValueError(f"{what}; accepted units: {accepted}")
    value = number * UNITS[dimension][unit]
    if not math.isfinite(value) or value < 0:
        raise ValueError(f"{text!r} must be finite and not negative")
    return value


def format_quantity(value: float, dimension: str, digits: int = 3) -> str:
    """Write an SI value in the largest decimal unit of its dimension that keeps the number at or above 1.

    >>> format_quantity(50e9, "bytes_per_second")
    '50 GB/s'
    >>> format_quantity(4.2, "seconds")
    '4.2 s'
    """
    decimal = {unit: factor for unit, factor in UNITS[dimension].items() if "i" not in unit.split("/")[0]}
    if dimension == "ratio":
        return f"{100 * value:.{digits}g} %"
    if not math.isfinite(value):
        return str(value)
    rounded = abs(float(f"{value:.{digits}g}"))
    fitting = [(factor, unit) for unit, factor in decimal.items() if rounded >= factor]
    factor, unit = max(fitting) if fitting else min((factor, unit) for unit, factor in decimal.items())
    number = value / factor
    shown = f"{number:.{digits}g}"
    return f"{number:.0f} {unit}" if "e+" in shown else f"{shown} {unit}"


def _from_document(value: Any, info: ValidationInfo, dimension: str) -> Any:
    if isinstance(value, str):
        return parse_quantity(value, dimension)
    bare_ratio = dimension == "ratio" and isinstance(value, (int, float)) and not isinstance(value, bool)
    if info.context is not None and not bare_ratio:
        accepted = ", ".join(UNITS[dimension])
        raise ValueError(
            f"{value!r} is a bare {type(value).__name__}, not a quantity; add one of the units: {accepted}"
        )
    if isinstance(value, (int, float)) and not (math.isfinite(value) and value >= 0):
        raise ValueError(f"{value!r} must be finite and not negative")
    return value


def _quantity(dimension: str, example: str) -> tuple[BeforeValidator, WithJsonSchema]:
    units = "|".join(UNITS[dimension])
    schema: dict[str, Any] = {"type": "string", "pattern": rf"^\s*{_NUMBER}\s*({units})\s*$", "examples": [example]}
    if dimension == "ratio":
        schema = {"anyOf": [{"type": "number", "minimum": 0}, schema]}
    return BeforeValidator(lambda value, info: _from_document(value, info, dimension)), WithJsonSchema(schema)


Bytes = Annotated[float, *_quantity("bytes", "80 GB")]
BytesPerSecond = Annotated[float, *_quantity("bytes_per_second", "400 Gbit/s")]
Seconds = Annotated[float, *_quantity("seconds", "10 min")]
FlopPerSecond = Annotated[float, *_quantity("flop_per_second", "989.5 TFLOP/s")]
Watts = Annotated[float, *_quantity("watts", "700 W")]
Usd = Annotated[float, *_quantity("usd", "30000 USD")]
UsdPerSecond = Annotated[float, *_quantity("usd_per_second", "2.5 USD/h")]
UsdPerJoule = Annotated[float, *_quantity("usd_per_joule", "0.08 USD/kWh")]
Tokens = Annotated[float, *_quantity("tokens", "15.6 T tokens")]
PerSecond = Annotated[float, *_quantity("per_second", "6.11 %/year")]
Ratio = Annotated[float, *_quantity("ratio", "85 %")]

SUFFIXES = tuple(
    sorted((f"_{dimension}" for dimension in UNITS if dimension not in {"tokens", "ratio"}), key=len, reverse=True)
)
"""Endings that name the unit in code and are left out in documents, longest first."""


def document_key(field: str) -> str:
    """Return the key of a field in a document: its name without the unit, which stands in the value there.

    >>> document_key("memory_bytes")
    'memory'
    """
    return next((field.removesuffix(suffix) for suffix in SUFFIXES if field.endswith(suffix)), field)
