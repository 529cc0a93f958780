"""Memory of stages that are not alike: unequal, empty, or with layers that recompute one by one."""

import numpy as np
import pytest
from memory_models import LLAMA3_70B, cluster_of, gpt, job_of, shares_of

from scenarios.layout import Layout, Stage
from simulator.activations import activation_bytes
from simulator.arrays import LayoutArrays
from simulator.memory import memory_use, peak_bytes
from simulator.schedule import op_orders
from simulator.stages import stage_layers


def test_unequal_virtual_stages_are_counted_by_their_op_order():
    """Play the op order of every rank and add up what is alive: no peak exceeds the stated activations."""
    job = job_of(LLAMA3_70B, 4096)
    sizes = (12, 9, 10, 11, 6, 12, 10, 10)
    for schedule, pp, vpp in (("interleaved", 4, 2), ("interleaved", 2, 4), ("zbv", 4, 2)):
        stages = tuple(Stage(layers=size) for size in sizes)
        layout = Layout(tp=8, pp=pp, vpp=vpp, schedule=schedule, stages=stages, optimizer_sharding="none")
        use = memory_use(cluster_of(), job, layout)
        saved, again = (float(part[0]) for part in one_layer(job, layout))
        for rank, order in enumerate(op_orders(schedule, pp, vpp, layout.num_microbatches(job))):
            split = {(op.stage, op.microbatch) for op in order if op.kind == "W"}
            alive, peak = 0.0, 0.0
            for op in order:
                if op.kind == "F":
                    alive += sizes[op.stage] * saved
                elif (op.kind == "W") == ((op.stage, op.microbatch) in split):
                    alive -= sizes[op.stage] * saved
                peak = max(peak, alive)
            ends = 2 * 2.0 * 4096 * 8192 if pp * vpp - 1 in {op.stage for op in order} else 0.0
            assert use.stages[rank].activations_bytes == pytest.approx(peak + again + ends)


def test_stages_that_the_uniform_rule_leaves_unequal_inside_are_counted_by_their_op_order():
    job = job_of(gpt(61, 4096, 32), 4096)
    layout = Layout(tp=8, pp=2, vpp=5, schedule="interleaved", optimizer_sharding="none")
    sizes = stage_layers(61, 2, 5)
    assert len(set(sizes[2:-2:2])) > 1  # inner chunks of a rank
    stages = tuple(Stage(layers=size) for size in sizes)
    spelt = memory_use(cluster_of(), job, layout.model_copy(update={"stages": stages}))
    use = memory_use(cluster_of(), job, layout)
    assert use == spelt
    assert peak_bytes(cluster_of(), job, LayoutArrays.of([layout]))[0] == pytest.approx(use.peak_bytes, rel=0.02)


def one_layer(job, layout):
    layer = next(iter(job.model.layer_kinds.values()))
    return activation_bytes(job, layer, shares_of(job, layout), np.zeros(1))


def test_every_zbv_table_is_as_full_as_its_fullest_stage():
    """Virtual stages without layers: no rank may be dropped because another looks fuller."""
    model = gpt(61, 4096, 32)
    job = job_of(model, 4096)
    for pp in (8, 16, 31):
        for recompute in ("none", "full"):
            layout = Layout(tp=1, pp=pp, vpp=2, dp=1, schedule="zbv", recompute=recompute, optimizer_sharding="none")
            (peak,) = peak_bytes(cluster_of(), job, LayoutArrays.of([layout]))
            assert peak == pytest.approx(memory_use(cluster_of(), job, layout).peak_bytes, rel=1e-12)


def test_letters_choose_the_layers_that_recompute():
    job = job_of(LLAMA3_70B, 4096)

    def use(*stages):
        return memory_use(cluster_of(), job, Layout(tp=8, pp=2, recompute="full", stages=stages)).stages

    first = use(Stage(layers=40, recompute_layers=2), Stage(layers=40))
    spelt = use(Stage(layers=40, recompute_layers=2, recompute="fnf" + "n" * 37), Stage(layers=40))
    assert first == spelt
    with pytest.raises(ValueError, match="letters"):
        Stage(layers=3, recompute_layers=1, recompute="ff")
