"""A calibration becomes a cluster document that loads, holds for its machine, and is used again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime import calibrate as module
from runtime.calibrate import calibrate_machine, describe
from runtime.environment import usable_cores
from runtime.fixed_costs import with_fixed_costs
from runtime.small_models import PAIRS, Trial
from simulator.phases import phase_seconds
from simulator.step import predict_step
from topologies.cluster import Cluster
from topologies.cluster_file import quantity, to_yaml
from topologies.document import load
from topologies.errors import InputError
from topologies.hardware import Gpu
from topologies.units import UNITS, parse_quantity

PHASES = ("forward_backward", "gradient_reduction", "optimizer")
COSTS = (
    *("layer", "recompute_layer", "tp_layer", "tp_sequence_layer", "tp_recompute_layer", "dp_layer", "moe_layer"),
    *("expert", "ep_layer", "layer_gigabyte", "dp_gigabyte", "flat_gigabyte", "shard_gigabyte", "tp_mebibyte"),
    *("tp_sequence_mebibyte", "moe_mebibyte", "ep_mebibyte", "head_mebibyte", "tp_head_mebibyte", "microbatch"),
    *("pp_microbatch", "step"),
)
RESULT: dict[str, Any] = {
    "gemms": [
        {"m": 64, "n": 256, "k": 512, "precision": "fp32", "rate_flop_per_second": 80.123456e9},
        {"m": 512, "n": 256, "k": 512, "precision": "fp32", "rate_flop_per_second": 95e9},
        {"m": 512, "n": 256, "k": 512, "precision": "bf16", "rate_flop_per_second": 210e9},
    ],
    "attention": [
        {
            "batch": 1,
            "seq_length": 128,
            "heads": 8,
            "head_dim": 64,
            "precision": "fp32",
            "forward_seconds": 5e-4,
            "backward_seconds": 1.2e-3,
        }
    ],
    "memory_bandwidth_bytes_per_second": 16e9,
    "optimizer_bytes_per_second": 50e9,
    "spread": {"gemms": 0.02},
    "collectives": [
        {"kind": "all_reduce", "ranks": 2, "size_bytes": 1024.0, "time_seconds": 4e-4},
        {"kind": "all_reduce", "ranks": 2, "size_bytes": 2.0**26, "time_seconds": 5.5e-2},
        {"kind": "all_gather", "ranks": 2, "size_bytes": 1024.0, "time_seconds": 2e-4},
        {"kind": "all_gather", "ranks": 2, "size_bytes": 1e9, "time_seconds": 1.0},
        {"kind": "reduce_scatter", "ranks": 2, "size_bytes": 1024.0, "time_seconds": 3e-4},
        {"kind": "reduce_scatter", "ranks": 2, "size_bytes": 1e9, "time_seconds": 2.0},
        {"kind": "send_recv", "ranks": 2, "size_bytes": 1024.0, "time_seconds": 1e-4},
    ],
    "collective_spread": 0.3,
    "trials": {name: [dict.fromkeys(PHASES, 0.01), dict.fromkeys(PHASES, 0.02)] for name in PAIRS},
    "foreign_cpu_share": 0.07,
}


def test_a_profile_loads_as_it_was_measured(tmp_path: Path) -> None:
    cluster = describe(RESULT, (2,), cores=3)
    (tmp_path / "machine.yaml").write_text(to_yaml(cluster))
    again = load(tmp_path / "machine.yaml", Cluster)
    assert again.num_gpus == 3
    assert again.gpu.architecture == "cpu"
    assert again.gpu.peak("fp32") == 95e9
    assert again.gpu.peak("bf16") == 210e9
    assert again.scale_up.bus_bandwidth_bytes_per_second == pytest.approx(2**26 / 5.5e-2, rel=1e-5)
    assert again.measured is not None
    assert [point.rate_flop_per_second for point in again.measured.gemms] == pytest.approx([80.123456e9, 95e9, 210e9])
    assert again.measured.attention[0].backward_seconds == pytest.approx(1.2e-3)
    assert again.measured.collectives[1].size_bytes == 2**26
    assert again.measured.environment["contended"] == "true"
    assert again.measured.environment["foreign_cpu_share"] == "7 %"


def test_the_short_form_can_be_overridden(tmp_path: Path) -> None:
    (tmp_path / "machine.yaml").write_text(to_yaml(describe(RESULT, (2,), cores=2)))
    changes = ["node.gpus_per_node=4", "oversubscribed_cores=2"]
    assert load(tmp_path / "machine.yaml", Cluster, overrides=changes).num_gpus == 4


def phases_of(machine: Cluster, trial: Trial) -> dict[str, float]:
    """What a machine would measure that is as the simulator says."""
    parts = predict_step(machine, trial.job, trial.layout).breakdown_seconds
    return {phase: phase_seconds(parts, trial.layout, phase) for phase in PHASES}


def test_the_costs_of_a_made_up_machine_are_found_from_its_trials() -> None:
    costs = {name: 1e-3 * (1 + index / 10) for index, name in enumerate(COSTS)}
    costs |= {name: 100 * seconds for name, seconds in costs.items() if name.endswith("gigabyte")}
    bare = describe(RESULT, (2,), cores=2)
    assert bare.measured is not None

    def machine(**changes: Any) -> Cluster:
        return bare.model_copy(update={"measured": bare.measured.model_copy(update=changes)})  # type: ignore[union-attr]

    truth = machine(host_seconds=costs, memory_bandwidth_bytes_per_second=10e9)
    trials = {name: [phases_of(truth, trial) for trial in pair] for name, pair in PAIRS.items()}
    found = with_fixed_costs(machine(host_seconds={}, memory_bandwidth_bytes_per_second=16e9), trials)
    # the smallest layers move something too: their bandwidth is found after their cost
    assert found.memory_bandwidth_bytes_per_second == pytest.approx(10e9, rel=0.02)
    assert found.host_seconds == pytest.approx(costs, rel=0.02)
    faster = {name: [dict.fromkeys(PHASES, 0.0)] * 2 for name in PAIRS}
    assert set(with_fixed_costs(truth, faster).host_seconds.values()) == {0.0}


def test_a_profile_of_this_machine_is_used_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def launch(request: Any, **_: Any) -> dict[str, Any]:
        calls.append(request)
        return RESULT

    monkeypatch.setattr(module, "launch", launch)
    path = tmp_path / "machine.yaml"
    first, fresh = calibrate_machine(path, ranks=(2, 4))
    assert fresh
    assert calls[0].world_size == 4
    assert calls[0].busy_ranks == min(usable_cores(), 4)
    second, fresh = calibrate_machine(path, ranks=(2, 4))
    assert not fresh
    assert second.gpu == first.gpu
    for changed in ({"ranks": (2,)}, {"ranks": (2, 4), "force": True}):
        assert calibrate_machine(path, **changed)[1]  # type: ignore[arg-type]
    path.write_text("name: [")
    assert calibrate_machine(path, ranks=(2, 4))[1]
    assert len(calls) == 4


def test_group_sizes_without_two_are_refused() -> None:
    with pytest.raises(InputError, match="include 2"):
        calibrate_machine(None, ranks=(4,))


@given(
    st.sampled_from(["bytes", "seconds", "bytes_per_second", "flop_per_second", "watts"]),
    st.floats(1e-7, 1e18, allow_nan=False),
)
def test_written_quantities_read_back(dimension: str, value: float) -> None:
    written = quantity(value, dimension)
    assert parse_quantity(written, dimension) == pytest.approx(value, rel=1e-5)
    assert written.split(" ", 1)[1] in UNITS[dimension]


def test_every_shipped_document_survives_writing(tmp_path: Path) -> None:
    from topologies.hardware import CATALOG

    for folder, model in (("gpus", Gpu), ("clusters", Cluster)):
        for path in sorted((CATALOG / folder).glob("*.yaml")):
            document = load(path, model)  # type: ignore[type-var]
            (tmp_path / path.name).write_text(to_yaml(document))
            assert to_yaml(load(tmp_path / path.name, model)) == to_yaml(document), path  # type: ignore[type-var]


@pytest.mark.slow
@pytest.mark.jobs
def test_this_machine_is_measured(tmp_path: Path) -> None:
    path = tmp_path / "machine.yaml"
    cluster, fresh = calibrate_machine(path, ranks=(2,))
    assert fresh
    assert load(path, Cluster).num_gpus == usable_cores()
    measured = cluster.measured
    assert measured is not None
    assert {point.precision for point in measured.gemms} == {"fp32", "bf16"}
    assert all(1e9 < point.rate_flop_per_second < 1e13 for point in measured.gemms)
    times = {(point.kind, point.size_bytes): point.time_seconds for point in measured.collectives if point.ranks == 2}
    for kind in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send_recv"):
        assert times[kind, 2.0**26] > 3 * times[kind, 2.0**10]
    assert measured.host_seconds["tp_layer"] > measured.host_seconds["layer"] > 0
