"""Models and scenarios in figures, as plain data for tables and JSON; and what deserves a look in a scenario."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from scenarios.model import ModelSpec
from scenarios.scenario import Scenario
from topologies.checks import Finding, check_cluster
from topologies.document import InputFile


def model_row(spec: ModelSpec) -> dict[str, Any]:
    """Return one line about a model."""
    return {
        "title": spec.name,
        "parameters": spec.num_params,
        "active_parameters": spec.num_active_params,
        "num_layers": spec.num_layers,
        "layer_kinds": spec.kind_counts,
    }


def model_summary(spec: ModelSpec, seq_length: int) -> dict[str, Any]:
    """Return parameters and FLOPs of a model by layer kind and part, and what is not in them."""
    forward = spec.forward_flops_per_token(seq_length)
    kinds = {
        kind: {
            "layers": count,
            "parameters_per_layer": spec.layer_params(kind),
            "active_parameters_per_layer": spec.layer_active_params(kind),
            "routed_expert_parameters_per_layer": spec.layer_expert_params(kind),
            "forward_flops_per_token_per_layer": sum(spec.layer_flops_per_token(kind, seq_length).values()),
            "layer": spec.layer_kinds[kind].model_dump(exclude_none=True),
        }
        for kind, count in spec.kind_counts.items()
    }
    return {
        "name": spec.name,
        "hidden_size": spec.hidden_size,
        "vocab_size": spec.vocab_size,
        "num_layers": spec.num_layers,
        "max_seq_length": spec.max_seq_length,
        "parameters": {
            "total": spec.num_params,
            "active": spec.num_active_params,
            "embedding": spec.embedding_params,
            "head": spec.head_params,
            "multi_token_prediction": spec.mtp_params,
        },
        "layer_kinds": kinds,
        "flops_per_token": {
            "seq_length": seq_length,
            "attention": "causal, counted once",
            "forward": forward,
            "forward_total": sum(forward.values()),
            "training": spec.flops_per_token(seq_length),
        },
        "not_counted": list(spec.not_counted),
        "defaults": {key: text for key, text in spec.source.items() if text.startswith("default of ")},
        "source": spec.source,
    }


def scenario_row(scenario: Scenario) -> dict[str, Any]:
    """Return one line about a scenario."""
    return {
        "title": scenario.name,
        "model": scenario.model.name,
        "cluster": scenario.cluster.name,
        "num_gpus": scenario.cluster.num_gpus,
        "seq_length": scenario.job.seq_length,
        "global_batch_size": scenario.job.global_batch_size,
        "precision": scenario.job.precision,
        "target_tokens": scenario.job.target_tokens,
        "objective": scenario.objective,
    }


def scenario_summary(scenario: Scenario, inputs: list[InputFile]) -> dict[str, Any]:
    """Return what a scenario asks, with every file that it was read from."""
    job, cluster, faults = scenario.job, scenario.cluster, scenario.faults
    flops = scenario.model.flops_per_token(job.seq_length) * job.tokens_per_step
    rate = faults.rate_per_second(cluster.num_gpus, cluster.num_nodes)
    return {
        "name": scenario.name,
        "objective": scenario.objective,
        "model": {"name": scenario.model.name, **model_row(scenario.model)},
        "cluster": {
            "name": cluster.name,
            "num_gpus": cluster.num_gpus,
            "num_nodes": cluster.num_nodes,
            "gpu": cluster.gpu.name,
        },
        "job": job.model_dump(exclude={"model"}, exclude_none=True),
        "tokens_per_step": job.tokens_per_step,
        "flops_per_step": flops,
        "steps": None if job.target_tokens is None else job.target_tokens / job.tokens_per_step,
        "faults": {"name": faults.name, "mean_seconds_between_failures": 1 / rate if rate else None},
        "prices": {"name": scenario.prices.name, "gpu_usd_per_second": scenario.prices.gpu_usd_per_second},
        "layout": scenario.layout.model_dump(exclude_none=True),
        "inputs": [asdict(file) for file in inputs],
    }


def check_scenario(scenario: Scenario) -> list[Finding]:
    """Return what is wrong in a scenario that can be read (failures), and what should be known (warnings)."""
    return [*_job(scenario), *check_cluster(scenario.cluster)]


def _job(scenario: Scenario) -> Iterator[Finding]:
    job, gpu, longest = scenario.job, scenario.cluster.gpu, scenario.model.max_seq_length
    if gpu.peak(job.precision) is None:
        known = ", ".join(gpu.peak_flop_per_second)
        text = f"{gpu.name} has no peak for {job.precision}; choose one of: {known}"
        yield Finding(level="failure", rule="precision", text=text)
    if longest is not None and job.seq_length > longest:
        text = f"sequences of {job.seq_length} tokens, and {scenario.model.name} is made for {longest}"
        yield Finding(level="warning", rule="seq_length", text=text)
    for what in scenario.model.not_counted:
        yield Finding(level="warning", rule="not counted", text=what)
    if job.target_tokens is not None and job.target_tokens < job.tokens_per_step:
        text = f"{job.target_tokens:g} tokens in all are less than one step of {job.tokens_per_step}"
        yield Finding(level="failure", rule="target_tokens", text=text)
