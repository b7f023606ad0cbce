"""Aggregations of gradients with residuals by parameter."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from bagua import _C
from bagua._core.group.process_group import BaguaProcessGroup
from bagua._core.state.ledger import Ledger, Page
from bagua._core.state.saved_values import check_state, saved_tensor

from mlbench_core.aggregation.pytorch._staging import aggregated_together
from mlbench_core.aggregation.pytorch.aggregation import (
    Aggregation,
    Denominator,
    Kind,
    canonical_op,
)

__all__ = ["ErrorFeedbackAggregation", "Part"]


@dataclass(frozen=True, eq=False)
class Part:
    """Tensors that are aggregated together, in one flat tensor.

    Attributes:
        op: aggregates it.
        page: its state.
    """

    op: _C.BucketOp
    page: Page


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
            name: p.shape for name, p in model.named_parameters() if p.is_floating_point()
        }
        self._key: tuple[Any, ...] = ()
        self._parts: list[Part] = []
        self._ledger = Ledger(type(self).__name__, self._connections, counters=["calls"])

    # For subclasses.

    @abstractmethod
    def _make_part(
        self,
        flat: torch.Tensor,
        named: list[tuple[str, torch.Tensor]],
        outcome: _C.RoundOutcome,
    ) -> Part:
        """The op and an empty page for tensors that lie in a flat tensor like ``flat``.

        ``named``: (name of the parameter, place in ``flat``).
        """

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
            ``calls``, their number; after the first one ``ranks``, those with residuals;
            ``communications``, the calls in which all gradients were finite; and
            ``rank<r>/error/<name>`` of every parameter that has been aggregated, of its shape and
            f32 (f64).
        """
        return self._ledger.state()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore :meth:`state_dict`, on every rank.

        With another number of ranks than saved it, give every rank the dicts of all old ranks
        merged into one (``a | b | ...``): each then starts from the mean of their
        residuals.

        Raises:
            ValueError: the state is of another class, model or number of ranks; names the entry.
        """
        check_state(state, type(self).__name__)
        named = {key: key.split("/", 2)[2] for key in state if "/error/" in key}
        unknown = sorted(set(named.values()) - set(self._parameters))
        if unknown:
            raise ValueError(f"the state has errors of {unknown}, which the model does not have")
        for key, name in named.items():
            like = torch.empty(self._parameters[name], device="meta")
            saved_tensor(state, key, like, "load what this class saved")
        self._ledger.restore(state, [])
        self._key, self._parts = (), []

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
            if known is None or known != tensor.shape:
                said = "without it" if known is None else f"of shape {tuple(known)}"
                raise ValueError(
                    f"{type(self).__name__} was made with a model {said}, the model to aggregate "
                    f"has '{name}' of shape {tuple(tensor.shape)}; make one for this model"
                )

        self._prepare(named, by_layer)
        self._ledger.counters["calls"] += 1
        call = self._ledger.counters["calls"]
        parts = iter(self._parts)

        def aggregate(data: torch.Tensor) -> None:
            part = next(parts)
            part.op.run(data.view(-1), step=call, bucket=part.page.names[0])

        tensors = [tensor for _, tensor in named]
        self._staging.run(tensors, by_layer, self._device_for, aggregate)

    def _prepare(self, named: list[tuple[str, torch.Tensor]], by_layer: bool) -> None:
        """Have parts for these tensors, in the order in which they are staged."""
        key = (by_layer, *((name, t.dtype, t.device) for name, t in named))
        if key == self._key:
            return
        outcome = _C.RoundOutcome()
        tensors = [tensor for _, tensor in named]
        parts = [
            self._part_of([named[i] for i in together], outcome)
            for together in aggregated_together(tensors, by_layer)
        ]
        self._ledger.take(*(part.page for part in parts))
        self._parts, self._key = parts, key

    def _part_of(self, together: list[tuple[str, torch.Tensor]], outcome: _C.RoundOutcome) -> Part:
        first, numel = together[0][1], sum(tensor.numel() for _, tensor in together)
        flat = torch.empty(numel, dtype=first.dtype, device=self._device_for(first))
        pieces = flat.split([tensor.numel() for _, tensor in together])
        views = [
            (name, piece.view(tensor.shape))
            for (name, tensor), piece in zip(together, pieces, strict=True)
        ]
        return self._make_part(flat, views, outcome)

    def _refuse_weights(self) -> NoReturn:
        raise NotImplementedError(
            f"{type(self).__name__} aggregates gradients (agg_grad): of weights, what is not sent "
            "would be missing. Use AllReduceAggregation or DecentralizedAggregation for weights."
        )
