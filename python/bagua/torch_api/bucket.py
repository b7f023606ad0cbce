"""Buckets of tensors. ``BaguaBucket`` is a builder: the engine's own is made from it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from typing_extensions import Self

from bagua import _C
from bagua._core.group.process_group import BaguaProcessGroup, Hierarchy
from bagua._core.state.bagua_tensor import (
    Record,
    bagua_getter_closure,
    carries_gradient,
    is_sparse,
    point_at,
    record_of,
)
from bagua._ops import operations
from bagua._ops.operations import AverageWeights, Operation
from bagua._sync.averaging_synchronizer import AsynchronousAverage, check_asynchronous_mode

__all__ = ["BaguaBucket", "SparseBucket", "aligned_buckets", "bucket_of", "split_by_bucket_size"]

#: Parts of a bucket begin at multiples of this many elements per rank: 16-byte loads, any dtype.
_ALIGNMENT = 16

#: The first bucket is small, so that the wire has work while backward is still young.
_FIRST_BUCKET_BYTES = 1024**2

#: A bucket below this share of its limit is not worth separate messages.
_WORTH_CLOSING = 1 / 16

Item = TypeVar("Item")
T = TypeVar("T", bound=Operation)


class BaguaBucket:
    """Tensors that are communicated together.

    Args:
        tensors: registered tensors (``ensure_bagua_tensor``), same module, dtype and device.
        name: unique within the module.
        flatten: make the communicated tensors views of one contiguous memory. Otherwise they stay
            where they are and are copied in and out.
        alignment: the number of elements is padded with zeros to a multiple of it.

    Attributes:
        tensors: without padding.
        backend_tensor: the flat memory, padding included.
        padding_tensor: the padding, or None.
        ops: operations on the bucket when all tensors are ready, in this order.
        asynchronous: the averaging in a separate thread, instead of operations.
        position: (index of this bucket, number of buckets) of the module.
        part: the number of the part of the module that it belongs to, where rounds are of one part.
        watched: whether a guard asks for samples of the last operation.
        sampled: the operation that was built, where it is watched.
        owns_memory: whether nothing but its tensors points into the flat memory, which may then
            move where ranks of one host share it.

    Raises:
        ValueError: no tensors, a duplicate name, or mixed module names, dtypes or devices.
    """

    owns_memory: bool = True

    def __init__(
        self, tensors: Sequence[torch.Tensor], name: str, flatten: bool, alignment: int = 1
    ) -> None:
        if not tensors:
            raise ValueError(f"bucket '{name}' has no tensors")
        self.tensors = list(tensors)
        self.name = name
        self.flatten = flatten
        self.alignment = alignment
        self.ops: list[Operation] = []
        self.asynchronous: AsynchronousAverage | None = None
        self.position = (0, 1)
        self.part = 0
        self.watched = False
        self.sampled: _C.Sampled | None = None
        self._check()
        self.gradients = self._carries_gradients()
        self._allocate()

    @property
    def bagua_module_name(self) -> str | None:
        return record_of(self.tensors[0]).module_name

    def _check(self) -> None:
        first = bagua_getter_closure(self.tensors[0])
        names: set[str] = set()
        for tensor in self.tensors:
            record = record_of(tensor)
            effective = bagua_getter_closure(tensor)
            if record.name in names:
                raise ValueError(f"bucket '{self.name}': tensor '{record.name}' occurs twice")
            names.add(record.name)
            if record.module_name != self.bagua_module_name:
                raise ValueError(
                    f"bucket '{self.name}': tensor '{record.name}' belongs to module "
                    f"'{record.module_name}', not '{self.bagua_module_name}'"
                )
            if (effective.dtype, effective.device) != (first.dtype, first.device):
                raise ValueError(
                    f"bucket '{self.name}': tensor '{record.name}' is {effective.dtype} on "
                    f"{effective.device}, others are {first.dtype} on {first.device}; "
                    "one bucket holds one dtype on one device"
                )

    def _carries_gradients(self) -> bool:
        return all(carries_gradient(tensor) for tensor in self.tensors)

    def _allocate(self) -> None:
        effective = [bagua_getter_closure(tensor) for tensor in self.tensors]
        numel = sum(tensor.numel() for tensor in effective)
        padded = -(-numel // self.alignment) * self.alignment
        first = effective[0]
        with torch.no_grad():
            flat = torch.zeros(padded, dtype=first.dtype, device=first.device)
        self.backend_tensor = flat
        self.padding_tensor = flat[numel:] if padded > numel else None
        self._views: list[torch.Tensor] = []
        offset = 0
        for tensor, value in zip(self.tensors, effective, strict=True):
            layout = tensor if self.gradients else value
            strides = _dense_strides(layout)
            view = flat.as_strided(layout.size(), strides, offset)
            with torch.no_grad():
                view.copy_(value)
            if self.flatten:
                point_at(tensor, record_of(tensor), view)
            self._views.append(view)
            offset += value.numel()

    def view_of(self, index: int) -> torch.Tensor:
        return self._views[index]

    def named_views(self) -> list[tuple[str, torch.Tensor]]:
        return [
            (record_of(tensor).name, view)
            for tensor, view in zip(self.tensors, self._views, strict=True)
        ]

    def slots(self) -> list[_C.Slot]:
        adopt = _C.Adopt.NONE
        if self.gradients:
            adopt = _C.Adopt.GRAD_VIEW if self.flatten else _C.Adopt.GRAD_COPY
        return [
            _C.Slot(
                record_of(tensor).name,
                int(view.storage_offset()),
                list(view.size()),
                list(view.stride()),
                adopt,
                tensor if self.gradients else None,
            )
            for tensor, view in zip(self.tensors, self._views, strict=True)
        ]

    def copy_in(self, index: int) -> None:
        """Bring a tensor that is not a view of the flat memory (any more) into it."""
        tensor, view = self.tensors[index], self._views[index]
        effective = self.effective(index)
        if effective.data_ptr() == view.data_ptr():
            return
        if effective.shape != view.shape or (self.flatten and effective.dtype != view.dtype):
            raise _C.BaguaError(_changed(record_of(tensor), effective, view))
        with torch.no_grad():
            view.copy_(effective)
        if self.flatten:
            point_at(tensor, record_of(tensor), view)

    def copy_out(self) -> None:
        """Give tensors that are not flattened the communicated values."""
        if self.flatten:
            return
        with torch.no_grad():
            for index, view in enumerate(self._views):
                self.effective(index).copy_(view)

    def flattened_tensor(self) -> torch.Tensor:
        """A contiguous copy of all communicated tensors, padding included."""
        for index in range(len(self.tensors)):
            self.copy_in(index)
        return self.backend_tensor.clone()

    def check_flatten(self) -> bool:
        """Whether the communicated tensors are views of the flat memory."""
        return all(
            self.effective(index).data_ptr() == view.data_ptr()
            for index, view in enumerate(self._views)
        )

    def effective(self, index: int) -> torch.Tensor:
        """The communicated tensor; its place in the flat memory while there is none (no grad)."""
        effective: torch.Tensor | None = bagua_getter_closure(self.tensors[index])
        return self._views[index] if effective is None else effective

    def numel(self) -> int:
        """Elements of the communicated tensors, without padding."""
        return sum(view.numel() for view in self._views)

    def bytes(self) -> int:
        """Bytes of the communicated tensors, without padding."""
        return sum(view.numel() * view.element_size() for view in self._views)

    # Operations, in the order in which they run.

    def clear_ops(self) -> Self:
        """Remove all operations."""
        self.ops.clear()
        self.asynchronous = None
        return self

    def append_operation(self, operation: T) -> T:
        """Append an operation that a function of ``bagua._ops.operations`` has made for it."""
        self.ops.append(operation)
        return operation

    def append_centralized_synchronous_op(
        self,
        hierarchical: Hierarchy = False,
        average: bool = True,
        scattergather: bool = False,
        compression: str | None = None,
        group: BaguaProcessGroup | None = None,
    ) -> Self:
        """Sum or mean of the bucket over all ranks.

        Args:
            hierarchical: exact inside a node, compressed between the nodes' leaders; with
                ``"sharded"`` between all ranks of the nodes, each with a share of the bucket.
            average: mean instead of sum.
            scattergather: accumulate in f32 whatever the bucket's dtype.
            compression: a codec (``_C.codec_names()``) or Bagua's name ``"MinMaxUInt8"``.
            group: default the group of the wrapped module.

        Raises:
            ValueError: unknown codec, or another value of ``hierarchical``.
        """
        operation = self.sum_or_mean(hierarchical, average, scattergather, compression, group)
        self.append_operation(operation)
        return self

    def sum_or_mean(
        self,
        hierarchical: Hierarchy = False,
        average: bool = True,
        scattergather: bool = False,
        compression: str | None = None,
        group: BaguaProcessGroup | None = None,
    ) -> Operation:
        """The operation of :meth:`append_centralized_synchronous_op`."""
        codec = compression
        if not codec and scattergather:
            # They lose nothing of the dtype, and sum in f32; others need none.
            sums = {torch.float16: "fp16", torch.bfloat16: "bf16"}
            codec = sums.get(self.backend_tensor.dtype)
        if codec:
            return operations.compressed_all_reduce(self, codec, hierarchical, average, group)
        return operations.all_reduce(self, hierarchical, average, group)

    def append_decentralized_synchronous_op(
        self,
        peer_weight: torch.Tensor,
        hierarchical: bool = True,
        peer_selection_mode: str = "all",
        group: BaguaProcessGroup | None = None,
    ) -> AverageWeights:
        """Mean of the bucket with other ranks; the bucket itself is unchanged.

        Args:
            peer_weight: receives the mean. Contiguous separate memory, like ``backend_tensor``.
            hierarchical: mean inside a node, then ``peer_selection_mode`` between the leaders.
            peer_selection_mode: ``"all"``, or ``"shift_one"`` for one peer, another each time.
            group: default the group of the wrapped module.

        Returns:
            The op. After waiting, its ``copy_back_peer_weight(bucket)`` gives the bucket the mean.

        Raises:
            ValueError: unknown mode, or a ``peer_weight`` that does not fit.
        """
        return self.append_operation(
            operations.average_weights(self, peer_weight, hierarchical, peer_selection_mode, group)
        )

    def append_asynchronous_model_average_op(
        self,
        peer_selection_mode: str,
        group: BaguaProcessGroup | None = None,
        *,
        sync_interval_ms: int = 500,
    ) -> AsynchronousAverage:
        """Average the bucket, whose tensors are weights, in a separate thread.

        All buckets of a module have this operation, and no other, or none has.

        Args:
            peer_selection_mode: ``"all"``.
            group: default the group of the wrapped module.
            sync_interval_ms: milliseconds between averages; the least of all buckets counts.

        Raises:
            ValueError: another mode.
        """
        check_asynchronous_mode(peer_selection_mode)
        self.asynchronous = AsynchronousAverage(sync_interval_ms, group)
        return self.asynchronous

    def append_low_precision_decentralized_synchronous_op(
        self,
        weight: torch.Tensor,
        left_peer_weight: torch.Tensor,
        right_peer_weight: torch.Tensor,
        hierarchical: bool = True,
        compression: str = "MinMaxUInt8",
        group: BaguaProcessGroup | None = None,
    ) -> Operation:
        """Mix the bucket, whose tensors are weights, with both neighbours' on a ring of the ranks.

        Args:
            weight: the neighbours' replica of this rank. Like the other two f32, of one dimension,
                as long as ``backend_tensor``, with separate memory. All three start as copies of
                weights that are equal on all ranks.
            left_peer_weight: the replica of the left neighbour's ``weight``.
            right_peer_weight: the replica of the right neighbour's ``weight``.
            hierarchical: exact mean inside a node, the ring between the nodes' leaders.
            compression: a codec (``_C.codec_names()``) or Bagua's name ``"MinMaxUInt8"``.
            group: default the group of the wrapped module.

        Raises:
            ValueError: unknown codec, or a replica that does not fit.
        """
        replicas = {"weight": weight, "left": left_peer_weight, "right": right_peer_weight}
        return self.append_operation(
            operations.compressed_gossip(self, replicas, hierarchical, compression, group)
        )

    def append_python_op(
        self,
        python_function: Callable[[str], None],
        group: BaguaProcessGroup | None = None,
    ) -> Self:
        """Call ``python_function(bucket_name)`` on the lane's thread, with the GIL.

        An exception in it is raised by the end of backward, on this rank and the others.
        """
        del group  # upstream: whose CUDA stream it runs on; here the lane's

        def on_copies(name: str) -> None:
            self.copy_out()
            python_function(name)
            for index in range(len(self.tensors)):
                self.copy_in(index)

        function = python_function if self.flatten else on_copies
        self.append_operation(operations.python_function(function))
        return self


def _changed(record: Record, now: torch.Tensor, before: torch.Tensor) -> str:
    was, has = (f"{t.dtype} of shape {list(t.shape)}" for t in (before, now))
    return (
        f"module '{record.module_name}': '{record.name}' was {was} at the wrap and is {has} now, "
        "so it would train unsynchronised. Call bagua.wrap again, on every rank, after such a "
        "change."
    )


def _dense_strides(tensor: torch.Tensor) -> tuple[int, ...]:
    """The tensor's own strides if it is dense (channels_last), else those of a fresh tensor."""
    return torch.empty_like(tensor, device="meta").stride()


class SparseBucket(BaguaBucket):
    """A parameter with a sparse gradient, which is not copied into flat memory.

    It goes from autograd to the operation and back unchanged. ``backend_tensor`` has one element,
    which determines dtype and device. The only operation is the exact sum or mean.
    """

    def __init__(self, tensor: torch.Tensor, name: str) -> None:
        super().__init__([tensor], name, flatten=False)
        self._rows: Operation | None = None

    def _check(self) -> None:
        """One tensor agrees with itself."""

    def _allocate(self) -> None:
        parameter = self.tensors[0]
        self.backend_tensor = torch.zeros(1, dtype=parameter.dtype, device=parameter.device)
        self.padding_tensor = None
        self._views = [self.backend_tensor]

    def slots(self) -> list[_C.Slot]:
        parameter = self.tensors[0]
        record = record_of(parameter)
        if self.ops != [self._rows]:
            raise NotImplementedError(
                f"'{record.name}' has sparse gradients, which only "
                "append_centralized_synchronous_op without compression communicates: pass "
                "sparse=False to the embedding"
            )
        return [_C.Slot(record.name, 0, [1], [1], _C.Adopt.SPARSE, parameter, record.sparse)]

    def copy_in(self, index: int) -> None:
        """There is nothing to copy."""

    def copy_out(self) -> None:
        """There is nothing to copy."""

    def check_flatten(self) -> bool:
        return False

    def sum_or_mean(
        self,
        hierarchical: Hierarchy = False,
        average: bool = True,
        scattergather: bool = False,
        compression: str | None = None,
        group: BaguaProcessGroup | None = None,
    ) -> Operation:
        """Exact sum or mean: rows are gathered from all ranks, whatever ``hierarchical`` says."""
        record = record_of(self.tensors[0])
        if compression is not None:
            raise NotImplementedError(
                f"'{record.name}' has sparse gradients, which are not compressed: pass "
                "sparse=False to the embedding"
            )
        assert record.sparse is not None
        sizes = list(self.tensors[0].size())
        self._rows = operations.all_reduce_rows(record.sparse, sizes, average, group)
        return self._rows


def bucket_of(tensors: Sequence[torch.Tensor], name: str, flatten: bool) -> BaguaBucket:
    """A bucket of the kind that the gradients of ``tensors`` need."""
    if len(tensors) == 1 and is_sparse(tensors[0]):
        return SparseBucket(tensors[0], name)
    return BaguaBucket(tensors, name=name, flatten=flatten)


def split_by_bucket_size(
    items: Sequence[Item],
    effective: Callable[[Item], torch.Tensor],
    bucket_bytes: int | Sequence[int],
    alone: Callable[[Item], bool] = lambda _: False,
) -> list[list[Item]]:
    """Cut ``items`` into buckets, keeping their order.

    A bucket holds one dtype on one device. It is closed when it has reached ``bucket_bytes`` (the
    first one: 1 MiB), and before a tensor that would make it exceed them, unless it is still tiny;
    so it exceeds them by at most one tensor. A tensor of another dtype opens a new bucket
    kind and leaves the others open; an item that is ``alone`` has a bucket for itself.

    ``bucket_bytes`` may be one limit for each bucket; the last holds for all that follow.
    """
    if isinstance(bucket_bytes, int):
        bucket_bytes = (min(bucket_bytes, _FIRST_BUCKET_BYTES), bucket_bytes)
    buckets: list[list[Item]] = []
    open_buckets: dict[tuple[torch.dtype, torch.device], tuple[list[Item], int]] = {}
    for item in items:
        if alone(item):
            buckets.append([item])
            continue
        tensor = effective(item)
        kind = (tensor.dtype, tensor.device)
        size = tensor.numel() * tensor.element_size()
        members, filled = open_buckets.get(kind, ([], 0))
        limit = bucket_bytes[min(max(len(buckets), 1), len(bucket_bytes)) - 1]
        overflows = filled + size > limit and filled >= limit * _WORTH_CLOSING
        if not members or filled >= limit or overflows:
            members, filled = [], 0
            buckets.append(members)
        members.append(item)
        open_buckets[kind] = (members, filled + size)
    return buckets


def aligned_buckets(
    tensors: Sequence[Sequence[torch.Tensor]],
    do_flatten: bool,
    ranks: int,
    in_parts: Callable[[torch.dtype, int], bool] = lambda *_: True,
) -> list[BaguaBucket]:
    """Buckets that ``ranks`` equal parts fill, from tensors grouped as buckets shall be.

    ``in_parts``: whether a bucket of a dtype and a number of elements is; others have no padding.
    """
    buckets = []
    for i, group in enumerate(tensors):
        effective = [bagua_getter_closure(tensor) for tensor in group]
        parted = in_parts(effective[0].dtype, sum(tensor.numel() for tensor in effective))
        alignment = _ALIGNMENT * ranks if parted else 1
        buckets.append(BaguaBucket(group, name=str(i), flatten=do_flatten, alignment=alignment))
    return buckets
