"""What one rank allocates and sends while torch runs a step on shapes alone: each storage by purpose, each collective.

Runs below a FakeTensorMode. DTensor derives the shapes of its results by running the operation once on whole shapes;
nothing of that is memory, so it is left out.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

WEIGHTS, GRADIENTS, OPTIMIZER = "weights", "gradients", "optimizer"
ACTIVATIONS, WEIGHT_COPIES, TEMPORARIES, BUFFERS = "activations", "weight_copies", "temporaries", "buffers"
PURPOSES = (WEIGHTS, GRADIENTS, OPTIMIZER, ACTIVATIONS, WEIGHT_COPIES, TEMPORARIES, BUFFERS)
"""activations: made by the forward pass; weight_copies: weights cast to the compute format there; temporaries: made
by the backward pass or the optimizer; buffers: gathered weights, and what replicas exchange."""

CollectiveKey = tuple[str, str, str, int]
"""Operation, axis, dtype, bytes of the whole buffer."""
RESIZE: Callable[[torch.UntypedStorage, int], None] = torch.UntypedStorage.resize_


class Ledger(TorchDispatchMode):
    """Books storages as long as they live, and keeps the fullest state of each moment of the step."""

    def __init__(self, axes: dict[str, str], exchange: str | None = None) -> None:
        """Take the axis of each group by torch's name, and the name of the group in which experts exchange tokens."""
        super().__init__()  # type: ignore[no-untyped-call]
        self.axes, self.exchange = axes, exchange
        self.held: Counter[str] = Counter()
        self.peaks: dict[str, Counter[str]] = {}
        self.collectives: Counter[CollectiveKey] = Counter()
        self.joined: Counter[tuple[str, str, str]] = Counter()
        """Bytes that replicas exchange in the update, of all buckets together."""
        self.moment = "forward"
        self._entries: dict[int, tuple[weakref.ref[Any], str, int]] = {}
        self._deriving_shapes = 0

    def book(self, tensor: torch.Tensor, purpose: str, *, anew: bool = True) -> None:
        """Book the storages of a tensor; of one that is known, change the purpose if ``anew``."""
        for storage in storages(tensor):
            known = self._entries.get(id(storage))
            if known is None:
                self._enter(storage, purpose)
            elif anew and known[1] != purpose:
                self._entries[id(storage)] = (known[0], purpose, known[2])
                self.held[known[1]] -= known[2]
                self.held[purpose] += known[2]
        self.look()

    def purpose_of(self, tensor: torch.Tensor) -> str | None:
        """What a tensor's storage is booked as."""
        known = self._entries.get(id(storages(tensor)[0]))
        return None if known is None else known[1]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation and book what it made."""
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented
        if func is torch.ops._c10d_functional.wait_tensor.default:
            return args[0]  # on shapes alone it would return a second tensor
        result = func(*args, **(kwargs or {}))
        if self._deriving_shapes:
            return result
        purpose = self._purpose(func, args)
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                self.book(leaf, purpose, anew=False)
        space, _, name = str(func).partition(".")
        if space in ("c10d", "_c10d_functional"):
            self._record(space, name.split(".")[0], (args, kwargs), result)
        return result

    def _purpose(self, func: Any, args: Any) -> str:
        if self.moment == "update" or torch._C._current_graph_task_id() != -1:
            return TEMPORARIES
        if func is torch.ops.aten._to_copy.default and self.purpose_of(args[0]) == WEIGHTS:
            return WEIGHT_COPIES
        return ACTIVATIONS

    def _record(self, space: str, name: str, inputs: Any, result: Any) -> None:
        leaves = tree_leaves((inputs, result))
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.numel()]
        if not tensors or name in ("barrier", "monitored_barrier_"):
            return
        group = next((leaf for leaf in leaves if isinstance(leaf, str) and leaf in self.axes), "")
        if space == "c10d":
            for tensor in tensors:
                if self.purpose_of(tensor) in (ACTIVATIONS, TEMPORARIES):
                    self.book(tensor, BUFFERS)
            boxed = next(
                leaf for leaf in leaves if isinstance(leaf, torch.ScriptObject) and "ProcessGroup" in str(leaf)
            )
            group = dist.ProcessGroup.unbox(boxed).group_name
        largest = max(tensors, key=lambda tensor: tensor.numel() * tensor.element_size())
        size, dtype = largest.numel() * largest.element_size(), str(largest.dtype).removeprefix("torch.")
        operation, axis = NAMES.get(name, name), self.axes.get(group, "world")
        if operation == "all_to_all" and group == self.exchange:
            axis = "ep"  # where all replicas share the experts, theirs is the same group
        if self.moment == "update" and axis in ("dp", "edp"):
            self.joined[operation, axis, dtype] += size
        else:
            self.collectives[operation, axis, dtype, size] += 1

    def all_collectives(self) -> Counter[CollectiveKey]:
        """Count the collectives; what replicas exchange in the update is one, whatever its buckets."""
        return self.collectives + Counter({(*key, size): 1 for key, size in self.joined.items()})

    def _enter(self, storage: torch.UntypedStorage, purpose: str) -> None:
        key, size = id(storage), storage.nbytes()

        def gone(_: object) -> None:
            _, last, held = self._entries.pop(key)
            self.held[last] -= held

        self._entries[key] = (weakref.ref(storage, gone), purpose, size)
        self.held[purpose] += size

    def _resized(self, storage: torch.UntypedStorage, size: int) -> None:
        RESIZE(storage, size)
        if id(storage) not in self._entries:
            self._enter(storage, BUFFERS)
        else:
            reference, purpose, before = self._entries[id(storage)]
            self._entries[id(storage)] = (reference, purpose, size)
            self.held[purpose] += size - before
        self.look()

    def look(self) -> None:
        """Remember the present state if it is the fullest of its moment."""
        peak = self.peaks.get(self.moment)
        if peak is None or self.held.total() > peak.total():
            self.peaks[self.moment] = self.held.copy()

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Book everything that happens inside, FSDP's resizing of storages included."""
        derive = ShardingPropagator._propagate_tensor_meta_non_cached

        def unbooked(*args: Any, **kwargs: Any) -> Any:
            self._deriving_shapes += 1
            try:
                return derive(*args, **kwargs)
            finally:
                self._deriving_shapes -= 1

        def resize(storage: torch.UntypedStorage, size: int) -> None:
            self._resized(storage, size)

        changed = cast(Any, ShardingPropagator), cast(Any, torch.UntypedStorage)
        changed[0]._propagate_tensor_meta_non_cached, changed[1].resize_ = unbooked, resize
        try:
            with self:
                yield
        finally:
            changed[0]._propagate_tensor_meta_non_cached, changed[1].resize_ = derive, RESIZE


NAMES = {
    "_allgather_base_": "all_gather",
    "all_gather_into_tensor": "all_gather",
    "_reduce_scatter_base_": "reduce_scatter",
    "reduce_scatter_tensor": "reduce_scatter",
    "allreduce_": "all_reduce",
    "alltoall_base_": "all_to_all",
}
"""torch's operations by the names that the simulator uses."""


def storages(tensor: torch.Tensor) -> list[torch.UntypedStorage]:
    """All storages behind a tensor or a wrapper of tensors."""
    if isinstance(tensor, DTensor):
        return storages(tensor._local_tensor)
    flatten = getattr(tensor, "__tensor_flatten__", None)
    if flatten is not None:
        names, _ = flatten()
        return [storage for name in names for storage in storages(getattr(tensor, name))]
    return [tensor.untyped_storage()]
