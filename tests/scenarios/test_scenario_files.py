"""The shipped scenarios, what a scenario file can get wrong, and the JSON Schemas that editors use."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator
from ruamel.yaml import YAML

from scenarios.json_schema import DOCUMENTS, document_schema
from scenarios.model import MODELS
from scenarios.scenario import FAULTS, PRICES, SCENARIOS, load_scenario
from scenarios.summary import check_scenario
from topologies.document import InputFile, shipped
from topologies.errors import InputError
from topologies.hardware import CATALOG

SHIPPED = sorted(shipped(SCENARIOS))
GOOD = """\
name: test
model: llama-30m
cluster: laptop
job:
  seq_length: 128
  global_batch_size: 16
  target_tokens: 2 M tokens
  precision: fp32
"""


def complaint(tmp_path: Path, text: str) -> str:
    path = tmp_path / "scenario.yaml"
    path.write_text(text)
    with pytest.raises(InputError) as caught:
        load_scenario(str(path))
    return str(caught.value)


@pytest.mark.parametrize("name", SHIPPED)
def test_shipped_scenarios_are_sound(name: str) -> None:
    inputs: list[InputFile] = []
    scenario = load_scenario(name, inputs=inputs)
    assert not [finding for finding in check_scenario(scenario) if finding.level == "failure"]
    assert (SCENARIOS / f"{name}.yaml").read_text().startswith("# yaml-language-server: $schema=scenario.schema.json\n")
    assert len({file.path for file in inputs}) == len(inputs) >= 5
    sizes = [int(word) for word in name.split("-") if word.isdigit()]
    assert scenario.cluster.num_gpus in sizes if sizes else True


def test_llama3_405b_scenario_is_what_the_paper_says() -> None:
    """arXiv 2407.21783: 16,384 H100, 8 a server, 16.8 M tokens a step, 15.6 T tokens, 3.8e25 FLOPs (section 3.2)."""
    scenario = load_scenario("llama3-405b-16k-h100")
    assert (scenario.cluster.num_gpus, scenario.cluster.num_nodes) == (16384, 2048)
    assert scenario.job.tokens_per_step == 2048 * 8192
    assert scenario.model.num_params == 405_853_388_800
    assert scenario.job.target_tokens == pytest.approx(15.6e12)
    flops = 6 * scenario.model.num_params * scenario.job.target_tokens
    assert flops == pytest.approx(3.8e25, rel=0.01)


def test_laptop_step_is_short() -> None:
    """1 to 2 seconds on two cores of 80 to 100 GFLOP/s."""
    scenario = load_scenario("laptop")
    flops = scenario.model.flops_per_token(scenario.job.seq_length) * scenario.job.tokens_per_step
    assert 1.0 < flops / 200e9 < flops / 160e9 < 2.0


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("target_tokens: 2 M tokens", "target_token: 2 M tokens", ["yaml:7:", "job.target_token", "did you mean"]),
        ("name: test", "nam: test", ["nam", "did you mean 'name'?"]),
        ("target_tokens: 2 M tokens", "target_tokens: 2000000", ["bare int", "M tokens"]),
        ("target_tokens: 2 M tokens", "target_tokens: 2 GB", ["unit 'GB' is not known here", "T tokens"]),
        ("target_tokens: 2 M tokens", "target_tokens: -2 M tokens", ["must be finite and not negative"]),
        ("seq_length: 128", "seq_length: -128", ["seq_length", "greater than or equal to 1"]),
        ("seq_length: 128", "seq_length: many", ["seq_length", "valid integer"]),
        ("global_batch_size: 16", "global_batch_size: 0", ["global_batch_size", "greater than or equal to 1"]),
        ("precision: fp32", "precision: fp7", ["precision", "fp8"]),
        ("precision: fp32", "model: llama3-8b", ["'model' is given twice", "keep the one at the top"]),
        ("model: llama-30m\n", "", ["model: is missing"]),
        ("model: llama-30m", "model: llama-3m", ["'llama-3m' is not shipped", "did you mean 'llama-30m'"]),
        ("model: llama-30m", "model: ./no/config.json", ["there is no file", "relative to the file"]),
        ("cluster: laptop", "cluster: laptopp", ["'laptopp' is not shipped", "did you mean 'laptop'"]),
        ("cluster: laptop", "cluster: laptop\nfaults: llama4", ["did you mean 'llama3'"]),
        ("cluster: laptop", "cluster: laptop\nobjective: fun", ["objective", "time"]),
        ("cluster: laptop", "cluster: {from: laptop, num_nodes: 0}", ["num_nodes", "greater than or equal to 1"]),
        ("job:", "layout: {tp: 0}\njob:", ["tp", "greater than or equal to 1"]),
        ("name: test", "version: 2\nname: test", ["format version 2", "upgrade headway"]),
        ("name: test", "name: [", ["is not valid YAML"]),
    ],
)
def test_a_bad_scenario_is_refused(tmp_path: Path, old: str, new: str, words: list[str]) -> None:
    assert old in GOOD
    text = complaint(tmp_path, GOOD.replace(old, new, 1))
    assert "scenario.yaml" in text or "laptop.yaml" in text
    for word in words:
        assert word in text, text


def test_unknown_scenario_lists_near_names() -> None:
    with pytest.raises(InputError, match="did you mean 'llama3-405b-16k-h100'"):
        load_scenario("llama3-405b")
    with pytest.raises(InputError, match="there is no file"):
        load_scenario("nowhere/scenario.yaml")


def test_a_scenario_takes_a_hugging_face_config_beside_it(tmp_path: Path) -> None:
    config = {"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4,
              "intermediate_size": 96, "vocab_size": 1000}  # fmt: skip
    (tmp_path / "mine.json").write_text(json.dumps(config))
    path = tmp_path / "scenario.yaml"
    path.write_text(GOOD.replace("llama-30m", "mine.json"))
    inputs: list[InputFile] = []
    assert load_scenario(str(path), inputs=inputs).model.num_layers == 4
    assert str(tmp_path / "mine.json") in {file.path for file in inputs}
    (tmp_path / "mine.json").write_text(json.dumps({**config, "hidden_size": -1}))
    with pytest.raises(InputError, match=r"mine\.json.*hidden_size: -1 is out of range"):
        load_scenario(str(path))


HUGGING_FACE_KEYS = """\
model:
  model_type: llama
  vocab_size: 1000
  hidden_size: 64
  num_hidden_layers: 4
  num_attention_heads: 4
  intermediate_size: 96
"""


def test_a_scenario_holds_a_hugging_face_config(tmp_path: Path) -> None:
    path = tmp_path / "scenario.yaml"
    path.write_text(GOOD.replace("model: llama-30m\n", HUGGING_FACE_KEYS))
    scenario = load_scenario(str(path))
    assert (scenario.model.name, scenario.model.num_layers) == ("a llama model", 4)


def test_a_mistake_in_a_held_config_is_shown_where_it_stands(tmp_path: Path) -> None:
    told = complaint(tmp_path, GOOD.replace("model: llama-30m\n", HUGGING_FACE_KEYS).replace("heads: 4", "heads: many"))
    assert "scenario.yaml:7:" in told
    assert "num_attention_heads: 'many' is not a whole number" in told


def test_check_finds_what_cannot_work(tmp_path: Path) -> None:
    path = tmp_path / "scenario.yaml"
    path.write_text(GOOD.replace("fp32", "fp8").replace("2 M tokens", "2 tokens").replace("128", "4096"))
    rules = {finding.rule: finding.level for finding in check_scenario(load_scenario(str(path)))}
    assert rules == {"precision": "failure", "target_tokens": "failure", "seq_length": "warning"}


@pytest.mark.parametrize("kind", sorted(DOCUMENTS))
def test_schemas_are_valid(kind: str) -> None:
    Draft202012Validator.check_schema(document_schema(kind))


def _files() -> list[Any]:
    folders = {
        "scenario": SCENARIOS, "cluster": CATALOG / "clusters", "node": CATALOG / "nodes", "gpu": CATALOG / "gpus",
        "nic": CATALOG / "nics", "model": MODELS, "faults": FAULTS, "prices": PRICES,
    }  # fmt: skip
    return [
        pytest.param(kind, path, id=f"{kind}:{name}")
        for kind, folder in folders.items()
        for name, path in shipped(folder).items()
    ]


@pytest.mark.parametrize(("kind", "path"), _files())
def test_shipped_files_satisfy_their_schema(kind: str, path: Path) -> None:
    Draft202012Validator(document_schema(kind)).validate(YAML(typ="safe").load(path.read_text()))


@pytest.mark.parametrize(
    "change",
    [
        {"modell": "llama3-8b"},
        {"job": {"seq_length": 1, "global_batch_size": 1, "target_tokens": 5}},
        {"job": {"seq_length": 1, "global_batch_size": 1, "model": "llama3-8b"}},
        {"job": {"seq_length": 1}},
        {"layout": {"tp": 0}},
        {"model": None},
    ],
)
def test_the_scenario_schema_refuses_what_the_reader_refuses(change: dict[str, Any]) -> None:
    content = {**YAML(typ="safe").load(GOOD), **change}
    assert list(Draft202012Validator(document_schema("scenario")).iter_errors(content))


def test_the_shipped_schema_is_current() -> None:
    written = json.loads((SCENARIOS / "scenario.schema.json").read_text())
    assert written == document_schema("scenario"), "run: headway schema scenario -o scenarios/scenario.schema.json"
