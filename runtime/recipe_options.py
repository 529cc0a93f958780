"""Options of ``headway run`` for what neither job nor layout says: learning rate, clipping, balance, compilation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click

from runtime.request import Recipe

Decorated = TypeVar("Decorated", bound=Callable[..., Any])
POSITIVE = click.FloatRange(min=0, min_open=True)
OPTIONS = (
    click.option("--learning-rate", type=POSITIVE, help="The highest of the schedule (3e-4)."),
    click.option("--lr-warmup", "warmup_steps", type=click.IntRange(min=0), help="Steps in which it rises (0)."),
    click.option("--lr-decay", "decay", type=click.Choice(["constant", "cosine", "linear"]), help="Then (constant)."),
    click.option("--clip-norm", type=POSITIVE, help="Longest gradient of the whole model (not clipped)."),
    click.option("--balance-loss", type=click.FloatRange(min=0), help="Coefficient for routed experts (0.001)."),
    click.option(
        "--compile",
        type=click.Choice(["default", "reduce-overhead"]),
        help="torch.compile of each layer; reduce-overhead replays CUDA graphs.",
    ),
)


def recipe_options(function: Decorated) -> Decorated:
    """Add the options to a command."""
    for option in reversed(OPTIONS):
        function = option(function)
    return function


def take_recipe(options: dict[str, Any]) -> Recipe:
    """Take what was said of a recipe out of the options of a command."""
    said = {name: options.pop(name) for name in Recipe.model_fields if name in options}
    return Recipe(**{name: value for name, value in said.items() if value is not None})
