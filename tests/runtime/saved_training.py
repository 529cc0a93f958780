"""Trainings that save and resume, for the tests of checkpoints; imported by the spawned ranks too."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import torch
from tiny_training import request

from runtime.request import CheckpointSettings
from runtime.session import Session
from runtime.train import train
from topologies.errors import RunFailed


def train_saving(folder: Path, *, model: str = "dense", settings: dict[str, Any] | None = None, **layout: Any) -> Any:
    """Train with a save every second step; return losses, and what was told."""
    chosen = {"directory": str(folder), "interval_steps": 2, "keep": 9} | (settings or {})
    asked = request(model=model, **layout).model_copy(update={"checkpoint": CheckpointSettings(**chosen)})
    told: list[str] = []
    directory = folder.parent / f"{folder.name}-job"
    directory.mkdir(exist_ok=True)
    rank = torch.distributed.get_rank()
    session = Session(directory=directory, rank=rank, attempt=0, tell=told.append)
    return train(asked, torch.device("cpu"), session).losses, told


def shard_hashes(folder: Path, step: int) -> dict[str, str]:
    index = json.loads((folder / f"step-{step}" / "headway.json").read_text())
    return {name: told["sha256"] for name, told in index["files"].items()}


def resume_from(folder: Path, other: Path, step: int) -> None:
    """Let another folder hold one checkpoint of this one; only rank 0 copies."""
    if torch.distributed.get_rank() == 0:
        shutil.copytree(folder / f"step-{step}", other / f"step-{step}")
    torch.distributed.barrier()


def save_and_resume(case: dict[str, Any]) -> dict[str, Any]:
    """Train through, and again from the save in the middle, in the same layout."""
    root, layout = Path(case["root"]), case["layout"]
    losses, _ = train_saving(root, **layout)
    resumed_root = root.with_name(f"{root.name}-resumed")
    resume_from(root, resumed_root, 2)
    resumed, told = train_saving(resumed_root, **layout)
    return {
        "losses": losses,
        "resumed": resumed,
        "told": told,
        "same_bits": shard_hashes(root, 4) == shard_hashes(resumed_root, 4),
    }


def resume_elsewhere(case: dict[str, Any]) -> list[float]:
    """Go on in another layout from the save in the middle."""
    other = Path(case["to"])
    resume_from(Path(case["root"]), other, 2)
    losses: list[float] = train_saving(other, **case["layout"])[0]
    return losses


def resume_damaged(case: dict[str, Any]) -> dict[str, Any]:
    """One process: damage the newest checkpoint, then resume."""
    root = Path(case["root"])
    train_saving(root)
    for step in case["steps"]:
        DAMAGES[case["damage"]](root / f"step-{step}")
    try:
        losses, told = train_saving(root)
    except RunFailed as error:
        return {"error": str(error)}
    return {"losses": losses, "told": told, "left": sorted(entry.name for entry in root.iterdir())}


def _shard(folder: Path) -> Path:
    return next(folder.glob("*.distcp"))


def _flip(folder: Path) -> None:
    content = bytearray(_shard(folder).read_bytes())
    content[len(content) // 2] ^= 1
    _shard(folder).write_bytes(content)


class _Bomb:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (os.environ["BOMB"],)


def _bomb(folder: Path) -> None:
    import pickle

    os.environ["BOMB"] = str(folder.parent.parent / "exploded")
    (folder / ".metadata").write_bytes(pickle.dumps(_Bomb()))


DAMAGES = {
    "flipped bit": _flip,
    "missing shard": lambda folder: _shard(folder).unlink(),
    "cut index": lambda folder: os.truncate(folder / "headway.json", 500),
    "altered index": lambda folder: (folder / "headway.json").write_text(
        (folder / "headway.json").read_text().replace('"step": 4', '"step": 3')
    ),
    "bomb": _bomb,
}


def fill_disk(case: dict[str, Any]) -> dict[str, Any]:
    """One process: from the second save on, files cannot be written."""
    import resource

    root = Path(case["root"])
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    os.environ |= {"RANK": "0", "HEADWAY_FAULT": f"fill-disk:rank=0,step=3,seconds={case['kilobytes']}"}
    try:
        losses, told = train_saving(root, settings=case["settings"])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        del os.environ["HEADWAY_FAULT"]
    return {"losses": losses, "told": told, "left": sorted(entry.name for entry in root.iterdir())}
