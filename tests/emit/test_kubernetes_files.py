"""Kubernetes resources against the schemas of their custom resource definitions, and the rules that these leave out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from emit_plans import HOSTILE, large_plan, tiny_plan, with_nodes
from ruamel.yaml import YAML

from planner.plan import Plan
from runtime.emit.emitting import Wishes, emit_plan
from topologies.errors import InputError

KINDS = {"volcano": "volcano-job", "jobset": "jobset", "trainjob": "trainjob"}


def resource(target: str, plan: Plan, **wishes: Any) -> dict[str, Any]:
    """Emit, read back, and hold against the closed schema."""
    settings = {"steps": 10, "image": "registry.example/trainer:1", "claim": "shared", **wishes}
    _, files = emit_plan(plan, target, Path("/shared/job"), Wishes(**settings))
    content: dict[str, Any] = YAML(typ="safe").load(files[f"{target}.yaml"])
    schema = json.loads((Path(__file__).parent / "schemas" / f"{KINDS[target]}.json").read_text())
    jsonschema.Draft202012Validator(schema).validate(content)
    return content


@pytest.mark.parametrize("target", KINDS)
@pytest.mark.parametrize("trainer", ["headway", "megatron"])
def test_schema_accepts_the_resource(target: str, trainer: str) -> None:
    plan = tiny_plan(2) if trainer == "headway" else large_plan(tp=8, dp=4)
    content = resource(target, plan, trainer=trainer)
    assert content["metadata"]["name"] == plan.scenario.name


@pytest.mark.parametrize("target", KINDS)
def test_schema_would_notice_a_wrong_key(target: str) -> None:
    content = resource(target, tiny_plan(2))
    content["spec"]["minAvailible"] = 1
    schema = json.loads((Path(__file__).parent / "schemas" / f"{KINDS[target]}.json").read_text())
    with pytest.raises(jsonschema.ValidationError, match="minAvailible"):
        jsonschema.Draft202012Validator(schema).validate(content)


def test_gang_and_ranks() -> None:
    plan = large_plan(tp=8, dp=4)
    volcano = resource("volcano", plan, trainer="megatron")["spec"]
    assert volcano["minAvailable"] == volcano["tasks"][0]["replicas"] == 4
    job = resource("jobset", plan, trainer="megatron")["spec"]["replicatedJobs"][0]["template"]["spec"]
    assert job["parallelism"] == job["completions"] == 4
    train = resource("trainjob", plan, trainer="megatron")["spec"]["trainer"]
    assert train["numNodes"] * train["numProcPerNode"] == plan.layout.world_size
    for container in (
        volcano["tasks"][0]["template"]["spec"]["containers"][0],
        job["template"]["spec"]["containers"][0],
    ):
        assert container["resources"]["limits"] == container["resources"]["requests"] == {"nvidia.com/gpu": "8"}
        assert "--nnodes=4" in container["command"]


def test_racks_of_the_plan_are_partitions() -> None:
    plan = large_plan(cluster="gb200-nvl72", tp=8, dp=9, pp=2, job={"global_batch_size": 576})
    task = resource("volcano", plan, trainer="megatron")["spec"]["tasks"][0]
    policy = task["partitionPolicy"]
    assert policy["totalPartitions"] * policy["partitionSize"] == task["replicas"] == 36  # Volcano's webhook's rule
    assert policy["partitionSize"] * plan.scenario.cluster.node.gpus_per_node == 72


def test_pods_are_bound_to_the_plans_nodes_in_its_order() -> None:
    """Rank r's pod on the r-th node of the plan, and the head by the name that the controller gives it."""
    plan = with_nodes(large_plan(tp=8, dp=4), "gpu[1-128]", [9, 4, 5, 7], [0])
    hosts = ["gpu10", "gpu5", "gpu6", "gpu8"]
    volcano = resource("volcano", plan, trainer="megatron")
    tasks = [(one["name"], one["template"]["spec"]) for one in volcano["spec"]["tasks"]]
    assert volcano["spec"]["minAvailable"] == 4
    assert "TaskCompleted" not in [one["event"] for one in volcano["spec"]["policies"]]
    jobs = resource("jobset", plan, trainer="megatron")["spec"]["replicatedJobs"]
    pods = [(one["name"], one["template"]["spec"]["template"]["spec"]) for one in jobs]
    for suffix, bound in (("-0", tasks), ("-0-0", pods)):
        assert [pod["nodeSelector"]["kubernetes.io/hostname"] for _, pod in bound] == hosts
        for rank, (_, pod) in enumerate(bound):
            words = pod["containers"][0]["command"]
            assert f"--node-rank={rank}" in words
            assert f"--master-addr=large-{bound[0][0]}{suffix}.large" in words


def test_what_the_resource_cannot_say_is_told() -> None:
    plan = with_nodes(large_plan(tp=8, dp=4), "gpu[1-128]", [9, 4, 5, 7], [0])
    wishes = Wishes(steps=10, image="x", trainer="megatron")
    texts = {kind: emit_plan(plan, kind, Path("/shared/job"), wishes)[1][f"{kind}.yaml"] for kind in KINDS}
    assert {kind for kind, text in texts.items() if "the scheduler places the pods" in text} == {"trainjob"}


@pytest.mark.parametrize("target", KINDS)
def test_hostile_names_stay_words(target: str) -> None:
    content = resource(target, tiny_plan(2, name=HOSTILE), variables=("X=$(NODE_RANK)",), directory="/a b/$(HOME)")
    assert content["metadata"]["name"] == "it-s-touch-tmp-owned-id-x-rm-rf-sbatch-u"
    text = json.dumps(content)
    assert "$$(HOME)" in text  # two dollar signs: Kubernetes makes them one and replaces nothing
    assert '"value": "$$(NODE_RANK)"' in text


def test_image_is_asked_for() -> None:
    with pytest.raises(InputError, match="--image"):
        emit_plan(tiny_plan(2), "jobset", Path("/x"), Wishes(steps=1))
