"""A plan as a Kubernetes resource: a Volcano Job, a JobSet or a Kubeflow TrainJob, one pod of torchrun per node.

Fields: volcano ed72c7c (2026-08-20), jobset 08dfbdf (2026-08-18), kubeflow/trainer 8c0f505 (2026-08-21), their custom
resource definitions.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ruamel.yaml import YAML

from runtime.emit.launch import Launch
from runtime.emit.scripts import render
from topologies.errors import InputError

PORT = 29500
"""torchrun's own."""
GPU_RESOURCES = {"NVIDIA": "nvidia.com/gpu", "AMD": "amd.com/gpu"}
"""Extended resources of the vendors' device plugins."""
HOST_LABEL = "kubernetes.io/hostname"
MOST_PINNED = 256
"""Nodes of a job whose pods are bound to them one by one: a larger resource nears the 1.5 MiB that etcd takes."""
RANK_ANNOTATION = "metadata.annotations['batch.kubernetes.io/job-completion-index']"


@dataclass(frozen=True, slots=True, kw_only=True)
class Pods:
    """What a pod is made of beside the launch."""

    image: str
    claim: str | None
    """Volume claim with the emitted files, mounted at the launch's directory."""
    vendor: str


def kubernetes_files(launch: Launch, kind: str, pods: Pods) -> dict[str, str]:
    """Write the resource and the files that its pods read.

    Args:
        launch: what to start.
        kind: volcano, jobset or trainjob.
        pods: image and volume.

    Raises:
        InputError: the image is not a reference to one.
    """
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._/:@-]*", pods.image):
        raise InputError(f"{pods.image!r} is not the name of an image", hint="give --image", file="--image")
    writers: dict[str, Callable[[Launch, Pods], dict[str, Any]]] = {
        "volcano": volcano_job,
        "jobset": jobset,
        "trainjob": trainjob,
    }
    stream = io.StringIO()
    yaml = YAML()
    yaml.width = 4096
    yaml.dump(writers[kind](launch, pods), stream)
    head = render("kubernetes.yaml.j2", launch=launch, claim=pods.claim, kind=kind)
    return {f"{kind}.yaml": head + stream.getvalue(), **launch.program.files}


def pinned(launch: Launch, kind: str) -> bool:
    """Whether each pod is bound to the plan's node for its ranks."""
    return kind in ("volcano", "jobset") and 0 < len(launch.hosts) <= MOST_PINNED


def volcano_job(launch: Launch, pods: Pods) -> dict[str, Any]:
    """A Volcano Job: a gang by minAvailable, restarted as a whole, on the plan's nodes or in the racks it wants."""
    name = resource_name(launch.name)
    restarts = [{"event": event, "action": "RestartJob"} for event in ("PodFailed", "PodEvicted")]
    completes: list[dict[str, Any]] = []  # a Job of several tasks is complete when all its pods are
    if pinned(launch, "volcano"):
        head = f"{name}-node0-0.{name}"
        tasks = [
            {"name": f"node{rank}", "replicas": 1, "template": {"spec": one}}
            for rank, one in enumerate(_pinned_pods(launch, pods, head))
        ]
    else:
        arguments = torchrun_words(launch, rank="$(VC_TASK_INDEX)", head=f"{name}-node-0.{name}")
        task: dict[str, Any] = {
            "name": "node",
            "replicas": launch.nodes,
            "template": {"spec": pod(launch, pods, arguments)},
        }
        if launch.segment is not None:
            task["partitionPolicy"] = {
                "totalPartitions": launch.nodes // launch.segment,
                "partitionSize": launch.segment,
                "networkTopology": {"mode": "hard", "highestTierAllowed": 1},
            }
        tasks = [task]
        completes = [{"event": "TaskCompleted", "action": "CompleteJob"}]
    return _resource(
        "batch.volcano.sh/v1alpha1",
        "Job",
        name,
        {
            "schedulerName": "volcano",
            "minAvailable": launch.nodes,
            "maxRetry": launch.max_restarts,
            "plugins": {"env": [], "svc": []},
            "policies": [*restarts, *completes],
            "tasks": tasks,
        },
    )


def jobset(launch: Launch, pods: Pods) -> dict[str, Any]:
    """A JobSet of one indexed Job, or of one Job for each of the plan's nodes, created again after a failure."""
    name = resource_name(launch.name)

    def job(nodes: int, spec: dict[str, Any]) -> dict[str, Any]:
        return {
            "parallelism": nodes,
            "completions": nodes,
            "completionMode": "Indexed",
            "backoffLimit": 0,
            "template": {"spec": spec},
        }

    if pinned(launch, "jobset"):
        specs = _pinned_pods(launch, pods, f"{name}-node0-0-0.{name}")
        jobs = {f"node{rank}": job(1, spec) for rank, spec in enumerate(specs)}
    else:
        arguments = torchrun_words(launch, rank="$(NODE_RANK)", head=f"{name}-node-0-0.{name}")
        rank_variable = {"name": "NODE_RANK", "valueFrom": {"fieldRef": {"fieldPath": RANK_ANNOTATION}}}
        jobs = {"node": job(launch.nodes, pod(launch, pods, arguments, rank_variable))}
    return _resource(
        "jobset.x-k8s.io/v1alpha2",
        "JobSet",
        name,
        {
            "network": {"enableDNSHostnames": True, "subdomain": name},
            "failurePolicy": {"maxRestarts": launch.max_restarts, "restartStrategy": "Recreate"},
            "replicatedJobs": [
                {"name": each, "replicas": 1, "template": {"spec": spec}} for each, spec in jobs.items()
            ],
        },
    )


def _pinned_pods(launch: Launch, pods: Pods, head: str) -> list[dict[str, Any]]:
    """One pod for each of the plan's nodes, in the order of ranks."""
    return [
        pod(launch, pods, torchrun_words(launch, rank=str(rank), head=head)) | {"nodeSelector": {HOST_LABEL: host}}
        for rank, host in enumerate(launch.hosts)
    ]


def trainjob(launch: Launch, pods: Pods) -> dict[str, Any]:
    """A TrainJob on the runtime torch-distributed, whose controller tells torchrun nodes, rank and head by PET_*."""
    program = ["torchrun", "--monitor-interval=0.1", *_python(launch), *map(_literal, launch.words())]
    return _resource(
        "trainer.kubeflow.org/v1alpha1",
        "TrainJob",
        resource_name(launch.name),
        {
            "runtimeRef": {
                "apiGroup": "trainer.kubeflow.org",
                "kind": "ClusterTrainingRuntime",
                "name": "torch-distributed",
            },
            "trainer": {
                "image": pods.image,
                "command": program,
                "env": _variables(launch),
                "numNodes": launch.nodes,
                "numProcPerNode": launch.ranks_per_node,
                "resourcesPerNode": _resources(launch, pods),
            },
        },
    )


def torchrun_words(launch: Launch, *, rank: str, head: str) -> list[str]:
    """The command of a pod as a list of words: no shell reads it."""
    return [
        "torchrun",
        f"--nnodes={launch.nodes}",
        f"--node-rank={rank}",
        f"--nproc-per-node={launch.ranks_per_node}",
        f"--master-addr={head}",
        f"--master-port={PORT}",
        "--monitor-interval=0.1",
        *_python(launch),
        *map(_literal, launch.words()),
    ]


def pod(launch: Launch, pods: Pods, arguments: list[str], *variables: dict[str, Any]) -> dict[str, Any]:
    """The specification of one pod, which takes a whole node's GPUs."""
    container: dict[str, Any] = {
        "name": "node",
        "image": pods.image,
        "command": arguments,
        "workingDir": launch.directory,
        "env": [*_variables(launch), *variables],
        "resources": _resources(launch, pods) | {"requests": _resources(launch, pods)["limits"]},
        "ports": [{"name": "rendezvous", "containerPort": PORT}],
        "volumeMounts": [{"name": "shared-memory", "mountPath": "/dev/shm"}],
    }
    volumes: list[dict[str, Any]] = [{"name": "shared-memory", "emptyDir": {"medium": "Memory"}}]
    if pods.claim is not None:
        container["volumeMounts"].append({"name": "job", "mountPath": launch.directory})
        volumes.append({"name": "job", "persistentVolumeClaim": {"claimName": pods.claim}})
    return {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": launch.lead_seconds,
        "containers": [container],
        "volumes": volumes,
    }


def resource_name(name: str) -> str:
    """Reduce a name to what DNS allows, short enough for the names that controllers derive from it.

    >>> resource_name("Llama 3 405B on 16,384 H100")
    'llama-3-405b-on-16-384-h100'
    """
    words = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")[:40].strip("-")
    return words if words and words[0].isalpha() else f"job-{words}".strip("-")


def _resource(version: str, kind: str, name: str, spec: dict[str, Any]) -> dict[str, Any]:
    return {"apiVersion": version, "kind": kind, "metadata": {"name": name}, "spec": spec}


def _literal(word: str) -> str:
    """Kubernetes replaces ``$(NAME)`` in commands; ``$$`` is its dollar sign."""
    return word.replace("$", "$$")


def _python(launch: Launch) -> list[str]:
    return [] if launch.program.python else ["--no-python"]


def _variables(launch: Launch) -> list[dict[str, Any]]:
    return [{"name": name, "value": _literal(value)} for name, value in launch.environment.items()]


def _resources(launch: Launch, pods: Pods) -> dict[str, Any]:
    if not launch.gpus_per_node:
        return {"limits": {"cpu": str(launch.ranks_per_node)}}
    if pods.vendor not in GPU_RESOURCES:
        raise InputError(f"no device plugin is known for GPUs of {pods.vendor}", hint="emit for slurm", key="cluster")
    return {"limits": {GPU_RESOURCES[pods.vendor]: str(launch.gpus_per_node)}}
