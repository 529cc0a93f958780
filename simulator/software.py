"""From a declared stack to factors: what is declared is used, what is not is assumed, named, and widens the band."""

from __future__ import annotations

from dataclasses import dataclass

from scenarios.job import Job
from scenarios.model import Moe
from scenarios.stack import AttentionKernel
from simulator.keeping import MEGATRON_CORE
from simulator.parameters import Parameters
from topologies.cluster import Cluster

TUNED = {"megatron", "nemo", "megatron-bridge", "maxtext", "jax", "internevo"}
"""Trainers that GPU vendors or their largest users tune for a machine."""
ASYNC_SINCE = "2021-09"
"""Since when the backward of Megatron-LM sends the input gradient while it computes the weight gradient."""
DEEPSPEED_MATURE = "2022-07"
"""Since when its pipeline engine is no slower than Megatron-LM's."""
WITHOUT_HOST_TIME = {"maxtext", "jax"}
"""Trainers that compile a whole step into one program."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Software:
    """Factors of one stack on one GPU. ``exposed_*`` is the share of a traffic that the GPU waits for."""

    attention_kernel: AttentionKernel
    kernel_factor: float
    efficiency: float
    """Of GEMMs, against vendor-tuned stacks; attention kernels are libraries, with a factor of their own."""
    memory_ops: float
    host_share: float
    """Of the dense host time that the CUDA graphs leave."""
    moe_host_share: float
    sync_seconds: float
    """Of a layer and micro-batch in which the GPU waits for the host whatever it computes."""
    moe_release: float
    exposed_tp: float
    exposed_tp_backward: float
    """Of what the backward sends while weight gradients could hide it."""
    exposed_cp: float
    exposed_ep: float
    exposed_pp: float
    exposed_pp_interleaved: float
    exposed_dp: float
    dp_overlap: bool
    exposed_fsdp: float
    split_boundary: bool
    """Each rank of a tp group sends its share of an activation to the next stage (Narayanan et al. 2021, 4.1)."""
    lora: bool
    cpu_optimizer: bool
    gather_bytes: float
    """Of one weight on its way to the ranks that need it."""
    deduplicates: bool
    assumptions: tuple[str, ...]
    undeclared: tuple[str, ...]
    """Names of the band parameters that widen the error bar."""

    @property
    def unfused(self) -> bool:
        """The score matrix goes through memory."""
        return self.attention_kernel == "unfused"


def software(cluster: Cluster, job: Job, parameters: Parameters) -> Software:
    """Resolve the stack of a job on a cluster (factors: table 7 of the fit of published runs, see parameters.yaml)."""
    stack, architecture = job.stack, cluster.gpu.architecture
    moe = any(isinstance(layer.feed_forward, Moe) for layer in job.model.layer_kinds.values())
    cpu, old = architecture == "cpu", architecture == "ampere"
    assumptions: list[str] = []
    undeclared: list[str] = []

    def assume(text: str, band: str | None = None) -> None:
        assumptions.append(f"assumed: {text}")
        if band is not None and not cpu:
            undeclared.append(band)

    kernel = stack.attention_kernel or ("unfused" if job.attention == "unfused" else None)
    if kernel is None:
        kernel = "flash2" if old or cpu else "flash3-cudnn"
        assume(f"attention kernel {kernel}, the best of the generation", "attention kernel not declared")

    tuned = stack.tuned
    if tuned is None and stack.trainer is not None:
        tuned = stack.trainer in TUNED
    if tuned is None:
        tuned = True
        assume("a stack tuned for the GPU (stack.trainer is not declared)", None if old else "trainer not declared")

    graph = "full" if stack.cuda_graph is None and stack.trainer in WITHOUT_HOST_TIME else stack.cuda_graph
    if graph is None:
        graph = "none"
        if moe:
            assume("no CUDA graphs", "cuda graph not declared")

    tp_overlap = stack.tp_overlap
    if tp_overlap is None:
        tp_overlap = tuned and not old and not cpu and not moe
        assume(f"TP traffic {'overlapped' if tp_overlap else 'not overlapped'}", "overlap not declared")
    dp_overlap = not cpu if stack.dp_overlap is None else stack.dp_overlap
    ep_overlap = bool(stack.ep_overlap)
    if moe and stack.ep_overlap is None:
        assume("all-to-all not overlapped", "overlap not declared")

    p = parameters
    hidden_by_wgrad = stack.trainer in MEGATRON_CORE and (stack.date is None or stack.date >= ASYNC_SINCE)
    early = stack.trainer == "deepspeed" and stack.date is not None and stack.date < DEEPSPEED_MATURE
    lora = job.tuning == "lora"
    memory_ops = p.memory_ops_eager.value if stack.fused is False else p.memory_ops.value
    if lora:
        memory_ops = memory_ops * p.lora_memory_ops.value
    graph_share = {"none": 1.0, "partial": p.graph_partial.value, "full": p.graph_full.value}[graph]
    shared = {
        "exposed_tp": p.exposed_tp_overlapped.value if tp_overlap else p.exposed_tp.value,
        "exposed_tp_backward": p.exposed_tp_overlapped.value
        if tp_overlap
        else p.exposed_tp_backward.value
        if hidden_by_wgrad
        else p.exposed_tp.value,
        "exposed_cp": p.exposed_cp.value,
        "exposed_ep": p.exposed_ep_overlapped.value if ep_overlap else p.exposed_ep.value,
        "exposed_pp": p.exposed_pp_overlapped.value if stack.pp_overlap else p.exposed_pp.value,
        "exposed_pp_interleaved": p.exposed_pp.value if stack.pp_overlap is False else p.exposed_pp_overlapped.value,
        "exposed_dp": p.exposed_dp_overlapped.value if dp_overlap else p.exposed_dp.value,
        "exposed_fsdp": p.exposed_fsdp.value,
    }
    if stack.step_factor != 1.0:
        assumptions.append(f"step times x {stack.step_factor:.3g}: a few measured runs of this stack, shrunk")
    if cpu:
        assumptions.append("assumed: CPU cores move data themselves, so no traffic is hidden behind compute")
        shared = dict.fromkeys(shared, 1.0)
    return Software(
        attention_kernel=kernel,
        kernel_factor=_kernel_factor(kernel, architecture, parameters),
        efficiency=1.0 if tuned or old or cpu else p.untuned.value,
        sync_seconds=p.early_deepspeed.value if early else 0.0,
        memory_ops=memory_ops,
        host_share=graph_share,
        moe_host_share=p.graph_full.value if graph == "full" else 1.0,
        moe_release=_moe_release(stack.date, parameters),
        split_boundary=stack.trainer in MEGATRON_CORE or stack.trainer == "deepspeed",
        lora=lora,
        cpu_optimizer=stack.offload == "optimizer",
        gather_bytes=4.0 if job.precision == "fp32" else 1.0 if stack.weight_gather == "fp8" else 2.0,
        dp_overlap=dp_overlap and not cpu,
        deduplicates=stack.moe_dispatcher == "deduplicating",
        assumptions=tuple(assumptions),
        undeclared=tuple(dict.fromkeys(undeclared)),
        **shared,
    )


def _kernel_factor(kernel: AttentionKernel, architecture: str, parameters: Parameters) -> float:
    factors = parameters.kernel_factor
    for name in (f"{kernel} {architecture}", kernel):
        if name in factors:
            return factors[name].value
    return 1.0


def _moe_release(date: str | None, parameters: Parameters) -> float:
    """Factor on MoE overheads by the date of the software, 1 at mid 2025 and where no date is declared."""
    if date is None:
        return 1.0
    year, month = (int(part) for part in date.split("-"))
    age = min(1.5, max(-1.0, year + (month - 0.5) / 12 - 2025.5))
    factor: float = (1 - parameters.moe_release.value) ** age
    return factor
