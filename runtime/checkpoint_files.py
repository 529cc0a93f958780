"""Checkpoints as folders on disk, without torch: which are complete, whether they are whole, what they hold.

A checkpoint is complete when its folder is called ``step-N``: it is written as ``step-N.partial`` and renamed, once,
when everything is there. ``headway.json`` in it says what it holds and gives the SHA-256 of every shard.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from topologies.document import FORMAT_VERSION, to_json

INDEX_FILE = "headway.json"
_NAME = re.compile(r"step-(\d+)")
_LEFT_OVER = re.compile(r"step-\d+\.(partial|deleting)")
BLOCK_BYTES = 1 << 20


class Damaged(Exception):
    """A checkpoint is not whole; the message says what is wrong with it."""


def checkpoint_folder(root: Path, step: int) -> Path:
    """Folder of the complete checkpoint of a step."""
    return root / f"step-{step}"


def partial_folder(root: Path, step: int) -> Path:
    """Folder in which a checkpoint is written."""
    return root / f"step-{step}.partial"


def complete_steps(root: Path) -> list[int]:
    """Steps whose checkpoints are complete, in order; empty where there is no such folder."""
    if not root.is_dir():
        return []
    found = [_NAME.fullmatch(entry.name) for entry in root.iterdir() if entry.is_dir()]
    return sorted(int(match[1]) for match in found if match)


def newest_first(*roots: str | Path | None) -> list[Path]:
    """Complete checkpoints of several places, the newest first; of one step the first place comes first."""
    places = [Path(root) for root in roots if root is not None]
    found = [(step, -place, root) for place, root in enumerate(places) for step in complete_steps(root)]
    return [checkpoint_folder(root, step) for step, _, root in sorted(found, reverse=True)]


def file_sha256(path: Path) -> str:
    """SHA-256 of a file."""
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        while block := stream.read(BLOCK_BYTES):
            digest.update(block)
    return digest.hexdigest()


def write_index(folder: Path, content: dict[str, Any]) -> None:
    """Write the index of a checkpoint with its own checksum, and wait until it is on the disk."""
    signed = {"format_version": FORMAT_VERSION, **content}
    signed["sha256"] = _digest(signed)
    with (folder / INDEX_FILE).open("w", encoding="utf-8") as stream:
        stream.write(to_json(signed))
        stream.flush()
        os.fsync(stream.fileno())


def read_index(folder: Path) -> dict[str, Any]:
    """Read the index of a checkpoint.

    Raises:
        Damaged: missing, not complete, altered, or of a newer format version.
    """
    try:
        content = json.loads((folder / INDEX_FILE).read_text(encoding="utf-8"))
    except OSError as error:
        raise Damaged(f"{INDEX_FILE} cannot be read: {error.strerror}") from None
    except ValueError:
        raise Damaged(f"{INDEX_FILE} is not complete JSON") from None
    if not isinstance(content, dict) or "sha256" not in content:
        raise Damaged(f"{INDEX_FILE} is not the index of a checkpoint")
    if content.get("format_version", 0) > FORMAT_VERSION:
        raise Damaged(f"{INDEX_FILE} has format_version {content['format_version']}; upgrade headway")
    if _digest(content) != content["sha256"]:
        raise Damaged(f"{INDEX_FILE} was altered: its checksum differs")
    return content


def _digest(content: dict[str, Any]) -> str:
    rest = {key: value for key, value in content.items() if key != "sha256"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()


def damage(folder: Path, index: dict[str, Any], names: Iterable[str]) -> str | None:
    """Say what is wrong with the first of these files that is not as the index says; None: they are whole."""
    for name in names:
        told, path = index["files"][name], folder / name
        if not path.is_file():
            return f"shard {name} is missing"
        if path.stat().st_size != told["bytes"]:
            return f"shard {name} has {path.stat().st_size} bytes instead of {told['bytes']}"
        if file_sha256(path) != told["sha256"]:
            return f"shard {name} is corrupt: its SHA-256 differs"
    return None


def publish(partial: Path, final: Path) -> None:
    """Make a checkpoint complete by one rename, and wait until the disk knows it."""
    _sync_folder(partial)
    partial.rename(final)
    _sync_folder(final.parent)


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def set_aside(folder: Path) -> Path:
    """Rename a damaged checkpoint, so that it is neither used nor overwritten."""
    target = folder.with_name(f"{folder.name}.damaged")
    count = 1
    while target.exists():
        count += 1
        target = folder.with_name(f"{folder.name}.damaged-{count}")
    folder.rename(target)
    return target


def prune(root: Path, keep: int) -> None:
    """Delete the oldest complete checkpoints, all but ``keep``; an interrupted deletion never looks complete."""
    for step in complete_steps(root)[:-keep]:
        folder = checkpoint_folder(root, step)
        doomed = folder.with_name(f"{folder.name}.deleting")
        folder.rename(doomed)
        shutil.rmtree(doomed)


def sweep(root: Path) -> list[str]:
    """Delete what interrupted saves and deletions left; return the names."""
    swept = sorted(entry.name for entry in root.iterdir() if _LEFT_OVER.fullmatch(entry.name))
    for name in swept:
        with contextlib.suppress(OSError):
            shutil.rmtree(root / name)
    return swept


def archive(folder: Path, durable: Path) -> None:
    """Copy a complete checkpoint to another place, complete there by one rename too; nothing is overwritten."""
    target = durable / folder.name
    if target.exists():
        return
    partial = target.with_name(f"{target.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    shutil.copytree(folder, partial)
    for file in partial.iterdir():
        with file.open("rb") as stream:
            os.fsync(stream.fileno())
    publish(partial, target)
