"""How a job is spread over GPUs: the parallel degrees, the schedule, sharding, recompute and the stages."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal, Optional

from pydantic import Field, create_model, model_validator

from topologies.document import Document

if TYPE_CHECKING:
    from scenarios.job import Job

Axis = Literal["tp", "cp", "ep", "dp", "pp"]
Sharding = Literal["none", "zero1", "zero2", "zero3"]
Schedule = Literal["gpipe", "1f1b", "interleaved", "zb-h1", "zbv", "dualpipe", "zb-h2"]
ContextExchange = Literal["ring", "all-gather", "all-to-all"]
Recompute = Literal["none", "selective", "full"]
RecomputeModule = Literal[
    "core_attn", "layernorm", "act", "mla_up_proj", "mlp", "moe", "shared_experts", "half_of_matmuls"
]
"""What selective recompute repeats, in Megatron-Core's words; ``half_of_matmuls`` is torchtitan's per-operator rule:
every second matrix multiplication and everything that is not one."""

SHARDINGS: tuple[Sharding, ...] = ("none", "zero1", "zero2", "zero3")
SCHEDULES: tuple[Schedule, ...] = ("gpipe", "1f1b", "interleaved", "zb-h1", "zbv", "dualpipe", "zb-h2")
RECOMPUTES: tuple[Recompute, ...] = ("none", "selective", "full")


class Stage(Document):
    """The layers of one virtual pipeline stage, in model order."""

    layers: int = Field(ge=0)
    recompute_layers: int = Field(default=0, ge=0)
    """How many of them recompute their whole forward pass."""
    recompute: str = Field(default="", pattern="^[fsn]*$")
    """One letter per layer, in order: f full, s selective, n none. Empty: the first ``recompute_layers`` are f, the
    others s where the layout's recompute is selective, else n."""

    @model_validator(mode="after")
    def _letters_agree(self) -> Stage:
        letters, full = len(self.recompute), self.recompute.count("f")
        if letters and (letters != self.layers or full != self.recompute_layers):
            raise ValueError(
                f"recompute {self.recompute!r} has {letters} letters, {full} of them f; the stage has {self.layers} "
                f"layers and recompute_layers {self.recompute_layers}"
            )
        return self

    def modes(self, recompute: Recompute) -> str:
        """Return the recompute letter of each layer under a layout's recompute mode."""
        rest = "s" if recompute == "selective" else "n"
        return self.recompute or "f" * self.recompute_layers + rest * (self.layers - self.recompute_layers)


class Layout(Document):
    """A complete layout. GPUs used: ``tp * cp * pp * dp``; experts are spread over ``ep * etp`` of ``tp * cp * dp``.

    ``stages`` has ``pp * vpp`` entries in model order (stage ``i`` lies on pipeline rank ``i % pp``); empty means the
    uniform split: ``ceil(layers / (pp * vpp))`` each, the slots to spare taken from the ends.
    """

    tp: int = Field(default=1, ge=1)
    """Tensor parallel degree."""
    cp: int = Field(default=1, ge=1)
    """Context parallel degree: the sequence is split."""
    pp: int = Field(default=1, ge=1)
    """Pipeline parallel degree."""
    dp: int = Field(default=1, ge=1)
    """Data parallel replicas of the dense layers."""
    ep: int = Field(default=1, ge=1)
    """Expert parallel degree."""
    etp: int = Field(default=1, ge=1)
    """Tensor parallel degree inside an expert."""
    vpp: int = Field(default=1, ge=1)
    """Virtual stages (model chunks) per pipeline rank."""
    micro_batch_size: int = Field(default=1, ge=1)
    """Sequences of one micro-batch of one replica."""
    dp_replicate: int = Field(default=1, ge=1)
    """Groups of dp replicas that hold a copy each of what is sharded (HSDP): shards lie over dp / dp_replicate."""
    cp_comm: ContextExchange = "ring"
    """How the ranks of a cp group attend to the whole sequence: keys and values travel from rank to rank beside the
    computation (Liu et al. 2023), or are gathered before it (Llama 3), or heads are exchanged for tokens (Ulysses,
    Jacobs et al. 2023)."""
    sequence_parallel: bool = False
    """Norms and residuals split along the sequence inside the tp group (Korthikanti et al. 2022)."""
    optimizer_sharding: Sharding = "zero1"
    """none: replicated; zero1: optimizer states; zero2: and gradients; zero3: and weights (FSDP)."""
    schedule: Schedule = "1f1b"
    recompute: Recompute = "none"
    """selective: the ``recompute_modules``; full: every layer, or the ``recompute_layers`` of ``stages``."""
    recompute_modules: tuple[RecomputeModule, ...] = ("core_attn",)
    stages: tuple[Stage, ...] = ()
    rank_order: tuple[Axis, ...] = ("tp", "cp", "ep", "dp", "pp")
    """Axes from the fastest-varying rank index to the slowest."""

    @model_validator(mode="after")
    def _replicas_divide(self) -> Layout:
        if self.dp % self.dp_replicate:
            raise ValueError(f"dp {self.dp} does not divide into dp_replicate {self.dp_replicate} groups")
        return self

    @property
    def world_size(self) -> int:
        """GPUs that the layout uses."""
        return self.tp * self.cp * self.pp * self.dp

    def num_microbatches(self, job: Job) -> int:
        """Micro-batches that each replica runs per step.

        Raises:
            ValueError: the global batch does not divide.
        """
        count, rest = divmod(job.global_batch_size, self.dp * self.micro_batch_size)
        if rest or count == 0:
            raise ValueError(
                f"global batch {job.global_batch_size} is not a multiple of "
                f"dp {self.dp} x micro-batch {self.micro_batch_size}"
            )
        return count

    def label(self) -> str:
        """Short name for tables, degrees of 1 left out.

        >>> Layout(tp=8, pp=16, dp=128, sequence_parallel=True).label()
        'TP8 PP16 DP128 SP zero1 1f1b mb1'
        """
        degrees = [
            f"{axis.upper()}{getattr(self, axis)}"
            for axis in ("tp", "cp", "pp", "vpp", "ep", "etp", "dp")
            if getattr(self, axis) > 1
        ]
        words = [*(degrees or ["DP1"]), *(["SP"] if self.sequence_parallel else []), self.optimizer_sharding]
        words += [f"x{self.dp_replicate} copies"] if self.dp_replicate > 1 else []
        words += [f"cp-{self.cp_comm}"] if self.cp > 1 and self.cp_comm != "ring" else []
        words += [self.schedule] if self.pp > 1 else []
        words += [f"recompute-{self.recompute}"] if self.recompute != "none" else []
        return " ".join([*words, f"mb{self.micro_batch_size}"])


_OPTIONAL: dict[str, Any] = {
    name: (
        Optional[Annotated[info.annotation, *info.metadata] if info.metadata else info.annotation],  # noqa: UP045
        Field(default=None, description=info.description),
    )
    for name, info in Layout.model_fields.items()
}
Pins: Any = create_model("Pins", __base__=Document, __doc__="The fields of a Layout that the user fixes.", **_OPTIONAL)
"""The fields of a Layout, all optional: the planner chooses those that are None."""
