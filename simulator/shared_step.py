"""One training step with its traffic on the links of the fabric, and what each cause adds to the closed form.

The same step is played up to four times: as the closed form has it, with every traffic on its own way through the
fabric, with what is slow, and with all that shares links. Each adds to the one before, and the difference is its cost.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from scenarios.job import Job
from scenarios.layout import Layout
from simulator.background import Other, background, with_others
from simulator.critical_path import Segment, critical_path
from simulator.disturbances import Disturbances, work_factors
from simulator.longest_path import OpGraph
from simulator.network import Counters
from simulator.op_times import OpTimes, shard_seconds
from simulator.outcome import StepTime, StepTimeline
from simulator.rank_places import rank_grid
from simulator.step import StageCosts
from simulator.step_path import breakdown, longest_seconds, prepared_step, together
from simulator.step_player import play_streams
from simulator.step_problem import StepProblem, step_problem
from simulator.step_records import EndCosts, OpTraffic, Played
from simulator.step_spans import step_spans
from simulator.step_traffic import step_traffic
from simulator.step_volumes import StepVolumes, step_volumes, without_taper
from simulator.utilisation import Utilisation, utilisation
from topologies.cluster import Cluster
from topologies.errors import InputError
from topologies.link_map import Floats, Ints, LinkMap, link_map
from topologies.link_names import with_faults

MOST_OPS = 60_000
"""Ops of all classes of units together that are played."""
GROUPED_OPS = 1_000
"""The same where paths are hashed and units are too many to be played each by itself: those of their groups."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedStep:
    """A step on shared links."""

    timeline: StepTimeline
    predicted: StepTime
    """The closed form, on the fabric as it is meant to be."""
    untapered_seconds: float
    """The closed form with no level of the fabric oversubscribed; it charges a level to every NIC that may cross it."""
    alone_seconds: float
    """Event by event with the closed form's times, no level of the fabric oversubscribed."""
    breakdown_seconds: dict[str, float]
    """The parts of ``StepTime``, then ``paths`` (traffic on its own way takes longer than alone) and ``contention``
    (traffic shares links); they add up to the step. ``straggler`` has what slow GPUs and jitter cost."""
    path: tuple[Segment, ...]
    """Critical path."""
    utilisation: Utilisation | None
    """None: no network is played, because CPU cores play the part of GPUs."""
    counters: Counters
    flows: int
    classes: int
    """Replicas that differ."""
    exact: bool
    """False: replicas whose hashed paths differ are played in groups, each at the pace of its slowest."""
    others: dict[str, int]
    """How often each other traffic was through."""

    @property
    def mfu(self) -> float | None:
        """Model FLOP utilisation at the played step time; None: the peak is unknown."""
        if self.predicted.mfu is None:
            return None
        return self.predicted.mfu * self.predicted.total_seconds / self.timeline.step_seconds


def shared_step(
    cluster: Cluster,
    job: Job,
    layout: Layout,
    disturbances: Disturbances | None = None,
    *,
    gpus: Ints | None = None,
    every_replica: bool = False,
) -> SharedStep:
    """Play one optimizer step on shared links.

    Args:
        cluster: the machine.
        job: what is trained.
        layout: how.
        disturbances: what is slow, dead, or shares the links.
        gpus: the GPU of each rank; None: ranks stand on GPUs in their order.
        every_replica: play all of them, also where they are alike: slow, the same answer where it is exact.

    Raises:
        ValueError: the global batch does not divide, or the schedule does not exist for these degrees.
        InputError: the GPU lacks the job's precision; no such link or GPU; traffic has no way.
    """
    wish = disturbances or Disturbances()
    flat = without_taper(cluster)
    graph, times, costs, shares, predicted = prepared_step(flat, job, layout)
    untapered = predicted.total_seconds
    if flat != cluster:
        predicted = prepared_step(cluster, job, layout)[4]
    waits = together(layout)
    base = longest_seconds(graph, times, costs, together=waits)
    parts = breakdown(graph, times, costs, shares, base)
    if wish.jitter > 0:  # drawn, instead of its mean effect
        graph, times, costs, shares, _ = prepared_step(flat, job, layout, jitter=False)

    volumes = step_volumes(flat, job, layout)
    network = with_faults(link_map(cluster), wish.faults)
    places = np.arange(layout.world_size) if gpus is None else gpus
    if places.max() >= cluster.num_gpus:
        raise InputError(f"a rank is to stand on GPU {places.max()}, and {cluster.name} has {cluster.num_gpus} GPUs")
    problem, factors, flows, others = _problem(network, graph, layout, volumes, costs, wish, places, every_replica)
    ends = _ends(costs, volumes)
    traffic = _op_traffic(graph, times, costs, volumes)
    undisturbed = [times] * len(factors)
    disturbed = [_stretched(times, one) for one in factors]

    plain = longest_seconds(graph, times, costs, together=waits)
    on_paths, slowed = plain, plain
    if problem is not None and problem.alone_factor.max(initial=1.0) > 1:
        on_paths = slowed = play_streams(
            graph, undisturbed, ends, traffic, problem, together=waits, sharing=False
        ).step_seconds
    if wish.jitter > 0 or wish.slow_gpus:
        slow = play_streams(graph, disturbed, ends, traffic, problem, together=waits, sharing=False)
        slowed = slow.step_seconds
    behind = () if problem is None else background(problem, others)
    played = play_streams(graph, disturbed, ends, traffic, problem, together=waits, background=behind)
    step = played.step_seconds
    used = None if problem is None else utilisation(network, problem, played)
    path = critical_path(played, problem, network)
    shown, names = _shown(played, problem, path, layout.pp)
    return SharedStep(
        timeline=StepTimeline(
            spans=step_spans(graph, disturbed, costs, shares, played, shown),
            step_seconds=step,
            rank_names=names,
            counters=() if used is None else used.counters,
        ),
        predicted=predicted,
        untapered_seconds=untapered,
        alone_seconds=base,
        breakdown_seconds=parts
        | {
            "straggler": parts["straggler"] + slowed - on_paths + plain - base,
            "paths": on_paths - plain,
            "contention": step - slowed,
        },
        path=path,
        utilisation=used,
        counters=played.counters,
        flows=flows,
        classes=len(factors),
        exact=problem is None or problem.exact,
        others=played.rounds,
    )


def _problem(
    network: LinkMap,
    graph: OpGraph,
    layout: Layout,
    volumes: StepVolumes,
    costs: StageCosts,
    wish: Disturbances,
    gpus: Ints,
    every_replica: bool,
) -> tuple[StepProblem | None, Floats, int, tuple[Other, ...]]:
    """The streams on links, and by how much longer each op of each class of units takes."""
    if network.cluster.gpu.architecture == "cpu":  # what was measured there holds what its ranks share
        factors = work_factors(wish, layout, graph, gpus[rank_grid(layout)], np.zeros(layout.dp, np.int64))
        return None, factors, 0, ()
    slow = costs.straggler_factor
    hops = {(graph.ranks[j], graph.ranks[i]) for i in range(len(graph.ops)) for j in graph.inputs[i]}
    traffic = step_traffic(
        network,
        layout,
        volumes,
        hops=tuple(sorted((a, b) for a, b in hops if a != b)),
        p2p_seconds=slow * costs.p2p_seconds,
        p2p_bytes=costs.p2p_bytes,
        slow=slow,
        gpus=gpus,
        seed=wish.seed,
    )
    traffic, others = with_others(network, traffic, gpus, wish)
    factors = work_factors(wish, layout, graph, gpus[rank_grid(layout)], traffic.unit_of_replica)
    colours = np.unique(factors, axis=0, return_inverse=True)[1].ravel()
    most = max(1, MOST_OPS // len(graph.ops), int(colours.max()) + 1)
    problem = step_problem(
        network,
        traffic,
        colours,
        most_classes=most,
        most_groups=max(1, GROUPED_OPS // len(graph.ops)),
        fold_alike=not every_replica,
        seed=wish.seed,
    )
    first = [int(np.argmax(problem.unit_class == number)) for number in range(problem.num_classes)]
    return problem, factors[first], traffic.flows, others


def _ends(costs: StageCosts, volumes: StepVolumes) -> EndCosts:
    """Hide gradients first, then weights, which the next forward needs layer by layer."""
    total, exposed = costs.dp_seconds, costs.dp_exposed_seconds
    gather = volumes.gather_seconds if total > 0 else 0.0
    reduce = total - gather
    reduce_exposed = max(0.0, reduce - (total - exposed)) if gather > 0 else exposed
    return EndCosts(
        reduce_seconds=reduce,
        reduce_exposed_seconds=reduce_exposed,
        gather_seconds=gather,
        gather_exposed_seconds=exposed - reduce_exposed,
        optimizer_seconds=costs.optimizer_seconds,
    )


def _op_traffic(graph: OpGraph, times: OpTimes, costs: StageCosts, volumes: StepVolumes) -> OpTraffic:
    each = costs.straggler_factor * volumes.fsdp_seconds * len(set(graph.ranks)) / graph.num_stages
    return OpTraffic(
        p2p_seconds=costs.straggler_factor * costs.p2p_seconds,
        inner_share={kind: one.seconds_share for kind, one in volumes.inner.items()},
        fsdp_seconds=shard_seconds(graph, times, each, volumes.fsdp_forward_share) if each > 0 else (),
    )


def _stretched(times: OpTimes, factors: Floats) -> OpTimes:
    if (factors == 1).all():
        return times
    return replace(times, work=tuple(float(a * b) for a, b in zip(times.work, factors, strict=True)))


def _shown(
    played: Played, problem: StepProblem | None, path: Sequence[Segment], pp: int
) -> tuple[list[int], tuple[str, ...]]:
    """Draw the replicas that most are like, and beside them the one that ends last, if it is another."""
    if problem is None or problem.num_classes == 1:
        return [0], ()
    counts = np.bincount(problem.unit_class)
    most = int(np.argmax(counts))
    times: dict[int, float] = {}
    for one in path:
        if one.replica >= 0:
            number = int(problem.unit_class[one.replica])
            times[number] = times.get(number, 0.0) + one.seconds
    slowest = max(times, key=lambda one: times[one], default=most)
    shown = list(dict.fromkeys([most, slowest]))
    return shown, tuple(
        f"pipeline rank {rank}, "
        + (f"{counts[number]} units like replica {int(np.argmax(problem.unit_class == number))}")
        for number in shown
        for rank in range(pp)
    )
