from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from planner.plan import Plan
from scenarios.layout import Layout, Stage
from scenarios.scenario import load_scenario
from simulator.outcome import MEMORY_PARTS, Measurement, MemoryUse, Span, StageMemory, StepTime, StepTimeline
from topologies.document import InputFile

SCENARIO = """
name: {name}
model:
  name: toy
  hidden_size: 256
  vocab_size: 1000
  layer_kinds:
    block:
      mixer: {{type: attention, heads: 4, kv_heads: 4, head_dim: 64}}
      feed_forward: {{type: mlp, ffn_hidden_size: 1024, gated: true}}
  pattern: {pattern}
  source: {{"*": "made for a test"}}
cluster:
  name: two-cards
  source: {{"*": "made for a test"}}
  num_nodes: {num_nodes}
  node:
    name: box
    source: {{"*": "data sheet of the box"}}
    gpus_per_node: 8
    gpu:
      name: card
      vendor: nobody
      architecture: hopper
      peak: {{bf16: 100 TFLOP/s}}
      memory: 80 GB
      usable_memory: 76 GB
      memory_bandwidth: 2 TB/s
      power: 700 W
      source: {{peak: "data sheet, page 3", "*": "data sheet"}}
    scale_up: {{kind: nvswitch, bandwidth: 450 GB/s, bus_bandwidth: 360 GB/s, latency: 1 us, domain_size: 8}}
    nic: {{name: port, bandwidth: 400 Gbit/s, latency: 2 us, source: {{"*": "data sheet of the port"}}}}
    nics_per_node: 8
  fabric: {{kind: rail-optimized, rails: 8, tiers: [{{name: leaf, nodes: 64}}]}}
job: {{seq_length: 1024, global_batch_size: 64, target_tokens: 2 T tokens}}
"""

BREAKDOWN = {
    "compute": 3.0,
    "tp_comm": 0.4,
    "cp_comm": 0.0,
    "ep_comm": 0.0,
    "pp_bubble": 0.3,
    "pp_comm": 0.05,
    "dp_comm": 0.2,
    "optimizer": 0.05,
    "straggler": 0.0,
}
CAUSES = {"gemm": 2.0, "attention": 0.3, "memory_bound": 0.4, "recompute": 0.1, "head": 0.1, "host": 0.1}


def stage_memory(in_flight: float) -> StageMemory:
    sizes = dict(zip(MEMORY_PARTS, (10e9, 20e9, 12e9, 3e9 * in_flight, 0.5e9, 1e9, 4e9), strict=True))
    return StageMemory(in_flight_microbatches=in_flight, **{f"{part}_bytes": size for part, size in sizes.items()})


@pytest.fixture
def make_plan(tmp_path: Path) -> Callable[..., Plan]:
    """Build a plan of pp stages on 2 * pp * 4 cards; keywords replace entries of ``predicted``."""

    def make(name: str = "small", pp: int = 2, layers: int = 4, inputs: Any = None, **changes: Any) -> Plan:
        path = tmp_path / "scenario.yaml"
        pattern = "[" + ", ".join(["block"] * layers) + "]"
        text = SCENARIO.format(name=repr(name), pattern=pattern, num_nodes=pp)
        path.write_text(text, encoding="utf-8")
        read: list[InputFile] = []
        scenario = load_scenario(str(path), inputs=read)
        parts = {f"{key}_seconds": value for key, value in BREAKDOWN.items()}
        step = StepTime(
            **parts,
            mfu=0.40,
            hfu=0.43,
            tokens_per_second_per_gpu=1024.0,
            tflops_per_gpu=40.0,
            low_seconds=3.6,
            high_seconds=4.5,
            compute_parts_seconds=CAUSES,
            basis=("GEMM rates: made for a test",),
        )
        memory = MemoryUse(
            stages=tuple(stage_memory(pp - stage) for stage in range(pp)),
            capacity_bytes=76e9,
            not_included=("the graph of the compiler",),
        )
        predicted = {
            "step_seconds": step.total_seconds,
            "step_seconds_low": step.low_seconds,
            "step_seconds_high": step.high_seconds,
            "mfu": step.mfu,
            "hfu": step.hfu,
            "tokens_per_second_per_gpu": step.tokens_per_second_per_gpu,
            "tflops_per_gpu": step.tflops_per_gpu,
            "breakdown_seconds": step.breakdown_seconds,
            "compute_parts_seconds": step.compute_parts_seconds,
            "basis": list(step.basis),
            "memory_bytes": memory.as_json(),
            "goodput": 0.93,
            "days": {"p10": 40.0, "p50": 43.0, "p90": 47.0},
            "cost_usd": 1.25e6,
            "energy_kwh": 2.5e5,
        } | changes
        stages = tuple(Stage(layers=layers // pp) for _ in range(pp))
        layout = Layout(tp=4, pp=pp, dp=2, sequence_parallel=True, stages=stages)
        rival = Layout(tp=8, pp=pp, dp=1).model_dump(mode="json") | {"num_microbatches": 64}
        reason = "tensor parallel traffic grows"
        return Plan(
            scenario=scenario,
            layout=layout,
            placement={"rank_order": list(layout.rank_order)},
            checkpoint={
                "interval_steps": 150,
                "interval_seconds": 600.0,
                "mode": "async",
                "tiers": [],
                "bytes": 1.2e12,
            },
            predicted=predicted,
            alternatives=[{"layout": rival, "step_seconds": 4.4, "mfu": 0.364, "lost_because": reason}],
            solver={"name": "enumeration", "status": "complete", "candidates": 96, "feasible": 31, "gap": None},
            inputs=[{"path": one.path, "sha256": one.sha256} for one in read] if inputs is None else inputs,
        )

    return make


@pytest.fixture
def make_measurement() -> Callable[..., Measurement]:
    """Measure a plan: 5 % slower than promised."""

    def make(plan: Plan, **changes: Any) -> Measurement:
        fields: dict[str, Any] = {
            "plan_sha256": plan.sha256(),
            "world_size": plan.layout.world_size,
            "steps": 10,
            "step_seconds": {"median": 4.2, "p10": 4.1, "p90": 4.35},
            "mfu": 0.40 * 4.0 / 4.2,
            "tokens_per_second_per_gpu": 1024.0 * 4.0 / 4.2,
            "peak_memory_bytes": 60e9,
            "losses": [7.0, 6.9],
            "phases_seconds": {"forward_backward": 3.9, "optimizer": 0.06, "data": 0.01},
            "environment": {"torch": "2.13", "contended": False},
        }
        return Measurement(**(fields | changes))

    return make


@pytest.fixture
def timeline() -> StepTimeline:
    """Two ranks, two micro-batches of 1F1B, one gradient reduction, one optimizer step."""
    return play_by_hand(pp=2, num_microbatches=4)


def play_by_hand(pp: int, num_microbatches: int) -> StepTimeline:
    """GPipe on paper: forward 1 s, backward 2 s, transfers free."""
    spans = []
    for rank in range(pp):
        for batch in range(num_microbatches):
            spans.append(
                Span(
                    rank=rank,
                    stream="compute",
                    name=f"F{batch}",
                    kind="forward",
                    start_seconds=rank + batch,
                    duration_seconds=1.0,
                )
            )
            start = pp + num_microbatches - 1 + 2.0 * (pp - 1 - rank + batch)
            spans.append(
                Span(
                    rank=rank,
                    stream="compute",
                    name=f"B{batch}",
                    kind="backward",
                    start_seconds=start,
                    duration_seconds=2.0,
                )
            )
        end = pp + num_microbatches - 1 + 2.0 * (pp - 1 + num_microbatches)
        spans.append(
            Span(
                rank=rank,
                stream="communication",
                name="gradients",
                kind="dp_comm",
                start_seconds=end,
                duration_seconds=1.0,
                bytes=1e9,
            )
        )
        spans.append(
            Span(
                rank=rank, stream="compute", name="adamw", kind="optimizer", start_seconds=end + 1, duration_seconds=0.5
            )
        )
    return StepTimeline(spans=tuple(spans), step_seconds=end + 1.5)
