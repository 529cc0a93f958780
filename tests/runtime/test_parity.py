"""Losses of several steps in every layout equal those of a single process that uses none of the runtime's machinery."""

from __future__ import annotations

from typing import Any

import pytest
from ranks_of_gloo import in_ranks
from tiny_training import plain_losses, run

from scenarios.layout import Stage

pytestmark = pytest.mark.jobs
TOLERANCE = 2e-6


def worst(losses: list[float], reference: list[float]) -> float:
    return max(abs(one - other) / other for one, other in zip(losses, reference, strict=True))


def uneven(*layers: int, recomputed: tuple[int, ...] | None = None) -> tuple[Stage, ...]:
    again = recomputed or (0,) * len(layers)
    return tuple(Stage(layers=count, recompute_layers=more) for count, more in zip(layers, again, strict=True))


def replicas(sharding: str, **more: Any) -> dict[str, Any]:
    return {"dp": 2, "optimizer_sharding": sharding, "micro_batch_size": 2, **more}


BY_HEADS: dict[str, Any] = {"cp_comm": "all-to-all"}
GATHERED: dict[str, Any] = {"cp_comm": "all-gather"}

TWO: dict[str, dict[str, Any]] = {
    "dp2 none": replicas("none"),
    "dp2 zero1": replicas("zero1"),
    "dp2 zero2": replicas("zero2"),
    "dp2 zero3": replicas("zero3"),
    "dp2 zero3 recompute": replicas("zero3", recompute="full"),
    "tp2": {"tp": 2, "micro_batch_size": 8},
    "tp2 sp": {"tp": 2, "micro_batch_size": 4, "sequence_parallel": True},
    "tp2 sp recompute": {"tp": 2, "micro_batch_size": 8, "sequence_parallel": True, "recompute": "full"},
    "tp2 selective": {"tp": 2, "micro_batch_size": 8, "recompute": "selective"},
    "gpt tp2 sp": {"model": "gpt", "tp": 2, "micro_batch_size": 8, "sequence_parallel": True},
    "gpt cp2": {"model": "gpt", "cp": 2, "micro_batch_size": 4},
    "gptj tp2": {"model": "gptj", "tp": 2, "micro_batch_size": 8},
    "gptj tp2 sp": {"model": "gptj", "tp": 2, "micro_batch_size": 8, "sequence_parallel": True},
    "gemma tp2 sp": {"model": "gemma", "tp": 2, "micro_batch_size": 8, "sequence_parallel": True},
    "gemma pp2": {"model": "gemma", "pp": 2, "micro_batch_size": 2},
    "cp2 ring": {"cp": 2, "micro_batch_size": 4},
    "cp2 gathered": {"cp": 2, "micro_batch_size": 4, **GATHERED},
    "cp2 heads recompute": {"cp": 2, "micro_batch_size": 4, "recompute": "selective", **BY_HEADS},
    "pp2 1f1b": {"pp": 2, "micro_batch_size": 2},
    "pp2 gpipe": {"pp": 2, "micro_batch_size": 2, "schedule": "gpipe"},
    "pp2 interleaved": {"pp": 2, "vpp": 2, "micro_batch_size": 2, "schedule": "interleaved"},
    "pp2 zb-h1": {"pp": 2, "micro_batch_size": 2, "schedule": "zb-h1"},
    "pp2 zbv": {"pp": 2, "vpp": 2, "micro_batch_size": 2, "schedule": "zbv"},
    "pp2 dualpipev": {
        "pp": 2,
        "vpp": 2,
        "micro_batch_size": 2,
        "schedule": "zbv",
        "recipe": {"v_order": "dualpipev"},
    },
    "pp2 uneven": {"pp": 2, "micro_batch_size": 2, "stages": uneven(3, 1)},
    "pp2 no layer first": {"pp": 2, "micro_batch_size": 2, "stages": uneven(0, 4)},
    "pp2 uneven recompute": {
        "pp": 2,
        "micro_batch_size": 2,
        "recompute": "full",
        "stages": uneven(1, 3, recomputed=(1, 2)),
    },
    "tied pp2": {"model": "tied", "pp": 2, "micro_batch_size": 2},
    "tied tp2": {"model": "tied", "tp": 2, "micro_batch_size": 8},
    "tied zbv": {"model": "tied", "pp": 2, "vpp": 2, "micro_batch_size": 2, "schedule": "zbv"},
    "tied clipped": {"model": "tied", "pp": 2, "micro_batch_size": 2, "recipe": {"clip_norm": 0.5}},
    "tied zero3": replicas("zero3", model="tied"),
}
FOUR: dict[str, dict[str, Any]] = {
    **{f"dp2 tp2 {one}": replicas(one, tp=2) | {"micro_batch_size": 4} for one in ("none", "zero1", "zero3")},
    "dp2 tp2 zero3 sp": replicas("zero3", tp=2, sequence_parallel=True) | {"micro_batch_size": 4},
    "dp2 tp2 zero1 sp": replicas("zero1", tp=2, sequence_parallel=True) | {"micro_batch_size": 4},
    **{f"dp2 pp2 {one}": replicas(one, pp=2) for one in ("none", "zero1", "zero2", "zero3")},
    **{
        f"dp2 pp2 interleaved {one}": replicas(one, pp=2, vpp=2, schedule="interleaved") | {"micro_batch_size": 1}
        for one in ("zero2", "zero3")
    },
    "tp2 pp2": {"tp": 2, "pp": 2, "micro_batch_size": 4},
    "tp2 pp2 sp": {"tp": 2, "pp": 2, "micro_batch_size": 4, "sequence_parallel": True},
    "tied tp2 pp2": {"model": "tied", "tp": 2, "pp": 2, "micro_batch_size": 4},
    "tied dp2 pp2": replicas("zero3", model="tied", pp=2),
    "pp4 uneven": {"pp": 4, "micro_batch_size": 2, "stages": uneven(2, 1, 1, 0)},
    "dp outside tp reversed": replicas("zero3", tp=2, rank_order=("dp", "cp", "ep", "tp", "pp"))
    | {"micro_batch_size": 4},
}


SPARSE: dict[str, dict[str, Any]] = {
    "moe dp2 none": replicas("none", model="moe"),
    "moe dp2 ep2 zero1": replicas("zero1", model="moe", ep=2),
    "moe dp2 zero3": replicas("zero3", model="moe"),
    "moe dp2 ep2 zero2 recompute": replicas("zero2", model="moe", ep=2, recompute="full"),
    "moe tp2": {"model": "moe", "tp": 2, "micro_batch_size": 4},
    "moe tp2 ep2 sp": {"model": "moe", "tp": 2, "ep": 2, "micro_batch_size": 4, "sequence_parallel": True},
    "moe pp2 recompute moe": {
        "model": "moe",
        "pp": 2,
        "micro_batch_size": 2,
        "recompute": "selective",
        "recompute_modules": ("core_attn", "moe"),
    },
    "deepseek dp2 ep2 zero3": replicas("zero3", model="deepseek", ep=2),
    "deepseek tp2 etp2": {"model": "deepseek", "tp": 2, "etp": 2, "micro_batch_size": 4},
    "deepseek cp2 ep2 sp": {"model": "deepseek", "cp": 2, "ep": 2, "micro_batch_size": 4},
    "deepseek zbv": {"model": "deepseek", "pp": 2, "vpp": 2, "micro_batch_size": 2, "schedule": "zbv"},
    "gpt-oss tp2 etp2 sp": {"model": "gpt-oss", "tp": 2, "etp": 2, "micro_batch_size": 8, "sequence_parallel": True},
    "gpt-oss cp2 ring": {"model": "gpt-oss", "cp": 2, "ep": 2, "micro_batch_size": 8},
    "gpt-oss cp2 gathered": {"model": "gpt-oss", "cp": 2, "micro_batch_size": 8, **GATHERED},
    "gpt-oss cp2 heads": {"model": "gpt-oss", "cp": 2, "micro_batch_size": 8, **BY_HEADS},
    "llama4 tp2": {"model": "llama4", "tp": 2, "micro_batch_size": 4},
    "llama4 cp2 zero3": {"model": "llama4", **GATHERED, "cp": 2, "micro_batch_size": 4, "optimizer_sharding": "zero3"},
}
COMBINED: dict[str, dict[str, Any]] = {
    "moe dp2 tp2 ep4 zero3": replicas("zero3", model="moe", tp=2, ep=4),
    "moe dp2 cp2 ep2 zero3": replicas("zero3", model="moe", cp=2, ep=2),
    "moe pp2 dp2 ep2": replicas("zero1", model="moe", pp=2, ep=2),
    "moe hsdp ep2": replicas("zero3", model="moe", ep=2, dp_replicate=2) | {"dp": 4},
    "hsdp": replicas("zero2", dp_replicate=2) | {"dp": 4},
    "zero1 in two copies": replicas("zero1", model="moe", dp_replicate=2) | {"dp": 4},
    "cp4 ring": {"cp": 4, "micro_batch_size": 8, "optimizer_sharding": "none"},
    "llama4 cp4 gathered": {"model": "llama4", "cp": 4, "micro_batch_size": 8, **GATHERED},
    "llama4 cp4 ring": {"model": "llama4", "cp": 4, "micro_batch_size": 8, "recompute": "selective"},
    "cp2 tp2 heads sp": {"cp": 2, "tp": 2, "micro_batch_size": 8, "sequence_parallel": True, **BY_HEADS},
    "deepseek cp2 tp2 ep4 sp": {
        "model": "deepseek",
        "cp": 2,
        "tp": 2,
        "ep": 4,
        "micro_batch_size": 4,
        "sequence_parallel": True,
    },
    "deepseek dp2 tp2 ep2 etp2": replicas("zero1", model="deepseek", tp=2, ep=2, etp=2, sequence_parallel=True),
    "deepseek pp2 dp2 ep2 zbv": replicas("zero2", model="deepseek", pp=2, vpp=2, ep=2, schedule="zbv"),
    "gpt-oss pp2 cp2": {"model": "gpt-oss", "pp": 2, "cp": 2, "ep": 2, "micro_batch_size": 2},
    "gpt-oss dp2 tp2 ep2 etp2 zero3": replicas("zero3", model="gpt-oss", tp=2, ep=2, etp=2),
    "deepseek clipped": replicas("zero3", model="deepseek", tp=2, ep=2, recipe={"clip_norm": 0.5}),
    "moe clipped": replicas("zero1", model="moe", tp=2, ep=4, recipe={"clip_norm": 0.5}),
    "tied clipped": replicas("zero1", model="tied", pp=2, recipe={"clip_norm": 0.5}),
}
EIGHT: dict[str, dict[str, Any]] = {
    "moe pp2 dp2 tp2 ep4": replicas("zero1", model="moe", pp=2, tp=2, ep=4, sequence_parallel=True),
    "deepseek dp2 cp2 tp2 ep4 etp2": replicas("zero3", model="deepseek", cp=2, tp=2, ep=4, etp=2),
    "gpt-oss pp2 cp2 tp2 ep2": {
        "model": "gpt-oss",
        "pp": 2,
        "cp": 2,
        "tp": 2,
        "ep": 2,
        "micro_batch_size": 4,
        "sequence_parallel": True,
    },
    "hsdp tp2 zero3": replicas("zero3", tp=2, dp_replicate=2) | {"dp": 4},
}


def reference(case: dict[str, Any]) -> tuple[str, float | None]:
    """What of a case changes the single process too."""
    return case.get("model", "dense"), case.get("recipe", {}).get("clip_norm")


def check(world_size: int, cases: dict[str, dict[str, Any]], timeout_seconds: float = 150) -> None:
    references = {one: plain_losses(*one) for one in map(reference, cases.values())}
    for losses in references.values():
        assert losses[-1] < losses[0], "the model learns something in four steps"
    found = in_ranks(world_size, run, cases, timeout_seconds)
    errors = {name: worst(losses, references[reference(cases[name])]) for name, losses in found.items()}
    assert errors.keys() == cases.keys()
    assert {name: error for name, error in errors.items() if error > TOLERANCE} == {}


def test_two_ranks() -> None:
    check(2, TWO)


def test_two_ranks_with_experts_and_split_sequences() -> None:
    check(2, SPARSE)


@pytest.mark.slow
def test_four_ranks() -> None:
    check(4, FOUR)


@pytest.mark.slow
def test_four_ranks_with_experts_and_split_sequences() -> None:
    check(4, COMBINED, 300)


@pytest.mark.slow
def test_eight_ranks() -> None:
    check(8, EIGHT, 300)


@pytest.mark.slow
def test_compiled_layers() -> None:
    compiled = {"recipe": {"compile": "default"}}
    check(
        2,
        {name: replicas(name, **compiled) | {"micro_batch_size": 4} for name in ("zero1", "zero3")}
        | {
            "tp": {"tp": 2, "micro_batch_size": 8, **compiled},
            "gemma tp sp": {
                "model": "gemma",
                "tp": 2,
                "micro_batch_size": 8,
                "sequence_parallel": True,
                **compiled,
            },
        },
    )


def test_clipping_changes_the_training() -> None:
    assert worst(plain_losses("moe", 0.5), plain_losses("moe")) > 10 * TOLERANCE


def test_bf16_follows_fp32_within_its_precision() -> None:
    cases = {
        "dp2 zero3": replicas("zero3", precision="bf16"),
        "dp2 none": replicas("none", precision="bf16"),
        "pp2": {"precision": "bf16", "pp": 2, "micro_batch_size": 4},
        "tp2 sp": {"precision": "bf16", "tp": 2, "micro_batch_size": 8, "sequence_parallel": True},
        "cp2": {"precision": "bf16", "cp": 2, "micro_batch_size": 8},
        "moe ep2 zero3": replicas("zero3", precision="bf16", model="moe", ep=2),
        "deepseek ep2 tp2": {"precision": "bf16", "model": "deepseek", "tp": 2, "ep": 2, "micro_batch_size": 8},
    }
    references = {one: plain_losses(*one) for one in map(reference, cases.values())}
    errors = {
        name: worst(losses, references[reference(cases[name])]) for name, losses in in_ranks(2, run, cases).items()
    }
    assert all(TOLERANCE < error < 2e-4 for error in errors.values()), errors
