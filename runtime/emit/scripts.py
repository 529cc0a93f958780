"""Fill the templates of scripts. Values come in only through the filters that quote them."""

from __future__ import annotations

from functools import cache
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from runtime.emit.shell import comment, exports, word
from runtime.environment import package_version


@cache
def _templates() -> Environment:
    templates = Environment(
        loader=PackageLoader("runtime.emit"),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,  # shell, not HTML: the filters below quote
    )
    templates.filters |= {"word": word, "comment": comment, "exports": exports, "literal": repr}
    return templates


def render(template: str, **values: Any) -> str:
    """Fill one template."""
    return _templates().get_template(template).render(version=package_version("headway-planner"), **values)
