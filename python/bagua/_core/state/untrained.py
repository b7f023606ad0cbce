"""State beside the trained weights: buffers, and frozen weights that training moves."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from bagua import _C
from bagua._core.group.connections import Connections
from bagua._core.state.initial_state import broadcast_tensors
from bagua._core.state.saved_values import bits_of, digest

_SAMPLED_ELEMENTS = 1024  # of each frozen weight, evenly spaced


def mean_of(tensor: torch.Tensor, connections: Connections) -> torch.Tensor:
    """The ranks' mean of a floating-point or complex tensor, in f32 (f64 of f64)."""
    values = tensor.detach().resolve_conj()
    values = torch.view_as_real(values) if values.is_complex() else values
    wide = torch.float64 if values.dtype == torch.float64 else torch.float32
    mean = values.to(wide, copy=True).contiguous()
    connections.main_communicator(tensor.device).all_reduce(mean, _C.ReduceOp.AVG)
    return torch.view_as_complex(mean) if tensor.is_complex() else mean


def share_untrained(
    means: Sequence[tuple[torch.Tensor, torch.Tensor]],
    others: Sequence[torch.Tensor],
    frozen: Sequence[torch.Tensor],
    connections: Connections,
) -> None:
    """Make equal on all ranks what the mean of the trained weights leaves out. All ranks call it.

    NaN and infinity of a rank reach no other: all get the values of the first rank without.

    Args:
        means: (buffer, the ranks' mean of it).
        others: get the first rank's values.
        frozen: weights; those that differ between the ranks get their mean, or, where they have
            none, the first rank's values.
    """
    with torch.no_grad():
        moved = _differing(frozen, connections)
        averaged = [t for t in moved if t.is_floating_point() or t.is_complex()]
        means = [*means, *((tensor, mean_of(tensor, connections)) for tensor in averaged)]
        others = [*others, *(t for t in moved if all(t is not other for other in averaged))]
        own = [tensor.clone() for tensor in others]
        broadcast_tensors(others, connections)
        if _finite(mean for _, mean in means) and not _nan(others):
            for tensor, mean in means:
                tensor.copy_(mean)
            return
        broken = _nan(own) or not _finite(tensor for tensor, _ in means)
        flags = connections.gather_numbers("looking for ranks with NaN or infinity", int(broken))
        if 0 in flags:
            for tensor, value in zip(others, own, strict=True):
                tensor.copy_(value)
            tensors = [*(tensor for tensor, _ in means), *others]
            broadcast_tensors(tensors, connections, flags.index(0))


def _differing(tensors: Sequence[torch.Tensor], connections: Connections) -> list[torch.Tensor]:
    """Those of which a sample of the elements or the sum of all bits differs between ranks."""
    if not tensors:
        return []
    hashes = [(int(digest(_sample(tensor))) + _sum_of_bits(tensor)) % 2**62 for tensor in tensors]
    both = connections.reduce_numbers(
        "comparing frozen weights", _C.ReduceOp.MAX, *hashes, *(-number for number in hashes)
    )
    highest, lowest = both[: len(tensors)], both[len(tensors) :]
    return [t for t, h, low in zip(tensors, highest, lowest, strict=True) if h != -low]


def _sample(tensor: torch.Tensor) -> torch.Tensor:
    flat = tensor.detach().reshape(-1)
    return flat[:: max(1, flat.numel() // _SAMPLED_ELEMENTS)]


def _sum_of_bits(tensor: torch.Tensor) -> int:
    """The sum of the elements' bits as integers: it depends on no order of additions."""
    if type(tensor.data) is not torch.Tensor or tensor.layout != torch.strided:
        return 0  # what its memory is only the class knows
    return int(bits_of(tensor).sum(dtype=torch.int64))


def _finite(tensors: Iterable[torch.Tensor]) -> bool:
    return all(bool(tensor.isfinite().all()) for tensor in tensors)


def _nan(tensors: Iterable[torch.Tensor]) -> bool:
    return any(bool(tensor.isnan().any()) for tensor in tensors)
