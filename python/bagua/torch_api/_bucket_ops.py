"""What a bucket does when it is ready: descriptions, from which ``_plan`` makes the C++ ops."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from bagua.torch_api.communication import BaguaProcessGroup

if TYPE_CHECKING:
    from bagua.torch_api.bucket import BaguaBucket

__all__ = [
    "BucketOp",
    "CentralizedOp",
    "DecentralizedOp",
    "MomentumOp",
    "PythonOp",
    "check_peer_selection_mode",
]

#: How a rank chooses with whom it averages.
_PEER_SELECTION_MODES = ("all", "shift_one")


@dataclass(frozen=True)
class CentralizedOp:
    """Sum or mean over all ranks, exact or through a codec."""

    hierarchical: bool
    average: bool
    codec: str | None
    group: BaguaProcessGroup | None


def check_peer_selection_mode(mode: str) -> None:
    """Raise ValueError, naming ``mode`` and the known ones, if it is none of them."""
    if mode not in _PEER_SELECTION_MODES:
        raise ValueError(
            f"unknown peer_selection_mode '{mode}'; known: {', '.join(_PEER_SELECTION_MODES)}"
        )


def _zero() -> torch.Tensor:
    return torch.zeros((), dtype=torch.int64)


@dataclass(frozen=True, eq=False)
class DecentralizedOp:
    """The mean with all ranks or with one peer, in a memory beside the bucket's.

    Attributes:
        peer_weight: the result; one dimension, as many elements and the dtype of the bucket.
        communications: how often the op has run, one int64, written by the op; whoever goes on
            from a checkpoint sets it before the next communication.

    Raises:
        ValueError: unknown ``peer_selection_mode``.
    """

    peer_weight: torch.Tensor
    hierarchical: bool
    peer_selection_mode: str
    group: BaguaProcessGroup | None
    communications: torch.Tensor = field(default_factory=_zero)

    def __post_init__(self) -> None:
        check_peer_selection_mode(self.peer_selection_mode)

    def copy_back_peer_weight(self, bucket: BaguaBucket) -> None:
        """Give the tensors of ``bucket`` the averaged values: after waiting for it."""
        with torch.no_grad():
            bucket.backend_tensor.copy_(self.peer_weight)
        bucket.copy_out()


@dataclass(frozen=True, eq=False)
class MomentumOp:
    """Gradients become momenta in place: ``beta * memory + (1 - beta) * gradient``.

    Attributes:
        memories: per tensor of the bucket, of its shape, dtype and device; only read.
        offsets: of the tensors in the bucket, in elements.
        strides: of the tensors in the bucket.
        betas: one f64 per tensor, on CPU; may be written between two rounds.
    """

    memories: list[torch.Tensor]
    offsets: list[int]
    strides: list[list[int]]
    betas: torch.Tensor


@dataclass(frozen=True)
class PythonOp:
    """A user's function, called with the bucket's name on the lane's thread."""

    function: Callable[[str], None]


#: Whatever a bucket can do.
BucketOp = CentralizedOp | DecentralizedOp | MomentumOp | PythonOp
