"""Aggregations of gradients with residuals by parameter."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from bagua import _C
from bagua._core.compression.error_state import error_key, load_memory, ranks_text
from bagua._core.group.process_group import BaguaProcessGroup
from bagua._core.state.saved_values import check_state, saved_count, saved_tensor

from mlbench_core.aggregation.pytorch._staging import aggregated_together
from mlbench_core.aggregation.pytorch.aggregation import (
    Aggregation,
    Denominator,
    Kind,
    canonical_op,
)

__all__ = ["ErrorFeedbackAggregation", "Part"]


@dataclass
class Part:
    """Tensors that are aggregated together, in one flat tensor.

    Attributes:
        places: by name of the parameter: its offset and shape in the flat tensor.
        op: aggregates it.
        memory: of the op; its first tensor is the residual, as long as the flat one, or empty.
    """

    places: dict[str, tuple[int, torch.Size]]
    op: _C.BucketOp
    memory: _C.RoundMemory

    def errors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(name, error) of every parameter, in its shape. Writing into them counts."""
        error = self.memory.value(0)
        for name, (offset, shape) in self.places.items() if error.numel() else ():
            yield name, error[offset : offset + shape.numel()].view(shape)


class ErrorFeedbackAggregation(Aggregation):
    """Base class with residuals by name of the parameter, for any grouping of the tensors.

    A call in which a gradient is not finite on some rank passes non-finite values on and leaves all
    residuals unchanged.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        use_cuda: bool = False,
        *,
        process_group: BaguaProcessGroup | None = None,
    ) -> None:
        super().__init__(use_cuda=use_cuda, process_group=process_group)
        self._parameters = {
            name: (p.shape, torch.promote_types(p.dtype, torch.float32))
            for name, p in model.named_parameters()
            if p.is_floating_point()
        }
        self._calls = 0
        self._key: tuple[Any, ...] = ()
        self._parts: list[Part] = []
        # State of parameters that are in no part, in the form of a state dict.
        self._kept: dict[str, torch.Tensor] = {}

    # For subclasses.

    @abstractmethod
    def _make_part(
        self,
        places: dict[str, tuple[int, torch.Size]],
        flat: torch.Tensor,
        outcome: _C.RoundOutcome,
    ) -> Part:
        """The op and the empty memory for tensors that lie in a flat tensor like ``flat``."""

    def _equal_memory(self, part: Part) -> Iterator[tuple[str, torch.Tensor]]:
        """(key, tensor) of a part's state that is equal on all ranks; writes take effect."""
        raise NotImplementedError

    # For users.

    def agg_model(
        self, by_layer: bool = False, *, include_buffers: bool = False
    ) -> Callable[..., None]:
        """Refused: parts of the weights that are not sent would be lost.

        Raises:
            NotImplementedError: always.
        """
        self._refuse_weights()

    def state_dict(self) -> dict[str, Any]:
        """Residuals and counters; call it on every rank.

        Returns:
            ``ranks``, those with residuals; ``calls``, their number; ``rank<r>/error/<name>`` of
            every parameter that has been aggregated, of its shape and f32 (f64); and further
            state of the class.
        """
        connections = self._connections()
        state: dict[str, Any] = {"ranks": ranks_text(range(connections.size)), "calls": self._calls}
        for key, value in self._remembered().items():
            kind, _, name = key.partition("/")
            state[error_key(connections.rank, name) if kind == "error" else key] = value
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore :meth:`state_dict`, on every rank.

        With another number of ranks than saved it, give every rank the dicts of all old ranks
        merged into one (``a | b | ...``): each then starts from the mean of their
        residuals.

        Raises:
            ValueError: the state is of another class, model or number of ranks; names the entry.
        """
        check_state(state, type(self).__name__)
        calls = saved_count(state, "calls", type(self).__name__)
        connections = self._connections()
        names = {key.split("/", 2)[2] for key in state if "/error/" in key}
        unknown = sorted(names - set(self._parameters))
        if unknown:
            raise ValueError(f"the state has errors of {unknown}, which the model does not have")
        errors = {}
        for name in sorted(names):
            shape, dtype = self._parameters[name]
            errors[name] = torch.zeros(shape, dtype=dtype, device="cpu")
        # Their shapes are compared when the next call has places for them.
        others = {
            key: value.detach().clone()
            for key, value in state.items()
            if isinstance(value, torch.Tensor) and "/error/" not in key
        }
        for key, value in others.items():
            saved_tensor(others, key, value, "load what this class saved")
        load_memory(
            state,
            equal=(),
            errors=errors.items(),
            rank=connections.rank,
            ranks=range(connections.size),
        )
        self._kept = {f"error/{name}": error for name, error in errors.items()}
        self._kept |= others
        self._key, self._parts = (), []
        self._calls = calls

    # Steps of a call.

    def _check(self, op: str, denom: Denominator) -> None:
        if canonical_op(op) != "avg_world":
            raise NotImplementedError(
                f"{type(self).__name__} has the operations avg_world and avg, not '{op}'"
            )

    def _agg(self, data: torch.Tensor, op: str, denom: Denominator = None) -> torch.Tensor:
        """Refused: memory is kept by name, which a tensor alone does not have."""
        raise TypeError(
            f"{type(self).__name__} remembers by name of parameter; call agg_grad() with the model"
        )

    def _aggregate(
        self,
        named: list[tuple[str, torch.Tensor]],
        by_layer: bool,
        op: str,
        denom: Denominator,
        *,
        kind: Kind,
    ) -> None:
        # Checks
        if kind != "gradient":
            self._refuse_weights()
        for name, tensor in named:
            known = self._parameters.get(name)
            if known is None or known[0] != tensor.shape:
                said = f"of shape {tuple(known[0])}" if known else "without it"
                raise ValueError(
                    f"{type(self).__name__} was made with a model {said}, the model to aggregate "
                    f"has '{name}' of shape {tuple(tensor.shape)}; make one for this model"
                )

        self._prepare(named, by_layer)
        self._calls += 1
        parts = iter(self._parts)

        def aggregate(data: torch.Tensor) -> None:
            part = next(parts)
            part.op.run(data.view(-1), step=self._calls, bucket=next(iter(part.places)))

        tensors = [tensor for _, tensor in named]
        self._staging.run(tensors, by_layer, self._device_for, aggregate)

    def _prepare(self, named: list[tuple[str, torch.Tensor]], by_layer: bool) -> None:
        """Have parts for these tensors, in the order in which they are staged."""
        key = (by_layer, *((name, t.dtype, t.device) for name, t in named))
        if key == self._key:
            return
        remembered = self._remembered()
        outcome = _C.RoundOutcome()
        tensors = [tensor for _, tensor in named]
        parts = [
            self._part_of([named[i] for i in together], outcome)
            for together in aggregated_together(tensors, by_layer)
        ]
        self._kept, self._parts, self._key = remembered, parts, key
        for part in parts:
            own = [(f"error/{name}", error) for name, error in part.errors()]
            for entry, view in (*self._equal_memory(part), *own):
                if entry in remembered:
                    view.copy_(saved_tensor(remembered, entry, view, "load what this class saved"))

    def _part_of(self, together: list[tuple[str, torch.Tensor]], outcome: _C.RoundOutcome) -> Part:
        places, offset = {}, 0
        for name, tensor in together:
            places[name] = (offset, tensor.shape)
            offset += tensor.numel()
        first = together[0][1]
        flat = torch.empty(offset, dtype=first.dtype, device=self._device_for(first))
        return self._make_part(places, flat, outcome)

    def _remembered(self) -> dict[str, torch.Tensor]:
        """Copies of all memory by key: ``error/<name>`` and the keys of the subclass."""
        current = dict(self._kept)
        for part in self._parts:
            current |= {f"error/{name}": error.clone() for name, error in part.errors()}
            current |= {key: value.clone() for key, value in self._equal_memory(part)}
        return current

    def _refuse_weights(self) -> NoReturn:
        raise NotImplementedError(
            f"{type(self).__name__} aggregates gradients (agg_grad): of weights, what is not sent "
            "would be missing. Use AllReduceAggregation or DecentralizedAggregation for weights."
        )
