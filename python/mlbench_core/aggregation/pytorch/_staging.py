"""Flat memory in which tensors are aggregated while they stay as they are."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

__all__ = ["Staging"]

Kind = tuple[torch.dtype, torch.device]


class Staging:
    """One flat buffer per dtype and device, used again by every call; it only grows.

    A tensor lies in it in the order of its indices, whatever its strides: ranks may lay out the
    same tensor differently.
    """

    def __init__(self) -> None:
        self._memory: dict[Kind, torch.Tensor] = {}

    def run(
        self,
        tensors: Sequence[torch.Tensor],
        by_layer: bool,
        device_of: Callable[[torch.Tensor], torch.device],
        aggregate: Callable[[torch.Tensor], None],
    ) -> None:
        """Aggregate tensors, each dtype and device together or each tensor by itself.

        1. Copy the tensors of each dtype and device into the flat memory.
        2. ``aggregate(flat)`` changes it in place: a one-dimensional tensor, or with ``by_layer``
           one in the shape of each tensor. It is not called for empty ones.
        3. When all of them succeeded, copy back into the tensors' own memory.

        Args:
            device_of: where a tensor's flat memory is to be.
        """
        groups: dict[Kind, list[torch.Tensor]] = {}
        for tensor in tensors:
            groups.setdefault((tensor.dtype, tensor.device), []).append(tensor)
        staged = []
        # 1.
        for kind, members in groups.items():
            flat = self._take(kind, sum(t.numel() for t in members), device_of(members[0]))
            parts = flat.split([tensor.numel() for tensor in members])
            views = [part.view(t.shape) for part, t in zip(parts, members, strict=True)]
            torch._foreach_copy_(views, members)
            staged.append((flat, views, members))
        # 2.
        for flat, views, _ in staged:
            for data in views if by_layer else [flat]:
                if data.numel() > 0:
                    aggregate(data)
        # 3.
        for _, views, members in staged:
            torch._foreach_copy_(members, views)

    def _take(self, kind: Kind, numel: int, device: torch.device) -> torch.Tensor:
        memory = self._memory.get(kind)
        if memory is None or memory.numel() < numel or memory.device != device:
            memory = self._memory[kind] = torch.empty(numel, dtype=kind[0], device=device)
        return memory[:numel]
