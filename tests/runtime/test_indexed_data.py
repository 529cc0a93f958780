"""Token files in Megatron's format, and batches from them."""

from __future__ import annotations

import importlib.util
import json
import os
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st
from plans import plan_file, plan_of
from ranks_of_gloo import in_ranks
from tiny_training import request

from runtime.batches import IndexedBatches, batches_of, cached, shuffled
from runtime.commands import data as data_commands
from runtime.commands import run
from runtime.indexed_data import read_indexed, write_indexed
from runtime.request import DataSettings
from runtime.train import train
from topologies.errors import InputError, RunFailed

SEQ = 32


def test_the_index_is_megatrons_byte_for_byte(tmp_path: Path) -> None:
    write_indexed(tmp_path / "t", [np.array([1, 2, 3]), np.array([7]), np.array([300, 5])], np.uint16)
    expected = (
        b"MMIDIDX\x00\x00"
        + struct.pack("<Q", 1)  # version
        + struct.pack("<B", 8)  # uint16
        + struct.pack("<QQ", 3, 4)
        + struct.pack("<3i", 3, 1, 2)
        + struct.pack("<3q", 0, 6, 8)
        + struct.pack("<4q", 0, 1, 2, 3)
    )
    assert (tmp_path / "t.idx").read_bytes() == expected
    assert (tmp_path / "t.bin").read_bytes() == struct.pack("<6H", 1, 2, 3, 7, 300, 5)
    found = read_indexed(tmp_path / "t")
    assert [found.sequence(index).tolist() for index in range(3)] == [[1, 2, 3], [7], [300, 5]]
    with pytest.raises(InputError, match="nothing is overwritten"):
        write_indexed(tmp_path / "t", [], np.uint16)


def test_documents_of_several_sequences_as_megatron_writes_them_are_read(tmp_path: Path) -> None:
    (tmp_path / "m.bin").write_bytes(np.arange(5, dtype=np.int32).tobytes())
    modes = b"\x00\x00"  # of the sequences; Megatron appends them for multimodal data
    (tmp_path / "m.idx").write_bytes(
        b"MMIDIDX\x00\x00" + struct.pack("<QBQQ2i2q2q", 1, 4, 2, 2, 2, 3, 0, 8, 0, 2) + modes
    )
    found = read_indexed(tmp_path / "m.bin")
    assert found.tokens.tolist() == [0, 1, 2, 3, 4]
    assert found.bounds.tolist() == [0, 2]


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (lambda folder: (folder / "t.idx").write_bytes(b"PK" * 40), "is not an index of Megatron's format"),
        (lambda folder: os.truncate(folder / "t.idx", 50), "is truncated: 50 of"),
        (lambda folder: os.truncate(folder / "t.bin", 3), "has 3 bytes, its index tells of 6"),
        (lambda folder: (folder / "t.bin").unlink(), "cannot be read"),
    ],
)
def test_unusable_files_are_refused(tmp_path: Path, spoil: Any, reason: str) -> None:
    write_indexed(tmp_path / "t", [np.array([1, 2, 3])], np.uint16)
    spoil(tmp_path)
    with pytest.raises(InputError, match=reason):
        read_indexed(tmp_path / "t")


@given(st.integers(1, 300), st.integers(0, 3), st.integers(0, 2))
def test_the_shuffle_is_a_permutation(count: int, seed: int, epoch: int) -> None:
    assert sorted(shuffled(place, count, seed, epoch) for place in range(count)) == list(range(count))


def test_seed_and_epoch_change_the_order() -> None:
    orders = [[shuffled(place, 50, seed, epoch) for place in range(50)] for seed, epoch in ((0, 0), (1, 0), (0, 1))]
    assert len({tuple(order) for order in orders}) == 3
    assert sum(place == value for place, value in enumerate(orders[0])) < 10


def corpus(folder: Path, tokens: int = 1000) -> Path:
    write_indexed(folder / "c", [np.arange(tokens) % 256], np.uint16)
    return folder / "c"


def batches(prefix: Path) -> IndexedBatches:
    asked = request().model_copy(update={"data": DataSettings(prefix=str(prefix))})
    found = batches_of(asked)
    assert isinstance(found, IndexedBatches)
    return found


def test_an_epoch_holds_every_piece_once_whoever_reads_it(tmp_path: Path) -> None:
    source = batches(corpus(tmp_path, 8 * 4 * SEQ + 1))  # four batches of 8 are an epoch
    whole = [source.at(index, 0, 8) for index in range(4)]
    tokens, targets = (torch.cat([batch[part] for batch in whole]) for part in (0, 1))
    assert torch.equal(tokens[:, 1:], targets[:, :-1])
    begins = sorted(source.tokens.tokens[place * SEQ] for place in range(32))
    assert sorted(tokens[:, 0].tolist()) == begins
    replica = batches(tmp_path / "c")  # reads its half only, in another order of the steps
    for index in (2, 0, 3):
        assert torch.equal(replica.at(index, 4, 4)[0], whole[index][0][4:])
    assert not torch.equal(source.at(4, 0, 8)[0], whole[0][0])


def test_a_token_outside_the_vocabulary_is_told(tmp_path: Path) -> None:
    write_indexed(tmp_path / "big", [np.full(100, 5000)], np.uint16)
    with pytest.raises(RunFailed, match="holds token 5000, and the model has 256 tokens"):
        batches(tmp_path / "big").at(0, 0, 1)


def test_the_local_copy_is_made_once_and_follows_the_source(tmp_path: Path) -> None:
    prefix, cache = corpus(tmp_path), tmp_path / "nvme"
    copy = cached(prefix, cache, copies=True)
    assert read_indexed(copy).tokens.tolist() == read_indexed(prefix).tokens.tolist()
    before = copy.with_name(f"{copy.name}.bin").stat().st_ino
    assert cached(prefix, cache, copies=False) == copy
    assert copy.with_name(f"{copy.name}.bin").stat().st_ino == before
    os.utime(tmp_path / "c.bin", (1, 1))
    cached(prefix, cache, copies=True)
    assert copy.with_name(f"{copy.name}.bin").stat().st_ino != before


def train_on(case: dict[str, Any]) -> list[float]:
    asked = request(**case["layout"]).model_copy(update={"data": DataSettings(**case["data"])})
    return train(asked, torch.device("cpu")).losses


@pytest.mark.jobs
def test_losses_do_not_depend_on_the_layout(tmp_path: Path) -> None:
    data = {"prefix": str(corpus(tmp_path, 3000))}
    split = {"dp": 2, "micro_batch_size": 2, "optimizer_sharding": "none"}
    two = in_ranks(2, train_on, {"dp2": {"layout": split, "data": data}})["dp2"]
    one = in_ranks(1, train_on, {"one": {"layout": {"micro_batch_size": 8}, "data": data}})["one"]
    assert two == pytest.approx(one, rel=2e-6)
    assert one[-1] < one[0]


# ---- headway data build


def test_text_and_jsonl_become_bytes_with_an_end_after_each_document(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("Zug é", encoding="utf-8")
    (tmp_path / "b.jsonl").write_text('{"text": "ab"}\n\n{"text": ""}\n{"text": "c"}\n', encoding="utf-8")
    words = ["build", str(tmp_path / "a.txt"), str(tmp_path / "b.jsonl"), "-o", str(tmp_path / "out" / "t"), "--json"]
    result = CliRunner().invoke(data_commands, words)
    assert result.exit_code == 0, result.output
    told = json.loads(result.stdout)
    assert (told["documents"], told["tokens"], told["vocab_size"]) == (3, 7 + 3 + 2, 257)
    found = read_indexed(tmp_path / "out" / "t")
    assert bytes(found.sequence(0)[:-1].tolist()).decode() == "Zug é"
    assert [found.sequence(index).tolist() for index in (1, 2)] == [[97, 98, 256], [99, 256]]
    again = CliRunner().invoke(data_commands, words)
    assert again.exit_code == 2
    assert "nothing is overwritten" in again.output


@pytest.mark.parametrize(
    ("content", "arguments", "reason"),
    [
        (b'{"text": "a"}\n{"text"', [], "b.jsonl:2: is not JSON"),
        (b'{"text": 5}', [], "has no text under 'text'"),
        (b'{"text": "a"}', ["--key", "body"], "has no text under 'body'"),
        (b"\xff\xfe", [], "is not UTF-8 text"),
        (None, [], "cannot be read"),
    ],
)
def test_bad_text_is_refused_and_leaves_nothing(
    tmp_path: Path, content: bytes | None, arguments: list[str], reason: str
) -> None:
    if content is not None:
        (tmp_path / "b.jsonl").write_bytes(content)
    words = ["build", str(tmp_path / "b.jsonl"), "-o", str(tmp_path / "t"), *arguments]
    result = CliRunner().invoke(data_commands, words)
    assert result.exit_code == 2
    assert reason in result.output.replace("\n", " ")
    assert not list(tmp_path.glob("*t.*"))
    assert not list(tmp_path.glob(".t*"))


def test_a_tokenizer_file_needs_its_library_or_is_used(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("a b a", encoding="utf-8")
    model = {"type": "WordLevel", "vocab": {"a": 0, "b": 1, "<|endoftext|>": 2}, "unk_token": "b"}
    content = {"version": "1.0", "model": model, "pre_tokenizer": {"type": "Whitespace"}, "added_tokens": []}
    (tmp_path / "tokenizer.json").write_text(json.dumps(content), encoding="utf-8")
    words = [
        "build",
        str(tmp_path / "a.txt"),
        "-o",
        str(tmp_path / "t"),
        "--tokenizer",
        str(tmp_path / "tokenizer.json"),
    ]
    result = CliRunner().invoke(data_commands, words)
    if importlib.util.find_spec("tokenizers") is None:
        assert result.exit_code == 2
        assert "needs the extra 'tokenizers'" in result.output
    else:
        assert result.exit_code == 0, result.output
        assert read_indexed(tmp_path / "t").tokens.tolist() == [0, 1, 0, 2]


def test_a_plan_with_other_tokens_is_refused_before_it_starts(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("x" * 100, encoding="utf-8")
    CliRunner().invoke(data_commands, ["build", str(tmp_path / "a.txt"), "-o", str(tmp_path / "t")])
    plan = plan_file(tmp_path, plan_of())
    result = CliRunner().invoke(run, [plan, "--data", str(tmp_path / "t")])
    assert result.exit_code == 2
    assert "was made with 257 tokens (bytes), the model has 256" in result.output
    short = corpus(tmp_path, SEQ)
    result = CliRunner().invoke(run, [plan, "--data", str(short)])
    assert f"holds {SEQ} tokens, fewer than one sequence of {SEQ} + 1" in result.output
