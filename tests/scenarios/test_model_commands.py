"""``headway model``, ``headway scenario``, ``headway schema``: output, JSON keys and exit codes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from planner.cli import headway


def run(*words: str) -> Result:
    return CliRunner().invoke(headway, list(words))


def answer(*words: str) -> Any:
    result = run(*words, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def test_model_list_and_show_agree() -> None:
    rows = {row["name"]: row for row in answer("model", "list")["models"]}
    assert {"llama-30m", "llama3-405b", "deepseek-v3"} <= rows.keys()
    shown = answer("model", "show", "deepseek-v3")
    assert shown["parameters"]["total"] == rows["deepseek-v3"]["parameters"] == 671_026_419_200
    assert shown["parameters"]["active"] == 37_552_297_472
    kinds = shown["layer_kinds"]
    assert {kind: facts["layers"] for kind, facts in kinds.items()} == {"mla+mlp": 3, "mla+moe": 58}
    layers = sum(facts["layers"] * facts["parameters_per_layer"] for facts in kinds.values())
    assert layers + shown["parameters"]["embedding"] + shown["parameters"]["head"] + 7168 == 671_026_419_200


def test_model_show_takes_a_config_and_a_length(tmp_path: Path) -> None:
    config = {"model_type": "gemma3", "text_config": {"num_hidden_layers": 6}}
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    short, long = (answer("model", "show", str(path), "--seq-length", str(length)) for length in (1024, 32768))
    assert short["flops_per_token"]["seq_length"] == 1024
    assert short["flops_per_token"]["forward"]["mlp"] == long["flops_per_token"]["forward"]["mlp"]
    assert short["flops_per_token"]["forward"]["attention"] < long["flops_per_token"]["forward"]["attention"]
    flops = long["flops_per_token"]
    assert flops["training"] == pytest.approx(3 * sum(flops["forward"].values()))
    assert short["defaults"]["vocab_size"] == "default of gemma3_text: 262208"
    assert short["not_counted"]
    assert [file["path"] for file in short["inputs"]] == [str(path)]


@pytest.mark.parametrize("words", [("model", "list"), ("scenario", "list"), ("scenario", "show", "laptop")])
def test_tables_are_printed(words: tuple[str, ...]) -> None:
    result = run(*words)
    assert result.exit_code == 0
    assert "llama" in result.stdout.lower()


def test_model_show_tells_what_it_leaves_out_and_assumes() -> None:
    result = run("model", "show", "deepseek-v3")
    assert "671,026,419,200 parameters" in result.stdout
    assert "multi-token prediction" in result.stdout
    assert "causal, counted once" in result.stdout


def test_scenario_list_show_check() -> None:
    rows = {row["name"]: row for row in answer("scenario", "list")["scenarios"]}
    assert rows["llama3-405b-16k-h100"]["num_gpus"] == 16384
    shown = answer("scenario", "show", "llama3-405b-16k-h100", "--set", "job.seq_length=4096")
    assert shown["tokens_per_step"] == 2048 * 4096
    assert shown["faults"]["mean_seconds_between_failures"] == pytest.approx(3.093 * 3600, rel=1e-3)
    assert all(len(file["sha256"]) == 64 for file in shown["inputs"])
    checked = answer("scenario", "check", "laptop")
    assert checked["ok"] is True


def test_check_exits_1_where_the_answer_is_no_and_2_where_it_cannot_read(tmp_path: Path) -> None:
    path = tmp_path / "s.yaml"
    text = "name: s\nmodel: llama-30m\ncluster: laptop\njob: {seq_length: 64, global_batch_size: 4, precision: fp8}\n"
    path.write_text(text)
    no = run("scenario", "check", str(path))
    assert no.exit_code == 1
    assert "precision" in no.stdout
    path.write_text(text.replace("seq_length", "seq_lenth"))
    trouble = run("scenario", "check", str(path))
    assert trouble.exit_code == 2
    assert "did you mean 'seq_length'" in trouble.stderr
    assert json.loads(run("scenario", "check", str(path), "--json").stdout)["error"]["kind"] == "InputError"


@pytest.mark.parametrize("words", [("model", "show", "llama9"), ("scenario", "show", "lapto"), ("schema", "plan")])
def test_unknown_names_exit_2(words: tuple[str, ...]) -> None:
    result = run(*words)
    assert result.exit_code == 2
    assert result.stderr


def test_schema_goes_to_stdout_or_a_file(tmp_path: Path) -> None:
    printed = json.loads(run("schema", "scenario").stdout)
    assert {"name", "job", "cluster", "model"} <= set(printed["required"])
    assert "model" not in printed["$defs"]["Job"]["properties"]
    path = tmp_path / "schema.json"
    assert run("schema", "scenario", "-o", str(path)).exit_code == 0
    assert json.loads(path.read_text()) == printed
