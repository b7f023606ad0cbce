"""Aggregations of gradients that send a part of them, with residuals by parameter."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import Any, NoReturn

import torch
from bagua import _C
from bagua._core.compression import check_ratio, low_rank_matrices, number_sent, sparse_mean
from bagua._core.group import environment as env
from bagua._core.group.connections import Connections
from bagua._core.group.process_group import BaguaProcessGroup
from bagua._core.state.ledger import Ledger, Page
from bagua._core.state.saved_values import check_state, saved_tensor

from mlbench_core.aggregation.pytorch._staging import aggregated_together
from mlbench_core.aggregation.pytorch.aggregation import (
    Aggregation,
    Denominator,
    Kind,
    Named,
    canonical_op,
)

#: What aggregates the tensors that lie in one flat tensor, and its state.
Part = tuple[_C.BucketOp, Page]


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
        self._scratch = _C.Scratch()
        self._key: tuple[Any, ...] = ()
        self._parts: list[Part] = []
        self._ledger = Ledger(type(self).__name__, self._connections, counters=["calls"])

    # For subclasses.

    @abstractmethod
    def _make_part(self, flat: torch.Tensor, named: Named, outcome: _C.RoundOutcome) -> Part:
        """The op and an empty page for tensors that lie in a flat tensor like ``flat``.

        ``named``: (name of the parameter, place in ``flat``).
        """

    # For users.

    def agg_model(
        self, by_layer: bool = False, *, include_buffers: bool = False
    ) -> Callable[..., None]:
        """Refused: parts of the weights that are not sent would be lost."""
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
        named: Named,
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
            operation, page = next(parts)
            operation.run(data.view(-1), step=call, bucket=page.names[0])

        tensors = [tensor for _, tensor in named]
        self._staging.run(tensors, by_layer, self._device_for, aggregate)

    def _prepare(self, named: Named, by_layer: bool) -> None:
        key = (by_layer, *((name, t.dtype, t.device) for name, t in named))
        if key == self._key:
            return
        outcome = _C.RoundOutcome()
        tensors = [tensor for _, tensor in named]
        parts = [
            self._part_of([named[i] for i in together], outcome)
            for together in aggregated_together(tensors, by_layer)
        ]
        self._ledger.take(*(page for _, page in parts))
        self._parts, self._key = parts, key

    def _part_of(self, together: Named, outcome: _C.RoundOutcome) -> Part:
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


class PowerAggregation(ErrorFeedbackAggregation):
    """Means of gradients, approximated with error feedback (T. Vogels et al., NeurIPS 2019).

    Gradients of two and more dimensions become ``P Q^T`` with ``rank`` columns each, what that
    loses is added to the next gradient; vectors are averaged exactly in the same messages, which
    are two per call and dtype (two per parameter by layer). All ranks get the same bits. The
    operations are ``avg_world`` and ``avg``.

    Args:
        model: whose gradients are aggregated; memory is kept by its parameters' names.
        use_cuda: communicate CUDA tensors directly; otherwise through CPU memory.
        reuse_query: start from the last call's ``Q`` (warm start) instead of a random one.
        world_size: number of ranks, checked by the first aggregation; 1: whatever it is.
        rank: columns of the factors; at most the smaller side of each matrix.
        process_group: default: all ranks.

    Raises:
        ValueError: an argument out of range; at the first aggregation: ``world_size`` is not the
            number of ranks. At any: the model has other parameters.
        NotImplementedError: at an aggregation: another operation, or weights.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        use_cuda: bool = False,
        reuse_query: bool = False,
        world_size: int = 1,
        rank: int = 1,
        *,
        process_group: BaguaProcessGroup | None = None,
    ) -> None:
        # Checks
        for name, number in (("world_size", world_size), ("rank", rank)):
            if not isinstance(number, int) or number < 1:
                raise ValueError(f"{name} must be a positive integer, not {number!r}")

        super().__init__(model, use_cuda, process_group=process_group)
        self.world_size = world_size
        self.reuse_query = reuse_query
        self.rank = rank

    def _check_group(self, connections: Connections) -> None:
        if self.world_size not in (1, connections.size):
            raise ValueError(
                f"PowerAggregation was made with world_size={self.world_size}, but its group has "
                f"{connections.size} rank(s); pass torch.distributed.get_world_size()"
            )

    def _describe(self, op: str, denom: object) -> list[str]:
        return [f"rank {self.rank}, reuse_query {self.reuse_query}"]

    def _make_part(self, flat: torch.Tensor, named: Named, outcome: _C.RoundOutcome) -> Part:
        matrices = low_rank_matrices(named, self.rank, min_compression_rate=1.0)
        page = Page(flat, named, outcome, matrices=matrices)
        operation = _C.LowRank(
            self._communicator("data", flat.device),
            self._scratch,
            flat.numel(),
            list(matrices.values()),
            warm_start=self.reuse_query,
            error_feedback=True,
            seed=0,
            memory=page.memory,
        )
        return operation, page


class SparsifiedAggregation(ErrorFeedbackAggregation):
    """Means of some elements of gradients, with error feedback (S. Stich et al., NeurIPS 2018).

    Each rank sends the elements of largest magnitude, exactly selected from all gradients of a
    dtype (by layer: from each parameter's); what it does not send is added to its next gradient.
    Where sparse messages would not be smaller than all of it, the mean is exact. All ranks get the
    same bits. The operations are ``avg_world`` and ``avg``.

    Args:
        model: whose gradients are aggregated; memory is kept by its parameters' names.
        use_cuda: communicate CUDA tensors directly; otherwise through CPU memory.
        ratio: the part of the elements that is sent, at least one.
        process_group: default: all ranks.

    Raises:
        ValueError: ``ratio`` is out of range; at an aggregation: the model has other parameters.
        NotImplementedError: at an aggregation: another operation, or weights.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        use_cuda: bool = False,
        *,
        ratio: float = 0.01,
        process_group: BaguaProcessGroup | None = None,
    ) -> None:
        # Checks
        check_ratio(ratio)

        super().__init__(model, use_cuda, process_group=process_group)
        self.ratio = ratio

    def _describe(self, op: str, denom: object) -> list[str]:
        return [
            f"ratio {self.ratio}",
            f"BAGUA_CHECKSUM={int(env.get_checksum())}",
        ]

    def _make_part(self, flat: torch.Tensor, named: Named, outcome: _C.RoundOutcome) -> Part:
        page = Page(flat, named, outcome)
        operation = sparse_mean(
            self._communicator("data", flat.device),
            self._scratch,
            flat,
            number_sent(flat.numel(), self.ratio),
            page.memory,
        )
        return operation, page
