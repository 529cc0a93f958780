"""Parameter counts against published counts and against the transformers library."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from scenarios.huggingface import spec_from_config
from scenarios.model import MODELS, ModelSpec, load_model
from topologies.document import shipped

CONFIGS = Path(__file__).resolve().parents[2].parent / "shared" / "data" / "practitioner-files" / "hf_configs"
COUNTS = json.loads((Path(__file__).parent / "transformers_counts.json").read_text())
"""Small configs of every family, counted by transformers 5.24.0: the sizes of all parameters of
AutoModelForCausalLM.from_config on the meta device, with the router correction vectors that it keeps as buffers."""


def _published() -> list[Any]:
    """Rows (file, total, active) of the README beside the configs."""
    if not CONFIGS.is_dir():
        return [pytest.param("", 0, 0, marks=pytest.mark.skip(reason="the shared practitioner files are not here"))]
    rows = []
    for line in (CONFIGS.parent / "README.md").read_text().splitlines():
        cells = [cell.strip() for cell in line.split("|")[1:-1]]
        total = re.search(r"\d{1,3}(,\d{3})+", cells[3]) if len(cells) == 5 and cells[0].endswith(".json") else None
        if total is None:
            continue
        active = total if cells[4] == "same" else re.search(r"\d{1,3}(,\d{3})+", cells[4])
        assert active is not None, line
        rows.append(pytest.param(cells[0], *(int(one[0].replace(",", "")) for one in (total, active)), id=cells[0]))
    assert len(rows) == 20
    return rows


@pytest.mark.parametrize(("file", "total", "active"), _published())
def test_counts_are_exact_for_published_configs(file: str, total: int, active: int) -> None:
    spec = load_model(str(CONFIGS / file))
    assert (spec.num_params, spec.num_active_params) == (total, active)


@pytest.mark.skipif(not CONFIGS.is_dir(), reason="the shared practitioner files are not here")
@pytest.mark.parametrize(
    ("file", "total"),
    [
        # transformers 5.24.0 on the meta device, correction vectors of the routers included
        ("glm_5.json", 743_911_218_432),
        ("nemotron_h_56b.json", 56_324_350_464),
        ("nemotron3_nano_30b_a3b.json", 31_577_940_288),
    ],
)
def test_counts_of_hybrids_and_sparse_attention(file: str, total: int) -> None:
    assert load_model(str(CONFIGS / file)).num_params == total


@pytest.mark.skipif(not CONFIGS.is_dir(), reason="the shared practitioner files are not here")
def test_active_counts_agree_with_the_model_cards() -> None:
    """Nemotron 3 Nano: 31.6 B, of these 3.6 B active with embeddings (its model card)."""
    nano = load_model(str(CONFIGS / "nemotron3_nano_30b_a3b.json"))
    assert (round(nano.num_params / 1e9, 1), round(nano.num_active_params / 1e9, 1)) == (31.6, 3.6)
    assert nano.kind_counts == {"mamba": 23, "moe": 23, "attention": 6}


@pytest.mark.parametrize("case", COUNTS, ids=[case["case"] for case in COUNTS])
def test_counts_agree_with_transformers(case: dict[str, Any]) -> None:
    spec = ModelSpec.model_validate(spec_from_config(case["config"], "tiny", "config.json"))
    assert spec.num_params == case["parameters"]


@pytest.mark.parametrize(
    ("name", "total", "active"),
    [
        ("llama2-7b", 6_738_415_616, None),
        ("llama3-8b", 8_030_261_248, None),
        ("llama3-70b", 70_553_706_496, None),
        ("llama3-405b", 405_853_388_800, None),
        ("mixtral-8x7b", 46_702_792_704, 12_879_925_248),
        ("mixtral-8x22b", 140_620_634_112, 39_152_031_744),
        ("qwen3-30b-a3b", 30_532_122_624, 3_353_032_704),
        ("qwen3-235b-a22b", 235_093_634_560, 22_190_763_520),
        ("deepseek-v3", 671_026_419_200, 37_552_297_472),
    ],
)
def test_shipped_models_have_their_published_counts(name: str, total: int, active: int | None) -> None:
    """Counts of the published checkpoints."""
    spec = load_model(name)
    assert (spec.num_params, spec.num_active_params) == (total, active or total)


@pytest.mark.parametrize(("name", "billions"), [("gpt3-175b", 174.6), ("gpt-1t", 1008.0)])
def test_gpt_models_follow_the_formula_of_their_paper(name: str, billions: float) -> None:
    """arXiv 2104.04473, section 5.1: P = 12 l h^2 (1 + 13/(12 h) + (V + s)/(12 l h)); the final norm is not in it."""
    spec = load_model(name)
    layers, hidden, vocab, seq = spec.num_layers, spec.hidden_size, spec.vocab_size, 2048
    formula = 12 * layers * hidden**2 + 13 * layers * hidden + (vocab + seq) * hidden
    assert spec.num_params == formula + 2 * hidden
    assert round(formula / 1e9, 1) == billions


def test_multi_token_prediction_is_counted_apart() -> None:
    """DeepSeek-V3's module has 14 B weights, embedding and head included (its README: 685 B = 671 B + 14 B)."""
    spec = load_model("deepseek-v3")
    shared = spec.embedding_params + spec.head_params
    assert (spec.mtp_params + shared) / 1e9 == pytest.approx(14, abs=0.6)
    assert any("multi-token prediction" in text for text in spec.not_counted)


@pytest.mark.parametrize("name", sorted(shipped(MODELS)))
def test_parts_add_up(name: str) -> None:
    spec = load_model(name)
    layers = sum(spec.layer_params(layer) for layer in spec.pattern)
    norms = spec.hidden_size * (1 + spec.norm_bias)
    assert spec.num_params == spec.embedding_params + layers + norms + spec.head_params
    idle = spec.num_params - spec.num_active_params
    assert idle == sum(spec.layer_params(kind) - spec.layer_active_params(kind) for kind in spec.pattern)
    assert spec.source, "every shipped model names its source"


def test_laptop_model_splits_over_a_few_ranks() -> None:
    spec = load_model("llama-30m")
    assert 20e6 < spec.num_params < 50e6
    assert spec.num_layers % 4 == 0
    layer = spec.layers[0].model_dump()
    assert (
        layer["mixer"]["heads"] % 4
        == layer["mixer"]["kv_heads"] % 4
        == layer["feed_forward"]["ffn_hidden_size"] % 64
        == 0
    )
