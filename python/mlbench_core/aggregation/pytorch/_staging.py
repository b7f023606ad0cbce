"""Flat memory for aggregation; the tensors themselves keep their memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

Kind = tuple[torch.dtype, torch.device]
# Flat memory, its views in the shapes of the tensors, and the tensors.
Staged = tuple[torch.Tensor, list[torch.Tensor], list[torch.Tensor]]


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

        1. Copy the tensors of each dtype and device into flat memory, where ``device_of`` says.
        2. ``aggregate(flat)`` changes it in place: a one-dimensional tensor, or with ``by_layer``
           one in the shape of each tensor. It is not called for empty ones.
        3. When all of them succeeded, copy back into the tensors' own memory.
        """
        staged = self._copy_in(tensors, device_of)  # 1.
        # 2.
        for flat, views, _ in staged:
            for data in views if by_layer else [flat]:
                if data.numel() > 0:
                    aggregate(data)
        # 3.
        for _, views, members in staged:
            torch._foreach_copy_(members, views)

    def _copy_in(
        self, tensors: Sequence[torch.Tensor], device_of: Callable[[torch.Tensor], torch.device]
    ) -> list[Staged]:
        staged = []
        for kind, indices in _by_kind(tensors).items():
            members = [tensors[i] for i in indices]
            flat = self._take(kind, sum(t.numel() for t in members), device_of(members[0]))
            parts = flat.split([tensor.numel() for tensor in members])
            views = [part.view(t.shape) for part, t in zip(parts, members, strict=True)]
            torch._foreach_copy_(views, members)
            staged.append((flat, views, members))
        return staged

    def _take(self, kind: Kind, numel: int, device: torch.device) -> torch.Tensor:
        memory = self._memory.get(kind)
        if memory is None or memory.numel() < numel or memory.device != device:
            memory = self._memory[kind] = torch.empty(numel, dtype=kind[0], device=device)
        return memory[:numel]


def aggregated_together(tensors: Sequence[torch.Tensor], by_layer: bool) -> list[list[int]]:
    """The indices of the tensors of each call that :meth:`Staging.run` makes, in its order."""
    groups = list(_by_kind(tensors).values())
    calls = [[i] for group in groups for i in group] if by_layer else groups
    return [call for call in calls if any(tensors[i].numel() for i in call)]


def _by_kind(tensors: Sequence[torch.Tensor]) -> dict[Kind, list[int]]:
    groups: dict[Kind, list[int]] = {}
    for index, tensor in enumerate(tensors):
        groups.setdefault((tensor.dtype, tensor.device), []).append(index)
    return groups
