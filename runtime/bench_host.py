"""The costs of the software around the arithmetic: what a layer, its wrappers, a pipelined micro-batch and a step add.

Small models run in real layouts; the cost of a layer is the slope over the depth, the cost of a micro-batch the slope
over their number. What the step model counts elsewhere is taken off by ``runtime.calibrate.fixed_costs``.
"""

from __future__ import annotations

import time
from typing import Any

import torch
import torch.distributed as dist

from runtime.clocks import summary
from runtime.request import TrainRequest
from runtime.small_models import TINY, WIDE, WIDE_TOKENS, small_model
from runtime.train import build_replica
from scenarios.job import Job
from scenarios.layout import Layout, Stage
from scenarios.model import ModelSpec

STEPS = {TINY: 10, WIDE: 6}
"""Steps timed, the first not counted."""
WAITING = 1.5
"""Wall over CPU time of a rank that works in step with another one: 1.1 to 1.2 with work to do and 1.5 with hardly any
were measured on quiet cores. What is above was the scheduler's doing, on cores that others used too."""


def step_seconds(model: ModelSpec, microbatches: int, seq_length: int = 8, **degrees: object) -> float:
    """Lower decile of the seconds of a step under a layout, as its slowest rank sees it; nan on ranks outside.

    CPU time for one rank and for a pipeline, whose waiting is counted elsewhere; else wall time, because what ranks
    wait for each other belongs to the layer, within WAITING of the CPU time.
    """
    layout = Layout.model_validate(degrees)
    slots = layout.pp * layout.vpp
    per_stage = model.num_layers // slots
    stage = Stage(layers=per_stage, recompute_layers=per_stage if layout.recompute == "full" else 0)
    layout = layout.model_copy(update={"stages": (stage,) * slots})
    job = Job(model=model, seq_length=seq_length, global_batch_size=microbatches * layout.dp, precision="fp32")
    replica = build_replica(TrainRequest(job=job, layout=layout), torch.device("cpu"))
    if replica is None:
        return float("nan")
    walls, cpus = [], []
    for step in range(STEPS[model.hidden_size]):
        before = time.process_time()
        walls.append(sum(replica.step(step)[1]))
        cpus.append(time.process_time() - before)
    slowest = torch.tensor([walls[1:], cpus[1:]], dtype=torch.float64)
    dist.all_reduce(slowest, dist.ReduceOp.MAX, group=replica.meshes.world)
    wall, cpu = (summary(row).seconds for row in slowest.tolist())
    return cpu if layout.world_size == layout.pp else min(wall, WAITING * cpu)


def layer_seconds(
    hidden_size: int = TINY, part: int = 1, microbatches: int = 2, seq_length: int = 8, **degrees: object
) -> float:
    """Seconds of one layer and micro-batch under a layout: the slope over the depth."""
    few, many = 1, 3
    deep, shallow = (
        step_seconds(small_model(layers, hidden_size, part), microbatches, seq_length, **degrees)
        for layers in (many, few)
    )
    return (deep - shallow) / (many - few) / microbatches


def host_seconds() -> dict[str, float]:
    """Measure layers of every kind with two ranks; every rank of the job calls it.

    Returns:
        Seconds of one layer and micro-batch: plain (``layer``), tensor parallel (``tp_layer``, with sequence
        parallelism ``tp_sequence_layer``), under FSDP2 (``dp_layer``), with full recompute (``recompute_layer``,
        ``tp_recompute_layer``); the same with work to do (``wide_*``) beside the
        same work without a wrapper (``plain_*``). Seconds of a ``microbatch`` without layers, of a micro-batch on a
        pipeline stage of one layer (``pp_microbatch``), and of a ``step`` without micro-batches.
    """
    sharded: dict[str, Any] = {"dp": 2, "optimizer_sharding": "zero3"}
    few, many = small_model(1, TINY), small_model(2, TINY)
    layer, two, six = layer_seconds(), step_seconds(few, 2), step_seconds(few, 6)
    microbatch = (six - two) / 4
    split: dict[str, Any] = {"microbatches": 1, "seq_length": WIDE_TOKENS}
    return {
        "layer": layer,
        "tp_layer": layer_seconds(tp=2),
        "tp_sequence_layer": layer_seconds(tp=2, sequence_parallel=True),
        "dp_layer": layer_seconds(**sharded),
        "recompute_layer": layer_seconds(recompute="full"),
        "tp_recompute_layer": layer_seconds(tp=2, recompute="full"),
        "wide_dp_layer": layer_seconds(WIDE, **sharded),
        "plain_dp_layer": layer_seconds(WIDE),
        "wide_tp_layer": layer_seconds(WIDE, **split, tp=2),
        "plain_tp_layer": layer_seconds(WIDE, part=2, **split),
        "microbatch": max(microbatch - layer, 0.0),
        "pp_microbatch": (step_seconds(many, 8, pp=2) - step_seconds(many, 4, pp=2)) / 4,
        "step": max(two - 2 * microbatch, 0.0),
    }
