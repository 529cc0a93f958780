"""What a rank holds of a training state, as rectangles of whole tensors: any layout can save them and load its own.

A name is that of the parameter in the whole model, so that it does not depend on stages, shards or wrappers.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from runtime.layers import local
from runtime.optimizer import FlatShardAdamW, LocalAdamW, ReplicaOptimizer
from runtime.transformer import Decoder

MOMENTS = ("exp_avg", "exp_avg_sq")
"""State of AdamW beside its step count, which is that of the training."""


@dataclass(frozen=True, slots=True)
class Rectangle:
    """A part of a tensor: where it begins in the whole, and a view of its values."""

    offset: tuple[int, ...]
    values: torch.Tensor


@dataclass(frozen=True, slots=True)
class Piece:
    """What this rank holds of one tensor."""

    shape: tuple[int, ...]
    """Of the whole tensor."""
    rectangles: tuple[Rectangle, ...]

    @property
    def num_bytes(self) -> int:
        """On this rank."""
        return sum(one.values.numel() * one.values.element_size() for one in self.rectangles)


Pieces = Mapping[str, Piece]


def training_state(decoders: list[Decoder], optimizer: ReplicaOptimizer, *, copies: bool) -> dict[str, Piece]:
    """Return views of the parameters and the optimizer state of this rank.

    Args:
        decoders: the stages on this rank.
        optimizer: of these stages.
        copies: with the second copy of a tied embedding, which is loaded but not saved.
    """
    state: dict[str, Piece] = {}
    for name, parameter in named_parameters(decoders, copies=copies):
        state[f"model.{name}"] = whole_or_shard(parameter)
        for moment, piece in moments(optimizer, parameter).items():
            state[f"optimizer.{moment}.{name}"] = piece
    for decoder in decoders:
        saved = decoder.state_dict()
        for name, buffer in decoder.named_buffers():
            if name in saved:
                state[f"model.{name}"] = whole_or_shard(buffer)
    return state


def named_parameters(decoders: list[Decoder], *, copies: bool) -> Iterator[tuple[str, nn.Parameter]]:
    """Name the parameters as in the whole model; ``!copy`` marks the second copy of a tied embedding."""
    for decoder in decoders:
        for name, parameter in decoder.named_parameters():
            if decoder.tied and name == "head.weight":
                if copies:
                    yield "embedding.weight!copy", parameter
            else:
                yield name, parameter


def saved_name(name: str) -> str:
    """Name under which a piece lies in a checkpoint.

    >>> saved_name("model.embedding.weight!copy")
    'model.embedding.weight'
    """
    return name.removesuffix("!copy")


def whole_or_shard(tensor: torch.Tensor) -> Piece:
    """Describe a tensor, or the shard of a DTensor that is here."""
    shape = tuple(tensor.shape)
    values = local(tensor).detach()
    if values.numel() == 0:
        return Piece(shape, ())
    return Piece(shape, (Rectangle(offset_of(tensor), values),))


def offset_of(tensor: torch.Tensor) -> tuple[int, ...]:
    """Where the local part of a tensor begins in the whole."""
    if not isinstance(tensor, DTensor):
        return (0,) * tensor.dim()
    return tuple(tensor.__create_chunk_list__()[0].offsets)


def moments(optimizer: ReplicaOptimizer, parameter: nn.Parameter) -> dict[str, Piece]:
    """Return what the optimizer remembers of a parameter on this rank; made where it does not exist yet."""
    if isinstance(optimizer, FlatShardAdamW):
        return _flat_moments(optimizer, parameter)
    assert isinstance(optimizer, LocalAdamW)
    state = adamw_state(optimizer.inner, parameter)
    return {moment: whole_or_shard(state[moment]) for moment in MOMENTS}


def adamw_state(optimizer: torch.optim.Optimizer, parameter: nn.Parameter) -> dict[str, torch.Tensor]:
    """Return AdamW's state of a parameter, made as AdamW itself does in its first step."""
    state: dict[str, torch.Tensor] = optimizer.state[parameter]
    if not state:
        state["step"] = torch.zeros((), dtype=torch.float32, device=local(parameter).device)
        for moment in MOMENTS:
            state[moment] = torch.zeros_like(parameter, requires_grad=False)
    return state


def set_step_count(optimizer: ReplicaOptimizer, steps: int) -> None:
    """Tell AdamW how many steps were done; it corrects the bias of its moments by it."""
    assert isinstance(optimizer, FlatShardAdamW | LocalAdamW)
    for state in optimizer.inner.state.values():
        state["step"].fill_(float(steps))


def _flat_moments(optimizer: FlatShardAdamW, parameter: nn.Parameter) -> dict[str, Piece]:
    """Cut the slice of the flat buffer that this rank owns into rectangles of the parameter."""
    one = next(one for one in optimizer.shards if any(other is parameter for other in one.parameters))
    state = adamw_state(optimizer.inner, one.shard)
    low, high, place = next(span[1:] for span in one.spans() if span[0] is parameter)
    corner = offset_of(parameter)
    found: dict[str, Piece] = {}
    for moment in MOMENTS:
        rectangles = []
        for offset, shape, at in rectangles_of(tuple(local(parameter).shape), low, high):
            where = place + at - low
            view = state[moment].detach()[where : where + math.prod(shape)].view(shape)
            rectangles.append(Rectangle(tuple(one + two for one, two in zip(corner, offset, strict=True)), view))
        found[moment] = Piece(tuple(parameter.shape), tuple(rectangles))
    return found


def rectangles_of(
    shape: tuple[int, ...], low: int, high: int
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...], int]]:
    """Cut elements ``low`` to ``high`` of a row-major tensor into rectangles.

    Yields:
        Offset, shape and index of the first element of each, in order.

    >>> list(rectangles_of((3, 4), 2, 9))
    [((0, 2), (1, 2), 2), ((1, 0), (1, 4), 4), ((2, 0), (1, 1), 8)]
    """
    if low >= high:
        return
    if len(shape) == 1:
        yield (low,), (high - low,), low
        return
    row = math.prod(shape[1:])
    first, last = -(-low // row), high // row
    if last < first:  # inside one row
        yield from _in_row(shape, low, high, last)
        return
    yield from _in_row(shape, low, first * row, first - 1)
    if last > first:
        yield (first, *(0 for _ in shape[1:])), (last - first, *shape[1:]), first * row
    yield from _in_row(shape, last * row, high, last)


def _in_row(
    shape: tuple[int, ...], low: int, high: int, index: int
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...], int]]:
    begin = index * math.prod(shape[1:])
    for offset, inner, at in rectangles_of(shape[1:], low - begin, high - begin):
        yield (index, *offset), (1, *inner), begin + at


def staged(pieces: Pieces, before: Pieces | None) -> dict[str, Piece]:
    """Copy pieces into host memory, into the copies made ``before`` where there are such."""
    result: dict[str, Piece] = {}
    for name, piece in pieces.items():
        rectangles = []
        for index, one in enumerate(piece.rectangles):
            target = (
                torch.empty_like(one.values, device="cpu") if before is None else before[name].rectangles[index].values
            )
            rectangles.append(Rectangle(one.offset, target.copy_(one.values, non_blocking=True)))
        result[name] = Piece(piece.shape, tuple(rectangles))
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return result
