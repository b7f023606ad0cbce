"""Values of weights: a digest of them, and NaN and infinity among them."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping

import torch

from bagua._core.group.connections import Connections
from bagua._core.state.weights_check import digest

__all__ = ["clear_non_finite", "ranks_with_non_finite", "weights_digest"]


def weights_digest(weights: Mapping[str, torch.Tensor]) -> int:
    """63 bits of names and exact values."""
    text = " ".join(f"{name}={int(digest(weights[name]))}" for name in sorted(weights))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


def ranks_with_non_finite(connections: Connections, here: bool) -> list[int]:
    """The ranks whose weights hold NaN or infinity. All call it; ``here``: this one's do."""
    flags = connections.gather_numbers("looking for ranks with NaN or infinity", int(here))
    return [rank for rank, flag in enumerate(flags) if flag]


def clear_non_finite(optimizers: Iterable[torch.optim.Optimizer]) -> None:
    """Make NaN and infinity in the state of ``optimizers`` zero."""
    for optimizer in optimizers:
        for state in optimizer.state.values():
            for value in state.values():
                if isinstance(value, torch.Tensor) and value.is_floating_point():
                    value.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)
