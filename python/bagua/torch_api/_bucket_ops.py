"""What a bucket does when it is ready: descriptions, from which ``_plan`` makes the C++ ops."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from bagua import _C
from bagua.torch_api._low_rank import Matrices
from bagua.torch_api.communication import BaguaProcessGroup

if TYPE_CHECKING:
    from bagua.torch_api.bucket import BaguaBucket

__all__ = [
    "AsynchronousOp",
    "BucketOp",
    "CentralizedOp",
    "CommHookOp",
    "DecentralizedOp",
    "LaneOp",
    "LowPrecisionDecentralizedOp",
    "LowRankOp",
    "MomentumOp",
    "PythonOp",
    "RowsOp",
    "SparseOp",
    "check_asynchronous_mode",
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


def check_asynchronous_mode(mode: str) -> None:
    """Raise ValueError, naming ``mode``, unless asynchronous averaging has it."""
    if mode != "all":
        raise ValueError(f"asynchronous averaging has peer_selection_mode 'all' only, not '{mode}'")


def _zero() -> torch.Tensor:
    return torch.zeros((), dtype=torch.int64, device="cpu")


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


@dataclass(frozen=True, eq=False)
class CommHookOp:
    """A communication hook of torch's DistributedDataParallel: ``hook(state, GradBucket)``."""

    hook: Callable[..., Any]
    state: Any


@dataclass(eq=False)
class AsynchronousOp:
    """The mean of all ranks' weights, again and again while they are trained.

    The weights are locked by themselves from a training forward to the end of the optimizer's step;
    the methods are for algorithms that need more.
    """

    sync_interval_ms: int
    group: BaguaProcessGroup | None
    lane: _C.PeriodicLane | None = None  # made with the plan

    def _made(self) -> _C.PeriodicLane:
        if self.lane is None:
            raise RuntimeError("the operation's bucket is not part of a wrapped module yet")
        return self.lane

    def lock_weight(self) -> None:
        """No average is applied from now on."""
        self._made().enter()

    def unlock_weight(self) -> None:
        """Averages may be applied."""
        self._made().leave()

    def abort(self) -> None:
        """End averaging: returns once every rank has called it."""
        self._made().pause()

    def reset(self) -> None:
        """Average again. Every rank calls it."""
        self._made().resume()

    def check(self) -> None:
        """Raise the BaguaError that ended averaging, if one did."""
        self._made().check()

    def get_status(self) -> bool:
        """Whether averaging goes on."""
        return self._made().running


@dataclass(frozen=True, eq=False)
class LowPrecisionDecentralizedOp:
    """Mixing with both neighbours on the ring, through compressed differences.

    Attributes:
        weight: what the others believe this rank to hold; f32, one dimension, as long as the
            bucket. Equal to the neighbours' replicas of this rank, bit for bit; changed by the op.
        left_peer_weight: the replica of the left neighbour's ``weight``.
        right_peer_weight: of the right neighbour's.
    """

    weight: torch.Tensor
    left_peer_weight: torch.Tensor
    right_peer_weight: torch.Tensor
    hierarchical: bool
    codec: str
    group: BaguaProcessGroup | None

    def replicas(self) -> dict[str, torch.Tensor]:
        """All three, by what they are called in a state dict."""
        return {
            "weight": self.weight,
            "left": self.left_peer_weight,
            "right": self.right_peer_weight,
        }


@dataclass(frozen=True, eq=False)
class LowRankOp:
    """The mean over all ranks, of matrices approximated by power iteration (PowerSGD).

    Attributes:
        memory: errors (as long as the bucket, or empty), queries, and the number of communications.
        matrices: by name of the tensor: (offset, rows, columns, rank) in the bucket.
    """

    numel: int
    matrices: Matrices
    memory: _C.RoundMemory
    hierarchical: bool
    warm_start: bool
    error_feedback: bool
    seed: int
    group: BaguaProcessGroup | None


@dataclass(frozen=True, eq=False)
class SparseOp:
    """The mean over all ranks of some elements: the largest, or others at random.

    Attributes:
        flat: the bucket's memory.
        k: the elements that are sent.
        memory: errors (as long as the bucket, or empty), and the number of communications.
    """

    flat: torch.Tensor
    k: int
    memory: _C.RoundMemory
    hierarchical: bool
    random_sparse: bool
    seed: int
    group: BaguaProcessGroup | None


@dataclass(frozen=True, eq=False)
class RowsOp:
    """Sum or mean over all ranks of a gradient that holds some rows only, exact.

    Attributes:
        gradient: what the slot and the C++ op share.
        sizes: of the parameter, the number of rows first.
    """

    gradient: _C.SparseGradient
    sizes: list[int]
    average: bool
    group: BaguaProcessGroup | None


#: What needs nothing but its description to become an op.
LaneOp = (
    AsynchronousOp
    | CentralizedOp
    | DecentralizedOp
    | LowRankOp
    | LowPrecisionDecentralizedOp
    | MomentumOp
    | PythonOp
    | RowsOp
    | SparseOp
)

#: Whatever a bucket can do.
BucketOp = LaneOp | CommHookOp
