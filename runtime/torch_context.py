"""Attention over split sequences by torch's ``context_parallel``, beside headway's own in ``runtime.context``.

An experimental interface of torch 2.13 for CUDA: it replaces scaled_dot_product_attention while it is entered. Written
after its source and not run, for want of several GPUs.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch

from runtime.mesh import Meshes
from runtime.request import Recipe
from scenarios.layout import Layout


def torchs_attention(layout: Layout, meshes: Meshes, recipe: Recipe) -> AbstractContextManager[None]:
    """Return what the forward and backward passes of a step run in.

    A rank has the blocks r and 2 cp - 1 - r of each sequence, in which order torch's load balancer puts them too; so
    batches come divided, and only a stand-in is given to be divided.
    """
    if recipe.split_attention == "own" or meshes.cp is None:
        return nullcontext()
    from torch.distributed.tensor.experimental import context_parallel
    from torch.distributed.tensor.experimental._attention import set_rotate_method

    set_rotate_method("alltoall" if layout.cp_comm == "ring" else "allgather")
    places = torch.arange(2 * layout.cp, device=meshes.device)
    return context_parallel(meshes.cp, buffers=[places], buffer_seq_dims=[0], no_restore_buffers={places})
