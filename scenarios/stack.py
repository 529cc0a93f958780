"""The training software: what it is, which kernels it runs and what it overlaps.

Everything is optional. What is not declared takes the usual value for the GPU and the trainer, is named as an
assumption, and widens the error bar of a prediction.
"""

from __future__ import annotations

import re
from typing import Literal

from pydantic import Field, field_validator

from topologies.document import Document

Trainer = Literal[
    "megatron",
    "nemo",
    "megatron-bridge",
    "maxtext",
    "jax",
    "internevo",
    "torchtitan",
    "fsdp",
    "llm-foundry",
    "deepspeed",
    "huggingface",
    "automodel",
    "headway",
    "other",
]
AttentionKernel = Literal["unfused", "early-flash", "flash2", "flash3-cudnn"]


class Stack(Document):
    """A software stack; None means not declared."""

    trainer: Trainer | None = None
    version: str | None = None
    """Release of the trainer, as its makers write it."""
    date: str | None = None
    """Year and month of the software, such as 2025-07."""
    attention_kernel: AttentionKernel | None = None
    """unfused: the score matrix goes through memory; early-flash: FlashAttention 1 or its Triton kernel; flash2;
    flash3-cudnn: the vendor's best."""
    tuned: bool | None = None
    """Tuned by the GPU vendor for the machine (Megatron-Core, NeMo, MLPerf), or a generic PyTorch trainer."""
    fused: bool | None = None
    """Norms, activations and cross entropy run as fused or compiled kernels; False: eager, one kernel per operation."""
    cuda_graph: Literal["none", "partial", "full"] | None = None
    """partial: some modules are captured; full: the whole iteration."""
    tp_overlap: bool | None = None
    dp_overlap: bool | None = None
    ep_overlap: bool | None = None
    pp_overlap: bool | None = None
    moe_dispatcher: Literal["all-to-all", "deduplicating"] | None = None
    """deduplicating: a token crosses to each node once, whatever the number of its experts there (DeepEP, HybridEP)."""
    offload: Literal["none", "optimizer"] | None = None
    """optimizer: its states and its update live on the host CPU (ZeRO-Offload)."""
    weight_gather: Literal["bf16", "fp8"] | None = None
    """Format in which sharded weights are gathered."""
    step_factor: float = Field(default=1.0, gt=0, le=10)
    """What a few measured runs of this stack say: measured over predicted step time, shrunk towards 1
    (``headway calibrate --runs``). Multiplies every second of a step."""

    @field_validator("date")
    @classmethod
    def _is_a_month(cls, date: str | None) -> str | None:
        if date is not None and not re.fullmatch(r"\d{4}-(0[1-9]|1[0-2])", date):
            raise ValueError(f"{date!r} is not a year and a month; write them as 2025-07")
        return date
