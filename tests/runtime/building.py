"""Ranks that build what they hold of a model, for tests; imported by the spawned ranks too."""

from __future__ import annotations

import ctypes
import gc
from typing import Any

import torch
import torch.distributed as dist

from runtime import initial
from runtime.environment import reset_peak_memory, resident_bytes
from runtime.initial import BLOCK_ELEMENTS, build_decoder
from runtime.pieces import named_parameters, whole_or_shard
from runtime.ranks import shares
from runtime.request import TrainRequest
from runtime.train import DTYPES, build_replica, meshes_of
from scenarios.layout import Layout

CPU = torch.device("cpu")


def differences(asked: dict[str, Any]) -> list[str]:
    """Name the parameters whose part on any rank is not that of the whole model in one process."""
    initial.BLOCK_ELEMENTS = 100
    try:
        return _differences(asked)
    finally:
        initial.BLOCK_ELEMENTS = BLOCK_ELEMENTS


def _differences(asked: dict[str, Any]) -> list[str]:
    request = TrainRequest.model_validate(asked)
    model = request.job.model
    (share,) = shares(model, Layout())
    whole = build_decoder(model, share, seed=request.seed, dtype=DTYPES["fp32"], device=CPU)
    expected = {**dict(whole.named_parameters()), **dict(whole.named_buffers())}
    meshes = meshes_of(request, CPU)
    assert meshes is not None
    replica = build_replica(request, CPU, meshes)
    wrong = []
    for name, parameter in named_parameters(replica.decoders, copies=True):
        for one in whole_or_shard(parameter).rectangles:
            place = tuple(slice(at, at + size) for at, size in zip(one.offset, one.values.shape, strict=True))
            if not torch.equal(one.values, expected[name.removesuffix("!copy")][place]):
                wrong.append(name)
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, wrong)
    return [name for one in found for name in one]


def growth_bytes(asked: dict[str, Any]) -> float:
    """How much the fullest rank needs at any moment while it builds its part of a model."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    reset_peak_memory()
    before = resident_bytes("VmRSS")
    request = TrainRequest.model_validate(asked)
    meshes = meshes_of(request, CPU)
    assert meshes is not None
    build_replica(request, CPU, meshes)
    grown: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(grown, resident_bytes("VmHWM") - before)
    return float(max(grown))


def built(case: tuple[str, dict[str, Any]]) -> Any:
    """Do one of the two."""
    return {"differences": differences, "growth": growth_bytes}[case[0]](case[1])
