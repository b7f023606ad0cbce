"""Lists of tensors as one flat tensor."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors

__all__ = [
    "align_size",
    "apply_flattened_call",
    "apply_flattened_call_all",
    "check_contiguous",
    "flatten",
    "get_flattened_tensor",
    "unflatten",
]


def flatten(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """The elements of dense tensors of one dtype and device, one after the other, in one dimension.

    torch's own. One tensor that is contiguous gives a view of it; :func:`get_flattened_tensor`
    always copies.
    """
    result: torch.Tensor = _flatten_dense_tensors(tensors)
    return result


def unflatten(flat: torch.Tensor, tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """Views of ``flat`` with the sizes of ``tensors``. Inverse of :func:`flatten`; torch's own."""
    result: tuple[torch.Tensor, ...] = _unflatten_dense_tensors(flat, tensors)
    return result


def get_flattened_tensor(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """A new tensor of one dimension with the elements of ``tensors``, which are of one dtype.

    Raises:
        ValueError: there is no tensor, or they differ in dtype or device.
    """
    _check_alike(tensors)
    with torch.no_grad():
        return torch.cat([tensor.reshape(-1) for tensor in tensors])


def apply_flattened_call(
    bucket: Sequence[torch.Tensor],
    call: Callable[..., Any],
    extra_args: Sequence[Any] | None = None,
) -> None:
    """Call ``call(flat, *extra_args)`` once for all tensors of a list, which it changes in place.

    Sums of ``torch.distributed.all_reduce`` are divided by the number of ranks of its group; Bagua
    divides what its other reductions give too. To average gradients over all ranks in one message,
    ``with_bagua`` or torch's coalesced collectives need no helper.

    Args:
        bucket: dense tensors of one dtype and device.
        call: changes its first argument in place.
        extra_args: for ``all_reduce``: the operation and the group.

    Raises:
        ValueError: there is no tensor, they differ in dtype or device, or integers are averaged.
    """
    _check_alike(bucket)
    extra = list(extra_args or ())
    averages = call is dist.all_reduce and extra[:1] in ([], [dist.ReduceOp.SUM])
    if averages and not (bucket[0].is_floating_point() or bucket[0].is_complex()):
        raise ValueError(
            f"apply_flattened_call averages over the ranks, which {bucket[0].dtype} cannot hold; "
            "call torch.distributed.all_reduce on each tensor"
        )
    with torch.no_grad():
        flat = get_flattened_tensor(bucket)
        call(flat, *extra)
        if averages:
            flat /= dist.get_world_size(extra[1] if len(extra) > 1 else None)
        for tensor, result in zip(bucket, unflatten(flat, bucket), strict=True):
            tensor.copy_(result)


def apply_flattened_call_all(tensors: Sequence[torch.Tensor], call: Callable[..., Any]) -> None:
    """:func:`apply_flattened_call`, once for the tensors of each dtype and device.

    Raises:
        ValueError: integers are averaged.
    """
    groups: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
    for tensor in tensors:
        groups.setdefault((tensor.dtype, tensor.device), []).append(tensor)
    for group in groups.values():
        apply_flattened_call(group, call)


def align_size(size: int, align: int) -> int:
    """The smallest multiple of ``align`` that is not below ``size``."""
    return -(-size // align) * align


def check_contiguous(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether each tensor begins in memory where the one before it ends."""
    ends = [tensor.data_ptr() + tensor.numel() * tensor.element_size() for tensor in tensors]
    begins = [tensor.data_ptr() for tensor in tensors]
    return ends[:-1] == begins[1:]


def _check_alike(tensors: Sequence[torch.Tensor]) -> None:
    if not tensors:
        raise ValueError("the list of tensors is empty")
    kinds = {f"{tensor.dtype} on {tensor.device}" for tensor in tensors}
    if len(kinds) > 1:
        raise ValueError(
            f"the tensors are {' and '.join(sorted(kinds))}, and one flat tensor has one dtype and "
            "device; apply_flattened_call_all takes such a list"
        )
