"""The tensors and buckets of a plan of local training, by fragment."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from bagua._core.state.bagua_tensor import record_of
from bagua._sync.wrapper import Bucket
from bagua.torch_api.algorithms.base import WrappedModule
from bagua.torch_api.algorithms.diloco.fragments import Fragments, parts_of
from bagua.torch_api.bucket import BaguaBucket

__all__ = ["Parts"]


class Parts:
    """Fragments of the trained weights; floating buffers belong to none.

    Args:
        fragments: of the weights.
        bagua_ddp: the wrapped module.

    Attributes:
        count: the number of fragments, at least 1.

    Raises:
        ValueError: ``fragments`` do not fit the module.
    """

    def __init__(self, fragments: Fragments, bagua_ddp: WrappedModule) -> None:
        names = [name for name, _ in bagua_ddp.bagua_build_params()]
        self._of = parts_of(fragments, bagua_ddp.module, names)
        self.count = max(self._of.values(), default=0) + 1

    def of(self, tensor: torch.Tensor) -> int | None:
        """The fragment of the weight that a registered ``tensor`` stands for; None for a buffer."""
        return self._of.get(record_of(tensor).name)

    def make_tensors(self, bagua_ddp: WrappedModule) -> list[torch.Tensor]:
        """Registered memory for pseudo-gradients by fragment, then for floating buffers."""
        named: list[tuple[str, torch.Tensor]] = [*bagua_ddp.bagua_build_params()]
        named.sort(key=lambda pair: self._of[pair[0]])
        named += bagua_ddp.bagua_floating_buffers()
        module = bagua_ddp.bagua_module_name
        return [_wide(tensor, name, module) for name, tensor in named]

    def groups(self, tensors: Sequence[Sequence[torch.Tensor]]) -> list[list[torch.Tensor]]:
        """The tensors of each bucket, of one fragment or of buffers."""
        groups = [
            [tensor for tensor in group if self.of(tensor) == part]
            for part in (*range(self.count), None)
            for group in tensors
        ]
        return list(filter(None, groups))

    def assign(self, buckets: Sequence[BaguaBucket]) -> None:
        """Say which part of the plan each bucket is of; those of buffers are of the last."""
        for bucket in buckets:
            part = self.of(bucket.tensors[0])
            bucket.part = self.count - 1 if part is None else part

    def split(self, buckets: Sequence[Bucket]) -> tuple[list[list[Bucket]], list[Bucket]]:
        """(buckets of each fragment, buckets of buffers)."""
        found: dict[int | None, list[Bucket]] = {}
        for bucket in buckets:
            found.setdefault(self.of(bucket.tensors[0]), []).append(bucket)
        return [found.get(part, []) for part in range(self.count)], found.get(None, [])


def _wide(tensor: torch.Tensor, name: str, module_name: str) -> torch.Tensor:
    """Registered memory for a pseudo-gradient or the mean of a buffer."""
    wide = torch.float64 if tensor.dtype == torch.float64 else torch.float32
    empty = torch.zeros_like(tensor, dtype=wide, requires_grad=False)
    return empty.ensure_bagua_tensor(name, module_name)  # type: ignore[attr-defined,no-any-return]
