"""torch.distributed.checkpoint for pieces: who writes what, where it lies, and an index that is not a pickle.

The ``.metadata`` of torch is written too, so that other tools can read a checkpoint; it is never read here, because
reading it would execute what it says.
"""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from runtime.pieces import Piece, Pieces, saved_name

ROOT = "training"
"""The one key of the state given to torch: below it ranks may hold different names."""


def save_pieces(pieces: Pieces, folder: Path, group: dist.ProcessGroup) -> dict[str, Any]:
    """Write the pieces of all ranks into a folder; every rank of the group calls it.

    Returns:
        On rank 0, for the index: of each tensor its dtype, shape, and which file holds which rectangle. Elsewhere {}.

    Raises:
        CheckpointException: a rank could not write; all ranks raise it.
    """
    writer = _Writer(folder, thread_count=1, sync_files=True, overwrite=False)
    save({ROOT: pieces}, storage_writer=writer, planner=_SavePlanner(), process_group=group)
    return {} if writer.metadata is None else tensors_of(writer.metadata)


def load_pieces(pieces: Pieces, folder: Path, index: dict[str, Any], group: dist.ProcessGroup) -> None:
    """Fill the pieces of all ranks from a checkpoint of any layout; every rank of the group calls it.

    Raises:
        CheckpointException: a rank could not read; all ranks raise it.
    """
    reader = _Reader(folder, index)
    load({ROOT: pieces}, storage_reader=reader, planner=_LoadPlanner(), process_group=group)


def tensors_of(metadata: Metadata) -> dict[str, Any]:
    """Put torch's metadata into plain data."""
    tensors: dict[str, Any] = {}
    for name, told in metadata.state_dict_metadata.items():
        assert isinstance(told, TensorStorageMetadata)
        chunks = []
        for chunk in told.chunks:
            stored = metadata.storage_data[MetadataIndex(name, chunk.offsets)]
            chunks.append(
                {
                    "offset": list(chunk.offsets),
                    "shape": list(chunk.sizes),
                    "file": stored.relative_path,
                    "begin": stored.offset,
                    "bytes": stored.length,
                }
            )
        dtype = str(told.properties.dtype).removeprefix("torch.")
        tensors[name] = {"dtype": dtype, "shape": list(told.size), "chunks": chunks}
    return tensors


def metadata_of(tensors: dict[str, Any]) -> Metadata:
    """Turn plain data into torch's metadata."""
    described: dict[str, Any] = {}
    stored: dict[MetadataIndex, _StorageInfo] = {}
    for name, told in tensors.items():
        chunks = []
        for chunk in told["chunks"]:
            if Path(chunk["file"]).name != chunk["file"]:
                raise ValueError(f"{chunk['file']!r} is not the name of a shard")
            chunks.append(ChunkStorageMetadata(torch.Size(chunk["offset"]), torch.Size(chunk["shape"])))
            stored[MetadataIndex(name, chunk["offset"])] = _StorageInfo(chunk["file"], chunk["begin"], chunk["bytes"])
        properties = TensorProperties(dtype=getattr(torch, told["dtype"]))
        described[name] = TensorStorageMetadata(properties, torch.Size(told["shape"]), chunks)
    return Metadata(described, storage_data=stored, storage_meta=StorageMeta())


class _Writer(FileSystemWriter):
    """Keeps the metadata of what was written."""

    metadata: Metadata | None = None

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Raise what the disk said instead of what torch makes of it."""
        try:
            return super().write_data(plan, planner)
        except RuntimeError as error:
            cause = error.__context__
            while cause is not None and not isinstance(cause, OSError):
                cause = cause.__context__
            if cause is None:
                raise
            raise OSError(cause.errno, cause.strerror) from None

    def finish(self, metadata: Metadata, results: Any) -> None:
        super().finish(metadata, results)
        self.metadata = metadata


class _Reader(FileSystemReader):
    """Takes the metadata from the index instead of unpickling it; tensors are read with ``weights_only``."""

    def __init__(self, folder: Path, index: dict[str, Any]) -> None:
        super().__init__(folder)
        self.index = index

    def read_metadata(self, *_: Any, **__: Any) -> Metadata:
        return metadata_of(self.index["tensors"])


class _SavePlanner(DefaultSavePlanner):
    """Writes rectangles; of those that several ranks hold, one rank writes each (torch spreads them by size)."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def create_local_plan(self) -> SavePlan:
        pieces: Pieces = self.state_dict[ROOT]
        self.plan = SavePlan([item for name, piece in pieces.items() for item in _write_items(name, piece)])
        return self.plan

    def lookup_object(self, index: MetadataIndex) -> torch.Tensor:
        return _values(self.state_dict[ROOT], index)


class _LoadPlanner(LoadPlanner):
    """Reads rectangles straight into the tensors that train."""

    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        assert metadata is not None
        self.pieces: Pieces = state_dict[ROOT]
        self.metadata = metadata

    def create_local_plan(self) -> LoadPlan:
        items: list[ReadItem] = []
        for name, piece in self.pieces.items():
            stored = self.metadata.state_dict_metadata[saved_name(name)]
            assert isinstance(stored, TensorStorageMetadata)
            wanted = [_chunk(one.offset, one.values) for one in piece.rectangles]
            for item in create_read_items_for_chunk_list(saved_name(name), stored, wanted):
                where = MetadataIndex(name, item.dest_index.offset, item.dest_index.index)
                items.append(_aimed(item, where))
        return LoadPlan(items)

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        return global_plan

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        return central_plan

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        raise ValueError(f"{read_item.storage_index.fqn} is not a tensor")

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        values = _values(self.pieces, read_item.dest_index)
        for dim, (begin, length) in enumerate(zip(read_item.dest_offsets, read_item.lengths, strict=True)):
            values = values.narrow(dim, begin, length)
        return values

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        return


def _aimed(item: ReadItem, where: MetadataIndex) -> ReadItem:
    return ReadItem(
        type=item.type,
        dest_index=where,
        dest_offsets=item.dest_offsets,
        storage_index=item.storage_index,
        storage_offsets=item.storage_offsets,
        lengths=item.lengths,
    )


def _write_items(name: str, piece: Piece) -> list[WriteItem]:
    return [
        WriteItem(
            index=MetadataIndex(name, one.offset),
            type=WriteItemType.SHARD,
            tensor_data=TensorWriteData(
                chunk=_chunk(one.offset, one.values),
                properties=TensorProperties(dtype=one.values.dtype),
                size=torch.Size(piece.shape),
            ),
        )
        for one in piece.rectangles
    ]


def _chunk(offset: tuple[int, ...], values: torch.Tensor) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(torch.Size(offset), values.size())


def _values(pieces: Pieces, index: MetadataIndex) -> torch.Tensor:
    offset = tuple(index.offset or ())
    return next(one.values for one in pieces[index.fqn].rectangles if one.offset == offset)
