"""What every launcher is told: nodes, ranks, the command of a rank, its environment, restarts, and what was lost."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from pathlib import PurePosixPath

from planner.placement import group_spans, nodes_text, place
from planner.plan import Plan
from topologies.errors import InputError
from topologies.numbering import node_names

CHECKPOINT_LEAD_SECONDS = 300
"""Before its time limit a job is told to save: five minutes, the usual ``--signal=B:USR1@300``."""
MAX_RESTARTS = 3
"""Restarts of a whole job by the scheduler. A node dies rarely, a wrong program always."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """What each rank runs, and the files that it reads."""

    trainer: str
    words: tuple[str, ...]
    """The command line of a rank after torchrun's own options. ``{directory}`` stands for the folder of the files."""
    files: dict[str, str] = field(default_factory=dict)
    """Content by name, written beside the script."""
    environment: dict[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    """What of the plan the trainer does not do as planned, and what it needs from the user."""
    python: bool = True
    """torchrun starts it with Python; False: an executable."""
    supervised: bool = False
    """On each node ``COMMAND --watch DIRECTORY`` runs beside torchrun: it kills ranks that hang."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """A job as a scheduler sees it."""

    name: str
    label: str
    """Of the layout."""
    plan_sha256: str
    nodes: int
    ranks_per_node: int
    gpus_per_node: int
    """0: the ranks run on CPU cores."""
    segment: int | None
    """Nodes that must lie in one scale-up domain; None: a node holds its groups, or no choice of nodes helps."""
    directory: str
    """Where the files lie on the nodes: a shared file system."""
    program: Program
    environment: dict[str, str]
    notes: tuple[str, ...]
    hosts: tuple[str, ...] = ()
    """Names of the plan's nodes in the order of ranks; empty: the cluster has no names."""
    left_out: tuple[str, ...] = ()
    """Names of nodes that the job must not have."""
    max_restarts: int = MAX_RESTARTS
    lead_seconds: int = CHECKPOINT_LEAD_SECONDS

    def words(self) -> tuple[str, ...]:
        """The command of a rank, with the folder put in."""
        return tuple(one.replace("{directory}", self.directory) for one in self.program.words)


def describe(plan: Plan, program: Program, *, directory: str, variables: dict[str, str], restarts: int) -> Launch:
    """Turn a plan and the program that trains it into what a launcher needs.

    Args:
        plan: which ranks there are and how they lie on nodes.
        program: what each rank runs.
        directory: absolute path of the emitted files as the nodes see it.
        variables: environment that the user asks for.
        restarts: how often the scheduler may start the job again.

    Raises:
        InputError: the ranks do not fill whole nodes, or the path is not absolute.
    """
    layout, cluster = plan.layout, plan.scenario.cluster
    if not PurePosixPath(directory).is_absolute():
        raise InputError(f"{directory!r} is not an absolute path", hint="start it with '/'", file="--directory")
    placed = place(cluster, layout)
    if layout.world_size % placed.ranks_per_node:
        raise InputError(
            f"{layout.world_size} ranks do not fill nodes of {placed.ranks_per_node}, and a launcher starts equally "
            "many ranks on each node",
            hint="choose a layout whose ranks are a multiple",
            key="layout",
        )
    hosts, left_out, unnamed = _chosen_nodes(plan)
    on_gpu = cluster.gpu.architecture != "cpu"
    launch = Launch(
        name=plan.scenario.name,
        label=layout.label(),
        plan_sha256=plan.sha256(),
        nodes=placed.nodes,
        ranks_per_node=placed.ranks_per_node,
        gpus_per_node=placed.ranks_per_node if on_gpu else 0,
        segment=segment_nodes(plan),
        directory=directory,
        program=program,
        environment=program.environment | variables,
        notes=(*program.notes, *unnamed),
        hosts=hosts,
        left_out=left_out,
        max_restarts=restarts,
    )
    if tuple(layout.rank_order) != ("tp", "cp", "ep", "dp", "pp") and program.trainer in ("torchtitan", "deepspeed"):
        order = " ".join(layout.rank_order)
        return replace(launch, notes=(*launch.notes, f"the plan's rank order {order} is not {program.trainer}'s own"))
    return launch


def _chosen_nodes(plan: Plan) -> tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]:
    """Names of the nodes in rank order and of those left out; without names a note on the numbers, if they matter."""
    numbers, gone = (plan.placement.get(key) or [] for key in ("node_numbers", "excluded_nodes"))
    names = node_names(plan.scenario.cluster)
    if names:
        return tuple(names[number] for number in numbers), tuple(names[number] for number in gone), ()
    in_order = numbers == list(range(len(numbers)))
    told = (
        () if in_order and not gone else (f"the plan takes {nodes_text(plan.placement)}; give the cluster node_names",)
    )
    return (), (), told


def segment_nodes(plan: Plan) -> int | None:
    """Nodes of the widest group that the plan keeps inside a scale-up domain larger than a node.

    None where no group reaches over a node inside a domain, or where such segments do not divide the job.
    """
    cluster, layout = plan.scenario.cluster, plan.layout
    placed = place(cluster, layout)
    inside = [
        math.ceil(span / placed.ranks_per_node)
        for axis, span in group_spans(layout).items()
        if placed.inside_domain[axis] and span > placed.ranks_per_node
    ]
    widest = max(inside, default=1)
    return widest if widest > 1 and placed.nodes % widest == 0 else None
