"""What is to be trained: the model, the tokens, the precision and the recipe of the optimizer."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from scenarios.model import MODELS, ModelSpec, read_model_file
from scenarios.stack import Stack
from topologies.document import Document, Reference
from topologies.units import Seconds, Tokens

TrainingPrecision = Literal["fp32", "fp16", "bf16", "fp8", "mxfp8", "nvfp4"]


class Job(Document):
    """A training job. In a scenario file ``model`` and ``stack`` stand at the top level, beside ``job``."""

    model: Annotated[ModelSpec, Reference(MODELS, read_raw=read_model_file)]
    seq_length: int = Field(ge=1)
    """Tokens per sequence."""
    global_batch_size: int = Field(ge=1)
    """Sequences per optimizer step, over all replicas."""
    target_tokens: Tokens | None = None
    """Tokens of the whole run; None: no run is asked for."""
    precision: TrainingPrecision = "bf16"
    """Format of the matrix multiplications; fp8 and below keep bf16 weights and activations outside them."""
    gradient_precision: Literal["fp32", "bf16"] = "fp32"
    """Format in which gradients are accumulated and reduced."""
    tuning: Literal["full", "lora"] = "full"
    """lora: the weights are frozen and small adapters beside them learn (Hu et al. 2021)."""
    optimizer: Literal["adamw", "sgd"] = "adamw"
    attention: Literal["flash", "unfused"] = "flash"
    """flash: the quadratic score matrix is never stored; unfused: it is."""
    stack: Stack = Stack()
    """The training software."""
    deadline_seconds: Seconds | None = None

    @property
    def tokens_per_step(self) -> int:
        """Tokens of one optimizer step."""
        return self.global_batch_size * self.seq_length
