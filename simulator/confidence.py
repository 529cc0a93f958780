"""How sure a predicted step is: the band that held for published runs of the kind, widened by what is not declared."""

from __future__ import annotations

import math

from scenarios.job import Job
from scenarios.layout import Layout
from scenarios.model import Moe
from simulator.compute import Rates
from topologies.cluster import Cluster

SHORT_STEP_SECONDS = 0.5
FEW_RUNS = 12
"""Published runs of a GPU below which its own factor is mostly assumed."""


def band(
    cluster: Cluster, job: Job, layout: Layout, rates: Rates, total_seconds: float
) -> tuple[float, float, tuple[str, ...]]:
    """Return the low and high end of the 80 % band of a step, and the facts that it rests on.

    The base width comes from left-out errors of published runs by kind of model, GPU and stack; widths of undeclared
    parts are added in squares.
    """
    widths = rates.parameters.band
    names = [band_name(cluster, job, rates, total_seconds), *rates.software.undeclared]
    if rates.software.cpu_optimizer and not rates.cpu:
        names.append("optimizer on the host")
    alone = not rates.cpu and not rates.gemm.points and not rates.parameters.evidence.get(evidence_key(cluster, job))
    evidence = rates.parameters.evidence
    on_gpu = evidence.get(f"on {cluster.gpu.name}", 0)
    few = not rates.cpu and not rates.gemm.points and on_gpu < FEW_RUNS and not names[0].startswith("unproven")
    if alone:
        names.append("no measured run")
    elif few:
        names.append("few runs of this gpu")
    width = math.sqrt(sum(widths[name].value ** 2 for name in names))
    largest = sorted(names, key=lambda name: -widths[name].value)[:3]
    notes = [
        f"80 % band +-{100 * width:.0f} %: "
        + ", ".join(f"{name} +-{100 * widths[name].value:.0f} %" for name in largest)
    ]
    if alone:
        notes.append(f"no measured run like this one ({evidence_key(cluster, job)}) is among those that headway knows")
    if few and not alone:
        notes.append(f"of the measured runs that headway knows {on_gpu} are on {cluster.gpu.name}")
    basis = (*rates.facts, *rates.software.assumptions, *notes)
    return total_seconds / (1.0 + width), total_seconds * (1.0 + width), basis


def evidence_key(cluster: Cluster, job: Job) -> str:
    """Name what a published run must share with a job to be evidence for it: ``hopper fp8 moe full``."""
    precision = "16 bit" if job.precision in ("bf16", "fp16") else job.precision
    moe = any(isinstance(layer.feed_forward, Moe) for layer in job.model.layer_kinds.values())
    return f"{cluster.gpu.architecture} {precision} {'moe' if moe else 'dense'} {job.tuning}"


def band_name(cluster: Cluster, job: Job, rates: Rates, total_seconds: float) -> str:
    """Name the kind of run whose left-out errors give the base width of a band."""
    name = _base(cluster, job, rates)
    if rates.cpu or total_seconds >= SHORT_STEP_SECONDS:
        return name
    return max(name, "short step", key=lambda one: rates.parameters.band[one].value)


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
        return ("moe" if moe else "dense") + (" mxfp8" if job.precision == "mxfp8" else " blackwell")
    if moe:
        return "moe"
    if rates.software.unfused:
        return "unfused"
    return "dense tuned" if rates.software.efficiency == 1.0 and job.stack.tuned is not False else "dense untuned"
