"""Replicas for a cluster of several kinds of GPUs, chosen and predicted in full: what is told of them."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

from planner.mixing import Mix
from scenarios.layout import Layout
from scenarios.scenario import Scenario
from simulator.outcome import MemoryUse, StepTime


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """Replicas with their mix, predicted in full."""

    mix: Mix
    layouts: dict[str, tuple[tuple[int, ...], Layout]]
    """Pools of the stages and layout of each template in the mix."""
    step: StepTime
    memory: MemoryUse


def of_all(
    scenario: Scenario, step: StepTime, own_seconds: float, mix: Mix, layouts: dict[str, tuple[tuple[int, ...], Layout]]
) -> StepTime:
    """Rates over all GPUs at work, and the band stretched with the step."""
    job, gpus, peak = scenario.job, 0, 0.0
    for share in mix.shares:
        pools, layout = layouts[share.template.name]
        used = share.replicas * layout.tp * layout.cp
        gpus += used * layout.pp
        peaks = [scenario.cluster.pools[pool].node.gpu.peak(job.precision) or math.nan for pool in pools]
        peak += used * sum(peaks)
    total, tokens = step.total_seconds, job.tokens_per_step
    flops = job.model.flops_per_token(job.seq_length) * tokens
    stretched = total / own_seconds
    mfu = flops / total / peak
    return replace(
        step,
        mfu=mfu,
        hfu=None if step.mfu is None or step.hfu is None else mfu * step.hfu / step.mfu,
        tokens_per_second_per_gpu=tokens / total / gpus,
        tflops_per_gpu=flops / total / gpus / 1e12,
        low_seconds=step.low_seconds * stretched,
        high_seconds=step.high_seconds * stretched,
    )


def first_layout(one: Choice) -> Layout:
    """The layout of the first pool in use."""
    return min(one.layouts.values(), key=lambda each: each[0])[1]


def nodes_at_work(scenario: Scenario, best: Choice) -> list[int]:
    """Nodes at work in each pool."""
    used = [0.0] * len(scenario.cluster.pools)
    for share in best.mix.shares:
        for pool, need in enumerate(share.template.nodes):
            used[pool] += share.replicas / share.template.replicas * need
    return [math.ceil(one - 1e-9) for one in used]


def place_text(scenario: Scenario, pools: tuple[int, ...]) -> str:
    """Where a replica lies, in words."""
    return " + ".join(scenario.cluster.pools[pool].node.name for pool in dict.fromkeys(pools))


def replicas_told(scenario: Scenario, best: Choice) -> list[dict[str, Any]]:
    """The replicas as plain data; ``stage_pools`` where one reaches over several pools."""
    told = []
    for share in best.mix.shares:
        pools, layout = best.layouts[share.template.name]
        gpus = dict.fromkeys(scenario.cluster.pools[pool].node.gpu.name for pool in pools)
        spans = {"stage_pools": list(pools)} if len(set(pools)) > 1 else {}
        told.append(
            {
                "pool": pools[0],
                "node": place_text(scenario, pools),
                "gpu": " + ".join(gpus),
                "replicas": share.replicas,
                "gpus_per_replica": layout.tp * layout.cp * layout.pp,
                "micro_batch_size": layout.micro_batch_size,
                "num_microbatches": share.microbatches,
                "recompute": layout.recompute,
                "seconds": share.template.seconds(share.microbatches),
                "layout": layout.model_dump(mode="json"),
                **spans,
            }
        )
    return told
