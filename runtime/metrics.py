"""A running job as Prometheus metrics: what the plan promised beside what the journal says, on one scale.

Label ``source`` is ``predicted`` or ``measured``, so that one panel shows promise and fact.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from planner.plan import Plan
from runtime.accounting import CAUSES, outcome_of
from runtime.journal import Event
from runtime.pace import Pace
from topologies.errors import InputError, MissingExtra

if TYPE_CHECKING:
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

AXES = ("tp", "cp", "ep", "pp", "dp")
REDUCED_AT_THE_END = ("none", "zero1")
"""Shardings whose gradient traffic is a phase of its own, so that it can be measured."""
Labelled = dict[tuple[str, ...], float]
"""Values by the values of their labels."""
PREDICTED, MEASURED = "predicted", "measured"


class JobMetrics:
    """Collects the events of one job; Prometheus asks it for numbers."""

    def __init__(self, plan: Plan, *, seed: int = 0) -> None:
        self.plan, self.seed, self.pace = plan, seed, Pace.of(plan)
        self.events: list[Event] = []
        self._lock = threading.Lock()
        self._highest: dict[tuple[str, ...], float] = {}

    def take(self, event: Event) -> None:
        """Hear of an event of the journal."""
        with self._lock:
            self.events.append(event)

    def collect(self) -> Iterator[Metric]:
        """Return all metrics as they are now; the interface of prometheus_client."""
        with self._lock:
            events = list(self.events)
        steps = [event for event in events if event["event"] == "step"]
        yield from self._plan(steps)
        yield from self._job(events, steps)

    def _plan(self, steps: list[Event]) -> Iterator[Metric]:
        from prometheus_client.core import GaugeMetricFamily

        plan, layout = self.plan, self.plan.layout
        info = GaugeMetricFamily("headway_plan_info", "The plan that runs.", labels=["plan", "layout"])
        info.add_metric([plan.sha256()[:12], layout.label()], 1)
        yield info
        parts = plan.predicted.get("breakdown_seconds") or {}
        exposed = GaugeMetricFamily(
            "headway_step_exposed_comm_seconds", "Exposed communication of a step.", labels=["source", "axis"]
        )
        for axis in AXES:
            if f"{axis}_comm" in parts:
                exposed.add_metric([PREDICTED, axis], parts[f"{axis}_comm"])
        if steps and layout.optimizer_sharding in REDUCED_AT_THE_END:
            exposed.add_metric([MEASURED, "dp"], steps[-1]["phases_seconds"]["gradient_reduction"])
        yield exposed

    def _job(self, events: list[Event], steps: list[Event]) -> Iterator[Metric]:
        promised = self.plan.predicted
        seconds = steps[-1]["seconds"] if steps else None
        outcome = outcome_of(events, tokens_per_step=self.pace.tokens_per_step, seed=self.seed)
        goodput = outcome.goodput if outcome.wall_seconds > 0 else None
        mfu = None if seconds is None else self.pace.mfu(seconds)
        yield both("headway_step_seconds", "Of the last optimizer step.", promised.get("step_seconds"), seconds)
        yield both("headway_mfu_ratio", "Model FLOPs over the dense peak.", promised.get("mfu"), mfu)
        yield both(
            "headway_goodput_ratio", "Share of the wall time that became progress.", promised.get("goodput"), goodput
        )
        if steps:
            yield gauge("headway_loss", "Mean loss of the last step.", steps[-1]["loss"])
        saved = [event for event in events if event["event"] == "saved" and event["error"] is None]
        if saved:
            yield gauge(
                "headway_checkpoint_seconds", "From the call of the last save to its end.", saved[-1]["seconds"]
            )
            yield gauge("headway_checkpoint_bytes", "Of the last checkpoint.", saved[-1]["bytes"])
        yield self.counter("headway_tokens", "Trained on, each once.", {(): outcome.tokens})
        lost: Labelled = {(cause,): outcome.lost_seconds.get(cause, 0.0) for cause in CAUSES}
        yield self.counter("headway_lost_seconds", "Wall time that did not become progress.", lost, ["cause"])
        struck: Labelled = {(cause,): float(count) for cause, count in outcome.failures.items()}
        yield self.counter("headway_failures", "That stopped the job.", struck, ["component"])
        rent, watts = self.pace.usd_per_second, self.pace.watts
        if rent:
            yield self.counter(
                "headway_cost_usd", "Rent and electricity by price book.", {(): rent * outcome.wall_seconds}
            )
        if watts:
            told = "At the power that the plan states for its nodes."
            yield self.counter("headway_energy_joules", told, {(): watts * outcome.wall_seconds})

    def counter(self, name: str, told: str, values: Labelled, labels: list[str] | None = None) -> CounterMetricFamily:
        """A counter that never falls: what is booked anew under another cause does not go back."""
        from prometheus_client.core import CounterMetricFamily

        family = CounterMetricFamily(name, told, labels=labels or [])
        for key, value in values.items():
            highest = max(value, self._highest.get((name, *key), 0.0))
            self._highest[(name, *key)] = highest
            family.add_metric(list(key), highest)
        return family


def both(name: str, told: str, predicted: float | None, measured: float | None) -> GaugeMetricFamily:
    """A gauge with promise and fact, where they are known."""
    from prometheus_client.core import GaugeMetricFamily

    family = GaugeMetricFamily(name, told, labels=["source"])
    for source, value in ((PREDICTED, predicted), (MEASURED, measured)):
        if value is not None:
            family.add_metric([source], value)
    return family


def gauge(name: str, told: str, value: float) -> GaugeMetricFamily:
    """A gauge of one value."""
    from prometheus_client.core import GaugeMetricFamily

    return GaugeMetricFamily(name, told, value=value)


def serve(metrics: JobMetrics, port: int, address: str) -> Any:
    """Answer Prometheus until ``shutdown`` is called on what is returned.

    Raises:
        InputError: the port cannot be had.
        MissingExtra: prometheus_client is not installed.
    """
    try:
        from prometheus_client import CollectorRegistry, start_http_server
    except ModuleNotFoundError:
        raise MissingExtra("'--metrics-port'", "runtime") from None
    registry = CollectorRegistry()
    registry.register(metrics)
    try:
        server, _ = start_http_server(port, addr=address, registry=registry)
    except (OSError, OverflowError) as error:
        raise InputError(
            f"cannot listen on {address}:{port}: {error}", hint="choose a free port", file="--metrics-port"
        ) from None
    return server
