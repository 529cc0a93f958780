"""What cannot run is refused before anything starts, with the reason."""

from __future__ import annotations

from typing import Any

import pytest
from plans import plan_of
from tiny_models import LATENT, PLAIN, SOFTMAX, of
from tiny_training import tiny

from runtime.job import check_room, gpus_here, request_for
from runtime.support import check_runnable
from scenarios.job import Job
from scenarios.layout import Layout, Stage
from scenarios.model import Layer, Mamba, Mlp, ModelSpec, load_model
from topologies.errors import InputError


def with_heads(heads: int) -> ModelSpec:
    mixer = PLAIN.model_copy(update={"heads": heads, "kv_heads": heads})
    block = SOFTMAX.model_copy(update={"num_experts": 8})
    return tiny("moe").model_copy(update={"layer_kinds": {"moe": of(mixer, block)}, "vocab_size": 240})


def model_with(mixer: Any, feed_forward: Any = None, norms: int = 2) -> ModelSpec:
    layer = Layer(mixer=mixer, feed_forward=feed_forward or Mlp(ffn_hidden_size=96, gated=True), norms=norms)
    return tiny().model_copy(update={"layer_kinds": {"dense": layer}})


NARROW = SOFTMAX.model_copy(update={"ffn_hidden_size": 33})
MODELS = {
    "attention[+]moe with 3 norms": model_with(PLAIN, SOFTMAX, norms=3),
    "mamba[+]mlp": model_with(Mamba(generation=1, inner_size=128, state_size=8, conv_kernel=4, dt_rank=4)),
    "indexer_heads": model_with(LATENT.model_copy(update={"indexer_heads": 2, "indexer_head_dim": 8})),
    "even head_dim": model_with(PLAIN.model_copy(update={"head_dim": 15})),
    "even qk_rope_head_dim": model_with(LATENT.model_copy(update={"qk_rope_head_dim": 5})),
    "embedding_size = 32": tiny().model_copy(update={"embedding_size": 32}),
    "8 learned positions": tiny().model_copy(update={"position_embeddings": 8}),
    "mtp_layers = 1": tiny("deepseek").model_copy(update={"mtp_layers": 1}),
}
LAYOUTS: dict[str, dict[str, Any]] = {
    "kv_heads 2 is not divisible by tp 4": {"tp": 4},
    "global batch 8 is not a multiple": {"dp": 3},
    "does not divide into 2 x cp = 6 blocks": {"cp": 3},
    "4 heads do not divide over tp 1 x cp 8": {"cp": 8, "cp_comm": "all-to-all"},
    "the model has none": {"dp": 2, "ep": 2},
    "seq_length / cp 4 is not divisible by tp 8": {"model": with_heads(8), "tp": 8, "cp": 8},
    "8 experts do not divide over ep 3": {"model": tiny("moe"), "dp": 3, "ep": 3, "job": {"global_batch_size": 9}},
    "does not divide the 2 ranks of a stage": {"model": tiny("moe"), "dp": 2, "ep": 4},
    "etp 2 does not divide tp 1": {"model": tiny("moe"), "dp": 2, "etp": 2},
    "size 33 does not divide over etp 2": {"model": model_with(PLAIN, NARROW), "tp": 2, "etp": 2},
    "do not divide into dp_replicate 2": {"model": tiny("moe"), "dp": 2, "ep": 2, "dp_replicate": 2},
    "mla_up_proj cannot be recomputed alone": {"recompute": "selective", "recompute_modules": ("mla_up_proj",)},
    "dualpipe": {"pp": 2, "schedule": "dualpipe"},
    "zb-h2": {"pp": 2, "schedule": "zb-h2"},
    "let the weights go": {"pp": 2, "dp": 2, "schedule": "zb-h1", "optimizer_sharding": "zero3"},
    "interleaved needs vpp": {"pp": 2, "schedule": "interleaved"},
    "zbv holds two stages": {"pp": 2, "schedule": "zbv"},
    "holds one stage a rank": {"pp": 2, "vpp": 2, "schedule": "1f1b"},
    "splits the backward pass": {"pp": 2, "schedule": "zb-h1", "recompute": "full"},
    "do not fill 2 stages": {"pp": 2, "stages": (Stage(layers=1), Stage(layers=1))},
    "holds no layer": {"pp": 4, "stages": tuple(Stage(layers=count) for count in (2, 0, 1, 1))},
    "do not divide into 3": {"pp": 2, "vpp": 2, "schedule": "interleaved", "job": {"global_batch_size": 7}},
    "training in fp16": {"job": {"precision": "fp16"}},
    "reduced in fp32 only": {"job": {"gradient_precision": "bf16"}},
    "only AdamW": {"job": {"optimizer": "sgd"}},
}


@pytest.mark.parametrize(("reason", "model"), MODELS.items())
def test_models_that_are_not_built(reason: str, model: ModelSpec) -> None:
    with pytest.raises(InputError, match=reason):
        request_for(plan_of(model), steps=1)


@pytest.mark.parametrize(("reason", "layout"), LAYOUTS.items())
def test_layouts_and_jobs_that_are_not_executed(reason: str, layout: dict[str, Any]) -> None:
    with pytest.raises(InputError, match=reason):
        request_for(plan_of(**layout), steps=1)


@pytest.mark.parametrize("name", ["llama3-8b", "mixtral-8x7b", "qwen3-30b-a3b", "gpt3-175b", "gpt-1t", "moe-50m"])
def test_shipped_models_are_built(name: str) -> None:
    check_runnable(Job(model=load_model(name), seq_length=64, global_batch_size=8), Layout())


def test_more_ranks_than_the_cores_can_take_are_refused() -> None:
    plan = plan_of(dp=512, job={"global_batch_size": 512})
    assert request_for(plan, steps=1).world_size == 512
    with pytest.raises(InputError, match=r"needs 512 ranks on .*this machine has .* cores"):
        check_room(plan)


@pytest.mark.skipif(gpus_here() > 0, reason="this machine has GPUs")
def test_a_plan_for_gpus_is_refused_without_them() -> None:
    from dataclasses import replace

    from scenarios.scenario import load_scenario

    plan = plan_of()
    gpus = load_scenario("llama3-405b-16k-h100").cluster
    with pytest.raises(InputError, match="this machine has 0 GPUs"):
        check_room(replace(plan, scenario=plan.scenario.model_copy(update={"cluster": gpus})))
