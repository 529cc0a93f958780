"""Losses of several steps in every layout equal those of a single process that uses none of the runtime's machinery."""

from __future__ import annotations

from typing import Any

import pytest
from ranks_of_gloo import in_ranks
from tiny_training import plain_losses, run

from scenarios.layout import Stage

TOLERANCE = 2e-6


def worst(losses: list[float], reference: list[float]) -> float:
    return max(abs(one - other) / other for one, other in zip(losses, reference, strict=True))


def uneven(*layers: int, recomputed: tuple[int, ...] | None = None) -> tuple[Stage, ...]:
    again = recomputed or (0,) * len(layers)
    return tuple(Stage(layers=count, recompute_layers=more) for count, more in zip(layers, again, strict=True))


def replicas(sharding: str, **more: Any) -> dict[str, Any]:
    return {"dp": 2, "optimizer_sharding": sharding, "micro_batch_size": 2, **more}


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
    "pp2 1f1b": {"pp": 2, "micro_batch_size": 2},
    "pp2 gpipe": {"pp": 2, "micro_batch_size": 2, "schedule": "gpipe"},
    "pp2 interleaved": {"pp": 2, "vpp": 2, "micro_batch_size": 2, "schedule": "interleaved"},
    "pp2 zb-h1": {"pp": 2, "micro_batch_size": 2, "schedule": "zb-h1"},
    "pp2 zbv": {"pp": 2, "vpp": 2, "micro_batch_size": 2, "schedule": "zbv"},
    "pp2 uneven": {"pp": 2, "micro_batch_size": 2, "stages": uneven(3, 1)},
    "pp2 no layer first": {"pp": 2, "micro_batch_size": 2, "stages": uneven(0, 4)},
    "pp2 uneven recompute": {
        "pp": 2,
        "micro_batch_size": 2,
        "recompute": "full",
        "stages": uneven(1, 3, recomputed=(1, 2)),
    },
    "tied pp2": {"tied": True, "pp": 2, "micro_batch_size": 2},
    "tied tp2": {"tied": True, "tp": 2, "micro_batch_size": 8},
    "tied zbv": {"tied": True, "pp": 2, "vpp": 2, "micro_batch_size": 2, "schedule": "zbv"},
    "tied zero3": replicas("zero3", tied=True),
}
FOUR: dict[str, dict[str, Any]] = {
    **{f"dp2 tp2 {one}": replicas(one, tp=2) | {"micro_batch_size": 4} for one in ("none", "zero1", "zero3")},
    "dp2 tp2 zero3 sp": replicas("zero3", tp=2, sequence_parallel=True) | {"micro_batch_size": 4},
    "dp2 tp2 zero1 sp": replicas("zero1", tp=2, sequence_parallel=True) | {"micro_batch_size": 4},
    **{f"dp2 pp2 {one}": replicas(one, pp=2) for one in ("none", "zero1", "zero2", "zero3")},
    "tp2 pp2": {"tp": 2, "pp": 2, "micro_batch_size": 4},
    "tp2 pp2 sp": {"tp": 2, "pp": 2, "micro_batch_size": 4, "sequence_parallel": True},
    "tied tp2 pp2": {"tied": True, "tp": 2, "pp": 2, "micro_batch_size": 4},
    "tied dp2 pp2": replicas("zero3", tied=True, pp=2),
    "pp4 uneven": {"pp": 4, "micro_batch_size": 2, "stages": uneven(2, 1, 1, 0)},
    "dp outside tp reversed": replicas("zero3", tp=2, rank_order=("dp", "cp", "ep", "tp", "pp"))
    | {"micro_batch_size": 4},
}


def check(world_size: int, cases: dict[str, dict[str, Any]]) -> None:
    references = {tied: plain_losses(tied) for tied in (False, True)}
    assert references[False][-1] < references[False][0], "the model learns something in four steps"
    found = in_ranks(world_size, run, cases)
    errors = {name: worst(losses, references[cases[name].get("tied", False)]) for name, losses in found.items()}
    assert errors.keys() == cases.keys()
    assert {name: error for name, error in errors.items() if error > TOLERANCE} == {}


def test_two_ranks() -> None:
    check(2, TWO)


@pytest.mark.slow
def test_four_ranks() -> None:
    check(4, FOUR)


def test_bf16_follows_fp32_within_its_precision() -> None:
    cases = {
        "dp2 zero3": replicas("zero3", precision="bf16"),
        "dp2 none": replicas("none", precision="bf16"),
        "pp2": {"precision": "bf16", "pp": 2, "micro_batch_size": 4},
        "tp2 sp": {"precision": "bf16", "tp": 2, "micro_batch_size": 8, "sequence_parallel": True},
    }
    reference = plain_losses()
    errors = {name: worst(losses, reference) for name, losses in in_ranks(2, run, cases).items()}
    assert all(TOLERANCE < error < 2e-4 for error in errors.values()), errors
