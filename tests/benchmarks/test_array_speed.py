"""How many layouts a second the array form prices; prints, asserts nothing about time."""

import itertools
import time

import numpy as np
import pytest

from scenarios.layout import RECOMPUTES, SCHEDULES, SHARDINGS
from scenarios.scenario import load_scenario
from simulator.arrays import LayoutArrays
from simulator.memory import peak_bytes
from simulator.step import step_seconds

INTERLEAVED, PLAIN = SCHEDULES.index("interleaved"), SCHEDULES.index("1f1b")


def space(gpus, batch, layers, experts):
    """Every layout of powers of two, by plain enumeration."""
    rows = []
    powers = [2**i for i in range(15)]
    for tp, cp, pp, size, vpp in itertools.product(powers[:4], powers[:5], powers[:7], powers[:4], (1, 2, 3, 4, 6, 8)):
        dp, rest = divmod(gpus, tp * cp * pp)
        if rest or batch % (dp * size) or pp * vpp > layers or (pp == 1 and vpp > 1):
            continue
        if vpp > 1 and (batch // dp // size) % pp:
            continue
        for ep in [one for one in powers if one <= experts and dp * cp * tp % one == 0]:
            choices = itertools.product((False, True), range(len(SHARDINGS)), range(len(RECOMPUTES)))
            schedule = INTERLEAVED if vpp > 1 else PLAIN
            rows += [(tp, cp, pp, vpp, dp, ep, 1, size, sp, zero, schedule, re) for sp, zero, re in choices]
    columns = np.array(rows, dtype=np.int64).T
    names = ("tp", "cp", "pp", "vpp", "dp", "ep", "etp", "micro_batch_size")
    return LayoutArrays(
        **dict(zip(names, columns, strict=False)),
        sequence_parallel=columns[8].astype(bool),
        sharding=columns[9],
        schedule=columns[10],
        recompute=columns[11],
    )


@pytest.mark.parametrize(
    ("name", "gpus", "experts"), [("llama3-405b-16k-h100", 16384, 1), ("deepseek-v3-2048-h800", 2048, 64)]
)
def test_layouts_per_second(name, gpus, experts, capsys):
    scenario = load_scenario(name)
    job = scenario.job.model_copy(update={"global_batch_size": 4096})
    layouts = space(gpus, 4096, job.model.num_layers, experts)
    for price in (step_seconds, peak_bytes):
        price(scenario.cluster, job, layouts.take(slice(0, 1000)))
        start = time.process_time()
        price(scenario.cluster, job, layouts)
        seconds = time.process_time() - start
        with capsys.disabled():
            rate = f"{len(layouts):,} layouts, {len(layouts) / seconds:,.0f} per CPU second"
            print(f"\n{name}: {price.__name__} {rate}")  # noqa: T201
    assert len(layouts) > 10_000
