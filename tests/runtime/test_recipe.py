"""What a recipe says: the learning rate by step, the options that set it, and what it does not go with."""

from __future__ import annotations

import itertools
from typing import Any

import click
import pytest
from click.testing import CliRunner
from plans import plan_of
from tiny_training import tiny

from runtime.commands import recipe_options, take_recipe
from runtime.job import request_for
from runtime.request import Recipe
from topologies.errors import InputError


def test_the_rate_rises_then_falls_to_its_lowest_share() -> None:
    recipe = Recipe(learning_rate=2.0, warmup_steps=4, decay="cosine", lowest_share=0.1)
    rates = [recipe.rate(step, 104) for step in range(105)]
    assert rates[:4] == [0.5, 1.0, 1.5, 2.0]
    assert rates[4] == max(rates) == 2.0
    assert all(one > other for one, other in itertools.pairwise(rates[4:]))
    assert rates[54] == pytest.approx((2.0 + 0.2) / 2)
    assert rates[104] == pytest.approx(0.2)


def test_options_become_a_recipe_and_the_rest_stays() -> None:
    found: dict[str, Any] = {}

    @click.command()
    @click.option("--keep", type=int)
    @recipe_options
    def command(**options: Any) -> None:
        found["recipe"] = take_recipe(options)
        found["rest"] = options

    arguments = ["--keep", "3", "--learning-rate", "0.001", "--lr-decay", "linear", "--clip-norm", "1"]
    result = CliRunner().invoke(command, arguments)
    assert result.exit_code == 0, result.output
    assert found == {"recipe": Recipe(learning_rate=0.001, decay="linear", clip_norm=1.0), "rest": {"keep": 3}}
    assert CliRunner().invoke(command, ["--clip-norm", "0"]).exit_code == 2


@pytest.mark.parametrize(
    ("layout", "mode", "reason"),
    [
        ({"pp": 2, "schedule": "zb-h1"}, "default", "compiled layers cannot be split"),
        ({"tp": 2}, "default", "split over tp"),
        ({"dp": 2, "optimizer_sharding": "zero3"}, "reduce-overhead", "the same addresses"),
        ({"model": tiny("moe")}, "default", "as a router sends them"),
        ({"pp": 2}, "reduce-overhead", "which CUDA graphs overwrite"),
    ],
)
def test_compilation_that_does_not_go_with_a_plan_is_refused(layout: dict[str, Any], mode: str, reason: str) -> None:
    recipe = Recipe(compile=mode)  # type: ignore[arg-type]
    with pytest.raises(InputError, match=reason):
        request_for(plan_of(**layout), steps=1, recipe=recipe)
