"""What the planner is asked: a job on a cluster, and the numbers of both that the rules divide by."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from scenarios.job import Job
from scenarios.model import Attention, Mamba, Mla, Mlp, Moe
from scenarios.scenario import Allowance
from simulator.stages import tail_layers
from topologies.cluster import Cluster


@dataclass(frozen=True, kw_only=True)
class Question:
    """A job, a cluster and what is allowed; ``least_gpus`` must work (None: all of the cluster)."""

    cluster: Cluster
    job: Job
    allow: tuple[Allowance, ...] = ()
    least_gpus: int | None = None

    def allows(self, allowance: Allowance) -> bool:
        """Return whether the scenario permits it."""
        return allowance in self.allow

    @property
    def all_gpus(self) -> bool:
        """Whether every GPU of the cluster must work."""
        return self.least_gpus is None

    @cached_property
    def num_layers(self) -> int:
        """Blocks between embedding and head."""
        return self.job.model.num_layers

    @cached_property
    def tail_layers(self) -> int:
        """Layers' worth of work that the last stage does beside its own (multi-token prediction)."""
        return tail_layers(self.job.model)

    @cached_property
    def heads(self) -> tuple[int, ...]:
        """Query head counts that occur."""
        return _distinct(mixer.heads for mixer in self._mixers if isinstance(mixer, Attention | Mla))

    @cached_property
    def kv_heads(self) -> tuple[int, ...]:
        """Key-value head counts that occur (latent attention has none to split)."""
        return _distinct(mixer.kv_heads for mixer in self._mixers if isinstance(mixer, Attention))

    @cached_property
    def ffn_sizes(self) -> tuple[int, ...]:
        """Widths of dense and shared feed-forward blocks."""
        dense = (one.ffn_hidden_size for one in self._feed_forwards if isinstance(one, Mlp))
        shared = (one.shared_ffn_hidden_size for one in self._moes if one.shared_ffn_hidden_size)
        return _distinct([*dense, *shared])

    @cached_property
    def mamba_sizes(self) -> tuple[int, ...]:
        """Inner widths and head counts of Mamba mixers."""
        mambas = [mixer for mixer in self._mixers if isinstance(mixer, Mamba)]
        return _distinct([*(one.inner_size for one in mambas), *(one.heads for one in mambas if one.heads)])

    @cached_property
    def mamba_groups(self) -> tuple[int, ...]:
        """Groups of the second generation of Mamba."""
        return _distinct(one.groups for one in self._mixers if isinstance(one, Mamba) and one.generation == 2)

    @cached_property
    def num_experts(self) -> tuple[int, ...]:
        """Routed expert counts that occur; empty for a dense model."""
        return _distinct(one.num_experts for one in self._moes)

    @cached_property
    def expert_ffn_sizes(self) -> tuple[int, ...]:
        """Widths of routed experts."""
        return _distinct(one.ffn_hidden_size for one in self._moes)

    @cached_property
    def _mixers(self) -> list[Attention | Mla | Mamba | None]:
        return [layer.mixer for layer in self._used_kinds]

    @cached_property
    def _feed_forwards(self) -> list[Mlp | Moe | None]:
        return [layer.feed_forward for layer in self._used_kinds]

    @cached_property
    def _moes(self) -> list[Moe]:
        return [one for one in self._feed_forwards if isinstance(one, Moe)]

    @cached_property
    def _used_kinds(self) -> list[Any]:
        model = self.job.model
        return [model.layer_kinds[name] for name in model.kind_counts]

    @cached_property
    def domains(self) -> tuple[tuple[int, int], ...]:
        """Scale-up domains as (how many, GPUs of each), over all pools."""
        found = []
        for pool in self.cluster.pools:
            gpus, size = pool.num_nodes * pool.node.gpus_per_node, pool.node.scale_up.domain_size
            whole, rest = divmod(gpus, size)
            found += [(count, held) for count, held in ((whole, size), (1, rest)) if count and held]
        return tuple(found)

    @property
    def domains_text(self) -> str:
        """The domains in words: ``2048 of 8``."""
        return " + ".join(f"{count} of {size}" for count, size in self.domains)

    @cached_property
    def largest_domain(self) -> int:
        """GPUs of the largest scale-up domain."""
        return max(size for _, size in self.domains)

    @property
    def scale_up_name(self) -> str:
        """What the network inside a domain is called."""
        names = {"infinity-fabric": "Infinity Fabric", "pcie": "PCIe", "shared-memory": "shared-memory", "none": "node"}
        return names.get(self.cluster.scale_up.kind, "NVLink")

    def groups_in_domains(self, tp: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Tensor-parallel groups of each size that the domains hold whole: 6 + 2 GPUs hold none of 8."""
        return np.asarray(sum(count * (size // tp) for count, size in self.domains))


def _distinct(numbers: Iterable[int]) -> tuple[int, ...]:
    return tuple(sorted(set(numbers)))
