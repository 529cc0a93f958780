"""Whether a training may go on in a folder of checkpoints: told before anything starts, without torch."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from runtime import checkpoint_files as files
from runtime.request import TrainRequest
from simulator.checkpoints import checkpoint_bytes
from topologies.errors import InputError
from topologies.units import format_quantity

SAME_JOB = ("seq_length", "global_batch_size", "optimizer")
"""What must be the same for the order of the data and the state of the optimizer to hold."""


def check_folder(request: TrainRequest, *, resume: bool) -> None:
    """Refuse a folder that would be overwritten, that has nothing to resume from, or holds another training.

    Raises:
        InputError: with what is wrong and what to do.
    """
    settings = request.checkpoint
    assert settings is not None
    root = Path(settings.directory)
    if root.exists() and not root.is_dir():
        raise InputError("is not a folder", hint="give a folder for checkpoints", file=root)
    found = files.newest_first(root, settings.archive)
    if found and not resume:
        raise InputError(
            f"already holds checkpoints, the newest is {found[0].name}",
            hint="go on from there with --resume, or give another folder",
            file=root,
        )
    if resume and not found:
        raise InputError("holds no complete checkpoint", hint="start without --resume", file=root)
    for folder in found:
        try:
            index = files.read_index(folder)
        except files.Damaged:  # the ranks set it aside, say so, and take the one before
            continue
        check_same_training(request, index, folder)
        break
    _check_space(request, root)


def check_same_training(request: TrainRequest, index: dict[str, Any], folder: Path) -> None:
    """Refuse to go on with another model, other data or another seed; another layout is fine.

    Raises:
        InputError: names what differs.
    """
    model, job = request.job.model.model_dump(mode="json"), request.job.model_dump(mode="json")
    told = index["model"]
    differing = [key for key in model if key != "name" and model[key] != told.get(key)]
    if differing:
        here, there = (", ".join(f"{key} {one.get(key)}" for key in differing[:3]) for one in (model, told))
        raise InputError(
            f"is a checkpoint of another model ({told.get('name')}): {_short(there)}; the plan's {model['name']} has "
            f"{_short(here)}",
            hint="give the plan of that model, or another folder",
            file=folder,
        )
    for key in SAME_JOB:
        if job[key] != index["job"].get(key):
            raise InputError(
                f"was made with {key} {index['job'].get(key)}, the plan has {job[key]}",
                hint=f"plan with the same {key}: the order of the data would not hold",
                file=folder,
            )
    if request.seed != index["seed"]:
        raise InputError(
            f"was made with seed {index['seed']}", hint=f"give --seed {index['seed']}", file=folder, key="--seed"
        )
    data = None if request.data is None else request.data.prefix
    if data != index["data"]:
        before = "synthetic tokens" if index["data"] is None else f"--data {index['data']}"
        raise InputError(f"was made with {before}", hint="give the same data", file=folder, key="--data")
    step = index["progress"]["step"]
    if step >= request.steps:
        raise InputError(
            f"has done {step} steps, and --steps {request.steps} leaves nothing to do",
            hint=f"give more than {step} steps",
            file=folder,
            key="--steps",
        )


def _short(words: str) -> str:
    return words if len(words) <= 160 else f"{words[:157]}..."


def _check_space(request: TrainRequest, root: Path) -> None:
    place = root
    while not place.exists():
        place = place.parent
    needed, free = checkpoint_bytes(request.job), shutil.disk_usage(place).free
    if free < needed:
        raise InputError(
            f"has {format_quantity(free, 'bytes')} free, and one checkpoint takes {format_quantity(needed, 'bytes')}",
            hint="free space or give another folder",
            file=root,
        )
