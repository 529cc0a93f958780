"""Flags of Megatron-LM and overrides of Megatron-Bridge against the names and rules of their sources."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from emit_plans import large_plan, tiny_plan
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.plan import Plan
from runtime.emit.bridge import KEYS, LATENT_RECIPE, PRECISIONS, RECIPE, SWITCHES, bridge_overrides
from runtime.emit.emitting import Wishes, emit_plan
from runtime.emit.megatron import megatron_flags
from runtime.emit.megatron_layout import layout_string, recomputing
from scenarios.layout import Layout, Stage
from scenarios.model import ModelSpec, load_model
from topologies.errors import InputError

Facts = Callable[[str], dict[str, Any]]
DEEPSEEK = {"job": {"seq_length": 4096, "global_batch_size": 4096, "precision": "fp8"}}
PLANS: dict[str, Callable[[], Plan]] = {
    "dense": lambda: large_plan(tp=8, pp=4, dp=2, sequence_parallel=True),
    "uneven": lambda: large_plan("llama3-405b", tp=8, cp=2, pp=16, dp=2, sequence_parallel=True, recompute="full"),
    "interleaved": lambda: large_plan(tp=4, pp=4, vpp=5, dp=2, schedule="interleaved", recompute="selective"),
    "zero3": lambda: large_plan("llama3-8b", dp=64, optimizer_sharding="zero3"),
    "moe": lambda: large_plan("mixtral-8x7b", tp=2, ep=8, dp=16, sequence_parallel=True, etp=1),
    "mla": lambda: large_plan("deepseek-v3", pp=16, ep=64, dp=64, **DEEPSEEK),
    "qwen": lambda: large_plan("qwen3-30b-a3b", ep=8, dp=16, job={"gradient_precision": "bf16"}),
    "nvfp4": lambda: large_plan("llama3-8b", dp=8, job={"precision": "nvfp4"}),
    "mxfp8": lambda: large_plan("llama3-8b", dp=8, optimizer_sharding="none", job={"precision": "mxfp8"}),
}


def expanded(text: str) -> list[str]:
    """Read a layout string by the rules of its grammar: unroll (..)*n, then x*n, then split at the bars."""
    text = re.sub(r"\(([^)]+)\)\*(\d+)", lambda found: found[1] * int(found[2]), text)
    text = re.sub(r"(.)\*(\d+)", lambda found: found[1] * int(found[2]), text)
    return text.split("|")


@pytest.mark.parametrize("name", PLANS)
def test_every_flag_is_one_of_megatrons(name: str, facts: Facts) -> None:
    known = {f"--{flag}" for flag in facts("megatron_flags")["flags"].split()}
    flags, _ = megatron_flags(PLANS[name](), steps=100)
    assert set(flags) <= known


@pytest.mark.parametrize("name", PLANS)
def test_every_override_is_a_field_of_bridge(name: str, facts: Facts) -> None:
    known = {group: set(words.split()) for group, words in facts("bridge_keys")["keys"].items()}
    flags, _ = megatron_flags(PLANS[name](), steps=100)
    for override in bridge_overrides(flags):
        group, field = override.partition("=")[0].split(".")
        latent = known["latent"] if "--multi-latent-attention" in flags else set()
        assert field in known[group] | (latent if group == "model" else set())


def test_bridge_has_a_name_for_everything(facts: Facts) -> None:
    known = {f"--{flag}" for flag in facts("megatron_flags")["flags"].split()}
    assert KEYS.keys() | SWITCHES.keys() <= known
    mixed = set(facts("bridge_keys")["mixed_precisions"].split()) | {"null"}
    assert set(PRECISIONS.values()) <= mixed


@pytest.mark.parametrize("name", PLANS)
def test_sizes_multiply_to_the_world(name: str) -> None:
    plan = PLANS[name]()
    flags, _ = megatron_flags(plan, steps=100)
    sizes = {axis: int(flags[f"--{axis}-parallel-size"] or 0) for axis in ("tensor-model", "pipeline-model", "context")}
    model_parallel = sizes["tensor-model"] * sizes["pipeline-model"] * sizes["context"]
    assert plan.layout.world_size % model_parallel == 0
    dp = plan.layout.world_size // model_parallel  # as Megatron derives it
    micro, batch = int(flags["--micro-batch-size"] or 0), int(flags["--global-batch-size"] or 0)
    assert batch // (micro * dp) == plan.layout.num_microbatches(plan.scenario.job)
    assert flags["--save-interval"] == "50"


def test_uneven_stages_are_the_plans() -> None:
    plan = PLANS["uneven"]()
    flags, _ = megatron_flags(plan, steps=100)
    stages = expanded(flags["--pipeline-model-parallel-layout"] or "")
    assert [stage.count("t") for stage in stages] == [7, *[8] * 14, 7]  # Llama 3, arXiv 2407.21783, section 3.3.2
    assert (stages[0][0], stages[-1][-1]) == ("E", "L")
    assert "--num-virtual-stages-per-pipeline-rank" not in flags


def test_prediction_layer_lies_before_the_loss() -> None:
    flags, _ = megatron_flags(PLANS["mla"](), steps=100)
    stages = expanded(flags["--pipeline-model-parallel-layout"] or "")
    assert stages[-1] == "tmL"
    assert sum(stage.count("t") for stage in stages) == 61
    assert (flags["--mtp-num-layers"], flags["--moe-layer-freq"]) == ("1", "([0]*3+[1]*58)")


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 9), min_size=2, max_size=12))
def test_layout_string_says_any_stages(counts: list[int]) -> None:
    model = one_kind(sum(counts)) if sum(counts) else None
    if model is None:
        return
    layout = Layout(pp=len(counts), stages=tuple(Stage(layers=count) for count in counts))
    stages = expanded(layout_string(model, layout))
    assert [stage.count("t") for stage in stages] == counts
    assert "".join(stages) == "E" + "t" * sum(counts) + "L"


@settings(max_examples=60, deadline=None)
@given(st.lists(st.text("fsn", min_size=1, max_size=5), min_size=1, max_size=6))
def test_recompute_never_keeps_more_than_planned(stages: list[str]) -> None:
    layout = Layout(
        pp=len(stages),
        recompute="full",
        stages=tuple(Stage(layers=len(one), recompute=one, recompute_layers=one.count("f")) for one in stages),
    )
    told = recomputing(one_kind(sum(map(len, stages))), layout)
    for letters in stages:
        kept_whole = letters.count("n") if "f" in "".join(stages) else len(letters)
        if told.granularity == "full":
            assert told.layers is not None
            assert len(letters) - min(told.layers, len(letters)) <= kept_whole
    assert (told.granularity == "full") == ("f" in "".join(stages))
    if told.granularity == "full" and told.note is None:
        assert all(letters.count("f") == min(told.layers or 0, len(letters)) for letters in stages)


@cache
def small() -> ModelSpec:
    return load_model("llama-30m")


def one_kind(layers: int) -> ModelSpec:
    model = small()
    return model.model_copy(update={"pattern": (model.pattern[0],) * layers})


@pytest.mark.parametrize(
    ("plan", "reason"),
    [
        (lambda: large_plan(tp=8, pp=4, vpp=2, dp=1, schedule="zbv"), "no zbv schedule"),
        (lambda: large_plan(tp=8, dp=2, rank_order=("tp", "dp", "cp", "ep", "pp")), "lays ranks out"),
        (lambda: large_plan(dp=8, job={"tuning": "lora"}), "adapters"),
        (lambda: large_plan(pp=2, dp=8, optimizer_sharding="zero3"), "Megatron-FSDP"),
        (lambda: large_plan("mixtral-8x7b", tp=2, ep=8, dp=8), "sequence parallelism"),
        (lambda: large_plan(dp=8, recompute="selective", recompute_modules=("half_of_matmuls",)), "half_of_matmuls"),
    ],
)
def test_what_megatron_cannot_do_is_refused(plan: Callable[[], Plan], reason: str) -> None:
    with pytest.raises(InputError, match=reason):
        megatron_flags(plan(), steps=10)


def test_length_comes_from_the_tokens_or_is_asked_for() -> None:
    plan = large_plan(dp=8, job={"target_tokens": 512 * 8192 * 30})
    assert megatron_flags(plan, steps=None)[0]["--train-iters"] == "30"
    with pytest.raises(InputError, match="--steps"):
        megatron_flags(large_plan(dp=8), steps=None)


@pytest.mark.parametrize("trainer", ["megatron", "bridge"])
def test_listing_is_the_command(trainer: str) -> None:
    """Bash reads the array of the listing as the words that the script starts."""
    launch, files = emit_plan(PLANS["mla"](), trainer, Path("/shared/job"), Wishes(steps=10))
    (listing,) = [content for name, content in files.items() if name.endswith("s.sh")]
    array = {"megatron": "MEGATRON_ARGS", "bridge": "BRIDGE_OVERRIDES"}[trainer]
    shown = subprocess.run(
        ["bash", "-c", f'{listing}\nprintf "%s\\0" "${{{array}[@]}}"'], capture_output=True, text=True, check=True
    )
    assert tuple(shown.stdout.split("\0")[:-1]) == launch.words()[{"megatron": 1, "bridge": 7}[trainer] :]
    recipes = {RECIPE, LATENT_RECIPE} & set(launch.words())
    assert recipes == (set() if trainer == "megatron" else {LATENT_RECIPE})


def test_tiny_plan_for_cpu_is_a_megatron_job_too() -> None:
    flags, _ = megatron_flags(tiny_plan(2), steps=10)
    assert "--bf16" not in flags
