"""The costs of the software around the arithmetic, from small models in real layouts: the runs of ``small_models``.

What the step model counts elsewhere is taken off by ``runtime.fixed_costs``.
"""

from __future__ import annotations

import itertools
import math
import statistics
import time

import torch
import torch.distributed as dist

from runtime.clocks import summary
from runtime.mesh import Meshes
from runtime.request import TrainRequest
from runtime.small_models import PAIRS, TINY, WIDE, Trial
from runtime.train import PHASES, build_replica, meshes_of

BUDGET_SECONDS = {TINY: 0.08, WIDE: 0.25}
"""About how long a trial is timed, by its hidden size, after a step of warm-up."""
FEWEST, MOST = 3, 24
"""Steps that are timed; one more at least where ranks wait for each other."""
WAITING = 1.5
"""Wall over CPU time of a rank that works in step with another one: 1.1 to 1.2 with work to do and 1.5 with hardly any
were measured on quiet cores. What is above was the scheduler's doing, on cores that others used too."""
Shape = tuple[int, int, int, int, bool]


def trial_seconds() -> dict[str, list[dict[str, float]]]:
    """Run all pairs of trials with two ranks; every rank of the job calls it.

    Returns:
        Seconds of each phase of a step as the slowest rank sees it, for both trials of a pair; nan on ranks outside.
    """
    meshes: dict[Shape, Meshes | None] = {}
    done: dict[str, dict[str, float]] = {}
    for trial in itertools.chain(*PAIRS.values()):
        if repr(trial) not in done:
            done[repr(trial)] = _phases(trial, meshes)
    return {name: [done[repr(trial)] for trial in pair] for name, pair in PAIRS.items()}


def _phases(trial: Trial, meshes: dict[Shape, Meshes | None]) -> dict[str, float]:
    """Time the phases of a trial: by CPU time where a rank works alone, by the wall where it waits for the other."""
    layout = trial.layout
    request = TrainRequest(job=trial.job, layout=layout)
    shape = (layout.pp, layout.dp, layout.tp, layout.ep, trial.experts > 0)
    if shape not in meshes:
        meshes[shape] = meshes_of(request, torch.device("cpu"))
    here = meshes[shape]
    if here is None:
        return dict.fromkeys(PHASES, float("nan"))
    replica = build_replica(request, torch.device("cpu"), here)
    marks: list[float] = []
    replica.on_mark = lambda: marks.append(time.process_time())

    def step(number: int) -> list[list[float]]:
        marks.clear()
        wall = replica.step(number)[1]
        return [wall, [after - before for before, after in itertools.pairwise(marks)]]

    step(0)
    first = step(1)
    once = torch.tensor(sum(first[0]))
    dist.all_reduce(once, dist.ReduceOp.MAX, group=here.world)
    apart = layout.world_size == layout.dp and layout.ep == 1 and layout.optimizer_sharding in ("none", "zero1")
    least = FEWEST if apart else FEWEST + 1
    count = min(max(int(BUDGET_SECONDS[trial.hidden_size] / once.item()), least), MOST)
    timed = [first, *(step(number) for number in range(2, 1 + count))]
    slowest = torch.tensor(timed, dtype=torch.float64).transpose(0, 1)
    dist.all_reduce(slowest, dist.ReduceOp.MAX, group=here.world)
    seconds = {}
    for index, phase in enumerate(PHASES):
        wall, cpu = (values[:, index].tolist() for values in slowest)
        alone = summary(cpu).seconds
        meets = phase == "gradient_reduction" or not apart
        seconds[phase] = min(_faster_half(wall), WAITING * alone) if meets else alone
    return seconds


def _faster_half(seconds: list[float]) -> float:
    """Mean of the undisturbed half: ranks that wait for each other are disturbed by what disturbs one of them."""
    return statistics.fmean(sorted(seconds)[: math.ceil(len(seconds) / 2)])
