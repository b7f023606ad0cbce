"""Buffers of local training, which all ranks get the mean of in a round."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch

from bagua._core.state.bagua_tensor import record_of
from bagua._sync.wrapper import Bucket

__all__ = ["BufferAverage"]


class BufferAverage:
    """The mean of floating buffers, in ``buckets`` of float32 (float64), which are no views."""

    def __init__(self, buckets: Sequence[Bucket]) -> None:
        self._flats = [bucket.backend_tensor for bucket in buckets]
        self._names = [record_of(t).name for bucket in buckets for t in bucket.tensors]
        self._views = [view for bucket in buckets for _, view in bucket.named_views()]

    def launch(self, buffers: Mapping[str, torch.Tensor]) -> None:
        """Fill the buckets with this rank's buffers."""
        with torch.no_grad():
            for name, view in zip(self._names, self._views, strict=True):
                view.copy_(buffers[name])

    def named_means(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(key, tensor) of the last round's result, equal on all ranks."""
        for name, view in zip(self._names, self._views, strict=True):
            yield f"mean/{name}", view

    def arrive(self, buffers: Mapping[str, torch.Tensor]) -> bool:
        """Give the buffers their mean; False, having changed nothing, if that is not finite."""
        if not all(bool(flat.isfinite().all()) for flat in self._flats):
            return False
        with torch.no_grad():
            for name, view in zip(self._names, self._views, strict=True):
                buffers[name].copy_(view)
        return True
