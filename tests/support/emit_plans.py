"""Plans for the tests of what is emitted: a tiny one that runs here on several nodes, and large ones that do not."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from planner.plan import Plan
from scenarios.job import Job
from scenarios.layout import Layout
from scenarios.model import Attention, Layer, Mlp, ModelSpec, load_model
from scenarios.scenario import Scenario, load_scenario
from topologies.catalog import load_cluster
from topologies.cluster import Cluster

HOSTILE = 'it\'s; $(touch /tmp/owned) `id` "x" && rm -rf ~\n#SBATCH --uid=0 {{ 7 * 7 }}'
"""A scenario's name that would do harm wherever it is read as code."""


def tiny_plan(nodes: int = 2, *, name: str = "tiny", interval_steps: int | None = 10, **layout: Any) -> Plan:
    """A plan for CPU nodes of one rank each, small enough to finish in seconds."""
    laptop = load_scenario("laptop").cluster
    node = laptop.node.model_copy(update={"gpus_per_node": 1})
    pool = laptop.pools[0].model_copy(update={"node": node, "num_nodes": 4})
    layer = Layer(mixer=Attention(heads=4, kv_heads=2, head_dim=16), feed_forward=Mlp(ffn_hidden_size=96, gated=True))
    model = ModelSpec(name="tiny", hidden_size=64, vocab_size=256, layer_kinds={"dense": layer}, pattern=("dense",) * 2)
    job = Job(model=model, seq_length=64, global_batch_size=8, precision="fp32")
    plan = plan_on(laptop.model_copy(update={"pools": (pool,)}), job, name=name, **{"dp": nodes, **layout})
    return replace(plan, checkpoint={"interval_steps": interval_steps, "mode": "async"} if interval_steps else {})


def large_plan(
    model: str = "llama3-70b", cluster: str = "dgx-h100-superpod", *, job: dict[str, Any] | None = None, **layout: Any
) -> Plan:
    """A plan for a shipped model on a shipped cluster; nothing is promised."""
    settings = {"seq_length": 8192, "global_batch_size": 512} | (job or {})
    return plan_on(load_cluster(cluster), Job(model=load_model(model), **settings), **layout)


def plan_on(cluster: Cluster, job: Job, *, name: str = "large", **layout: Any) -> Plan:
    """A plan with a layout and a checkpoint interval, and no predictions."""
    return Plan(
        scenario=Scenario(name=name, job=job, cluster=cluster),
        layout=Layout(**layout),
        placement={},
        checkpoint={"interval_steps": 50, "mode": "async"},
        predicted={},
        alternatives=[],
        solver={},
        inputs=[],
    )


def with_nodes(plan: Plan, names: str, numbers: list[int], excluded: list[int]) -> Plan:
    """The plan on a cluster whose nodes have names, placed on some of them."""
    cluster = plan.scenario.cluster.model_copy(update={"node_names": names})
    placed = {"nodes": len(numbers), "node_numbers": numbers, "excluded_nodes": excluded}
    return replace(plan, scenario=plan.scenario.model_copy(update={"cluster": cluster}), placement=placed)
