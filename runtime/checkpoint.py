"""Save and resume a training: sharded, in the background, complete or not there at all.

The order of a save: copy what this rank holds into host memory (the only stall), write shards into ``step-N.partial``,
give every shard its SHA-256 in the index, rename to ``step-N``. Only then are older checkpoints deleted.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from runtime import checkpoint_files as files
from runtime.checkpoint_store import load_pieces, save_pieces
from runtime.environment import versions
from runtime.faults import strike
from runtime.optimizer import ReplicaOptimizer
from runtime.pieces import Piece, Pieces, Rectangle, saved_name, set_step_count, staged, training_state
from runtime.request import CheckpointSettings, TrainRequest
from runtime.transformer import Decoder
from topologies.errors import RunFailed


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """How far a training has come; with the weights and the optimizer it is all that a resume needs."""

    step: int = 0
    """Steps done."""
    skipped: tuple[int, ...] = ()
    """Batches that are left out, because they made the loss NaN."""

    def batch_index(self, step: int) -> int:
        """Which batch of the data a step uses.

        >>> Progress(skipped=(2, 5)).batch_index(4)
        6
        """
        index = step
        for skipped in sorted(self.skipped):
            index += skipped <= index
        return index


@dataclass(slots=True, kw_only=True)
class Save:
    """One save as it went; ``error`` says why it is not complete."""

    step: int
    stall_seconds: float = 0.0
    """What the training waited for: an earlier save, and the copy into host memory."""
    seconds: float = 0.0
    """From the call until it was complete."""
    bytes: int = 0
    error: str | None = None


@dataclass(slots=True, kw_only=True)
class Checkpointer:
    """Saves and loads the training state of this rank, together with all others of the job."""

    request: TrainRequest
    settings: CheckpointSettings
    decoders: list[Decoder]
    optimizer: ReplicaOptimizer
    tell: Callable[[str], None]
    saves: list[Save] = field(default_factory=list)
    """All that were begun."""
    group: dist.ProcessGroup = field(init=False)
    """Never the group that trains: the background thread must not mix its collectives with the training's."""
    worker: ThreadPoolExecutor = field(init=False)
    pending: Future[None] | None = None
    copies: dict[str, Piece] | None = None

    def __post_init__(self) -> None:
        group = dist.new_group(backend="gloo")
        assert group is not None
        self.group = group
        self.worker = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        if self._leads():
            self.root.mkdir(parents=True, exist_ok=True)
            for name in files.sweep(self.root):
                self.tell(f"removed {name}: its save was interrupted")

    @property
    def root(self) -> Path:
        """Folder of the checkpoints."""
        return Path(self.settings.directory)

    def save(self, progress: Progress, *, wait: bool = False) -> Save:
        """Begin a save, and wait for its end if asked to or if saves are synchronous; all ranks call it."""
        began = time.perf_counter()
        self.finish()
        save = Save(step=progress.step)
        self.saves.append(save)
        pieces = self._state(copies=False) | rng_piece()
        if self.settings.mode == "sync":
            self._write(pieces, progress, save, began)
        else:
            self.copies = staged(pieces, self.copies)
            self.pending = self.worker.submit(self._write, self.copies, progress, save, began)
        if wait:
            self.finish()
        save.stall_seconds = time.perf_counter() - began
        return save

    def finish(self) -> None:
        """Wait for the save that is under way."""
        if self.pending is not None:
            self.pending.result()
            self.pending = None

    def saved(self, step: int) -> bool:
        """Tell whether the newest save is of this step and went well."""
        return bool(self.saves) and self.saves[-1].step == step and self.saves[-1].error is None

    def _write(self, pieces: Pieces, progress: Progress, save: Save, began: float) -> None:
        error: str | None = None
        try:
            save.bytes = self._write_and_publish(pieces, progress)
        except CheckpointException as failure:
            error = _first_reason(failure)
        save.error = error
        save.seconds = time.perf_counter() - began
        if self._leads():
            if error is not None:
                shutil.rmtree(files.partial_folder(self.root, save.step), ignore_errors=True)
                steps = files.complete_steps(self.root)
                left = f"the newest complete one is step-{steps[-1]}" if steps else "there is none yet"
                self.tell(f"the checkpoint of step {save.step} was not written ({error}); {left}; training goes on")
            else:
                self._tidy(save.step)

    def _write_and_publish(self, pieces: Pieces, progress: Progress) -> int:
        partial, final = (
            files.partial_folder(self.root, progress.step),
            files.checkpoint_folder(self.root, progress.step),
        )
        self._together(lambda: shutil.rmtree(partial, ignore_errors=True) if self._leads() else None)
        tensors = save_pieces(pieces, partial, self.group)
        strike("save", progress.step)
        own = f"__{dist.get_rank(self.group)}_"
        described: list[dict[str, Any]] = self._together(
            lambda: {
                file.name: {"bytes": file.stat().st_size, "sha256": files.file_sha256(file)}
                for file in sorted(partial.glob(f"{own}*.distcp"))
            }
        )
        shards = {name: told for one in described for name, told in one.items()}
        self._together(lambda: self._publish(partial, final, progress, tensors, shards) if self._leads() else None)
        return sum(told["bytes"] for told in shards.values())

    def _publish(
        self, partial: Path, final: Path, progress: Progress, tensors: dict[str, Any], shards: dict[str, Any]
    ) -> None:
        job = self.request.job.model_dump(mode="json")
        content = {
            "progress": asdict(progress),
            "seed": self.request.seed,
            "data": None if self.request.data is None else self.request.data.prefix,
            "model": job.pop("model"),
            "job": job,
            "layout": self.request.layout.model_dump(mode="json"),
            "versions": versions(),
            "files": shards,
            "tensors": tensors,
        }
        if final.exists():
            self.tell(f"{final.name} was there already and is kept as {files.set_aside(final).name}")
        files.write_index(partial, content)
        files.publish(partial, final)

    def _tidy(self, step: int) -> None:
        """Archive and delete; neither may end the training."""
        settings = self.settings
        try:
            if settings.archive is not None and len(self.saves) % settings.archive_every == 0:
                durable = Path(settings.archive)
                durable.mkdir(parents=True, exist_ok=True)
                files.archive(files.checkpoint_folder(self.root, step), durable)
            files.prune(self.root, settings.keep)
        except OSError as error:
            self.tell(f"checkpoint step-{step} is complete, but was not archived or older ones not deleted: {error}")

    def load_newest(self) -> Progress | None:
        """Load the newest checkpoint that is whole; damaged ones are set aside, and it is told why.

        Returns:
            How far it had come; None where there is no checkpoint at all.

        Raises:
            RunFailed: there are checkpoints, and none of them is whole.
        """
        self.finish()
        reasons: list[str] = []
        for folder in self._candidates():
            index, reason = self._examine(folder)
            if reason is None:
                assert index is not None
                self._load(folder, index)
                return Progress(step=index["progress"]["step"], skipped=tuple(index["progress"]["skipped"]))
            reasons.append(f"{folder}: {reason}")
            if self._leads():
                aside = files.set_aside(folder).name if folder.parent == self.root else "left as it is"
                self.tell(f"checkpoint {folder.name} is damaged: {reason} ({aside}); looking for the one before")
            dist.barrier(self.group)
        if reasons:
            raise RunFailed("no checkpoint is whole: " + "; ".join(reasons))
        return None

    def _candidates(self) -> list[Path]:
        """Complete checkpoints, the newest first, those near before their archived copies; as rank 0 sees them."""
        seen: list[Any] = [[str(folder) for folder in files.newest_first(self.root, self.settings.archive)]]
        dist.broadcast_object_list(seen, src=0, group=self.group)
        return [Path(name) for name in seen[0]]

    def _examine(self, folder: Path) -> tuple[dict[str, Any] | None, str | None]:
        """Check index and shards, the shards divided over the ranks."""
        rank, size = dist.get_rank(self.group), dist.get_world_size(self.group)
        index, reason = None, None
        try:
            index = files.read_index(folder)
            reason = files.damage(folder, index, sorted(index["files"])[rank::size])
        except files.Damaged as error:
            reason = str(error)
        except OSError as error:
            reason = f"cannot be read: {error.strerror}"
        found: list[Any] = [None] * size
        dist.all_gather_object(found, reason, self.group)
        return index, next((one for one in found if one is not None), None)

    def _load(self, folder: Path, index: dict[str, Any]) -> None:
        state = self._state(copies=True)
        for name, piece in state.items():
            stored = index["tensors"].get(saved_name(name))
            shape = None if stored is None else tuple(stored["shape"])
            if shape != piece.shape:
                raise RunFailed(
                    f"checkpoint {folder} is of another model: {saved_name(name)} has shape {piece.shape} here and "
                    f"{shape or 'is missing'} there"
                )
        rng = {name: piece for name, piece in rng_piece().items() if name in index["tensors"]}
        load_pieces(state | rng, folder, index, self.group)
        set_step_count(self.optimizer, index["progress"]["step"])
        for piece in rng.values():
            torch.set_rng_state(piece.rectangles[0].values)

    def _state(self, *, copies: bool) -> dict[str, Piece]:
        return training_state(self.decoders, self.optimizer, copies=copies)

    def _leads(self) -> bool:
        return dist.get_rank() == 0

    def _together(self, work: Callable[[], Any]) -> list[Any]:
        """Do something on every rank, and fail on all if it fails on one."""
        result, problem = None, None
        try:
            result = work()
        except OSError as error:
            problem = f"{error.strerror or error}"
        found: list[Any] = [None] * dist.get_world_size(self.group)
        dist.all_gather_object(found, (result, problem), self.group)
        failures: dict[int, Any] = {
            rank: (OSError(reason), None) for rank, (_, reason) in enumerate(found) if reason is not None
        }
        if failures:
            raise CheckpointException("write", failures)
        return [one for one, _ in found]


def rng_piece() -> dict[str, Piece]:
    """State of this rank's random numbers; it is loaded where the number of ranks is the same."""
    state = torch.get_rng_state()
    name = f"rng.{dist.get_world_size()}.{dist.get_rank()}"
    return {name: Piece(tuple(state.shape), (Rectangle((0,), state),))}


def _first_reason(failure: CheckpointException) -> str:
    """Put what the first rank says into a few words."""
    rank, (error, _) = min(failure.failures.items())
    words = str(error).strip().splitlines()
    number = getattr(error, "errno", None)
    reason = os.strerror(number) if number else (words[0] if words else type(error).__name__)
    return f"rank {rank}: {reason}"
