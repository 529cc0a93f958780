"""Values by seed: a rank draws what it holds of each parameter, a block of rows at a time, and never the whole model.

Each block is drawn from a stream named by (seed, name of the parameter in the whole model, block), so that any stage
and any shard of any layout holds the same values.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import nn

from runtime.data import generator
from runtime.layers import local
from runtime.pieces import offset_of
from runtime.ranks import StageShare
from runtime.routing import Balance
from runtime.transformer import NO_BALANCE, Decoder
from scenarios.model import ModelSpec

INIT_STD = 0.02
"""Standard deviation of all matrices at the start (as GPT-2 and Llama do)."""
BLOCK_ELEMENTS = 2**22
"""Elements that are drawn at once, unless a row has more."""


def sketch_decoder(
    model: ModelSpec,
    share: StageShare,
    *,
    dtype: torch.dtype,
    recompute_modules: tuple[str, ...] = (),
    balance: Balance = NO_BALANCE,
) -> Decoder:
    """Build one stage without memory, to be split and sharded before it is filled."""
    with torch.device("meta"):
        return Decoder(model, share, dtype=dtype, recompute_modules=recompute_modules, balance=balance)


def allocate(decoder: Decoder, device: torch.device) -> Decoder:
    """Give a sketched stage memory for what this rank holds of it."""
    decoder.to_empty(device=device)
    decoder.tie()
    return decoder


def fill(decoder: Decoder, device: torch.device, seed: int) -> Decoder:
    """Allocate a stage: matrices normal with INIT_STD, norms 1, biases and all else 0."""
    allocate(decoder, device)
    with torch.no_grad():
        for name, parameter in decoder.named_parameters():
            if decoder.tied and name == "head.weight":
                name = "embedding.weight"
            if parameter.dim() > 1 and not name.endswith("bias"):
                draw(parameter, seed, name)
            else:
                local(parameter).fill_(1.0 if name.endswith("weight") else 0.0)
        for buffer in decoder.buffers():
            buffer.zero_()
    return decoder


def build_decoder(
    model: ModelSpec,
    share: StageShare,
    *,
    seed: int,
    dtype: torch.dtype,
    device: torch.device,
    balance: Balance = NO_BALANCE,
) -> Decoder:
    """Build and fill one whole stage on a device."""
    return fill(sketch_decoder(model, share, dtype=dtype, balance=balance), device, seed)


def draw(parameter: nn.Parameter, seed: int, name: str) -> None:
    """Draw the part of a parameter that is on this rank."""
    values, shape = local(parameter), tuple(parameter.shape)
    if values.numel() == 0:
        return
    offset, width = offset_of(parameter), shape[-1]
    rows, here = max(1, BLOCK_ELEMENTS // width), slice(offset[-1], offset[-1] + values.shape[-1])
    total, last, drawn = math.prod(shape[:-1]), -1, torch.empty(0)
    for first, part in neighbours(values, shape, offset):
        for block in range(first // rows, -(-(first + len(part)) // rows)):
            begin = block * rows
            if block != last:
                stream = generator(seed, f"{name} {block}" if block else name)
                drawn = torch.empty(min(rows, total - begin), width).normal_(0.0, INIT_STD, generator=stream)
                last = block
            low, high = max(first, begin), min(first + len(part), begin + rows)
            part[low - first : high - first].copy_(drawn[low - begin : high - begin, here])


def neighbours(
    values: torch.Tensor, shape: tuple[int, ...], offset: tuple[int, ...], first: int = 0
) -> Iterator[tuple[int, torch.Tensor]]:
    """Cut the local part of a tensor into rows that are neighbours in the whole: the first row of each, and a view.

    >>> [(row, tuple(part.shape)) for row, part in neighbours(torch.empty(2, 3, 5), (4, 6, 5), (2, 3, 0))]
    [(15, (3, 5)), (21, (3, 5))]
    """
    if values.dim() == 2:
        yield first + offset[0], values
        return
    for place, part in enumerate(values):
        yield from neighbours(part, shape[1:], offset[1:], first + (offset[0] + place) * math.prod(shape[1:-1]))
