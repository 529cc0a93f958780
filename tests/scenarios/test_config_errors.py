"""What a config.json can get wrong, and the sentence that it is answered with."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from scenarios.model import ModelSpec, load_model
from topologies.errors import InputError

LLAMA: dict[str, Any] = {
    "model_type": "llama", "hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "intermediate_size": 96, "vocab_size": 1000, "tie_word_embeddings": False,
}  # fmt: skip
MIXTRAL = {**LLAMA, "model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 2}
HYBRID = {**LLAMA, "model_type": "nemotron_h", "hybrid_override_pattern": "*-*-"}


def complaint(tmp_path: Path, config: Any) -> str:
    path = tmp_path / "config.json"
    path.write_text(config if isinstance(config, str) else json.dumps(config, indent=2))
    with pytest.raises(InputError) as caught:
        load_model(str(path))
    assert str(path) in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({**LLAMA, "model_type": "lama"}, ["'lama' is not known", "did you mean 'llama'", "json:2:"]),
        ({**LLAMA, "model_type": "qqqq"}, ["is not known", "known: arcee,", "qwen3_moe"]),
        ({**LLAMA, "model_type": 3}, ["model_type", "not a text"]),
        ({"hidden_size": 64}, ["model_type: is missing", "layer_kinds"]),
        ({k: v for k, v in LLAMA.items() if k != "vocab_size"}, ["vocab_size: is missing", "llama needs vocab_size"]),
        ({k: v for k, v in LLAMA.items() if k != "num_hidden_layers"}, ["num_hidden_layers: is missing", "n_layer"]),
        ({**LLAMA, "hidden_size": None}, ["hidden_size"]),
        ({**LLAMA, "hidden_size": -64}, ["hidden_size", "-64 is out of range"]),
        ({**LLAMA, "hidden_size": 0}, ["0 is out of range"]),
        ({**LLAMA, "hidden_size": 10**12}, ["1000000000000 is out of range"]),
        ({**LLAMA, "num_hidden_layers": 10**6}, ["num_hidden_layers", "out of range"]),
        ({**LLAMA, "hidden_size": "64"}, ["'64' is not a whole number"]),
        ({**LLAMA, "hidden_size": 64.5}, ["64.5 is not a whole number"]),
        ({**LLAMA, "vocab_size": True}, ["True is not a whole number"]),
        ({**LLAMA, "tie_word_embeddings": "no"}, ["tie_word_embeddings", "not true or false"]),
        ({**LLAMA, "num_attention_heads": 3}, ["3 heads do not divide the hidden size 64"]),
        ({**LLAMA, "num_key_value_heads": 3}, ["4 heads cannot share 3 key-value heads"]),
        (
            {k: v for k, v in LLAMA.items() if k != "num_key_value_heads"} | {"num_key_value_head": 2},
            ["num_key_value_head: is not a key of llama", "did you mean 'num_key_value_heads'?"],
        ),
        ({**MIXTRAL, "num_experts_per_tok": 9}, ["cannot visit 9 of 8 experts"]),
        ({k: v for k, v in MIXTRAL.items() if k != "num_local_experts"}, ["num_experts: is missing"]),
        ({**LLAMA, "model_type": "qwen3_moe", "num_experts": 8, "num_experts_per_tok": 2}, ["moe_intermediate_size"]),
        ({"model_type": "gemma3"}, ["text_config: is missing"]),
        ({"model_type": "gemma3", "text_config": 7}, ["text_config: is not a mapping"]),
        ({"model_type": "gemma3", "text_config": {"num_hidden_layers": 0}}, ["text_config.num_hidden_layers"]),
        ({**LLAMA, "model_type": "gpt_oss", **{k: MIXTRAL[k] for k in ("num_local_experts", "num_experts_per_tok")},
          "layer_types": ["full_attention"] * 3}, ["layer_types", "3 entries for 4 layers"]),
        ({**LLAMA, "model_type": "gemma2", "layer_types": ["linear_attention"] * 4}, ["'linear_attention'"]),
        ({**HYBRID, "hybrid_override_pattern": "*-*"}, ["spells 3 layers, and num_hidden_layers is 4"]),
        ({**HYBRID, "hybrid_override_pattern": "*-*X"}, ["the letter 'X' is not known"]),
        ({**LLAMA, "model_type": "deepseek_v3", "attention_bias": True}, ["bias in latent attention is not modelled"]),
        ("[1, 2]", ["holds a list at its top level"]),
        ("", ["holds nothing"]),
        ('{"model_type": "llama", "model_type": "llama"}', ["given twice"]),
        ('{"model_type": ', ["is not valid YAML"]),
    ],
)  # fmt: skip
def test_a_bad_config_is_refused_with_file_and_key(tmp_path: Path, config: Any, words: list[str]) -> None:
    text = complaint(tmp_path, config)
    for word in words:
        assert word in text, text


def test_defaults_of_the_format_are_told(tmp_path: Path) -> None:
    path = tmp_path / "tiny" / "config.json"
    path.parent.mkdir()
    keys = ("model_type", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "vocab_size")
    path.write_text(json.dumps({key: LLAMA[key] for key in keys}))
    spec = load_model(str(path))
    assert spec.name == "tiny"
    assert spec.source["tie_word_embeddings"] == "default of llama: false"
    assert spec.source["num_key_value_heads"] == "default of llama: 4"
    assert spec.num_params == 2 * 1000 * 64 + 4 * (4 * 64 * 64 + 3 * 64 * 96 + 2 * 64) + 64


def test_nested_configs_say_what_they_leave_out(tmp_path: Path) -> None:
    path = tmp_path / "gemma.json"
    path.write_text(json.dumps({"model_type": "gemma3", "text_config": {"num_hidden_layers": 12}}))
    spec = load_model(str(path))
    assert spec.vocab_size == 262208
    assert spec.source["vocab_size"] == "default of gemma3_text: 262208"
    assert spec.kind_counts == {"window-attention+mlp": 10, "attention+mlp": 2}
    assert any("vision" in text for text in spec.not_counted)


def test_a_native_model_round_trips(tmp_path: Path) -> None:
    spec = load_model("mixtral-8x7b")
    path = tmp_path / "mixtral.json"
    path.write_text(spec.model_dump_json(by_alias=True))
    assert load_model(str(path)) == spec


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"pattern": ["attention+mlpp"]}, ["'attention+mlpp'", "did you mean 'attention+mlp'?"]),
        ({"pattern": []}, ["pattern"]),
        ({"hidden_size": 0}, ["hidden_size"]),
        ({"hiden_size": 5}, ["is not a known key here", "hidden_size"]),
    ],
)
def test_a_bad_native_model_is_refused(tmp_path: Path, change: dict[str, Any], words: list[str]) -> None:
    content = json.loads(load_model("llama-30m").model_dump_json(by_alias=True)) | change
    path = tmp_path / "native.json"
    path.write_text(json.dumps(content))
    with pytest.raises(InputError) as caught:
        load_model(str(path))
    for word in words:
        assert word in str(caught.value)


def test_unknown_model_name_lists_near_names() -> None:
    with pytest.raises(InputError, match="did you mean 'llama3-70b'"):
        load_model("llama3-70")
    with pytest.raises(InputError, match="there is no file"):
        load_model("no/such/config.json")


def test_inputs_are_recorded(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(LLAMA))
    inputs: list[Any] = []
    assert isinstance(load_model(str(path), inputs=inputs), ModelSpec)
    assert [file.path for file in inputs] == [str(path)]
    assert len(inputs[0].sha256) == 64
