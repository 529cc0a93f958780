"""The length of the whole gradient, every part of it counted once, and the cut to a longest one."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from runtime.mesh import Meshes
from runtime.optimizer import ReplicaOptimizer
from runtime.transformer import Decoder


def clip(optimizer: ReplicaOptimizer, decoders: list[Decoder], meshes: Meshes, longest: float) -> float:
    """Scale all gradients so that they are together no longer than ``longest``.

    Args:
        optimizer: after it has summed the gradients.
        decoders: the stages on this rank.
        meshes: of the layout.
        longest: Euclidean norm.

    Returns:
        The norm before.
    """
    norm = gradient_norm(optimizer, decoders, meshes)
    if norm > longest:
        for group in optimizer.inner.param_groups:
            for parameter in group["params"]:
                parameter.grad.mul_(longest / norm)
    return norm


def gradient_norm(optimizer: ReplicaOptimizer, decoders: list[Decoder], meshes: Meshes) -> float:
    """Return the norm of the summed gradients of the whole model; all ranks of the layout call it."""
    second_copies = {
        decoder.head.weight
        for decoder in decoders
        if decoder.tied and decoder.head is not None and decoder.embedding is None
    }
    holders = meshes.world.size() // meshes.pp.size()
    total = torch.zeros((), dtype=torch.float64, device=meshes.device)
    for parameter, values, sharers in optimizer.reduced():
        if parameter not in second_copies:
            copies = holders / (sharers * shards_of(parameter))
            total += values.double().square().sum() / copies
    dist.all_reduce(total, group=meshes.world)
    return total.sqrt().item()


def shards_of(parameter: torch.Tensor) -> int:
    """Count the parts that a parameter is divided into."""
    if not isinstance(parameter, DTensor):
        return 1
    count = 1
    for axis, placement in enumerate(parameter.placements):
        if not placement.is_replicate():
            count *= parameter.device_mesh.size(axis)
    return count
