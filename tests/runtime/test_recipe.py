"""What a recipe says: the learning rate by step, the options that set it, and what it does not go with."""

from __future__ import annotations

import itertools
from contextlib import nullcontext
from typing import Any

import click
import pytest
from click.testing import CliRunner
from plans import plan_of
from tiny_training import tiny

from runtime.commands import recipe_options, take_recipe
from runtime.job import request_for
from runtime.request import Recipe
from runtime.support import check_recipe
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
        ({"tp": 2, "recompute": "selective"}, "default", "a device mesh"),
        ({"tp": 2, "model": tiny("gptj")}, "default", "recurses without end"),
        ({"dp": 2, "optimizer_sharding": "zero3"}, "reduce-overhead", "the same addresses"),
        ({"model": tiny("moe")}, "default", "as a router sends them"),
        ({"pp": 2}, "reduce-overhead", "which CUDA graphs overwrite"),
    ],
)
def test_compilation_that_does_not_go_with_a_plan_is_refused(layout: dict[str, Any], mode: str, reason: str) -> None:
    recipe = Recipe(compile=mode)  # type: ignore[arg-type]
    with pytest.raises(InputError, match=reason):
        request_for(plan_of(**layout), steps=1, recipe=recipe)


@pytest.mark.parametrize(
    ("layout", "chosen", "reason"),
    [
        ({"pp": 2}, {"v_order": "dualpipev"}, "this is 1f1b"),
        ({"pp": 4, "vpp": 2, "schedule": "zbv", "micro_batch_size": 2}, {"v_order": "dualpipev"}, "8 micro-batches"),
        ({"cp": 2}, {"split_attention": "torch"}, "no sharding rule for the attention kernel of CPUs"),
        ({"dp": 2}, {"split_attention": "torch"}, "which is 1"),
    ],
)
def test_choices_that_do_not_go_with_a_plan_are_refused(
    layout: dict[str, Any], chosen: dict[str, Any], reason: str
) -> None:
    with pytest.raises(InputError, match=reason):
        request_for(plan_of(**layout), steps=1, recipe=Recipe(**chosen))


@pytest.mark.parametrize(
    ("layout", "reason"),
    [
        ({"cp": 2, "cp_comm": "all-to-all"}, "moves heads"),
        ({"cp": 2, "model": tiny("gemma")}, "no windows"),
        ({"cp": 2}, None),
        ({"cp": 2, "cp_comm": "all-gather", "model": tiny("deepseek")}, None),
    ],
)
def test_what_torchs_own_split_attention_takes_on_gpus(layout: dict[str, Any], reason: str | None) -> None:
    plan = plan_of(**layout)
    with nullcontext() if reason is None else pytest.raises(InputError, match=reason):
        check_recipe(plan.scenario.job, plan.layout, Recipe(split_attention="torch"), on_gpu=True)
