"""Base class of all aggregations: copies modules into flat tensors and back."""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
import torch.distributed as dist
from bagua import _C
from bagua._core.group import environment as env
from bagua._core.group.connections import MOVED, Connections, fingerprint, total_traffic
from bagua._core.group.job import ensure_initialised
from bagua._core.group.process_group import BaguaProcessGroup, get_default_group
from torch.distributed import distributed_c10d as c10d

from mlbench_core.aggregation.pytorch._staging import Staging

__all__ = ["Aggregation", "CanonicalOp", "Denominator", "Kind", "Named", "canonical_op"]

Denominator = torch.Tensor | float | None
Kind = Literal["gradient", "weight"]
#: (Name, tensor), in the order in which they are staged.
Named = list[tuple[str, torch.Tensor]]
CanonicalOp = Literal["avg_world", "avg_custom", "sum", "min", "max"]

_NAMES: dict[str, CanonicalOp] = {
    "avg_world": "avg_world",
    "avg": "avg_world",
    "avg_custom": "avg_custom",
    "custom_avg": "avg_custom",
    "sum": "sum",
    "min": "min",
    "max": "max",
}

# States of one tensor on one rank. The highest of all ranks' states counts.
_ABSENT, _PRESENT, _REFUSED = 0, 1, 2

_FINGERPRINT_BYTES = 8
# The first message has one size whatever the model, or ranks with different models would hang.
_FIRST_MESSAGE_STATES = 1008


class Aggregation(ABC):
    """Aggregates the gradients or weights of a model over ranks.

    A subclass says how one tensor is aggregated, in :meth:`_agg`. Everything else is here: all
    tensors of one dtype and device travel as one flat tensor (``by_model``) or each by itself
    (``by_layer``), and the results are written into the tensors' own memory, so that no
    ``data_ptr()`` changes.

    All ranks make the same calls with the same model, operation and arguments; where they do not,
    every rank gets a ``BaguaMismatchError`` that names the difference. An exception leaves all
    tensors unchanged. Connections are made by the first aggregation.

    Args:
        use_cuda: communicate CUDA tensors directly; otherwise through CPU memory.
        process_group: default: all ranks.
    """

    def __init__(
        self, use_cuda: bool = False, *, process_group: BaguaProcessGroup | None = None
    ) -> None:
        self.use_cuda = use_cuda
        self._process_group = process_group
        self._joined: Connections | None = None
        self._communicators: dict[tuple[str, str], _C.CountingCommunicator] = {}
        self._staging = Staging()

    # For subclasses.

    @abstractmethod
    def _agg(self, data: torch.Tensor, op: str, denom: Denominator = None) -> torch.Tensor:
        """Aggregate one tensor.

        Args:
            data: dense and contiguous; this object's own memory, which may be changed in place.
            op: the operation, as the caller wrote it.
            denom: the denominator, for ``avg_custom``.

        Returns:
            The aggregated tensor, of as many elements as ``data``; it may be ``data``.
        """

    def _check(self, op: str, denom: Denominator) -> None:
        """Raise ValueError or NotImplementedError for what :meth:`_agg` cannot do.

        Called before anything is sent or changed.
        """
        del op, denom  # a subclass that says nothing lets everything through to its _agg

    def _check_group(self, connections: Connections) -> None:
        """Raise ValueError where the arguments do not fit the group; called once it is known."""
        del connections

    def _describe(self, op: str, denom: Denominator) -> list[str]:
        """Lines that must be equal on all ranks."""
        return [f"op {op}"]

    def _refusal(self, dtype: torch.dtype, op: str) -> str:
        """Why tensors of this dtype cannot be aggregated; empty if they can be."""
        del dtype, op
        return ""

    def _expected_size(self) -> int | None:
        """The number of ranks that the caller spoke of, if any."""
        return None

    # For users.

    def agg_grad(self, by_layer: bool = False) -> Callable[..., None]:
        """The function ``(model, op, denom=None)`` that aggregates gradients in place."""
        return self._agg_gradients_by_layer if by_layer else self._agg_gradients_by_model

    def agg_model(
        self, by_layer: bool = False, *, include_buffers: bool = False
    ) -> Callable[..., None]:
        """The function ``(model, op, denom=None)`` that aggregates weights in place.

        Args:
            include_buffers: floating-point buffers too, such as running means.
        """
        chosen = self._agg_weights_by_layer if by_layer else self._agg_weights_by_model
        return functools.partial(chosen, include_buffers=True) if include_buffers else chosen

    def traffic(self) -> dict[str, int]:
        """Traffic of this object until now, in bytes and messages."""
        total = total_traffic(self._communicators.values())
        return {name: total[name] for name in MOVED}

    # Steps of a call.

    @torch.no_grad()
    def _run(
        self,
        model: torch.nn.Module,
        op: str,
        denom: Denominator = None,
        *,
        by_layer: bool,
        kind: Kind,
        include_buffers: bool = False,
    ) -> None:
        """1. Check the arguments. 2. Agree on the call and on the tensors that there are. 3. A rank
        without a gradient that another rank has brings zeros. 4. Aggregate; 5. such a rank keeps
        the result as its gradient.
        """
        # 1.
        self._check(op, denom)
        # 2.
        what = f"{type(self).__name__} of {kind}s"
        arguments = ["by layer" if by_layer else "by model", *self._describe(op, denom)]
        candidates = _candidates_of(
            model, kind, include_buffers, lambda dtype: self._refusal(dtype, op)
        )
        control = self._communicator("agreement", "cpu")
        present = _agree_on(self._connections(), control, what, arguments, candidates)
        # 3.
        made: list[tuple[torch.Tensor, torch.Tensor]] = []
        named: Named = []
        for candidate in present:
            tensor = candidate.tensor
            if tensor is None:
                tensor = torch.zeros_like(candidate.owner)
                made.append((candidate.owner, tensor))
            named.append((candidate.name, tensor))
        # 4.
        if named:
            self._aggregate(named, by_layer, op, denom, kind=kind)
        # 5.
        for owner, gradient in made:
            owner.grad = gradient

    # mlbench-core's names.
    _agg_gradients_by_model = functools.partialmethod(_run, by_layer=False, kind="gradient")
    _agg_gradients_by_layer = functools.partialmethod(_run, by_layer=True, kind="gradient")
    _agg_weights_by_model = functools.partialmethod(_run, by_layer=False, kind="weight")
    _agg_weights_by_layer = functools.partialmethod(_run, by_layer=True, kind="weight")

    def _aggregate(
        self,
        named: Named,
        by_layer: bool,
        op: str,
        denom: Denominator,
        *,
        kind: Kind,
    ) -> None:
        """Replace the tensors, in place. ``named`` has the same names and shapes on all ranks."""

        def aggregate(data: torch.Tensor) -> None:
            result = self._agg(data, op, denom)
            if not isinstance(result, torch.Tensor) or result.numel() != data.numel():
                raise TypeError(
                    f"{type(self).__name__}._agg must return the aggregated tensor of "
                    f"{data.numel()} elements, it returned {_text(result)}"
                )
            if result is not data:
                data.copy_(result.reshape(data.shape))

        tensors = [tensor for _, tensor in named]
        self._staging.run(tensors, by_layer, self._device_for, aggregate)

    def _device_for(self, tensor: torch.Tensor) -> torch.device:
        through_host = tensor.is_cuda and not self.use_cuda
        return torch.device("cpu") if through_host else tensor.device

    def _connections(self) -> Connections:
        """The group, checked against the arguments when it is first asked for."""
        if self._joined is None:
            connections = _member_transport(self._process_group, self._expected_size())
            self._check_group(connections)
            self._joined = connections
        return self._joined

    def _communicator(self, purpose: str, device: torch.device | str) -> _C.CountingCommunicator:
        """This object's own communicator for a purpose, connected when it is first asked for."""
        connections = self._connections()
        key = (purpose, connections.label(device))
        if key not in self._communicators:
            # All members make theirs in the same order.
            name = f"aggregation/{connections.next_wrap()}/{purpose}/{connections.label(device)}"
            self._communicators[key] = connections.connect(name, device)
        return self._communicators[key]


def canonical_op(op: str) -> CanonicalOp:
    """The one name of an operation: ``avg`` is ``avg_world``, ``custom_avg`` is ``avg_custom``."""
    if op not in _NAMES:
        raise NotImplementedError(f"op={op!r} is not known; there are {', '.join(_NAMES)}")
    return _NAMES[op]


@dataclass(frozen=True)
class _Candidate:
    """A tensor that may be aggregated."""

    name: str
    owner: torch.Tensor  # the parameter, or the buffer
    tensor: torch.Tensor | None  # its gradient, if there is one, or itself without autograd
    refusal: str  # why the tensor cannot be aggregated; empty if it can be

    def describe(self) -> str:
        return f"{self.name} {list(self.owner.shape)} {self.owner.dtype}"


def _candidates_of(
    model: torch.nn.Module, kind: Kind, buffers: bool, refusal_of: Callable[[torch.dtype], str]
) -> list[_Candidate]:
    """The parameters or their gradients, tied ones once, in the module's order.

    ``buffers``: the floating-point buffers too.
    """
    owners: dict[str, torch.Tensor] = dict(model.named_parameters())
    if buffers:
        owners |= {name: b for name, b in model.named_buffers() if b.is_floating_point()}
    found = []
    for name, owner in owners.items():
        tensor = owner.grad if kind == "gradient" else owner.detach()
        refusal = ""
        if tensor is not None:
            refusal = _refusal_of(tensor, owner.dtype) or refusal_of(tensor.dtype)
        found.append(_Candidate(name, owner, tensor, refusal))
    return found


def _refusal_of(tensor: torch.Tensor, dtype: torch.dtype) -> str:
    if tensor.is_meta:
        return "it is on the meta device and has no values; materialise the model first"
    if tensor.is_complex():
        return f"complex numbers ({tensor.dtype}) are not supported; use torch.view_as_real"
    if tensor.layout != torch.strided:
        return f"it is sparse ({tensor.layout}); make it dense, e.g. nn.Embedding(sparse=False)"
    if tensor.dtype != dtype:
        return f"it is {tensor.dtype}, the parameter is {dtype}; convert it first"
    if any(n > 1 and stride == 0 for n, stride in zip(tensor.shape, tensor.stride(), strict=True)):
        return f"elements share memory (strides {list(tensor.stride())}); use .contiguous()"
    return ""


def _agree_on(
    connections: Connections,
    communicator: _C.Communicator,
    what: str,
    arguments: list[str],
    candidates: Sequence[_Candidate],
) -> list[_Candidate]:
    """The candidates that some rank has. All ranks call it, and raise where they differ.

    ``arguments`` describe the call ``what``; equal on all ranks, as names, shapes and dtypes are.
    """
    states = [
        _REFUSED if candidate.refusal else _ABSENT if candidate.tensor is None else _PRESENT
        for candidate in candidates
    ]
    if connections.size > 1:
        lines = [what, *arguments, *(candidate.describe() for candidate in candidates)]
        states = _highest_states(connections, communicator, what, lines, states)
    for candidate, state in zip(candidates, states, strict=True):
        if state == _REFUSED:
            why = candidate.refusal or "another rank cannot aggregate it, and says why"
            raise ValueError(f"{what}: '{candidate.name}': {why}")
    return [c for c, state in zip(candidates, states, strict=True) if state == _PRESENT]


def _highest_states(
    connections: Connections,
    communicator: _C.Communicator,
    what: str,
    lines: list[str],
    states: Sequence[int],
) -> list[int]:
    """The highest state over ranks of each tensor.

    1. Every rank sends the fingerprint of ``lines``, its complement and the first 1008 states, in
       one MAX all_reduce of 1 KiB.
    2. The highest byte and the complement of the lowest add up to 255 only where all are equal.
    3. If they do not, the ranks compare the lines and raise. If there are more states, a second
       all_reduce brings them.
    """
    # 1.
    own = fingerprint(lines).to_bytes(_FINGERPRINT_BYTES, "little")
    first = bytes(states[:_FIRST_MESSAGE_STATES]).ljust(_FIRST_MESSAGE_STATES, b"\0")
    highest = _maximum(communicator, own + bytes(255 - byte for byte in own) + first)
    # 2.
    head = highest[: 2 * _FINGERPRINT_BYTES]
    pairs = zip(head[:_FINGERPRINT_BYTES], head[_FINGERPRINT_BYTES:], strict=True)
    # 3.
    if any(high + complement_of_low != 255 for high, complement_of_low in pairs):
        connections.agree(what, lines)
    agreed = highest[len(head) :][: len(states)]
    if len(states) > _FIRST_MESSAGE_STATES:
        agreed += _maximum(communicator, bytes(states[_FIRST_MESSAGE_STATES:]))
    return agreed


def _maximum(communicator: _C.Communicator, values: bytes) -> list[int]:
    message = torch.frombuffer(bytearray(values), dtype=torch.uint8)
    communicator.all_reduce(message, _C.ReduceOp.MAX)
    result: list[int] = message.tolist()
    return result


def _member_transport(
    process_group: BaguaProcessGroup | None, world_size: int | None
) -> Connections:
    """The connections of this process to the group's members. All members call it.

    Without a group it is bagua's default one. A process without either is alone if it declares that
    by ``world_size=1``, or if no launcher says otherwise.
    """
    if process_group is not None:
        connections = process_group.connections
    elif dist.is_initialized():
        ensure_initialised()
        connections = get_default_group().connections
    elif world_size == 1 or (world_size is None and env.get_world_size() == 1):
        lonely = dist.HashStore()  # type: ignore[attr-defined]
        return Connections(lonely, 0, [0], c10d.default_pg_timeout)
    else:
        raise RuntimeError(
            "there is no process group to aggregate in: call "
            "torch.distributed.init_process_group() or bagua.init_process_group() before the "
            "first aggregation"
        )
    if connections.rank < 0:
        raise RuntimeError(
            f"this process is not a member of the group with ranks {connections.ranks}: aggregate "
            "on the members only, or pass another process_group"
        )
    return connections


def _text(result: object) -> str:
    if isinstance(result, torch.Tensor):
        return f"one of {result.numel()}"
    return f"a {type(result).__name__}"
