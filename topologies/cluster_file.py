"""Write a document as the YAML that its reader takes: keys without units, units in the values."""

from __future__ import annotations

import io
from collections.abc import Mapping
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.comments import CommentedMap, CommentedSeq

from topologies.cluster import Cluster
from topologies.document import Document
from topologies.units import UNITS, document_key

SKIPPED = ("min", "h", "d", "years", "%/year", "/year")
"""Units that would only obscure a measured value."""
DIGITS = 6
"""Significant digits of a written quantity: more than any measurement has."""


def to_yaml(document: Document) -> str:
    """Return the text of a document file; values that equal their default are left out."""
    out = io.StringIO()
    writer = YAML(typ="rt")
    writer.width = 118
    writer.indent(mapping=2, sequence=4, offset=2)
    content = _mapping(document, flat=False)
    if isinstance(document, Cluster) and len(document.pools) == 1:  # the short form, whose keys --set reaches
        pool = content.pop("pools")[0]
        content.insert(1, "num_nodes", pool["num_nodes"])
        content.insert(2, "node", pool["node"])
    writer.dump(content, out)
    return out.getvalue()


def quantity(value: float, dimension: str) -> str:
    """Write a value in the largest decimal unit that keeps it at or above 1; whole bytes below 1 GB stay exact.

    >>> quantity(1048576.0, "bytes"), quantity(0.00039, "seconds")
    ('1048576 B', '390 us')
    """
    if dimension == "bytes" and value < 1e9 and value == int(value):
        return f"{int(value)} B"
    units = [
        (factor, unit)
        for unit, factor in UNITS[dimension].items()
        if "i" not in unit.split("/")[0] and unit not in SKIPPED
    ]
    factor, unit = max([one for one in units if one[0] <= value] or [min(units)])
    return f"{value / factor:.{DIGITS}g} {unit}"


def _mapping(document: Document, *, flat: bool) -> CommentedMap:
    result = CommentedMap()
    for name, info in type(document).model_fields.items():
        value = getattr(document, name)
        if name != "type" and not info.is_required() and value == info.get_default(call_default_factory=True):
            continue
        key = document_key(name)
        result[key] = _value(value, None if key == name else name.removeprefix(f"{key}_"))
    if flat:
        result.fa.set_flow_style()
    return result


def _value(value: Any, dimension: str | None) -> Any:
    if isinstance(value, Document):
        return _mapping(value, flat=False)
    if isinstance(value, Mapping):
        return CommentedMap({key: _value(one, dimension) for key, one in value.items()})
    if isinstance(value, tuple | list):
        rows = [_row(one, dimension) for one in value]
        return CommentedSeq(rows)
    if dimension in UNITS and isinstance(value, int | float):
        return quantity(float(value), dimension)
    return value


def _row(value: Any, dimension: str | None) -> Any:
    """An entry of a list: points of a few numbers stand on one line."""
    if isinstance(value, Document):
        # a key of several words breaks a flow that is wider than a line
        nested = any(isinstance(getattr(value, name), Document | Mapping) for name in type(value).model_fields)
        return _mapping(value, flat=not nested)
    return _value(value, dimension)
