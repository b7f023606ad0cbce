"""Base class of all aggregations: copies modules into flat tensors and back."""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable

import torch
from bagua import _C
from bagua._core.group.connections import MOVED, Connections, total_traffic
from bagua._core.group.process_group import BaguaProcessGroup

from mlbench_core.aggregation.pytorch import _group
from mlbench_core.aggregation.pytorch._agreement import agree
from mlbench_core.aggregation.pytorch._ops import CanonicalOp, canonical_op
from mlbench_core.aggregation.pytorch._staging import Staging
from mlbench_core.aggregation.pytorch._tensors import Candidate, Kind, candidates_of

__all__ = ["Aggregation", "CanonicalOp", "Denominator", "Kind", "canonical_op"]

Denominator = torch.Tensor | float | None


class Aggregation(ABC):
    """Aggregates the gradients or weights of a model over ranks.

    A subclass says how one tensor is aggregated, in :meth:`_agg`. Everything else is here: all
    tensors of one dtype and device travel as one flat tensor (``by_model``) or each by itself
    (``by_layer``), and the results are written into the tensors' own memory, so that no
    ``data_ptr()`` changes.

    All ranks make the same calls with the same model, operation and arguments; where they do not,
    every rank gets a ``BaguaMismatchError`` that names the difference. An exception leaves all
    tensors as they were. Connections are made by the first aggregation.

    Args:
        use_cuda: communicate CUDA tensors as they are; otherwise through CPU memory.
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

    def _agg_gradients_by_model(
        self, model: torch.nn.Module, op: str, denom: Denominator = None
    ) -> None:
        """Aggregate all gradients at once, in place."""
        self._run(model, op, denom, by_layer=False, kind="gradient")

    def _agg_gradients_by_layer(
        self, model: torch.nn.Module, op: str, denom: Denominator = None
    ) -> None:
        """Aggregate each parameter's gradient by itself, in place."""
        self._run(model, op, denom, by_layer=True, kind="gradient")

    def _agg_weights_by_model(
        self,
        model: torch.nn.Module,
        op: str,
        denom: Denominator = None,
        *,
        include_buffers: bool = False,
    ) -> None:
        """Aggregate all parameters at once, in place."""
        self._run(model, op, denom, by_layer=False, kind="weight", buffers=include_buffers)

    def _agg_weights_by_layer(
        self,
        model: torch.nn.Module,
        op: str,
        denom: Denominator = None,
        *,
        include_buffers: bool = False,
    ) -> None:
        """Aggregate each parameter by itself, in place."""
        self._run(model, op, denom, by_layer=True, kind="weight", buffers=include_buffers)

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
        denom: Denominator,
        *,
        by_layer: bool,
        kind: Kind,
        buffers: bool = False,
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
        candidates = candidates_of(model, kind, buffers, lambda dtype: self._refusal(dtype, op))
        present = self._agree(what, arguments, candidates)
        # 3.
        made: list[tuple[torch.Tensor, torch.Tensor]] = []
        named: list[tuple[str, torch.Tensor]] = []
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

    def _agree(
        self, what: str, arguments: list[str], candidates: list[Candidate]
    ) -> list[Candidate]:
        connections = self._connections()
        control = self._communicator("agreement", "cpu")
        return agree(connections, control, what, arguments, candidates)

    def _aggregate(
        self,
        named: list[tuple[str, torch.Tensor]],
        by_layer: bool,
        op: str,
        denom: Denominator,
        *,
        kind: Kind,
    ) -> None:
        """Replace the tensors, in place. ``named`` has the same names and shapes on all ranks.

        ``kind``: ``"gradient"`` or ``"weight"``.
        """

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
        """The device on which a tensor is communicated."""
        through_host = tensor.is_cuda and not self.use_cuda
        return torch.device("cpu") if through_host else tensor.device

    def _connections(self) -> Connections:
        """The group, checked against the arguments when it is first asked for."""
        if self._joined is None:
            expected = self._expected_size()
            connections = _group.member_transport(self._process_group, world_size=expected)
            self._check_group(connections)
            self._joined = connections
        return self._joined

    def _communicator(self, purpose: str, device: torch.device | str) -> _C.CountingCommunicator:
        """This object's own communicator for a purpose, connected when it is first asked for."""
        connections = self._connections()
        key = (purpose, connections.label(device))
        if key not in self._communicators:
            self._communicators[key] = _group.communicator(connections, purpose, device)
        return self._communicators[key]


def _text(result: object) -> str:
    if isinstance(result, torch.Tensor):
        return f"one of {result.numel()}"
    return f"a {type(result).__name__}"
