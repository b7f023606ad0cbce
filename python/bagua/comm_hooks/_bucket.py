"""A bucket of torch's ``DistributedDataParallel``, as operations and algorithms see buckets."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from bagua import _C
from bagua._core.group.connections import fingerprint
from bagua.torch_api.bucket import BaguaBucket

__all__ = ["HookedBucket"]


class HookedBucket(BaguaBucket):
    """Gradients of some parameters in memory that belongs to torch.

    Args:
        bucket: as torch hands it over.
        names: of the parameters, by ``id``.
        name: of the bucket; by default its index.
    """

    owns_memory = False

    def __init__(
        self, bucket: _C.GradientBucket, names: Mapping[int, str], name: str | None = None
    ) -> None:
        self._buffer = bucket.buffer
        self._offsets = bucket.offsets
        self.names = [names[id(parameter)] for parameter in bucket.parameters]
        super().__init__(bucket.parameters, name or str(bucket.index), flatten=True)

    def _check(self) -> None:
        """Torch has made the bucket."""

    def _carries_gradients(self) -> bool:
        return True

    def _allocate(self) -> None:
        self.backend_tensor = self._buffer
        self.padding_tensor = None
        # Places only, which count from the start of the buffer wherever that lies in its storage.
        flat = torch.empty(self._buffer.numel(), dtype=self._buffer.dtype, device="meta")
        self._views = [
            flat.as_strided(tensor.size(), _strides(tensor), offset)
            for tensor, offset in zip(self.tensors, self._offsets, strict=True)
        ]

    def named_views(self) -> list[tuple[str, torch.Tensor]]:
        return list(zip(self.names, self._views, strict=True))

    def describe(self) -> str:
        """One line, equal on all ranks."""
        lines = [
            f"{name} at {view.storage_offset()}: {view.size()} {view.stride()}"
            for name, view in self.named_views()
        ]
        last = f" to '{self.names[-1]}'" if len(self.names) > 1 else ""
        return f"{[op.describe() for op in self.ops]} on '{self.names[0]}'{last}, " + (
            f"{len(lines)} parameters {fingerprint(lines):016x}"
        )


def _strides(parameter: torch.Tensor) -> tuple[int, ...]:
    """Strides of its gradient in torch's bucket: the parameter's own if it is dense."""
    dense = torch.empty_like(parameter, device="meta").stride()
    if dense == parameter.stride():
        return dense
    return torch.empty(parameter.size(), device="meta").stride()
