"""How sure a predicted step is: the band that held for published runs of the kind, widened by what is not declared."""

from __future__ import annotations

import math

from scenarios.job import Job
from scenarios.layout import Layout
from scenarios.model import Moe
from simulator.compute import Rates
from topologies.cluster import Cluster

SHORT_STEP_SECONDS = 0.5


def band(
    cluster: Cluster, job: Job, layout: Layout, rates: Rates, total_seconds: float
) -> tuple[float, float, tuple[str, ...]]:
    """Return the low and high end of the 80 % band of a step, and the facts that it rests on.

    The base width comes from left-out errors of published runs by kind of model, GPU and stack; widths of undeclared
    parts are added in squares.
    """
    widths = rates.parameters.band
    names = [_base(cluster, job, rates), *rates.software.undeclared]
    alone = not rates.cpu and not rates.gemm.points and not rates.parameters.evidence.get(evidence_key(cluster, job))
    if alone:
        names.append("no measured run")
    if not rates.cpu and total_seconds < SHORT_STEP_SECONDS:
        names[0] = max(names[0], "short step", key=lambda name: widths[name].value)
    width = math.sqrt(sum(widths[name].value ** 2 for name in names))
    largest = sorted(names, key=lambda name: -widths[name].value)[:3]
    notes = [
        f"80 % band +-{100 * width:.0f} %: "
        + ", ".join(f"{name} +-{100 * widths[name].value:.0f} %" for name in largest)
    ]
    if alone:
        notes.append(f"no measured run like this one ({evidence_key(cluster, job)}) is among those that headway knows")
    basis = (*rates.facts, *rates.software.assumptions, *notes)
    return total_seconds / (1.0 + width), total_seconds * (1.0 + width), basis


def evidence_key(cluster: Cluster, job: Job) -> str:
    """Name what a published run must share with a job to be evidence for it: ``hopper fp8 moe full``."""
    precision = "16 bit" if job.precision in ("bf16", "fp16") else job.precision
    moe = any(isinstance(layer.feed_forward, Moe) for layer in job.model.layer_kinds.values())
    return f"{cluster.gpu.architecture} {precision} {'moe' if moe else 'dense'} {job.tuning}"


def _base(cluster: Cluster, job: Job, rates: Rates) -> str:
    architecture = cluster.gpu.architecture
    if rates.cpu:
        return "calibrated" if rates.gemm.points else "uncalibrated"
    if architecture in ("cdna3", "cdna4"):
        return "unproven gpu"
    if rates.software.lora:
        return "lora"
    moe = any(isinstance(layer.feed_forward, Moe) for layer in job.model.layer_kinds.values())
    if architecture == "blackwell":
        return "moe blackwell" if moe else "dense blackwell"
    if moe:
        return "moe"
    if rates.software.unfused:
        return "unfused"
    return "dense tuned" if rates.software.efficiency == 1.0 and job.stack.tuned is not False else "dense untuned"
