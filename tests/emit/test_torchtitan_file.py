"""torchtitan's configuration file, imported against stand-ins that know only the fields of its source."""

from __future__ import annotations

import importlib.util
import sys
import types
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from emit_plans import large_plan

from planner.plan import Plan
from runtime.emit.emitting import Wishes, emit_plan
from runtime.emit.torchtitan_models import FLAVOURS
from topologies.errors import InputError

Facts = Callable[[str], dict[str, Any]]


def strict(name: str, fields: str) -> type:
    """A class that takes the given fields and no others."""

    def initialise(self: Any, **values: Any) -> None:
        unknown = values.keys() - set(fields.split())
        assert not unknown, f"{name} has no {unknown}"
        self.__dict__.update(values)

    def assign(self: Any, key: str, value: Any) -> None:
        assert key in fields.split(), f"{name} has no {key}"
        self.__dict__[key] = value

    return type(name, (), {"__init__": initialise, "__setattr__": assign})


@pytest.fixture
def torchtitan(facts: Facts, monkeypatch: pytest.MonkeyPatch) -> None:
    told = facts("torchtitan_fields")
    fields = told["fields"]
    training = strict("TrainingConfig", fields["TrainingConfig"])
    policies = {
        name: type(name, (), {"Config": type("Config", (), {"policy": name})}) for name in ("FullAC", "SelectiveAC")
    }
    content: dict[str, dict[str, Any]] = {
        "components.checkpointer": {
            "CheckpointManager": SimpleNamespace(Config=strict("Checkpoint", fields["CheckpointManager.Config"]))
        },
        "config": {"ParallelismConfig": strict("ParallelismConfig", fields["ParallelismConfig"])},
        "distributed.activation_checkpoint": policies,
        "trainer": {"Trainer": SimpleNamespace(Config=object)},
    }
    for family, flavours in told["flavours"].items():
        known = set(flavours.split())

        def registry(flavor: str, known: set[str] = known, family: str = family) -> str:
            assert flavor in known
            return f"{family} {flavor}"

        functions = {name: lambda: SimpleNamespace(training=training()) for name in told["functions"][family].split()}
        content[f"models.{family}"] = {"model_registry": registry}
        content[f"models.{family}.config_registry"] = functions
    for name in ("", "components", "distributed", "models", *content):
        module = types.ModuleType(f"torchtitan.{name}".rstrip("."))
        module.__path__ = []
        module.__dict__.update(content.get(name, {}))
        monkeypatch.setitem(sys.modules, module.__name__, module)


def imported(plan: Plan, folder: Path) -> Any:
    """Write the file, import it and return what its function returns."""
    _, files = emit_plan(plan, "torchtitan", folder, Wishes(steps=100))
    path = folder / "headway_torchtitan.py"
    path.write_text(files[path.name])
    spec = importlib.util.spec_from_file_location("headway_torchtitan", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.headway_plan()


def test_pipeline_with_uneven_stages(torchtitan: None, tmp_path: Path) -> None:
    plan = large_plan("llama3-405b", tp=8, cp=2, pp=16, dp=2, sequence_parallel=True, recompute="full")
    config = imported(plan, tmp_path)
    parallel, training = config.parallelism, config.training
    degrees = ("tensor_parallel_degree", "context_parallel_degree", "pipeline_parallel_degree")
    product = parallel.data_parallel_shard_degree * parallel.data_parallel_replicate_degree
    for degree in degrees:
        product *= getattr(parallel, degree)
    assert product == plan.layout.world_size
    modules = parallel.module_fqns_per_model_part
    assert [sum(name.startswith("layers.") for name in stage) for stage in modules] == [7, *[8] * 14, 7]
    everything = ["tok_embeddings", *(f"layers.{layer}" for layer in range(126)), "norm", "lm_head"]
    assert [name for stage in modules for name in stage] == everything
    assert config.model_spec == "llama3 405B"
    assert (config.activation_checkpoint.policy, parallel.pipeline_parallel_schedule) == ("FullAC", "1F1B")
    tokens = training.num_tokens_per_microbatch_per_dp_rank * parallel.num_pp_microbatches * plan.layout.dp
    assert tokens == training.num_tokens_per_train_step == 512 * 8192
    assert (config.checkpoint.interval, config.checkpoint.async_mode) == (50, "async_with_pinned_mem")


@pytest.mark.parametrize(
    ("sharding", "shard", "replicate", "reshard"),
    [("none", 1, 64, "never"), ("zero1", 64, 1, "never"), ("zero2", 64, 1, "never"), ("zero3", 64, 1, "always")],
)
def test_sharding(torchtitan: None, tmp_path: Path, sharding: str, shard: int, replicate: int, reshard: str) -> None:
    parallel = imported(large_plan("llama3-8b", dp=64, optimizer_sharding=sharding), tmp_path).parallelism
    assert (parallel.data_parallel_shard_degree, parallel.data_parallel_replicate_degree) == (shard, replicate)
    assert parallel.fsdp_reshard_after_forward == reshard


def test_experts(torchtitan: None, tmp_path: Path) -> None:
    config = imported(large_plan("qwen3-30b-a3b", ep=8, dp=16, optimizer_sharding="zero3"), tmp_path)
    assert config.parallelism.expert_parallel_degree == 8
    assert config.model_spec == "qwen3 30B-A3B"
    assert config.training.disable_cuda_graphs is True
    assert config.activation_checkpoint is None


def test_flavours_exist(facts: Facts) -> None:
    told = facts("torchtitan_fields")
    for flavour in FLAVOURS:
        assert flavour.flavor in told["flavours"][flavour.family].split()
        assert flavour.base in told["functions"][flavour.family].split()


@pytest.mark.parametrize(
    ("plan", "reason"),
    [
        (lambda: large_plan("llama-30m", dp=8), "ships no model"),
        (lambda: large_plan(tp=8, pp=4, dp=1, schedule="zb-h1"), "no zb-h1"),
        (lambda: large_plan(dp=8, job={"precision": "fp8"}), "converters"),
        (lambda: large_plan("qwen3-30b-a3b", tp=2, ep=4, etp=2, dp=4), "inside experts"),
    ],
)
def test_what_torchtitan_cannot_do_is_refused(plan: Callable[[], Plan], reason: str) -> None:
    with pytest.raises(InputError, match=reason):
        emit_plan(plan(), "torchtitan", Path("/shared/job"), Wishes(steps=10))


def test_what_it_does_otherwise_stands_in_the_head() -> None:
    _, files = emit_plan(large_plan("llama3-8b", dp=8), "torchtitan", Path("/shared/job"), Wishes(steps=10))
    head = files["headway_torchtitan.py"].split("from torchtitan")[0]
    assert "no ZeRO-1" in head
