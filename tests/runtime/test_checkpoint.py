"""Checkpoints: resume is bitwise equal, any layout reads any other's, and a save is whole or not there."""

from __future__ import annotations

import math
from collections import namedtuple
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from plans import plan_of
from ranks_of_gloo import in_ranks
from saved_training import fill_disk, resume_damaged, resume_elsewhere, save_and_resume
from tiny_training import plain_losses, tiny

from runtime import checkpoint_files as files
from runtime.checkpoint import Progress
from runtime.job import Durability, request_for
from runtime.pieces import rectangles_of
from runtime.resume import check_folder
from topologies.errors import InputError

pytestmark = [pytest.mark.xdist_group("ranks"), pytest.mark.jobs]
TOLERANCE = 1e-6
SHARDED = {"dp": 2, "micro_batch_size": 2}
LAYOUTS: dict[str, dict[str, Any]] = {
    "dp2 zero1": SHARDED | {"optimizer_sharding": "zero1"},
    "dp2 zero3": SHARDED | {"optimizer_sharding": "zero3"},
    "tp2 sp": {"tp": 2, "micro_batch_size": 8, "sequence_parallel": True},
    "pp2": {"pp": 2, "micro_batch_size": 2},
    "deepseek dp2 ep2 zero3": SHARDED | {"model": "deepseek", "ep": 2, "optimizer_sharding": "zero3"},
    "deepseek tp2 etp2": {"model": "deepseek", "tp": 2, "etp": 2, "micro_batch_size": 8},
    "tied pp2": {"pp": 2, "micro_batch_size": 2, "model": "tied"},
}


def worst(losses: list[float], reference: list[float]) -> float:
    return max(abs(one - other) / other for one, other in zip(losses, reference, strict=True))


@given(st.lists(st.integers(1, 5), min_size=1, max_size=3), st.data())
def test_rectangles_cover_a_flat_range_once_and_in_order(shape: list[int], data: st.DataObject) -> None:
    size = math.prod(shape)
    low = data.draw(st.integers(0, size))
    high = data.draw(st.integers(low, size))
    whole = np.arange(size).reshape(shape)
    covered: list[int] = []
    for offset, extent, at in rectangles_of(tuple(shape), low, high):
        part = whole[tuple(slice(begin, begin + length) for begin, length in zip(offset, extent, strict=True))]
        assert part.flat[0] == at
        covered += part.flatten().tolist()
    assert covered == list(range(low, high))


def test_resume_is_bitwise_and_any_layout_reads_the_others(tmp_path: Path) -> None:
    cases = {name: {"root": str(tmp_path / name), "layout": layout} for name, layout in LAYOUTS.items()}
    for name, found in in_ranks(2, save_and_resume, cases).items():
        assert found["same_bits"], name
        assert found["resumed"] == found["losses"][2:], name
        assert worst(found["losses"], plain_losses(trained(name))) < TOLERANCE, name
        assert any("resumed from step 2" in line for line in found["told"])
    hops = [("dp2 zero1", "tp2 sp"), ("tp2 sp", "pp2"), ("pp2", "dp2 zero3"), ("dp2 zero3", "dp2 zero1")]
    hops += [("deepseek dp2 ep2 zero3", "deepseek tp2 etp2"), ("deepseek tp2 etp2", "deepseek dp2 ep2 zero3")]
    moves = {f"{a} to {b}": move(tmp_path, a, b) for a, b in hops}
    for name, losses in in_ranks(2, resume_elsewhere, moves).items():
        assert worst(losses, plain_losses(trained(name))[2:]) < TOLERANCE, name
    alone = {name: move(tmp_path, name, "one") for name in ("dp2 zero1", "tied pp2", "deepseek dp2 ep2 zero3")}
    for name, losses in in_ranks(1, resume_elsewhere, alone).items():
        assert worst(losses, plain_losses(trained(name))[2:]) < TOLERANCE, name


def trained(name: str) -> str:
    return str(LAYOUTS[name.partition(" to ")[0]].get("model", "dense"))


def move(folder: Path, source: str, target: str) -> dict[str, Any]:
    layout = LAYOUTS[target] if target in LAYOUTS else {"micro_batch_size": 8, "model": trained(source)}
    return {"root": str(folder / source), "to": str(folder / f"{source} to {target}"), "layout": layout}


def test_damaged_checkpoints_are_told_and_the_one_before_is_taken(tmp_path: Path) -> None:
    words = {
        "flipped bit": "is corrupt: its SHA-256 differs",
        "missing shard": "is missing",
        "cut index": "is not complete JSON",
        "altered index": "was altered",
    }
    cases = {name: {"root": str(tmp_path / name), "damage": name, "steps": [4]} for name in words}
    cases["all"] = {"root": str(tmp_path / "all"), "damage": "missing shard", "steps": [2, 4]}
    cases["bomb"] = {"root": str(tmp_path / "bomb"), "damage": "bomb", "steps": [4]}
    found = in_ranks(1, resume_damaged, cases)
    for name, reason in words.items():
        told = found[name]["told"]
        assert any("step-4 is damaged" in line and reason in line for line in told), (name, told)
        assert any("resumed from step 2" in line for line in told)
        assert found[name]["losses"] == plain_tail(found[name]["losses"])
        assert found[name]["left"] == ["step-2", "step-4", "step-4.damaged"]
    assert "no checkpoint is whole" in found["all"]["error"]
    assert found["bomb"]["losses"] == []  # resumed at the end: nothing was left to do
    assert not (tmp_path / "exploded").exists()


def plain_tail(losses: list[float]) -> Any:
    return pytest.approx(plain_losses()[2:], rel=TOLERANCE) if losses else None


def test_a_full_disk_leaves_the_checkpoint_before_and_the_training_goes_on(tmp_path: Path) -> None:
    cases = {
        mode: {"root": str(tmp_path / mode), "settings": {"mode": mode}, "kilobytes": kilobytes}
        for mode, kilobytes in (("sync", 100), ("async", 101))
    }
    for name, found in in_ranks(1, fill_disk, cases).items():
        assert len(found["losses"]) == 4, name
        assert any(
            "checkpoint of step 4 was not written (rank 0: File too large); the newest complete one is step-2" in line
            for line in found["told"]
        ), found["told"]
        assert found["left"] == ["step-2"]


# ---- folders, without torch


def checkpoint(root: Path, step: int, **changes: Any) -> Path:
    """A complete checkpoint without tensors, as the tiny plan would leave it."""
    folder = root / f"step-{step}"
    folder.mkdir(parents=True)
    (folder / "__0_0.distcp").write_bytes(b"values")
    request = request_for(plan_of(), steps=1)
    job = request.job.model_dump(mode="json")
    content = {
        "progress": {"step": step, "skipped": []},
        "seed": 0,
        "data": None,
        "model": job.pop("model"),
        "job": job,
        "files": {"__0_0.distcp": {"bytes": 6, "sha256": files.file_sha256(folder / "__0_0.distcp")}},
        "tensors": {},
    }
    files.write_index(folder, content | changes)
    return folder


def check(root: Path, *, resume: bool = True, steps: int = 12) -> None:
    settings = Durability(directory=str(root), resume=resume)
    check_folder(request_for(plan_of(), steps=steps, durability=settings), resume=resume)


def test_a_folder_is_refused_before_anything_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InputError, match="holds no complete checkpoint; start without --resume"):
        check(tmp_path / "empty")
    check(tmp_path / "empty", resume=False)
    checkpoint(tmp_path / "good", 6)
    check(tmp_path / "good")
    with pytest.raises(
        InputError, match="already holds checkpoints, the newest is step-6; go on from there with --res"
    ):
        check(tmp_path / "good", resume=False)
    with pytest.raises(InputError, match="has done 6 steps, and --steps 6 leaves nothing to do"):
        check(tmp_path / "good", steps=6)
    other = tiny().model_copy(update={"name": "other", "hidden_size": 128}).model_dump(mode="json")
    checkpoint(tmp_path / "other", 6, model=other)
    with pytest.raises(InputError, match=r"checkpoint of another model \(other\): hidden_size 128; .* tiny has .* 64"):
        check(tmp_path / "other")
    checkpoint(tmp_path / "seed", 6, seed=5)
    with pytest.raises(InputError, match="give --seed 5"):
        check(tmp_path / "seed")
    checkpoint(tmp_path / "data", 6, data="/tokens")
    with pytest.raises(InputError, match="was made with --data /tokens"):
        check(tmp_path / "data")
    job = request_for(plan_of(), steps=1).job.model_dump(mode="json") | {"global_batch_size": 16}
    checkpoint(tmp_path / "batch", 6, job=job)
    with pytest.raises(InputError, match="global_batch_size 16, the plan has 8"):
        check(tmp_path / "batch")
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match="is not a folder"):
        check(tmp_path / "file")
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr("runtime.resume.shutil.disk_usage", lambda _: usage(1, 1, 1000))
    with pytest.raises(InputError, match="1 kB free, and one checkpoint takes"):
        check(tmp_path / "good")


def test_only_renamed_folders_count_and_old_ones_go(tmp_path: Path) -> None:
    for step in (2, 10, 4):
        checkpoint(tmp_path, step)
    for name in ("step-12.partial", "step-1.deleting", "step-8.damaged", "notes"):
        (tmp_path / name).mkdir()
    assert files.complete_steps(tmp_path) == [2, 4, 10]
    assert files.sweep(tmp_path) == ["step-1.deleting", "step-12.partial"]
    (tmp_path / "durable").mkdir()
    files.archive(tmp_path / "step-10", tmp_path / "durable")
    files.prune(tmp_path, 2)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == [
        "durable",
        "notes",
        "step-10",
        "step-4",
        "step-8.damaged",
    ]
    copied = tmp_path / "durable" / "step-10"
    assert files.damage(copied, files.read_index(copied), ["__0_0.distcp"]) is None
    assert files.set_aside(tmp_path / "step-10").name == "step-10.damaged"
    checkpoint(tmp_path, 10)
    assert files.set_aside(tmp_path / "step-10").name == "step-10.damaged-2"


def test_batches_that_are_left_out_shift_the_others() -> None:
    progress = Progress(skipped=(0, 3, 4))
    assert [progress.batch_index(step) for step in range(5)] == [1, 2, 5, 6, 7]
