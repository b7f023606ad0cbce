"""The bucket of a parameter whose gradient holds some rows only: ``nn.Embedding(sparse=True)``."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from typing_extensions import Self

from bagua import _C
from bagua._core.group.process_group import BaguaProcessGroup
from bagua._core.state.bagua_tensor import is_sparse, record_of
from bagua._ops.all_reduce_rows import AllReduceRows
from bagua._ops.contract.lane import Hierarchy
from bagua.torch_api.bucket import BaguaBucket

__all__ = ["SparseBucket", "bucket_of"]


class SparseBucket(BaguaBucket):
    """One parameter, whose gradient is no part of a flat memory.

    It goes from autograd to the operation and back as it is. ``backend_tensor`` has one element,
    which determines dtype and device. The only operation is the exact sum or mean.
    """

    def __init__(self, tensor: torch.Tensor, name: str) -> None:
        super().__init__([tensor], name, flatten=False)
        self._rows: AllReduceRows | None = None

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

    def append_centralized_synchronous_op(
        self,
        hierarchical: Hierarchy = False,
        average: bool = True,
        scattergather: bool = False,
        compression: str | None = None,
        group: BaguaProcessGroup | None = None,
    ) -> Self:
        """Exact sum or mean: rows are gathered from all ranks, whatever ``hierarchical`` says.

        Raises:
            NotImplementedError: ``compression``.
        """
        record = record_of(self.tensors[0])
        if compression is not None:
            raise NotImplementedError(
                f"'{record.name}' has sparse gradients, which are not compressed: pass "
                "sparse=False to the embedding"
            )
        assert record.sparse is not None
        sizes = list(self.tensors[0].size())
        self._rows = self.append_operation(AllReduceRows(record.sparse, sizes, average, group))
        return self


def bucket_of(tensors: Sequence[torch.Tensor], name: str, flatten: bool) -> BaguaBucket:
    """A bucket of the kind that the gradients of ``tensors`` need."""
    if len(tensors) == 1 and is_sparse(tensors[0]):
        return SparseBucket(tensors[0], name)
    return BaguaBucket(tensors, name=name, flatten=flatten)
