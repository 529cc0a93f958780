"""One training step, event by event, each traffic with its links to itself: ranks run ops and wait for neighbours.

It takes as long as the longest path of ``simulator.step_path``, and says when everything happens. Ranks of one tensor-
or data-parallel group do the same and are played once. ``simulator.shared_step`` plays the same step with its traffic
on the links of the fabric.
"""

from __future__ import annotations

from dataclasses import dataclass

from scenarios.job import Job
from scenarios.layout import Layout
from simulator.longest_path import OpGraph
from simulator.op_times import OpTimes
from simulator.outcome import StepTime, StepTimeline
from simulator.step import StageCosts
from simulator.step_path import breakdown, prepared_step, together
from simulator.step_player import play_streams
from simulator.step_records import EndCosts
from simulator.step_spans import step_spans
from topologies.cluster import Cluster


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlay:
    """A step that was played, and where the time of its busiest rank went."""

    timeline: StepTimeline
    breakdown_seconds: dict[str, float]
    """The parts of ``StepTime`` by name; they add up to the step. Its bubble is the wait of the busiest rank."""
    predicted: StepTime
    """The closed form of the same step."""

    @property
    def mfu(self) -> float | None:
        """Model FLOP utilisation at the played step time; None: the peak is unknown."""
        if self.predicted.mfu is None:
            return None
        return self.predicted.mfu * self.predicted.total_seconds / self.timeline.step_seconds


def play_step(cluster: Cluster, job: Job, layout: Layout) -> StepTimeline:
    """Play one optimizer step.

    Raises:
        ValueError: the global batch does not divide, or the schedule does not exist for these degrees.
        InputError: the GPU lacks the job's precision.
    """
    return explained_step(cluster, job, layout).timeline


def explained_step(cluster: Cluster, job: Job, layout: Layout) -> StepPlay:
    """Play one optimizer step and say where its time went."""
    graph, times, costs, shares, predicted = prepared_step(cluster, job, layout)
    timeline = play(graph, times, costs, shares, together=together(layout))
    return StepPlay(
        timeline=timeline,
        breakdown_seconds=breakdown(graph, times, costs, shares, timeline.step_seconds),
        predicted=predicted,
    )


def play(
    graph: OpGraph, times: OpTimes, costs: StageCosts, shares: dict[str, float], *, together: bool = True
) -> StepTimeline:
    """Run the ranks of a pipeline until the optimizer of the last one is done.

    Args:
        graph: the ops and what each waits for.
        times: seconds of each op.
        costs: data-parallel traffic and optimizer.
        shares: part of an op's work that is exposed traffic, by kind; for the spans only.
        together: no rank updates before the last has its gradients; False: each by itself (``busiest_span``).
    """
    ends = EndCosts(
        reduce_seconds=costs.dp_seconds,
        reduce_exposed_seconds=costs.dp_exposed_seconds,
        gather_seconds=0.0,
        gather_exposed_seconds=0.0,
        optimizer_seconds=costs.optimizer_seconds,
    )
    played = play_streams(graph, [times], ends, together=together)
    return StepTimeline(spans=step_spans(graph, [times], costs, shares, played), step_seconds=played.step_seconds)
