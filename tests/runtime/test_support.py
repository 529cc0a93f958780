"""What cannot run is refused before anything starts, with the reason."""

from __future__ import annotations

from typing import Any

import pytest
from plans import plan_of
from tiny_training import tiny

from runtime.job import check_room, gpus_here, request_for
from scenarios.layout import Stage
from scenarios.model import Attention, Layer, Mamba, Mla, Mlp, ModelSpec, Moe
from topologies.errors import InputError


def model_with(mixer: Any, feed_forward: Any = None) -> ModelSpec:
    layer = Layer(mixer=mixer, feed_forward=feed_forward or Mlp(ffn_hidden_size=96, gated=True))
    return tiny().model_copy(update={"layer_kinds": {"dense": layer}})


PLAIN = Attention(heads=4, kv_heads=2, head_dim=16)
MODELS = {
    "attention[+]moe": model_with(PLAIN, Moe(num_experts=4, top_k=2, ffn_hidden_size=32)),
    "mla[+]mlp": model_with(
        Mla(heads=4, q_lora_rank=None, kv_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=8, v_head_dim=16)
    ),
    "mamba[+]mlp": model_with(Mamba(generation=1, inner_size=128, state_size=8, conv_kernel=4, dt_rank=4)),
    "window of 8": model_with(PLAIN.model_copy(update={"window": 8})),
    "qk_norm": model_with(PLAIN.model_copy(update={"qk_norm": True})),
    "norm_bias": tiny().model_copy(update={"norm_bias": True}),
    "position_embeddings = 64": tiny().model_copy(update={"position_embeddings": 64}),
}
LAYOUTS: dict[str, dict[str, Any]] = {
    "context parallelism": {"cp": 2},
    "expert parallelism": {"dp": 2, "ep": 2},
    "expert-tensor parallelism": {"tp": 2, "etp": 2},
    "kv_heads 2 is not divisible by tp 4": {"tp": 4},
    "global batch 8 is not a multiple": {"dp": 3},
    "dualpipe": {"pp": 2, "schedule": "dualpipe"},
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


def test_a_window_as_long_as_the_sequence_is_plain_attention() -> None:
    assert request_for(plan_of(model_with(PLAIN.model_copy(update={"window": 32}))), steps=1).world_size == 1


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
